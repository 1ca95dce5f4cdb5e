"""Waiting on Windows, where Python notices Ctrl-C only between waits: a future is waited for in pieces."""

from __future__ import annotations

import concurrent.futures
import sys

import pytest

from tinsmith.client.runtime import futures
from tinsmith.client.runtime.futures import Future


@pytest.fixture(autouse=True)
def pieces(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The lengths of the waits."""
    waited: list[float] = []
    wait = concurrent.futures.wait

    def noted(fs: list[Future[str]], timeout: float) -> object:
        waited.append(timeout)
        return wait(fs, timeout)

    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(futures, "INTERRUPTIBLE_S", 0.01)
    monkeypatch.setattr(concurrent.futures, "wait", noted)
    return waited


def test_a_result_is_waited_for_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    future: Future[str] = Future()
    waited: list[float] = []

    def wait(fs: list[Future[str]], timeout: float) -> None:
        waited.append(timeout)
        if len(waited) == 3:
            fs[0].set_result("done")

    monkeypatch.setattr(concurrent.futures, "wait", wait)
    assert future.result(60) == "done"
    assert future.exception() is None
    assert waited == [0.01] * 3


def test_a_timeout_is_the_whole_wait(pieces: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TimeoutError):
        Future[str]().result(0.03)
    assert max(pieces) == 0.01
    with pytest.raises(TimeoutError):
        Future[str]().exception(0)
    left: list[float] = []
    monkeypatch.setattr(concurrent.futures.Future, "result", lambda _, timeout: left.append(timeout))
    Future[str]().result(0.03)
    assert left == [0.0], "what was waited for is not waited for again"


def test_ctrl_c_gets_through(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(concurrent.futures, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Future[str]().result()


def test_elsewhere_it_is_one_wait(monkeypatch: pytest.MonkeyPatch, pieces: list[float]) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    with pytest.raises(TimeoutError):
        Future[str]().result(0.01)
    assert pieces == []
