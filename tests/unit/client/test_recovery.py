"""How many steps a lost run fell back is counted by the order of the calls, not of their results."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tinsmith.client.recovery import RecoveringTrainingClient, RecoveryEvent
from tinsmith.client.runtime.futures import Future
from tinsmith.client.runtime.runner import Runner
from tinsmith.errors import RetryableException, RunRecoveredError


class Run:
    """A training client whose results are set by the test."""

    def __init__(self, runner: Runner, model_id: str) -> None:
        self.holder = SimpleNamespace(connection=SimpleNamespace(runner=runner))
        self.model_id = model_id
        self.futures: list[Future[Any]] = []

    def call(self, *_: Any) -> Future[Any]:
        self.futures.append(Future())
        return self.futures[-1]

    optim_step = save_state = call


@pytest.fixture
def runner() -> Iterator[Runner]:
    made = Runner()
    yield made
    made.close()


def test_steps_are_counted_from_where_the_checkpoint_was_asked_for(runner: Runner) -> None:
    run, told = Run(runner, "first"), []

    async def resume(path: str) -> Any:
        return Run(runner, f"from {path}")

    client = RecoveringTrainingClient(run, resume, on_recovery=told.append)  # type: ignore[arg-type]
    called: list[Future[Any]] = [
        client.optim_step(None),  # type: ignore[arg-type]
        client.save_state("a"),
        client.optim_step(None),  # type: ignore[arg-type]
        client.save_state("b"),
        client.optim_step(None),  # type: ignore[arg-type]
        client.optim_step(None),  # type: ignore[arg-type]
    ]
    for index in (0, 2, 4):  # the steps are heard of before the checkpoints between them
        run.futures[index].set_result(None)
        called[index].result(10)
    for index, path in ((3, "b"), (1, "a")):  # and the later checkpoint before the earlier one
        run.futures[index].set_result(SimpleNamespace(path=path))
        called[index].result(10)
    run.futures[5].set_exception(RetryableException("lost"))

    assert isinstance(called[5].exception(10), RunRecoveredError)
    [event] = told
    assert isinstance(event, RecoveryEvent)
    assert (event.checkpoint, event.steps_lost) == ("b", 1)
    assert client.model_id == "from b"
