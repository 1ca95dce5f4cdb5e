"""Clients that are slow or send too much, on real sockets: each gets a reason and is disconnected; others are not
affected."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvicorn
from support.in_process import Server, run, serving
from uvicorn.server import ServerState

from tinsmith.server.http import uvicorn_protocol
from tinsmith.server.http.uvicorn_protocol import MAX_HEAD_BYTES, GuardedProtocol


class Hasty(GuardedProtocol):
    """Waits a little only, and longer than a busy machine needs between two pieces of a test."""

    head_s = 0.5


@asynccontextmanager
async def listening(server: Server, kind: type[GuardedProtocol] = Hasty) -> AsyncIterator[int]:
    """The application behind real sockets; gives the port."""
    config = uvicorn.Config(server.app, http=kind, lifespan="off", log_config=None, ws="none")
    config.load()
    state = ServerState()
    loop = asyncio.get_running_loop()
    listener = await loop.create_server(lambda: kind(config=config, server_state=state, app_state={}), "127.0.0.1", 0)
    try:
        yield listener.sockets[0].getsockname()[1]
    finally:
        listener.close()
        for connection in list(state.connections):
            connection.transport.close()
        await asyncio.gather(*state.tasks, return_exceptions=True)


async def answer_of(reader: asyncio.StreamReader) -> tuple[int, Any]:
    """An answer that closes its connection."""
    text = await asyncio.wait_for(reader.read(), 20)
    head, _, body = text.partition(b"\r\n\r\n")
    return int(head.split()[1]), msgspec.json.decode(body)


@pytest.mark.parametrize(
    "pieces",
    [
        (),
        (b"GET /heal",),
        (b"GET /healthz HTTP/1.1\r\n", b"host: x\r\n", b"x-a: 1\r\n"),
        (b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\nGET /healthz HTTP/1.1\r\n",),
    ],
)
def test_a_slow_head_is_cut_off_with_a_reason(tmp_path: Path, pieces: tuple[bytes, ...]) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server, listening(server) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
            text = await asyncio.wait_for(reader.read(), 20)
            assert b"408 Request Timeout" in text
            assert b'"slow_head"' in text
            assert (b"200 OK" in text) == (pieces != () and b"\r\n\r\n" in pieces[0])
            writer.close()
            await writer.wait_closed()

    run(scenario())


def test_a_hundred_slow_clients_do_not_keep_others_out(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server, listening(server) as port:
            slow = [await asyncio.open_connection("127.0.0.1", port) for _ in range(100)]
            for _, writer in slow:
                writer.write(b"POST /api/v1/create_session HTTP/1.1\r\nx: ")
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            assert await answer_of(reader) == (200, {"status": "ok"})
            for read, write in [*slow, (reader, writer)]:
                # One that wrote while it was being let go sees a reset instead of the end.
                with suppress(ConnectionResetError):
                    await asyncio.wait_for(read.read(), 20)
                write.close()
                with suppress(ConnectionResetError):
                    await write.wait_closed()

    run(scenario())


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_head_that_is_too_large(tmp_path: Path, is_whole: bool) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server, listening(server) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            head = b"GET /healthz HTTP/1.1\r\nhost: x\r\nx-long: " + b"y" * (MAX_HEAD_BYTES + 10)
            writer.write(head + b"\r\n\r\n" if is_whole else head)
            status, body = await answer_of(reader)
            assert (status, body["code"]) == (431, "head_too_large")
            writer.close()
            await writer.wait_closed()

    run(scenario())


async def pushed(port: int, data: bytes) -> tuple[int, Any]:
    """The answer to a client that sends everything before it begins to read, on a socket of its own thread."""

    def exchange() -> bytes:
        with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
            connection.sendall(data)
            parts = []
            while part := connection.recv(65536):
                parts.append(part)
            return b"".join(parts)

    head, _, body = (await asyncio.to_thread(exchange)).partition(b"\r\n\r\n")
    announced = next(line for line in head.split(b"\r\n") if line.startswith(b"content-length:"))
    assert len(body) == int(announced.partition(b":")[2]), "the whole answer"
    return int(head.split()[1]), msgspec.json.decode(body)


BURST = b"y" * 1024 * 1024


def test_a_client_that_bursts_reads_why_it_is_refused_every_time(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server, listening(server) as port:
            for _ in range(20):
                status, body = await pushed(port, b"GET /healthz HTTP/1.1\r\nhost: x\r\nx-long: " + BURST)
                assert (status, body["code"]) == (431, "head_too_large")
                status, body = await pushed(port, b"\x16\x03\x01 hello\r\n\r\n" + BURST)
                assert (status, body["code"]) == (400, "bad_http")

    run(scenario())


@pytest.mark.parametrize("path", ["/api/v1/create_session", "/tinsmith/v1/sample_stream"])
@pytest.mark.parametrize("connection", ["close", "keep-alive"])
def test_a_body_that_is_too_large_is_refused_with_a_reason_every_time(
    tmp_path: Path, path: str, connection: str
) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, max_body_bytes=1000) as server, listening(server) as port:
            ann = await server.client()
            head = f"POST {path} HTTP/1.1\r\nx-api-key: {ann.key}\r\nconnection: {connection}\r\n"
            for _ in range(10):
                whole = f"{head}content-length: {len(BURST)}\r\n\r\n".encode() + BURST
                if connection == "close":
                    status, body = await pushed(port, whole)
                    assert (status, body["code"]) == (413, "limit_exceeded"), body
                    continue
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                for _ in range(2):  # the connection goes on behind the body
                    writer.write(whole)
                    assert b"413 " in await asyncio.wait_for(reader.readuntil(b"}"), 20)
                writer.close()
                await writer.wait_closed()

    run(scenario())


async def send_for_ever(writer: asyncio.StreamWriter, piece: bytes, pause_s: float) -> None:
    while True:
        writer.write(piece)
        await writer.drain()
        await asyncio.sleep(pause_s)


def test_a_client_that_goes_on_after_it_was_refused_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uvicorn_protocol, "LINGER_S", 0.2)
    monkeypatch.setattr(uvicorn_protocol, "LINGER_BYTES", 100_000)

    async def scenario() -> None:
        async with serving(tmp_path) as server, listening(server) as port:
            for piece, pause_s in ((b"z" * 1000, 0.02), (b"z" * 50_000, 0.0)):  # too long, too much
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(b"\x16\x03\x01 hello\r\n\r\n")
                assert b"bad_http" in await asyncio.wait_for(reader.readuntil(b"}"), 20)
                assert await asyncio.wait_for(reader.read(), 20) == b"", "it says no more at once"
                with pytest.raises(ConnectionError):
                    await asyncio.wait_for(send_for_ever(writer, piece, pause_s), 20)
                writer.close()
                with suppress(ConnectionError):
                    await writer.wait_closed()

    run(scenario())


def test_large_bodies_do_not_count_as_heads(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server, listening(server) as port:
            ann = await server.client()
            batch = {"events": [], "platform": "x", "sdk_version": "x", "session_id": "x"}
            body = msgspec.json.encode(batch) + b" " * 3 * MAX_HEAD_BYTES
            head = (
                f"POST /api/v1/telemetry HTTP/1.1\r\nhost: x\r\nx-api-key: {ann.key}\r\ncontent-length: {len(body)}\r\n"
            ).encode()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for split in (0, 1, 2, 3, 4):  # the end of the head arrives in two pieces
                end = b"\r\n"
                last = split == 4
                whole = head + (b"connection: close\r\n" if last else b"") + end + body
                cut = len(whole) - len(body) - split
                writer.write(whole[:cut])
                await writer.drain()
                await asyncio.sleep(0)
                writer.write(whole[cut:])
                await writer.drain()
                if not last:
                    text = await asyncio.wait_for(reader.readuntil(b"}"), 20)
                    assert b"200 OK" in text
            assert (await answer_of(reader))[0] == 200
            writer.close()
            await writer.wait_closed()

    run(scenario())


def test_what_is_not_http(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server, listening(server) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"\x16\x03\x01 hello\r\n\r\n")
            status, body = await answer_of(reader)
            assert (status, body["code"]) == (400, "bad_http")
            writer.close()
            await writer.wait_closed()

    run(scenario())


@pytest.mark.parametrize("path", ["/api/v1/create_session", "/tinsmith/v1/sample_stream"])
def test_a_slow_body_is_cut_off_with_a_reason(tmp_path: Path, path: str) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, body_timeout_s=0.05) as server, listening(server) as port:
            ann = await server.client()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(f"POST {path} HTTP/1.1\r\nx-api-key: {ann.key}\r\ncontent-length: 100\r\n\r\n{{".encode())
            status, body = await answer_of(reader)
            assert (status, body["code"]) == (408, "slow_body")
            writer.close()
            await writer.wait_closed()

    run(scenario())
