"""The one kind of future: waited for, awaited, with callbacks, cancelled, from any thread and any loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from typing import Any

import pytest
from support.tinker_server import Hold, TinkerServer

from tinsmith import (
    AdamParams,
    APIFuture,
    ModelInput,
    RequestFailedError,
    SamplingClient,
    SamplingParams,
    ServiceClient,
    TinkerError,
    TrainingClient,
)

pytestmark = pytest.mark.usefixtures("hard_limit", "clean_environment")

STEP = AdamParams(learning_rate=1e-3)
LOSS = "cross_entropy"
PROMPT = ModelInput.from_ints([1, 2, 3])
PARAMS = SamplingParams(max_tokens=2)


def test_every_operation_returns_the_same_kind_of_future(
    client: ServiceClient, trainer: TrainingClient, sampler: SamplingClient, datum: Any
) -> None:
    futures: list[Any] = [
        trainer.forward([datum(1)], LOSS),
        trainer.forward_backward([datum(1)], LOSS),
        trainer.optim_step(STEP),
        trainer.save_state("a"),
        trainer.save_weights_for_sampler("a"),
        sampler.sample(PROMPT, 1, PARAMS),
        sampler.compute_logprobs(PROMPT),
        client.create_rest_client().list_sessions(),
    ]
    for future in futures:
        assert isinstance(future, APIFuture)
        assert isinstance(future, concurrent.futures.Future)
        future.result(10)
        assert future.done()


def test_a_timeout_of_result_cancels_nothing(trainer: TrainingClient, sampler: SamplingClient, server: Any) -> None:
    for start in (lambda: trainer.optim_step(STEP), lambda: sampler.sample(PROMPT, 1, PARAMS)):
        server.pause_work()
        future = start()
        with pytest.raises(TimeoutError):
            future.result(timeout=0.05)
        with pytest.raises(TimeoutError):
            future.exception(timeout=0.05)
        assert not future.done()
        assert not future.cancelled()
        server.resume_work()
        assert future.result(10) is not None
        assert future.exception() is None


def test_a_timeout_of_result_async_cancels_nothing(sampler: SamplingClient, server: TinkerServer) -> None:
    async def run() -> Any:
        server.pause_work()
        future = sampler.sample(PROMPT, 1, PARAMS)
        with pytest.raises(TimeoutError):
            await future.result_async(timeout=0.05)
        assert not future.done()
        server.resume_work()
        return await future.result_async(timeout=10)

    assert asyncio.run(run()).sequences[0].tokens == [6, 7]


def test_a_future_can_be_awaited_again_and_waited_for_after_that(trainer: TrainingClient) -> None:
    async def run() -> tuple[Any, Any, Any]:
        future = trainer.optim_step(STEP)
        return await future, await future, future

    first, second, future = asyncio.run(run())
    assert first is second is future.result()

    async def run_in_a_new_loop() -> Any:
        return await future

    assert asyncio.run(run_in_a_new_loop()) is first


def test_several_tasks_await_one_future(trainer: TrainingClient, server: TinkerServer) -> None:
    async def run() -> list[Any]:
        server.pause_work()
        future = trainer.optim_step(STEP)

        async def wait() -> Any:
            return await future

        tasks = [asyncio.create_task(wait()) for _ in range(5)]
        await asyncio.sleep(0.05)
        server.resume_work()
        return await asyncio.gather(*tasks)

    results = asyncio.run(run())
    assert len(results) == 5
    assert all(result is results[0] for result in results)


def test_gather_takes_futures_of_all_operations(trainer: TrainingClient, sampler: SamplingClient, datum: Any) -> None:
    async def run() -> list[Any]:
        return await asyncio.gather(
            trainer.forward_backward([datum(1)], LOSS), trainer.optim_step(STEP), sampler.sample(PROMPT, 2, PARAMS)
        )

    passed, stepped, sampled = asyncio.run(run())
    assert passed.metrics["loss:sum"] > 0
    assert stepped.metrics == {"step": 1.0}
    assert [sequence.tokens for sequence in sampled.sequences] == [[6, 7], [13, 14]]


def test_a_failure_is_raised_by_every_way_of_waiting(sampler: SamplingClient, server: TinkerServer) -> None:
    server.fail_next("asample", "out of memory", "server")
    future = sampler.sample(PROMPT, 1, PARAMS)
    error = future.exception(10)
    assert isinstance(error, RequestFailedError)
    with pytest.raises(RequestFailedError, match="out of memory"):
        future.result()

    async def awaiting() -> None:
        await future

    async def asking() -> None:
        await future.result_async()

    for wait in (awaiting, asking):
        with pytest.raises(RequestFailedError, match="out of memory"):
            asyncio.run(wait())


def test_wait_and_as_completed_of_the_standard_library(sampler: SamplingClient, server: TinkerServer) -> None:
    server.script("asample", [Hold()])
    held = sampler.sample(ModelInput.from_ints([100]), 1, PARAMS)
    server.wait_for("asample", timeout_s=10)
    quick = [sampler.sample(ModelInput.from_ints([i]), 1, PARAMS) for i in range(5)]

    done, pending = concurrent.futures.wait([held, *quick], 10, return_when=concurrent.futures.FIRST_COMPLETED)
    assert held in pending
    assert done
    done, _ = concurrent.futures.wait(quick, 10)
    assert done == set(quick)
    arriving = concurrent.futures.as_completed([*quick, held], timeout=10)
    assert {next(arriving) for _ in quick} == set(quick)
    server.release()
    assert list(arriving) == [held]
    assert held.result().sequences[0].tokens == [100, 101]


def test_a_cancelled_sample_counts_as_done_for_wait_and_as_completed(
    sampler: SamplingClient, server: TinkerServer
) -> None:
    server.pause_work()
    future = sampler.sample(PROMPT, 1, PARAMS)
    server.wait_for("retrieve_future", timeout_s=10)
    assert future.cancel()

    assert future.cancelled()
    assert future.done()
    with pytest.raises(concurrent.futures.CancelledError):
        future.result(5)
    assert list(concurrent.futures.as_completed([future], timeout=5)) == [future]
    done, _ = concurrent.futures.wait([future], 5)
    assert done == {future}


def test_callbacks_are_called_once_whether_added_before_or_after(trainer: TrainingClient, server: TinkerServer) -> None:
    called: list[tuple[str, Any]] = []
    is_called = threading.Event()
    server.pause_work()
    future = trainer.optim_step(STEP)
    future.add_done_callback(lambda done: called.append(("before", done)))
    future.add_done_callback(lambda _: is_called.set())
    assert called == []
    server.resume_work()
    assert is_called.wait(10)
    future.add_done_callback(lambda done: called.append(("after", done)))

    assert called == [("before", future), ("after", future)]


def test_waiting_on_the_clients_own_thread_is_refused_at_once(
    trainer: TrainingClient, sampler: SamplingClient, server: TinkerServer
) -> None:
    told: list[BaseException] = []
    is_told = threading.Event()
    server.script("asample", [Hold()])
    other = sampler.sample(PROMPT, 1, PARAMS)
    server.wait_for("asample", timeout_s=10)

    def wait_for_another(_: object) -> None:
        for wait in (lambda: other.result(5), lambda: other.exception(5), lambda: trainer.get_info()):
            try:
                wait()
            except Exception as error:
                told.append(error)
        is_told.set()

    trainer.optim_step(STEP).add_done_callback(wait_for_another)
    assert is_told.wait(4)

    assert len(told) == 3
    for error in told:
        assert isinstance(error, TinkerError)
        assert "own thread" in str(error)
    server.release()
    other.result(10)


def test_a_finished_future_may_be_read_on_the_clients_own_thread(trainer: TrainingClient) -> None:
    read: list[Any] = []
    is_read = threading.Event()

    def read_it(future: Any) -> None:
        read.append(future.result())
        is_read.set()

    trainer.optim_step(STEP).add_done_callback(read_it)
    assert is_read.wait(10)
    assert read[0].metrics == {"step": 1.0}


def test_waiting_in_another_thread_than_the_caller(trainer: TrainingClient, server: TinkerServer) -> None:
    server.pause_work()
    future = trainer.optim_step(STEP)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(future.result, 10) for _ in range(8)]
        server.resume_work()
        assert {waited.result(10).metrics["step"] for waited in waiting} == {1.0}


def test_cancelling_samples_while_they_finish_leaves_no_error(
    sampler: SamplingClient, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(20):
        futures = [sampler.sample(PROMPT, 1, PARAMS) for _ in range(20)]
        for future in futures:
            future.cancel()
        for future in futures:
            if not future.cancelled():
                future.result(10)
    sampler.sample(PROMPT, 1, PARAMS).result(10)

    assert [record for record in caplog.records if record.name == "asyncio"] == []
