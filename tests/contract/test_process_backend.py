"""Engine processes: how they start, die, are restarted and end. Each test uses real processes."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.backends import ONE, TESTS, TWO, arithmetic_spec, is_alive, kill
from support.jobs import Jobs, datum

from tinsmith.engine.backend.engine_process import end_cause, end_reason, oom_kills
from tinsmith.engine.backend.local import ProcessBackend
from tinsmith.engine.backend.supervisor import SupervisorOptions
from tinsmith.engine.ipc import EngineSpec
from tinsmith.engine.protocol import BackendLostError, Done, JobFailedError, TokenEvent
from tinsmith.wire.codecs.proto_sampling import decode_response

PROBE = [5, 9, 2, 33, 7]
IMPATIENT = SupervisorOptions(backoff_s=0.01, retry_failed_s=0.0)


def run(
    scenario: Callable[[ProcessBackend], Awaitable[None]],
    *specs: EngineSpec,
    options: SupervisorOptions = IMPATIENT,
    eager: tuple[str, ...] = (),
) -> None:
    async def opened() -> None:
        backend = ProcessBackend(specs, options, eager=eager)
        async with asyncio.timeout(60):
            await backend.open()
            try:
                await scenario(backend)
            finally:
                processes = list(backend.processes().values())
                await backend.close(grace_s=0)
            assert [process for process in processes if is_alive(process)] == []

    asyncio.run(opened())


async def eventually(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def test_an_engine_starts_with_its_first_job_or_at_once(tmp_path: Path) -> None:
    async def scenario(backend: ProcessBackend) -> None:
        await eventually(lambda: TWO.name in backend.processes())
        assert ONE.name not in backend.processes()
        await eventually(lambda: backend.status.state == "ready")
        await backend.submit(Jobs(ONE.name).sample(PROBE, max_tokens=1))
        assert sorted(backend.processes()) == [ONE.name, TWO.name]

    run(scenario, arithmetic_spec(ONE), arithmetic_spec(TWO), eager=(TWO.name,))


def test_an_engine_that_cannot_start_says_why_and_is_tried_again_on_demand(tmp_path: Path) -> None:
    async def scenario(backend: ProcessBackend) -> None:
        jobs = Jobs(ONE.name)
        with pytest.raises(JobFailedError, match="start 1 was told to fail") as caught:
            await backend.submit(jobs.create())
        assert caught.value.category == "server"
        assert backend.status.state == "failed"
        assert "start 1 was told to fail" in backend.status.reason
        await backend.submit(jobs.create())
        assert backend.status.state == "ready"
        assert backend.epoch_of(ONE.name) == 1

    run(scenario, arithmetic_spec(ONE, start_log=str(tmp_path / "starts"), refuse=1))


def test_a_failed_engine_is_left_alone_for_a_while(tmp_path: Path) -> None:
    async def scenario(backend: ProcessBackend) -> None:
        jobs = Jobs(ONE.name)
        for _ in range(3):
            with pytest.raises(JobFailedError, match="start 1 was told to fail"):
                await backend.submit(jobs.create())
        assert len(lines(tmp_path / "starts")) == 1

    spec = arithmetic_spec(ONE, start_log=str(tmp_path / "starts"), refuse=1)
    run(scenario, spec, options=SupervisorOptions(retry_failed_s=1000))


def test_a_death_while_starting_is_tried_again_and_jobs_wait_for_it(tmp_path: Path) -> None:
    async def scenario(backend: ProcessBackend) -> None:
        jobs = Jobs(ONE.name)
        create = jobs.create()
        future = backend.submit(create)
        assert "starting" in backend.status.state
        assert backend.position(create.job_id).reason == "the engine is loading the model"
        await future
        assert len(lines(tmp_path / "starts")) == 3

    run(scenario, arithmetic_spec(ONE, start_log=str(tmp_path / "starts"), die_at_start=2))


def test_deaths_while_starting_come_to_an_end(tmp_path: Path) -> None:
    async def scenario(backend: ProcessBackend) -> None:
        with pytest.raises(
            JobFailedError,
            match=r"killed by SIGKILL, often because the machine ran out of memory.*dying as told.*for 0\.3 s",
        ):
            await backend.submit(Jobs(ONE.name).create())
        assert backend.status.state == "failed"
        assert lines(tmp_path / "starts")

    spec = arithmetic_spec(ONE, start_log=str(tmp_path / "starts"), die_at_start=999)
    run(scenario, spec, options=SupervisorOptions(backoff_s=0.01, start_deadline_s=0.3))


def test_an_engine_that_does_not_exist_or_is_another_model_is_refused() -> None:
    async def scenario(backend: ProcessBackend) -> None:
        with pytest.raises(JobFailedError, match="No module named 'nowhere'"):
            await backend.submit(Jobs(ONE.name).create())
        with pytest.raises(JobFailedError, match="vocabulary of 7, but 256 was announced"):
            await backend.submit(Jobs(TWO.name).create())

    other = dataclasses.replace(arithmetic_spec(TWO), options={"card": {**msgspec.to_builtins(TWO), "vocab_size": 7}})
    run(scenario, EngineSpec(card=ONE, executor="nowhere:make"), other)


def test_a_start_that_takes_too_long_is_ended() -> None:
    async def scenario(backend: ProcessBackend) -> None:
        with pytest.raises(JobFailedError, match=r"not ready after 0\.05 s"):
            await backend.submit(Jobs(ONE.name).create())

    options = SupervisorOptions(start_timeout_s=0.05, start_deadline_s=0.1)
    run(scenario, arithmetic_spec(ONE, hang=True), options=options)


def test_a_job_that_kills_the_engine_alone_is_not_run_again(tmp_path: Path) -> None:
    async def scenario(backend: ProcessBackend) -> None:
        killer = Jobs(ONE.name, "poison", tenant="eve")
        others = Jobs(ONE.name)
        innocents = [others.sample(PROBE, max_tokens=3, seed=seed) for seed in range(2)]
        bad = killer.create()
        end: Any = BackendLostError("not begun")
        results: dict[str, Any] = {}
        while isinstance(end, BackendLostError):
            left = [job for job in innocents if job.job_id not in results]
            ends = await asyncio.gather(*(backend.submit(job) for job in (*left, bad)), return_exceptions=True)
            end = ends.pop()
            assert all(isinstance(one, (Done, BackendLostError)) for one in ends)
            results |= {job.job_id: one for job, one in zip(left, ends, strict=True) if isinstance(one, Done)}
        assert isinstance(end, JobFailedError)
        assert end.category == "server"
        assert "also while nothing else was running (killed by SIGSEGV" in str(end)
        with pytest.raises(JobFailedError, match="is not tried again"):
            await backend.submit(bad)
        assert lines(tmp_path / "log").count(bad.job_id) == 2
        assert backend.epoch_of(ONE.name) == 3
        for job in innocents:
            done = results.get(job.job_id) or await backend.submit(job)
            assert len(decode_response(done.body).sequences) == 1

    run(scenario, arithmetic_spec(ONE, log=str(tmp_path / "log"), die_in="poison"))


def test_an_idle_engine_is_unloaded_and_comes_back() -> None:
    async def scenario(backend: ProcessBackend) -> None:
        jobs = Jobs(ONE.name)
        await backend.submit(jobs.create())
        epoch = backend.epoch_of(ONE.name)
        await eventually(lambda: not backend.processes())
        assert backend.epoch_of(ONE.name) == epoch + 1  # its models are gone with it
        assert backend.status.state == "ready"
        await backend.submit(jobs.sample(PROBE, max_tokens=1))
        await eventually(lambda: not backend.processes())
        assert backend.epoch_of(ONE.name) == epoch + 1  # there were none to lose

    run(scenario, arithmetic_spec(ONE), options=SupervisorOptions(idle_s=0.02))


def test_large_bodies_pass_while_samples_go_on() -> None:
    async def scenario(backend: ProcessBackend) -> None:
        jobs = Jobs(TWO.name)
        await backend.submit(jobs.create())
        row = list(range(1, 129))
        large = [jobs.forward_backward(*[datum(row)] * 8000) for _ in range(3)]
        assert len(large[0].body) > 16_000_000
        passes = [backend.submit(job) for job in large]
        samples = [backend.submit(jobs.sample(PROBE, max_tokens=4)) for _ in range(20)]
        await asyncio.gather(*samples)
        done = await asyncio.gather(*passes)
        assert {item.usage.training for item in done} == {8000 * 128}
        assert len(done[0].body) > 4_000_000

    run(scenario, arithmetic_spec(TWO))


def test_what_has_begun_is_finished_and_what_waits_is_dropped(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)

    async def scenario(backend: ProcessBackend) -> None:
        jobs = Jobs(ONE.name, prefix="hold-")
        held, later = jobs.create(), jobs.forward(datum(PROBE))
        futures = [backend.submit(held), backend.submit(later)]
        await eventually(lambda: backend.position(held.job_id).reason == "running")
        assert backend.position(later.job_id).reason == "waits for 1 earlier operations of the same model"
        backend.cancel(held.job_id)
        closing = asyncio.create_task(backend.close(grace_s=30))
        await asyncio.sleep(0)
        (await asyncio.to_thread(fifo.open, "w")).close()
        assert isinstance(await futures[0], Done)
        with pytest.raises(BackendLostError):
            await futures[1]
        await closing

    run(scenario, arithmetic_spec(ONE, hold_fifo=str(fifo)))


async def held_save(backend: ProcessBackend, directory: Path) -> asyncio.Future[Done]:
    """A model that is being written beside what comes next, and cannot be finished yet."""
    jobs = Jobs(ONE.name, prefix="hold-")
    others = Jobs(ONE.name)
    others.model_id = jobs.model_id
    await backend.submit(others.create())
    saving = backend.submit(jobs.save(directory, beside=True))
    await asyncio.gather(*(backend.submit(job) for job in others.steps(2)))
    assert not saving.done()
    assert not directory.exists()
    return saving


def test_what_is_written_beside_others_holds_none_of_them_up_and_is_told_when_it_is_there(tmp_path: Path) -> None:
    fifo, directory = tmp_path / "fifo", tmp_path / "saved"
    os.mkfifo(fifo)

    async def scenario(backend: ProcessBackend) -> None:
        saving = await held_save(backend, directory)
        jobs = Jobs(ONE.name)
        second = [jobs.create(), jobs.save(tmp_path / "second", beside=True)]
        await asyncio.gather(*(backend.submit(job) for job in second))
        assert (tmp_path / "second").exists(), "while one is under way the next is written at once"
        assert not saving.done()
        (await asyncio.to_thread(fifo.open, "w")).close()
        assert isinstance(await saving, Done)
        assert directory.exists()

    run(scenario, arithmetic_spec(ONE, hold_fifo=str(fifo)))


def test_a_process_that_is_stopped_finishes_what_it_writes(tmp_path: Path) -> None:
    fifo, directory = tmp_path / "fifo", tmp_path / "saved"
    os.mkfifo(fifo)

    async def scenario(backend: ProcessBackend) -> None:
        saving = await held_save(backend, directory)
        closing = asyncio.create_task(backend.close(grace_s=30))
        await asyncio.sleep(0)
        (await asyncio.to_thread(fifo.open, "w")).close()
        assert isinstance(await saving, Done)
        await closing
        assert directory.exists()

    run(scenario, arithmetic_spec(ONE, hold_fifo=str(fifo)))


def test_what_a_killed_process_was_writing_is_lost_and_said_to_be(tmp_path: Path) -> None:
    fifo, directory = tmp_path / "fifo", tmp_path / "saved"
    os.mkfifo(fifo)

    async def scenario(backend: ProcessBackend) -> None:
        saving = await held_save(backend, directory)
        await kill(backend, ONE.name)
        with pytest.raises(BackendLostError):
            await saving
        assert not directory.exists()

    run(scenario, arithmetic_spec(ONE, hold_fifo=str(fifo)))


def test_what_cannot_be_written_beside_others_fails_alone(tmp_path: Path) -> None:
    async def scenario(backend: ProcessBackend) -> None:
        jobs = Jobs(ONE.name)
        await backend.submit(jobs.create())
        (tmp_path / "taken").mkdir()
        (tmp_path / "taken" / "file").touch()
        saving = backend.submit(jobs.save(tmp_path / "taken", beside=True))
        await asyncio.gather(*(backend.submit(job) for job in jobs.steps(1)))
        with pytest.raises(JobFailedError, match="taken"):
            await saving
        await asyncio.gather(*(backend.submit(job) for job in jobs.steps(1)))

    run(scenario, arithmetic_spec(ONE))


def test_close_does_not_wait_longer_than_the_grace(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)

    async def scenario(backend: ProcessBackend) -> None:
        held = Jobs(ONE.name, prefix="hold-").create()
        future = backend.submit(held)
        await eventually(lambda: backend.position(held.job_id).reason == "running")
        process = backend.processes()[ONE.name]
        await backend.close(grace_s=0.01)
        with pytest.raises(BackendLostError):
            await future
        assert not is_alive(process)

    run(scenario, arithmetic_spec(ONE, hold_fifo=str(fifo)))


def test_close_while_starting_leaves_nothing() -> None:
    async def scenario(backend: ProcessBackend) -> None:
        future = backend.submit(Jobs(ONE.name).create())
        await backend.close(grace_s=10)
        with pytest.raises(BackendLostError):
            await future

    for _ in range(2):
        run(scenario, arithmetic_spec(ONE))
        run(scenario, arithmetic_spec(ONE, hang=True))


def test_a_broken_sampler_fails_its_samples_and_training_goes_on() -> None:
    async def scenario(backend: ProcessBackend) -> None:
        jobs = Jobs(ONE.name)
        futures = [backend.submit(job) for job in (jobs.create(), jobs.sample(PROBE), *jobs.steps(1))]
        with pytest.raises(JobFailedError, match="RuntimeError: the sampler is broken"):
            await futures[1]
        await asyncio.gather(futures[0], *futures[2:])

    run(scenario, arithmetic_spec(ONE, "make_broken_sampler"))


def test_a_listener_that_fails_loses_its_stream_only() -> None:
    async def scenario(backend: ProcessBackend) -> None:
        seen: list[TokenEvent] = []

        def take(event: TokenEvent) -> None:
            seen.append(event)
            raise ValueError("full")

        done = await backend.submit(Jobs(ONE.name).sample(PROBE, max_tokens=5, stop=[]), on_tokens=take)
        assert done.usage.sampled == 5
        assert len(seen) == 1
        assert backend.epoch_of(ONE.name) == 1

    run(scenario, arithmetic_spec(ONE))


PARENT = """
import asyncio, sys
from support.backends import ONE, arithmetic_spec
from support.jobs import Jobs
from tinsmith.engine.backend.local import ProcessBackend

async def main():
    backend = ProcessBackend([arithmetic_spec(ONE, hold_fifo=sys.argv[1])])
    await backend.open()
    held = Jobs(ONE.name, prefix="hold-").create()
    backend.submit(held)
    while backend.position(held.job_id).reason != "running":
        await asyncio.sleep(0.005)
    print(backend.processes()[ONE.name], flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_no_engine_outlives_a_killed_parent(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent / "src")])}
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, fifo], env=environment, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        engine = int(parent.stdout.readline())
        assert is_alive(engine)
        parent.send_signal(signal.SIGKILL)
        parent.wait()

    async def gone() -> None:
        async with asyncio.timeout(20):
            await eventually(lambda: not is_alive(engine))

    asyncio.run(gone())


def test_the_api_side_does_not_load_torch() -> None:
    program = "import sys, tinsmith.engine.backend.local; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    subprocess.run(
        [sys.executable, "-c", program], check=True, env={**os.environ, "PYTHONPATH": str(TESTS.parent / "src")}
    )


def test_restarts_in_a_row_do_not_lose_the_backend() -> None:
    async def scenario(backend: ProcessBackend) -> None:
        jobs = Jobs(ONE.name)
        for number in range(3):
            done: Any = await backend.submit(Jobs(ONE.name, prefix=f"{number}-").create())
            assert isinstance(done, Done)
            await kill(backend, ONE.name)
            assert backend.status.state in ("restarting", "ready")
        assert backend.epoch_of(ONE.name) == 4
        await backend.submit(jobs.create())

    run(scenario, arithmetic_spec(ONE))


@pytest.mark.parametrize(
    ("code", "before", "cause"),
    [
        (-signal.SIGKILL, oom_kills(), "killed"),
        (-signal.SIGKILL, (oom_kills() or 0) - 1, "memory"),
        (-signal.SIGKILL, None, "memory"),
        (-signal.SIGTERM, 0, "killed"),
        (-signal.SIGSEGV, 0, "crash"),
        (-signal.SIGABRT, 0, "crash"),
        (1, 0, "crash"),
        (0, 0, "crash"),
    ],
)
@pytest.mark.skipif(oom_kills() is None, reason="this kernel does not count")
def test_ends_have_causes(code: int, before: int | None, cause: str) -> None:
    assert end_cause(code, before) == cause


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (-signal.SIGKILL, "killed by SIGKILL, often because the machine ran out of memory"),
        (-signal.SIGSEGV, "killed by SIGSEGV"),
        (-signal.SIGILL, "killed by SIGILL: this processor does not support an instruction"),
        (-63, "killed by signal 63"),
        (3, "exited with code 3"),
    ],
)
def test_ends_have_names(code: int, text: str) -> None:
    assert end_reason(code, []).startswith(text)
    assert end_reason(code, [str(i) for i in range(9)]).endswith("last output: 4 | 5 | 6 | 7 | 8")


def test_a_sample_that_breaks_a_shared_step_costs_the_other_tenants_nothing() -> None:
    async def scenario(backend: ProcessBackend) -> None:
        good, bad = Jobs(ONE.name, tenant="good"), Jobs(ONE.name, tenant="bad")
        samples = [good.sample(PROBE, max_tokens=5, stop=[]) for _ in range(3)]
        expected = [(await backend.submit(sample)).body for sample in samples]
        again = [good.sample(PROBE, max_tokens=5, stop=[]) for _ in range(3)]
        broken = backend.submit(bad.sample(PROBE, max_tokens=5, stop=[], seed=666))
        futures = [backend.submit(sample) for sample in again]
        with pytest.raises(JobFailedError, match="RuntimeError: a row of 666"):
            await broken
        assert [(await future).body for future in futures] == expected
        assert backend.epoch_of(ONE.name) == 1

    run(scenario, arithmetic_spec(ONE, "make_breakable_sampler"))
