"""Waiting for a result: what is requested, what a deadline ends, and that budgets are released."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tinsmith.client.connection.limits import Limits
from tinsmith.client.connection.outage import Affected, Outage
from tinsmith.client.connection.polling import wait_for_result
from tinsmith.client.runtime.deadlines import Deadline, limit_of
from tinsmith.client.runtime.runner import Runner
from tinsmith.config import ClientConfig
from tinsmith.errors import APITimeoutError, TinkerError
from tinsmith.transport.base import HttpResponse
from tinsmith.wire.messages.training import OptimStepResponse
from tinsmith.wire.routes.table import OPTIM_STEP

LARGE = {"status": "complete_metadata", "response_payload_size": 1000}
PENDING = {"type": "try_again", "request_id": "r", "queue_state": "active"}


class FakeConnection:
    """Answers polls from a list, and keeps what was asked."""

    def __init__(self, answers: list[dict[str, Any]], **settings: Any) -> None:
        self.config = ClientConfig(base_url="http://127.0.0.1:1", api_key="tml-a", **settings)
        self.limits = Limits()
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.timeouts: list[float] = []
        self.held: list[int] = []
        self._answers = answers
        self._all = self.limits.response_bytes._free

    async def send(self, route: Any, body: bytes, *, headers: Any, timeout_s: float, **_: Any) -> HttpResponse:
        self.asked.append(json.loads(body))
        self.headers.append(dict(headers))
        self.timeouts.append(timeout_s)
        self.held.append(self._all - self.limits.response_bytes._free)
        answer = self._answers.pop(0)
        return HttpResponse(status=200, headers={}, body=json.dumps(answer).encode(), url="http://127.0.0.1:1")


def wait(connection: FakeConnection, **options: Any) -> Any:
    return asyncio.run(
        wait_for_result(connection, OPTIM_STEP, "r", what="optim_step of m", outage=Outage(), **options)  # type: ignore[arg-type]
    )


def wait_until(connection: FakeConnection, seconds: float) -> Any:
    """Wait in a runner, with a deadline, as clients do."""
    runner = Runner()
    limit = limit_of("optim_step of m", Deadline(seconds, "result_deadline_s"))
    waiting = wait_for_result(connection, OPTIM_STEP, "r", what="optim_step of m", outage=Outage())  # type: ignore[arg-type]
    try:
        return runner.submit(waiting, limit=limit).result(10)
    finally:
        runner.close(timeout_s=10)


def test_a_large_result_is_asked_for_again() -> None:
    connection = FakeConnection([PENDING, LARGE, PENDING, {"metrics": {"a": 1.0}}])
    answer: OptimStepResponse = wait(connection, submit_s=0.5)

    assert answer.metrics == {"a": 1.0}
    assert [body["allow_metadata_only"] for body in connection.asked] == [True, True, False, False]
    assert connection.timeouts == [connection.config.poll_timeout_s] * 4
    assert [headers["x-tinker-request-iteration"] for headers in connection.headers] == ["0", "1", "2", "3"]


def test_a_deadline_that_passes_while_the_result_is_fetched_is_said() -> None:
    connection = FakeConnection([LARGE, *[PENDING] * 1000])
    with pytest.raises(APITimeoutError, match=r"optim_step of m: no result 0.3 s after the call \(result_deadline_s\)"):
        wait_until(connection, 0.3)
    assert connection.limits.response_bytes._free == connection._all


def test_a_deadline_that_passes_while_there_is_no_room_is_said() -> None:
    connection = FakeConnection([LARGE])
    assert connection.limits.response_bytes.acquire_now(connection._all)
    with pytest.raises(APITimeoutError, match="result_deadline_s"):
        wait_until(connection, 0.1)
    assert len(connection.asked) == 1
    assert not connection.limits.response_bytes._waiting


def test_room_for_a_large_result_is_held_while_it_is_fetched() -> None:
    connection = FakeConnection([LARGE, {"metrics": {}}])
    wait(connection)
    assert connection.held == [0, 1000]
    assert connection.limits.response_bytes._free == connection._all


def test_a_server_that_gives_only_the_size_is_named() -> None:
    connection = FakeConnection([LARGE, LARGE])
    with pytest.raises(TinkerError, match="optim_step of m: the server sent the size of the result again"):
        wait(connection)
    assert connection.limits.response_bytes._free == connection._all


def test_an_outage_is_told_by_the_first_and_is_over_with_the_last() -> None:
    outage = Outage()
    first, second = Affected(outage), Affected(outage)
    assert first.begin()
    assert not first.begin()
    assert not second.begin()
    first.over()
    assert not first.begin(), "the second is still in trouble"
    for one in (first, second, second):
        one.over()
    assert second.begin()
