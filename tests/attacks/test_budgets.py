"""At a limit, the tenant over it is refused with the reason; others are not affected."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from support.in_process import (
    Answer,
    Client,
    Gate,
    Recorder,
    Server,
    datum,
    forward_backward,
    run,
    sample,
    serving,
    until,
)
from uvicorn.server import ServerState

from tinsmith.server.auth.budgets import Budgets
from tinsmith.server.http.uvicorn_protocol import GuardedProtocol, protocol_for
from tinsmith.server.jobs.pending_results import Outcome, Promise
from tinsmith.server.refusals import OverLimitError

KB, MB = 1024, 1024 * 1024


def large(model: str, seq: int) -> dict[str, Any]:
    """About 20 KB."""
    return forward_backward(model, seq, *[datum(*range(1, 60))] * 25)


def refused(answer: Answer, says: str) -> bool:
    return answer.status == 429 and says in answer.detail and "retry-after" in answer.headers


def test_queued_bytes_have_a_budget_by_tenant(tmp_path: Path) -> None:
    async def scenario() -> None:
        backend = Recorder(hold=(gate := Gate("forward_backward")))
        async with serving(tmp_path, backend=backend, max_queued_bytes=50_000) as server:
            ann, eve = await server.client(), await server.client("eve", org="evil")
            hers = await ann.model(await ann.session())
            theirs = await eve.model(await eve.session())
            statuses = [await eve.post("forward_backward", large(theirs, seq)) for seq in range(1, 6)]
            taken = [answer for answer in statuses if answer.status == 200]
            assert 1 <= len(taken) < 5
            assert refused(statuses[-1], "queued requests hold")
            assert (await ann.post("forward_backward", large(hers, 1))).status == 200
            gate.opened.set()
            for answer in taken:
                await eve.result(answer)
            again = await eve.post("forward_backward", large(theirs, len(taken) + 1))
            assert again.status == 200, "a refusal for now closes no number"
            await eve.result(again)
            await until(lambda: not server.services.broker.count())
            assert set(server.services.jobs.queued_bytes_by_org.values()) == {0}

    run(scenario())


def test_open_polls_have_a_budget_by_tenant(tmp_path: Path) -> None:
    async def scenario() -> None:
        backend = Recorder(hold=(gate := Gate("sample")))
        async with serving(tmp_path, backend=backend, max_waits=5, poll_s=20.0) as server:
            ann, eve = await server.client(), await server.client("eve", org="evil")
            promises = {}
            for who in (ann, eve):
                sampler = await who.sampler(await who.session())
                promises[who] = await who.post("asample", sample(sampler, 1))
            waiting = [asyncio.create_task(eve.poll(promises[eve])) for _ in range(5)]
            await until(lambda: server.services.budgets._waits.get(_org(server, eve)) == 5)
            assert refused(await eve.poll(promises[eve]), "open calls; the limit is 5")
            hers = asyncio.create_task(ann.poll(promises[ann]))
            gate.opened.set()
            assert (await hers).status == 200
            assert [(await one).status for one in waiting] == [200] * 5
            assert (await eve.poll(promises[eve])).status == 200
            assert server.services.budgets._waits == {}

    run(scenario())


def _org(server: Server, client: Client) -> str:
    return server.services.authenticator._keys[client.key].caller.org_id


def test_a_stream_counts_while_it_is_open(tmp_path: Path) -> None:
    async def scenario() -> None:
        backend = Recorder(hold=(gate := Gate("sample")))
        async with serving(tmp_path, backend=backend, max_waits=1) as server:
            eve = await server.client("eve", org="evil")
            sampler = await eve.sampler(await eve.session())
            stream = asyncio.create_task(eve.post("/tinsmith/v1/sample_stream", sample(sampler, 1)))
            await until(lambda: server.services.broker.count())
            await until(lambda: server.services.budgets._waits)
            assert refused(await eve.post("/tinsmith/v1/sample_stream", sample(sampler, 2)), "the limit is 1")
            gate.opened.set()
            assert (await stream).status == 200
            assert server.services.budgets._waits == {}

    run(scenario())


class Outlet:
    def __init__(self, unsent: int) -> None:
        self.unsent = unsent
        self.is_closed = False

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def is_closing(self) -> bool:
        return self.is_closed


def test_bodies_and_unread_answers_share_a_budget() -> None:
    budgets = Budgets(max_held_bytes=MB, max_waits=9)
    unread = Outlet(600 * KB)
    budgets.answer("evil", 600 * KB, unread)
    budgets.answer("evil", 100, unread)
    assert budgets.held_bytes("evil") == 600 * KB
    with pytest.raises(OverLimitError, match="have not read 614400 bytes"):
        budgets.answer("evil", 500 * KB, Outlet(0))
    with pytest.raises(OverLimitError, match="hold 614400 bytes"), budgets.body("evil", 500 * KB):
        pass
    with ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(budgets.body("acme", 500 * KB))
        with pytest.raises(OverLimitError):
            stack.enter_context(budgets.body("acme", 500 * KB))
    with budgets.body("evil", 300 * KB):
        assert budgets.held_bytes("evil") == 900 * KB
    unread.unsent = 0
    assert budgets.held_bytes("evil") == 0
    with budgets.body("evil", 2 * MB):
        assert budgets.held_bytes("evil") == 2 * MB, "one alone is bounded by its route"
    closed = Outlet(600 * KB)
    budgets.answer("evil", 600 * KB, closed)
    closed.is_closed = True
    assert budgets.held_bytes("evil") == 0
    assert budgets._bodies == budgets._outlets == {}


@asynccontextmanager
async def listening(server: Server, protocol: type[GuardedProtocol]) -> AsyncIterator[tuple[str, int]]:
    """The server behind a real socket."""
    config = uvicorn.Config(server.app, http=protocol, lifespan="off", log_config=None, ws="none")
    config.load()
    state = ServerState()
    listener = await asyncio.get_running_loop().create_server(
        lambda: protocol(config=config, server_state=state, app_state={}), "127.0.0.1", 0
    )
    try:
        yield listener.sockets[0].getsockname()
    finally:
        listener.close()
        for connection in list(state.connections):
            connection.transport.abort()
        await asyncio.gather(*state.tasks, return_exceptions=True)


def ask(key: str, request_id: str) -> bytes:
    body = b'{"request_id":"%s"}' % request_id.encode()
    head = (
        "POST /api/v1/retrieve_future HTTP/1.1\r\nhost: x\r\naccept: application/x-protobuf\r\n"
        f"content-type: application/json\r\nx-api-key: {key}\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def slow_reader(address: tuple[str, int], question: bytes) -> Any:
    """A connection that asks and does not read."""
    _, writer = await asyncio.open_connection(*address, limit=1024)
    raw: socket.socket = writer.get_extra_info("socket")
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    writer.write(question)
    await writer.drain()
    return writer


def unsent(server: Server) -> int:
    return sum(server.services.budgets.held_bytes(org) for org in list(server.services.budgets._outlets))


def test_slow_readers_hold_a_bounded_amount_and_are_cut_off(tmp_path: Path) -> None:
    """40 clients that did not read their results of 9 MB once took 355 MB."""

    async def scenario() -> None:
        async with serving(tmp_path, max_held_bytes=24 * MB, read_timeout_s=1.0) as server:
            ann, eve = await server.client(), await server.client("eve", org="evil")
            for who, name in ((ann, "hers"), (eve, "theirs")):
                await who.get("get_server_capabilities")
                caller = server.services.authenticator._keys[who.key].caller
                made = Promise(
                    request_id=name,
                    kind="x",
                    lane="l",
                    session_id="s",
                    org_id=caller.org_id,
                    user_id=caller.user_id,
                    created_at=0.0,
                )
                server.services.broker.open(made)
                server.services.broker.settle(name, Outcome(bytes(9 * MB), "protobuf"))
            protocol = protocol_for(server.services.config)
            async with listening(server, protocol) as address:
                writers = [await slow_reader(address, ask(eve.key, "theirs")) for _ in range(20)]
                await until(lambda: unsent(server) > 9 * MB)
                assert unsent(server) <= 24 * MB
                reader, writer = await asyncio.open_connection(*address)
                writer.write(ask(ann.key, "hers"))
                assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200")
                await reader.readuntil(b"\r\n\r\n")
                assert len(await reader.readexactly(9 * MB)) == 9 * MB, "nobody else notices"
                await until(lambda: not unsent(server))
                for one in (*writers, writer):
                    one.transport.abort()
                await until(lambda: not protocol.connections_by_address)

    run(scenario())


def test_connections_from_one_address_are_bounded(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, max_connections=3) as server:
            protocol = protocol_for(server.services.config)
            async with listening(server, protocol) as address:
                kept = [await asyncio.open_connection(*address) for _ in range(3)]
                await until(lambda: protocol.connections_by_address == {"127.0.0.1": 3})
                reader, over = await asyncio.open_connection(*address)
                assert b"429" in await reader.readuntil(b"\r\n")
                assert b"too_many_connections" in await reader.read()
                over.close()
                for _, writer in kept:
                    writer.close()
                await until(lambda: not protocol.connections_by_address)
                _, writer = await asyncio.open_connection(*address)
                writer.close()

    run(scenario())
