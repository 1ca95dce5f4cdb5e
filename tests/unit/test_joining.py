"""Head and body of an answer leave together; what comes alone does not wait for more."""

from __future__ import annotations

import asyncio
from typing import Any

from tinsmith.server.joining import JOINED_BYTES, JoiningTransport


class Pipe:
    """A transport that remembers each system call it would make."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def write(self, data: bytes) -> None:
        self.calls.append(data)

    def writelines(self, parts: Any) -> None:
        self.calls.append(list(parts))

    def close(self) -> None:
        self.calls.append("close")

    def is_closing(self) -> bool:
        return "close" in self.calls


def run(*writes: bytes, then_close: bool = False) -> list[Any]:
    async def act() -> list[Any]:
        pipe = Pipe()
        transport = JoiningTransport(pipe, asyncio.get_running_loop())  # type: ignore[arg-type]
        for data in writes:
            transport.write(data)
        if then_close:
            transport.close()
            assert transport.is_closing()
        await asyncio.sleep(0)
        return pipe.calls

    return asyncio.run(act())


def test_two_writes_are_one_call() -> None:
    assert run(b"head", b"body") == [b"headbody"]


def test_a_lone_write_leaves_in_the_next_round() -> None:
    assert run(b"head") == [b"head"]


def test_a_third_write_is_not_lost() -> None:
    assert run(b"head", b"body", b"more") == [b"headbody", b"more"]


def test_large_bodies_are_not_copied() -> None:
    body = bytes(JOINED_BYTES + 1)
    assert run(b"head", body) == [[b"head", body]]


def test_an_empty_body_does_not_hold_the_head() -> None:
    assert run(b"head", b"") == [b"head"]


def test_closing_sends_what_is_held_first() -> None:
    assert run(b"head", then_close=True) == [b"head", "close"]
