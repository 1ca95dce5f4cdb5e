"""Inside a running event loop: no awaited call blocks the loop, and timeouts on it work."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from support.tinker_server import Hold, TinkerServer

from tinsmith import AdamParams, ClientConfig, ModelInput, SamplingParams, ServiceClient, TrainingClient

pytestmark = pytest.mark.usefixtures("hard_limit", "clean_environment")

STEP = AdamParams(learning_rate=1e-3)
LOSS = "cross_entropy"
PROMPT = ModelInput.from_ints([1, 2, 3])
PARAMS = SamplingParams(max_tokens=2)
MODEL = "stub/model"


class Clients:
    """One of each, and a checkpoint."""

    def __init__(self, service: ServiceClient, datum: Any) -> None:
        self.service = service
        self.trainer = service.create_lora_training_client(MODEL, rank=4)
        self.sampler = service.create_sampling_client(base_model=MODEL)
        self.rest = service.create_rest_client()
        self.datum = datum(1)
        self.path = self.trainer.save_state("saved").result(10).path
        self.exported = self.trainer.save_weights_external("exported").result(10).path


async def twice(submitted: Awaitable[Any]) -> Any:
    """Training twins are awaited for a future, which is awaited for the value."""
    return await (await submitted)


OPERATIONS: dict[str, tuple[str, Callable[[Clients], Awaitable[Any]]]] = {
    "capabilities": ("get_server_capabilities", lambda c: c.service.get_server_capabilities_async()),
    "create_lora": ("create_model", lambda c: c.service.create_lora_training_client_async(MODEL, rank=4)),
    "from_state": ("weights_info", lambda c: c.service.create_training_client_from_state_async(c.path)),
    "from_state_with_optimizer": (
        "load_weights",
        lambda c: c.service.create_training_client_from_state_with_optimizer_async(c.path),
    ),
    "create_sampler": (
        "create_sampling_session",
        lambda c: c.service.create_sampling_client_async(base_model=MODEL),
    ),
    "forward": ("forward_backward", lambda c: twice(c.trainer.forward_async([c.datum], LOSS))),
    "forward_backward": ("forward_backward", lambda c: twice(c.trainer.forward_backward_async([c.datum], LOSS))),
    "optim_step": ("optim_step", lambda c: twice(c.trainer.optim_step_async(STEP))),
    "save_state": ("save_weights", lambda c: twice(c.trainer.save_state_async("again"))),
    "load_state": ("load_weights", lambda c: twice(c.trainer.load_state_async(c.path))),
    "save_for_sampler": (
        "save_weights_for_sampler",
        lambda c: twice(c.trainer.save_weights_for_sampler_async("again")),
    ),
    "save_external": ("save_weights_external", lambda c: twice(c.trainer.save_weights_external_async("again"))),
    "save_and_get_sampler": (
        "save_weights_for_sampler",
        lambda c: c.trainer.save_weights_and_get_sampling_client_async(),
    ),
    "get_info": ("get_info", lambda c: c.trainer.get_info_async()),
    "sample": ("asample", lambda c: c.sampler.sample_async(PROMPT, 1, PARAMS)),
    "compute_logprobs": ("asample", lambda c: c.sampler.compute_logprobs_async(PROMPT)),
    "get_base_model": ("samplers/.*", lambda c: c.sampler.get_base_model_async()),
    "list_runs": ("training_runs", lambda c: c.rest.list_training_runs_async()),
    "urls": (".*/external_weights_urls", lambda c: c.rest.get_external_weights_urls_async(c.exported)),
    "result_of_a_step": ("retrieve_future", lambda c: twice(c.trainer.optim_step_async(STEP))),
    "result_of_a_sample": ("retrieve_future", lambda c: c.sampler.sample_async(PROMPT, 1, PARAMS)),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_loop_runs_on_while_the_server_holds_its_answer(
    client: Any, server: TinkerServer, datum: Any, name: str
) -> None:
    route, operation = OPERATIONS[name]
    clients = Clients(client, datum)
    server.clear_requests()
    server.script(route, [Hold()])

    async def run() -> int:
        task = asyncio.ensure_future(operation(clients))
        await asyncio.to_thread(server.wait_for, route, 1, 10)
        ticks = 0
        for _ in range(20):
            await asyncio.sleep(0.002)
            ticks += 1
        assert not task.done()
        server.release()
        assert await asyncio.wait_for(task, 10) is not None
        return ticks

    assert asyncio.run(run()) == 20
    assert server.violations == []


def test_a_first_call_of_a_new_client_does_not_block_either(server: TinkerServer, connect: Any) -> None:
    server.script("client/config", [Hold()])

    async def run() -> None:
        client = connect(server)
        task = asyncio.ensure_future(client.create_lora_training_client_async(MODEL, rank=4))
        await asyncio.to_thread(server.wait_for, "client/config", 1, 10)
        for _ in range(10):
            await asyncio.sleep(0.002)
        assert not task.done()
        server.release()
        assert (await asyncio.wait_for(task, 10)).model_id

    asyncio.run(run())


def test_a_download_does_not_hold_the_loop_up(
    client: ServiceClient, server: TinkerServer, datum: Any, tmp_path: Path
) -> None:
    clients = Clients(client, datum)
    server.script("/files/.*", [Hold()])

    async def run() -> None:
        task = asyncio.ensure_future(clients.rest.download_external_weights_async(clients.exported, tmp_path))
        await asyncio.to_thread(server.wait_for, "/files/.*", 1, 10)
        for _ in range(10):
            await asyncio.sleep(0.002)
        assert not task.done()
        server.release()
        assert len(await asyncio.wait_for(task, 10)) == 2

    asyncio.run(run())


@pytest.mark.parametrize(
    ("route", "create"),
    [
        ("create_model", lambda c: c.create_lora_training_client_async(MODEL)),
        ("create_sampling_session", lambda c: c.create_sampling_client_async(base_model=MODEL)),
        ("client/config", lambda c: c.create_sampling_client_async(base_model=MODEL)),
    ],
)
def test_wait_for_interrupts_a_constructor(server: TinkerServer, connect: Any, route: str, create: Any) -> None:
    server.script(route, [Hold()])
    client = connect(server)

    async def run() -> float:
        started = time.monotonic()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(create(client), 0.3)
        return time.monotonic() - started

    assert asyncio.run(run()) < 3
    server.release()
    assert client.create_sampling_client(base_model=MODEL).sampling_session_id


def longest_pause(pauses: list[float]) -> float:
    return max(later - earlier for earlier, later in itertools.pairwise(pauses))


def test_leaving_an_async_context_does_not_hold_the_loop_up(server: TinkerServer, connect: Any) -> None:
    server.script("sessions/.*/finish", [Hold()])
    config = ClientConfig(base_url=server.url, api_key=server.key)

    async def run() -> list[float]:
        ticks: list[float] = []

        async def tick() -> None:
            while True:
                ticks.append(time.monotonic())
                await asyncio.sleep(0.01)

        async with ServiceClient(config=config) as client:
            await client.create_sampling_client_async(base_model=MODEL)
            ticking = asyncio.create_task(tick())
            await asyncio.sleep(0.05)
        ticks.append(time.monotonic())
        ticking.cancel()
        return ticks

    assert longest_pause(asyncio.run(run())) < 0.4
    assert server.find("sessions/.*/finish")[0].body["reason"] == {"type": "success"}


def test_two_loops_use_one_client(client: ServiceClient, trainer: TrainingClient) -> None:
    async def step() -> Any:
        return await (await trainer.optim_step_async(STEP))

    assert [asyncio.run(step()).metrics["step"] for _ in range(3)] == [1.0, 2.0, 3.0]


def test_a_cancelled_task_group_cancels_its_samples_and_nothing_else(
    client: ServiceClient, server: TinkerServer, eventually: Any
) -> None:
    sampler = client.create_sampling_client(base_model=MODEL)
    server.pause_work()

    async def fail_soon() -> None:
        await asyncio.to_thread(server.wait_for, "retrieve_future", 5, 10)
        raise ValueError("of mine")

    async def run() -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(5):
                group.create_task(sampler.sample_async(PROMPT, 1, PARAMS))
            group.create_task(fail_soon())

    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(run())
    assert [str(error) for error in caught.value.exceptions] == ["of mine"]
    eventually(lambda: all(poll.is_aborted for poll in server.find("retrieve_future")))
    server.resume_work()
    assert sampler.sample(PROMPT, 1, PARAMS).result(10)
