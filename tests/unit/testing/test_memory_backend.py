"""The backend for tests: what tests can do to it, and that its arithmetic is right."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from support.jobs import Jobs

from tinsmith.engine.protocol import BackendLostError, JobCancelledError, JobFailedError, LoraSpec, TokenEvent
from tinsmith.testing import arithmetic, losses
from tinsmith.testing.backend import ARITHMETIC, MemoryBackend, read_log
from tinsmith.wire.codecs.proto_outputs import decode_output
from tinsmith.wire.codecs.proto_sampling import decode_response
from tinsmith.wire.messages.training import AdamParams, ForwardBackwardInput
from tinsmith.wire.values.inputs import Datum, ModelInput
from tinsmith.wire.values.tensors import TensorData

PROBE = [5, 9, 2, 33, 7]


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 60))


def loss_of(weights: Any, work: ForwardBackwardInput) -> float:
    return losses.run(weights, work).output.metrics["loss:sum"]


@pytest.mark.parametrize("loss_fn", list(losses.LOSSES))
def test_gradients_are_those_of_the_loss(loss_fn: Any) -> None:
    random = np.random.default_rng(3)
    weights = random.normal(size=arithmetic.FEATURES)
    inputs: dict[str, Any] = {"target_tokens": random.integers(1, 500, 5)}
    if loss_fn == "cross_entropy":
        inputs["weights"] = random.normal(size=5).astype(np.float32)
    else:
        inputs["advantages"] = random.normal(size=5).astype(np.float32)
        inputs["logprobs"] = random.normal(-1, 0.5, 5).astype(np.float32)
    work = ForwardBackwardInput(data=[Datum(ModelInput.from_ints(PROBE), inputs)], loss_fn=loss_fn)
    gradient = losses.run(weights, work).gradient_D
    if loss_fn == "cispo":  # its ratio is held fixed, which is cross-entropy with these weights
        logprobs = losses.run(weights, work).output.loss_fn_outputs[0]["logprobs"].array
        held = np.clip(np.exp(logprobs - inputs["logprobs"]), 0, 4) * inputs["advantages"]
        fixed = {"target_tokens": inputs["target_tokens"], "weights": held.astype(np.float32)}
        work = ForwardBackwardInput(data=[Datum(ModelInput.from_ints(PROBE), fixed)], loss_fn="cross_entropy")
    for i in range(arithmetic.FEATURES):
        step = np.zeros(arithmetic.FEATURES)
        step[i] = 1e-6
        numeric = (loss_of(weights + step, work) - loss_of(weights - step, work)) / 2e-6
        assert gradient[i] == pytest.approx(numeric, rel=1e-5, abs=1e-7)


def test_a_fresh_adapter_is_its_base_and_switches_hold_parts_still() -> None:
    lora = LoraSpec(rank=2, seed=1, train_mlp=False)
    adapter = arithmetic.ArithmeticAdapter.fresh(lora, "some/base")
    assert (adapter.weights() == arithmetic.base_weights("some/base")).all()
    adapter.add_gradient(np.ones(arithmetic.FEATURES))
    adapter.optimize(AdamParams(learning_rate=0.1))
    moved = adapter.weights() != arithmetic.base_weights("some/base")
    assert moved.tolist() == [True] * 3 + [False] * 3 + [True] * 2


def test_csr_targets_and_rows_of_targets() -> None:
    async def scenario() -> None:
        backend = MemoryBackend()
        await backend.open()
        jobs = Jobs(ARITHMETIC.name)
        dense = {"target_tokens": np.array([[1, 2], [3, 4]]), "weights": np.array([[1, 0.5], [0.25, 1]], np.float32)}
        csr = {
            name: TensorData(table.reshape(-1), None, [2, 2], [0, 2, 4], [0, 1, 0, 1]) for name, table in dense.items()
        }
        bodies = []
        await backend.submit(jobs.create())
        for inputs in (dense, csr):
            done = await backend.submit(jobs.forward_backward(Datum(ModelInput.from_ints([8, 9]), inputs)))
            bodies.append(done.body)
        assert bodies[0] == bodies[1]
        output = decode_output(bodies[0])
        logprobs = output.loss_fn_outputs[0]["logprobs"].to_numpy()
        assert logprobs.shape == (2, 2)
        assert output.metrics["loss:sum"] == pytest.approx(-(logprobs * dense["weights"]).sum(), rel=1e-6)
        await backend.close(0)

    run(scenario())


def test_jobs_can_be_held_and_models_do_not_wait_for_each_other() -> None:
    async def scenario() -> None:
        gates = {"a": asyncio.Event(), "b": asyncio.Event()}
        backend = MemoryBackend(hold=lambda job: gates[job.tenant].wait())
        await backend.open()
        first, second = Jobs(ARITHMETIC.name, "first", tenant="a"), Jobs(ARITHMETIC.name, "second", tenant="b")
        held = [backend.submit(job) for job in [first.create(), *first.steps(1)]]
        gates["b"].set()
        await asyncio.gather(*[backend.submit(job) for job in [second.create(), *second.steps(1)]])
        assert [future.done() for future in held] == [False] * 3
        gates["a"].set()
        await asyncio.gather(*held)
        await backend.close(0)

    run(scenario())


def test_a_held_job_can_be_cancelled_and_the_next_one_runs() -> None:
    async def scenario() -> None:
        gate = asyncio.Event()
        backend = MemoryBackend(hold=lambda job: gate.wait())
        await backend.open()
        jobs = Jobs(ARITHMETIC.name)
        unwanted, wanted = jobs.create(seed=1), jobs.create(seed=2)
        futures = [backend.submit(unwanted), backend.submit(wanted)]
        await asyncio.sleep(0)
        assert backend.position(wanted.job_id).ahead == 1
        backend.cancel(unwanted.job_id)
        gate.set()
        with pytest.raises(JobCancelledError):
            await futures[0]
        await futures[1]
        await backend.close(0)

    run(scenario())


def test_executions_are_logged_across_backends(tmp_path: Path) -> None:
    async def scenario() -> None:
        path = tmp_path / "log"
        for _ in range(2):
            backend = MemoryBackend(log_path=path)
            await backend.open()
            jobs = Jobs(ARITHMETIC.name)
            await backend.submit(jobs.create())
            backend.lose()
            await backend.submit(jobs.sample(PROBE, max_tokens=1))
            await backend.close(0)
        lines = read_log(path)
        assert [(line.kind, line.epoch) for line in lines] == [("create_model", 1), ("sample", 2)] * 2

    run(scenario())


def test_a_line_that_a_kill_cut_off_is_neither_read_nor_continued(tmp_path: Path) -> None:
    async def scenario() -> None:
        path = tmp_path / "log"
        path.write_bytes(b'{"process": 1, "epoch": 1, "job_')
        assert read_log(path) == []
        backend = MemoryBackend(log_path=path)
        await backend.open()
        await backend.submit(Jobs(ARITHMETIC.name).create())
        assert [line.kind for line in read_log(path)] == ["create_model"]
        await backend.close(0)

    run(scenario())


def test_losing_state_ends_held_jobs_and_starts_none_of_them(tmp_path: Path) -> None:
    async def scenario() -> None:
        gate = asyncio.Event()
        backend = MemoryBackend(hold=lambda job: gate.wait(), log_path=tmp_path / "log")
        await backend.open()
        jobs = Jobs(ARITHMETIC.name)
        futures = [backend.submit(job) for job in [jobs.create(), jobs.sample(PROBE), *jobs.steps(2)]]
        await asyncio.sleep(0)
        backend.lose()
        gate.set()
        ends = await asyncio.gather(*futures, return_exceptions=True)
        assert all(isinstance(end, BackendLostError) for end in ends)
        again = Jobs(ARITHMETIC.name, prefix="again-")
        await backend.submit(again.create())
        assert [line.job_id for line in read_log(tmp_path / "log")] == [again.last_id]
        await backend.close(0)

    run(scenario())


def test_streams_can_be_paced_and_cancelled_between_tokens() -> None:
    async def scenario() -> None:
        reached, seen = asyncio.Event(), list[TokenEvent]()

        async def pace(job: Any, number: int) -> None:
            if number == 3:
                reached.set()
                await asyncio.Event().wait()

        backend = MemoryBackend(pace=pace)
        await backend.open()
        job = Jobs(ARITHMETIC.name).sample(PROBE, max_tokens=8, stop=[])
        future = backend.submit(job, on_tokens=seen.append)
        await reached.wait()
        backend.cancel(job.job_id)
        with pytest.raises(JobCancelledError):
            await future
        assert len(seen) == 3
        await backend.close(0)

    run(scenario())


def test_stop_strings_are_matched_on_the_tokens_text() -> None:
    async def scenario() -> None:
        backend = MemoryBackend()
        await backend.open()
        jobs = Jobs(ARITHMETIC.name)
        free = decode_response((await backend.submit(jobs.sample(PROBE, max_tokens=40, stop=[]))).body).sequences[0]
        at = next(i for i, token in enumerate(free.tokens) if token < 256)
        job = jobs.sample(PROBE, max_tokens=40, stop=[chr(free.tokens[at])])
        stopped = decode_response((await backend.submit(job)).body).sequences[0]
        assert (stopped.tokens, stopped.stop_reason) == (free.tokens[: at + 1], "stop")
        await backend.close(0)

    run(scenario())


def test_without_max_tokens_a_sample_ends_with_the_context() -> None:
    async def scenario() -> None:
        backend = MemoryBackend()
        await backend.open()
        jobs = Jobs(ARITHMETIC.name)
        whole = decode_response((await backend.submit(jobs.sample(PROBE, stop=[]))).body).sequences[0]
        assert len(whole.tokens) == 4096 - 5
        with pytest.raises(JobFailedError, match="max_tokens: 4092 is more than the 4091 tokens that fit"):
            await backend.submit(jobs.sample(PROBE, max_tokens=4092))
        await backend.close(0)

    run(scenario())


def test_a_damaged_checkpoint_is_refused_and_named(tmp_path: Path) -> None:
    async def scenario() -> None:
        backend = MemoryBackend()
        await backend.open()
        jobs = Jobs(ARITHMETIC.name)
        saved = tmp_path / "saved"
        for job in (jobs.create(), *jobs.steps(1), jobs.save(saved)):
            await backend.submit(job)
        weights = saved / "adapter_model.safetensors"
        assert sum(array.size for array in safetensors.numpy.load_file(weights).values()) == 2 * arithmetic.FEATURES
        weights.write_bytes(weights.read_bytes()[:-1] + b"\x00")
        with pytest.raises(JobFailedError, match=r"adapter_model\.safetensors is damaged"):
            await backend.submit(jobs.load(saved))
        await backend.close(0)

    run(scenario())


def test_samples_that_begin_together_are_those_that_run_alone(tmp_path: Path) -> None:
    jobs = Jobs(ARITHMETIC.name)
    asked: list[dict[str, Any]] = [
        {"max_tokens": 16},
        {"max_tokens": 0},
        {"max_tokens": 40, "stop": [7, 9], "num_samples": 3},
        {"max_tokens": 40, "stop": ["a", "zz"], "temperature": 0.0},
        {"num_samples": 2},  # up to the end of the context
        {"max_tokens": 1, "fields": {"topk_sample_logprobs": 3, "prompt_logprobs": True}},
        {"max_tokens": 0, "stop": []},
    ]
    wanted = [jobs.sample(PROBE[: 1 + i % 5], seed=i, **one) for i, one in enumerate(asked * 3)]
    broken = jobs.sample([5, ARITHMETIC.vocab_size], max_tokens=2)

    async def scenario() -> None:
        backend = MemoryBackend(log_path=tmp_path / "log")
        await backend.open()
        alone = [await backend.submit(job) for job in wanted]
        assert await asyncio.gather(*map(backend.submit, wanted)) == alone
        *together, error = await asyncio.gather(
            *map(backend.submit, [*wanted, broken]), return_exceptions=True
        )  # one that cannot be drawn takes none with it
        assert together == alone
        assert isinstance(error, JobFailedError)
        assert "512 is not a token of this model" in str(error)
        await backend.close(1)
        assert [line.job_id for line in read_log(tmp_path / "log")].count(wanted[0].job_id) == 3

    run(scenario())
