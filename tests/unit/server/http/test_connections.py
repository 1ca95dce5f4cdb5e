"""Connections on real sockets: answers in order, idle ones closed, bodies as they were sent."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from support.in_process import run, serving
from uvicorn.server import ServerState

from tinsmith.server.http.uvicorn_protocol import GuardedProtocol

App = Callable[[Any, Any, Any], Awaitable[None]]
ASK = b"GET /%s HTTP/1.1\r\nhost: x\r\n\r\n"


class Seen:
    """An application that remembers which task carried out each request."""

    def __init__(self) -> None:
        self.tasks: list[asyncio.Task[Any]] = []
        self.paths: list[str] = []
        self.gate = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.tasks.append(task)
        self.paths.append(scope["path"])
        digest, size, more = hashlib.sha256(), 0, True
        while more:
            message = await receive()
            body, more = message.get("body", b""), message.get("more_body", False)
            assert type(body) is bytes
            digest.update(body)
            size += len(body)
        if scope["path"] == "/fault":
            raise RuntimeError("a mistake")
        answer = f"{scope['path']} {size} {digest.hexdigest()}".encode()
        headers = [(b"content-length", b"%d" % len(answer))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer})
        if scope["path"] == "/lingers":
            await self.gate.wait()


@asynccontextmanager
async def connected(app: App, **settings: Any) -> AsyncIterator[tuple[Any, Any, ServerState]]:
    config = uvicorn.Config(app, http=GuardedProtocol, lifespan="off", log_config=None, ws="none", **settings)
    config.load()
    state = ServerState()
    listener = await asyncio.get_running_loop().create_server(
        lambda: GuardedProtocol(config=config, server_state=state, app_state={}), "127.0.0.1", 0
    )
    reader, writer = await asyncio.open_connection(*listener.sockets[0].getsockname())
    try:
        yield reader, writer, state
    finally:
        writer.close()
        listener.close()
        for connection in list(state.connections):
            connection.transport.close()
        await asyncio.gather(*state.tasks, return_exceptions=True)


async def answer_of(reader: Any) -> str:
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
    size = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    return str((await asyncio.wait_for(reader.readexactly(size), 20)).decode())


def test_pipelined_requests_are_answered_in_order() -> None:
    async def scenario() -> None:
        app = Seen()
        async with connected(app) as (reader, writer, _):
            writer.write(b"".join(ASK % b"%d" % number for number in range(6)))
            assert [(await answer_of(reader)).split()[0] for _ in range(6)] == [f"/{number}" for number in range(6)]
            writer.write(ASK % b"again")
            assert (await answer_of(reader)).startswith("/again")

    run(scenario())


def test_work_behind_an_answer_does_not_hold_up_the_next_request() -> None:
    async def scenario() -> None:
        app = Seen()
        async with connected(app) as (reader, writer, state):
            writer.write(ASK % b"lingers")
            assert (await answer_of(reader)).startswith("/lingers")
            for path in (b"next", b"over"):
                writer.write(ASK % path)
                assert (await answer_of(reader)).startswith(f"/{path.decode()}")
            assert app.tasks[0] in state.tasks
            app.gate.set()
            await asyncio.wait_for(app.tasks[0], 20)
            writer.write(ASK % b"last")
            assert (await answer_of(reader)).startswith("/last")

    run(scenario())


def test_an_application_that_fails_is_answered_for_and_closes() -> None:
    async def scenario() -> None:
        app = Seen()
        async with connected(app) as (reader, writer, _):
            writer.write(ASK % b"fault")
            assert await answer_of(reader) == "Internal Server Error"
            assert await asyncio.wait_for(reader.read(), 20) == b""
            await asyncio.wait_for(asyncio.gather(*app.tasks), 20)

    run(scenario())


def test_an_idle_connection_is_closed_and_a_busy_one_is_not() -> None:
    async def scenario() -> None:
        app = Seen()
        async with connected(app, timeout_keep_alive=1) as (reader, writer, state):
            writer.write(ASK % b"first")
            await answer_of(reader)
            [connection] = state.connections
            writer.write(ASK % b"busy")
            await answer_of(reader)
            assert not connection.transport.is_closing()
            assert await asyncio.wait_for(reader.read(), 20) == b""

    run(scenario())


@pytest.mark.parametrize("sizes", [(1,), (1, 1, 1), (70_000, 5), (40_000, 40_000, 40_000)])
def test_bodies_are_given_as_they_came(sizes: tuple[int, ...]) -> None:
    async def scenario() -> None:
        async with connected(Seen()) as (reader, writer, _):
            for turn in range(2):  # what is left of one body must not get into the next
                pieces = [bytes([index + turn]) * size for index, size in enumerate(sizes)]
                body = b"".join(pieces)
                writer.write(b"POST /body HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body))
                for piece in pieces:
                    writer.write(piece)
                    await asyncio.sleep(0.01)
                assert await answer_of(reader) == f"/body {len(body)} {hashlib.sha256(body).hexdigest()}"

    run(scenario())


def test_requests_and_refusals_of_the_whole_server(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann = await server.client()
            config = uvicorn.Config(server.app, http=GuardedProtocol, lifespan="off", log_config=None, ws="none")
            config.load()
            state = ServerState()
            loop = asyncio.get_running_loop()
            listener = await loop.create_server(
                lambda: GuardedProtocol(config=config, server_state=state, app_state={}), "127.0.0.1", 0
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
