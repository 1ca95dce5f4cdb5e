"""A connection has one task for all its requests, closes when it has been idle, and gives bodies as they were sent."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from support.in_process import run
from uvicorn.server import ServerState

from tinsmith.server import sockets
from tinsmith.server.exchange import ExchangeProtocol

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
    config = uvicorn.Config(app, http=ExchangeProtocol, lifespan="off", log_config=None, ws="none", **settings)
    config.load()
    state = ServerState()
    listener = await asyncio.get_running_loop().create_server(
        lambda: ExchangeProtocol(config=config, server_state=state, app_state={}), "127.0.0.1", 0
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


def test_requests_of_a_connection_share_a_task_that_ends_with_it() -> None:
    async def scenario() -> None:
        app = Seen()
        async with connected(app) as (reader, writer, state):
            for number in range(5):
                writer.write(ASK % b"%d" % number)
                assert (await answer_of(reader)).startswith(f"/{number} 0 ")
            await asyncio.sleep(0)
            assert len(set(app.tasks)) == 1
            assert not state.tasks  # a connection without a request is nothing to wait for at the end
            assert not app.tasks[0].done()
        await asyncio.wait_for(asyncio.gather(*app.tasks), 20)

    run(scenario())


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
            assert app.tasks[1] is app.tasks[2] is not app.tasks[0]
            app.gate.set()
            await asyncio.wait_for(app.tasks[0], 20)  # another task waits for requests: this one is not needed
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
            timer = connection.timeout_keep_alive_task
            assert timer is not None
            writer.write(ASK % b"second")
            await answer_of(reader)
            assert connection.timeout_keep_alive_task is timer  # it looks later, and finds when that was
            connection._idle_since -= 0.9
            connection.timeout_keep_alive_handler()  # not yet
            assert not connection.transport.is_closing()
            connection._unset_keepalive_if_required()  # something comes
            connection.timeout_keep_alive_handler()
            assert not connection.transport.is_closing()
            assert connection.timeout_keep_alive_task is None
            writer.write(ASK % b"third")
            await answer_of(reader)
            assert connection.timeout_keep_alive_task is not None
            assert await asyncio.wait_for(reader.read(), 20) == b""

    run(scenario())


@pytest.mark.parametrize("sizes", [(1,), (1, 1, 1), (70_000, 5), (40_000, 40_000, 40_000)])
def test_bodies_are_given_as_they_came(sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "GATHER_BYTES", 64 * 1024)
    monkeypatch.setattr(sockets, "GATHER_S", 0.005)

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
