"""Answers leave in one piece, bodies that are there are taken; whatever is unusual goes by ASGI."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from support.in_process import run, serving
from uvicorn.server import ServerState

from tinsmith.server.exchange import JOINED_BYTES, ExchangeProtocol, answer, whole_body

HEADERS = [(b"content-type", b"text/plain"), (b"content-length", b"2")]


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


def exchange(**fields: Any) -> Any:
    made = {
        "transport": Pipe(),
        "flow": SimpleNamespace(write_paused=False),
        "scope": {"method": "POST"},
        "default_headers": [(b"date", b"today")],
        "disconnected": False,
        "response_started": False,
        "response_complete": False,
        "keep_alive": True,
        "more_body": False,
        "body": bytearray(b"body"),
        "message_event": asyncio.Event(),
        "ended": [],
    }
    found = SimpleNamespace(**made | fields)
    found.on_response = lambda: found.ended.append(True)
    return found


def test_an_answer_is_one_call() -> None:
    found = exchange()
    assert answer(found, 200, HEADERS, b"ok")
    head = b"HTTP/1.1 200 OK\r\ndate: today\r\ncontent-type: text/plain\r\ncontent-length: 2\r\n\r\n"
    assert found.transport.calls == [head + b"ok"]
    assert (found.response_complete, found.message_event.is_set(), found.ended) == (True, True, [True])


def test_large_bodies_are_not_copied() -> None:
    found, body = exchange(), bytes(JOINED_BYTES + 1)
    assert answer(found, 404, HEADERS, body)
    [(head, sent)] = found.transport.calls
    assert head.startswith(b"HTTP/1.1 404 Not Found\r\n")
    assert sent is body


def test_a_connection_that_is_not_kept_is_closed_behind_the_answer() -> None:
    found = exchange(keep_alive=False)
    assert answer(found, 200, HEADERS, b"ok")
    assert found.transport.calls[0].endswith(b"\r\nconnection: close\r\n\r\nok")
    assert found.transport.calls[1:] == ["close"]


@pytest.mark.parametrize(
    ("fields", "headers"),
    [
        ({"disconnected": True}, HEADERS),
        ({"response_started": True}, HEADERS),
        ({"flow": SimpleNamespace(write_paused=True)}, HEADERS),
        ({"scope": {"method": "HEAD"}}, HEADERS),
        ({}, [(b"x", b"a\r\nset-cookie: b")]),
        ({}, [(b"x", b"a\nb")]),
    ],
)
def test_what_is_unusual_goes_by_asgi(fields: dict[str, Any], headers: list[tuple[bytes, bytes]]) -> None:
    found = exchange(**fields)
    assert not answer(found, 200, headers, b"ok")
    assert (found.transport.calls, found.response_complete, found.ended) == ([], False, [])


def test_a_body_is_taken_once_and_only_whole() -> None:
    found = exchange()
    assert whole_body(found) == b"body"
    assert whole_body(found) == b""
    for fields in ({"more_body": True}, {"disconnected": True}, {"response_complete": True}):
        assert whole_body(exchange(**fields)) is None


def test_on_a_real_socket(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann = await server.client()
            config = uvicorn.Config(server.app, http=ExchangeProtocol, lifespan="off", log_config=None, ws="none")
            config.load()
            state = ServerState()
            loop = asyncio.get_running_loop()
            listener = await loop.create_server(
                lambda: ExchangeProtocol(config=config, server_state=state, app_state={}), "127.0.0.1", 0
            )
            reader, writer = await asyncio.open_connection(*listener.sockets[0].getsockname())

            async def ask(body: bytes, *pieces: bytes, more: str = "") -> tuple[bytes, bytes]:
                length = len(body) + sum(map(len, pieces))
                head = f"POST /api/v1/create_session HTTP/1.1\r\nhost: x\r\nx-api-key: {ann.key}\r\n{more}"
                writer.write(f"{head}content-length: {length}\r\n\r\n".encode() + body)
                for piece in pieces:
                    await asyncio.sleep(0.05)
                    writer.write(piece)
                answered = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
                size = int(answered.partition(b"content-length: ")[2].partition(b"\r\n")[0])
                return answered, await reader.readexactly(size)

            try:
                message = b'{"tags": [], "sdk_version": "0.36.0"}'
                for pieces in ((message,), (message[:9], message[9:]), (message,)):
                    head, body = await ask(*pieces)
                    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
                    assert b"session_id" in body
                head, _ = await ask(b"{", more="connection: close\r\n")
                assert head.startswith(b"HTTP/1.1 4")
                assert b"connection: close\r\n" in head
                assert await asyncio.wait_for(reader.read(), 20) == b""
            finally:
                writer.close()
                listener.close()
                await asyncio.gather(*state.tasks, return_exceptions=True)

    run(scenario())
