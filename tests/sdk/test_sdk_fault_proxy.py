"""Through a network that repeats answers and lets them overtake one another: nothing lost, nothing doubled, nothing
taken for something else."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.fault_proxy import Clean, DropAfter, Duplicate, FaultProxy, Overtaken, Reset
from support.tinker_server import TinkerServer

from tinsmith import AdamParams, ModelInput, SamplingParams, ServiceClient

pytestmark = pytest.mark.usefixtures("hard_limit", "clean_environment")

STEP = AdamParams(learning_rate=1e-3)
LOSS = "cross_entropy"
PARAMS = SamplingParams(max_tokens=2)
COUNT = 20


def train_and_sample(client: ServiceClient, server: TinkerServer, datum: Any, loss_of: Any) -> None:
    """Many operations under way at once; each gets its own result, and ran once."""
    trainer = client.create_lora_training_client("stub/model", rank=4)
    sampler = client.create_sampling_client(base_model="stub/model")
    steps, passes, samples = [], [], []
    for i in range(COUNT):
        passes.append(trainer.forward_backward([datum(i)], LOSS))
        steps.append(trainer.optim_step(STEP))
        samples += [sampler.sample(ModelInput.from_ints([10 * i + j]), 1, PARAMS) for j in range(3)]

    losses = [future.result(15).metrics["loss:sum"] for future in passes]
    assert losses == pytest.approx([loss_of(datum(i)) for i in range(COUNT)])
    assert [future.result(15).metrics["step"] for future in steps] == [i + 1.0 for i in range(COUNT)]
    drawn = [future.result(15).sequences[0].tokens for future in samples]
    assert drawn == [[10 * i + j, 10 * i + j + 1] for i in range(COUNT) for j in range(3)]

    executed = [(number, name) for model, number, name in server.executed if model == trainer.model_id]
    assert [number for number, _ in executed] == list(range(1, 2 * COUNT + 1)), "in order, each once"
    asked = [request.body["seq_id"] for request in server.find("asample")]
    assert len(set(asked)) == len(asked) == 3 * COUNT, "no sample was submitted twice"
    assert server.violations == []


def test_duplicated_responses_are_taken_once(connect: Any, server: TinkerServer, datum: Any, loss_of: Any) -> None:
    with FaultProxy(server.url, [Duplicate()] * 400) as proxy:
        client = connect(proxy.url, api_key=server.key)
        train_and_sample(client, server, datum, loss_of)
        assert proxy.connections > COUNT, "a connection on which too much came is not used again"
        client.close()


def test_reordered_responses_reach_those_who_asked(
    connect: Any, server: TinkerServer, datum: Any, loss_of: Any
) -> None:
    with FaultProxy(server.url, [Overtaken(), Clean()] * 400) as proxy:
        client = connect(proxy.url, api_key=server.key)
        train_and_sample(client, server, datum, loss_of)
        assert proxy.overtaken > 0
        client.close()


def test_duplicated_and_reordered_responses_together(
    connect: Any, server: TinkerServer, datum: Any, loss_of: Any
) -> None:
    with FaultProxy(server.url, [Overtaken(), Duplicate(), Clean()] * 400) as proxy:
        client = connect(proxy.url, api_key=server.key)
        train_and_sample(client, server, datum, loss_of)
        assert proxy.overtaken > 0
        assert Duplicate() in proxy.history
        client.close()


def test_awaited_operations_get_their_own_results_too(
    connect: Any, server: TinkerServer, datum: Any, loss_of: Any
) -> None:
    with FaultProxy(server.url, [Overtaken(), Duplicate()] * 200) as proxy:
        client = connect(proxy.url, api_key=server.key)

        async def run() -> list[Any]:
            sampler = await client.create_sampling_client_async(base_model="stub/model")
            return await asyncio.gather(
                *(sampler.sample_async(ModelInput.from_ints([i]), 1, PARAMS) for i in range(30))
            )

        assert [one.sequences[0].tokens for one in asyncio.run(run())] == [[i, i + 1] for i in range(30)]
        client.close()


def test_large_bodies_arrive_whole_after_cuts_in_the_middle(
    connect: Any, server: TinkerServer, datum: Any, loss_of: Any
) -> None:
    """Each is sent again from the memory that it lies in, which the next ones use after it."""
    large = [datum(*(i * 7 + j % 600 for j in range(20_000))) for i in range(8)]  # 320 kB each
    assert len({round(loss_of(one), 6) for one in large}) == len(large)
    cuts = [Clean(), DropAfter(200_000, "to_server"), DropAfter(300_000, "to_server"), Reset(20), DropAfter(30)]
    with FaultProxy(server.url, cuts * 4) as proxy:
        client = connect(proxy.url, api_key=server.key)
        trainer = client.create_lora_training_client("stub/model", rank=4)
        passes = [trainer.forward_backward([one], LOSS) for one in large]
        losses = [future.result(15).metrics["loss:sum"] for future in passes]
        assert losses == pytest.approx([loss_of(one) for one in large])
        assert [number for _, number, _ in server.executed] == list(range(1, len(large) + 1))
        assert proxy.connections > len(cuts)
        client.close()
    assert server.violations == []
