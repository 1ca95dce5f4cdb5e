"""The client's default transport: everything that the aiohttp transport is tested for, and its own behaviour."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import aiohappyeyeballs
import pytest
import test_transport_http as shared
from test_transport_http import *  # noqa: F403 - the same tests, run with the other transport
from test_transport_http import OK, fails, request, run, scripted

from tinsmith.errors import APITimeoutError
from tinsmith.transport import http_connection
from tinsmith.transport import pool as direct_module
from tinsmith.transport.base import HttpRequest, Purpose
from tinsmith.transport.multipart import Multipart
from tinsmith.transport.pool import DirectTransport

Reader = asyncio.StreamReader
Writer = asyncio.StreamWriter
Scenario = Callable[[DirectTransport, str], Coroutine[Any, Any, None]]


@pytest.fixture(autouse=True)
def direct(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    monkeypatch.setattr(shared, "HttpTransport", DirectTransport)
    body = request.node.callspec.params.get("body") if hasattr(request.node, "callspec") else None
    if not isinstance(body, shared.Late):
        yield
        return
    body.rounds = 0  # both runs use the same one, in whichever order
    yield
    body.rounds = 0


class Server:
    """Answers each request with the next of its texts, on as many connections as it takes; counts them."""

    def __init__(self, *texts: bytes, hangs: bool = False) -> None:
        self._texts = list(texts)
        self._hangs = hangs
        self.served: list[int] = []
        """The number of the connection of each request."""
        self.connections = 0
        self.ended = asyncio.Event()
        """Set when a client has closed a connection."""

    async def __call__(self, reader: Reader, writer: Writer) -> None:
        self.connections += 1
        number = self.connections
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]
                await reader.readexactly(int(length or 0))
                self.served.append(number)
                writer.write(self._texts.pop(0) if self._texts else OK)
                await writer.drain()
                if self._hangs and not self._texts:
                    await reader.read()
        except (asyncio.IncompleteReadError, ConnectionError):
            self.ended.set()
        finally:
            writer.close()  # Python 3.13 warns of one that is not, also if the other side has closed the connection


def serve(server: Callable[[Reader, Writer], Coroutine[Any, Any, None]], scenario: Scenario, **options: Any) -> None:
    async def with_server(transport: Any) -> None:
        async with scripted(server) as url:
            await scenario(transport, url)
            await transport.close()

    run(with_server, **options)


KEPT = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n"


@pytest.mark.parametrize(
    ("first", "connections"),
    [
        (OK, [1, 1]),
        (KEPT, [1, 1]),
        (b"HTTP/1.1 204 No Content\r\n\r\n", [1, 1]),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK, [1, 1]),
        (OK.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"), [1, 2]),
        (OK.replace(b"1.1", b"1.0"), [1, 2]),
        (OK + b"more", [1, 2]),
    ],
)
def test_connections_are_used_again_where_the_answer_allows_it(first: bytes, connections: list[int]) -> None:
    server = Server(first)

    async def scenario(transport: DirectTransport, url: str) -> None:
        for _ in range(2):
            assert (await transport.send(request(url, "POST", body=b"x"))).status in (200, 204)
        assert server.served == connections

    serve(server, scenario)


@pytest.mark.parametrize("what", ["end", "word"])
def test_a_kept_connection_that_the_server_ends_is_noticed_before_it_is_used(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Even a POST, which is never repeated, does not fail."""
    monkeypatch.setattr(http_connection, "KEEP_ALIVE_S", 1000.0)
    go_on, gone = asyncio.Event(), asyncio.Event()
    connections = 0

    async def server(reader: Reader, writer: Writer) -> None:
        nonlocal connections
        connections += 1
        await reader.readuntil(b"\r\n\r\nx")
        writer.write(OK)
        if connections == 1:
            await go_on.wait()
            if what == "word":
                writer.write(b"HTTP/1.1 408 Request Timeout\r\n\r\n")
                assert await reader.read() == b""
            writer.close()
            await writer.wait_closed()
            gone.set()

    async def scenario(transport: DirectTransport, url: str) -> None:
        made = request(url, "POST", body=b"x")
        await transport.send(made)
        go_on.set()
        await gone.wait()
        await asyncio.sleep(0)
        assert (await transport.send(made)).body == b"ok"
        assert connections == 2

    serve(server, scenario)


def test_idle_connections_are_closed_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connection, "KEEP_ALIVE_S", 0.01)
    server = Server()

    async def scenario(transport: DirectTransport, url: str) -> None:
        await transport.send(request(url))
        await server.ended.wait()
        await transport.send(request(url))
        assert server.served == [1, 2]

    serve(server, scenario)


HALVES = [
    b"",
    b"HTTP/1.1 200 OK\r\nCont",
    b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf",
    b"HTTP/1.1 200 OK\r\n\r\nh",
]


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("way", ["cancel", "timeout", "close"])
def test_a_half_used_connection_is_not_kept(half: bytes, way: str) -> None:
    """Neither cancelled nor timed out, and what was cut off by closing is no complete answer."""
    server = Server(OK, half, hangs=True)

    async def scenario(transport: DirectTransport, url: str) -> None:
        await transport.send(request(url))
        made = request(url, timeout_s=0.05 if way == "timeout" else 10.0)
        task = asyncio.create_task(transport.send(made))
        while len(server.served) < 2:
            await asyncio.sleep(0)
        if way == "cancel":
            task.cancel()
        if way == "close":
            await transport.close()
        with pytest.raises((asyncio.CancelledError, shared.APIConnectionError)) as caught:
            await task
        assert isinstance(caught.value, APITimeoutError) is (way == "timeout")
        await server.ended.wait()
        if way != "close":
            assert (await transport.send(request(url))).body == b"ok"
            assert server.served == [1, 1, 2]

    serve(server, scenario, limits={Purpose.REST: 1})


def test_a_shorter_time_limit_than_the_last_one_counts() -> None:
    server = Server(OK, OK, b"")

    async def scenario(transport: DirectTransport, url: str) -> None:
        await transport.send(request(url, timeout_s=60.0))
        await transport.send(request(url, timeout_s=0.5))
        await fails(transport, request(url, timeout_s=0.01), "no response in 0.01 s")  # type: ignore[arg-type]
        assert server.connections == 1

    serve(server, scenario)


class Slow(Multipart):
    """An upload that never ends."""

    async def parts(self) -> AsyncIterator[bytes]:
        yield b"first"
        await asyncio.Event().wait()


@pytest.mark.parametrize("body", [Slow({}), bytes(20_000_000)], ids=["upload", "bytes"])
def test_an_answer_that_comes_before_all_is_sent(body: Any) -> None:
    connections = 0

    async def server(reader: Reader, writer: Writer) -> None:
        nonlocal connections
        connections += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nno" if connections == 1 else OK)
        await reader.read()

    async def scenario(transport: DirectTransport, url: str) -> None:
        answer = await transport.send(request(url, "POST", body=body))
        assert (answer.status, answer.body) == (413, b"no")
        assert (await transport.send(request(url))).body == b"ok"
        assert connections == 2

    serve(server, scenario)


@pytest.mark.parametrize("body", [Slow({}), bytes(20_000_000)], ids=["upload", "bytes"])
def test_a_server_that_hangs_up_while_it_is_sent_to(body: Any) -> None:
    async def server(reader: Reader, writer: Writer) -> None:
        await reader.readuntil(b"\r\n\r\n")

    async def scenario(transport: DirectTransport, url: str) -> None:
        error = await fails(transport, request(url, "POST", body=body), "closed the connection without a response")  # type: ignore[arg-type]
        assert error.retryable

    serve(server, scenario)


def test_a_connection_that_ends_at_once() -> None:
    async def server(reader: Reader, writer: Writer) -> None:
        writer.transport.abort()

    async def scenario(transport: DirectTransport, url: str) -> None:
        await fails(transport, request(url, "POST", body=b"x"), "closed the connection without a response")  # type: ignore[arg-type]

    serve(server, scenario)


def test_a_connection_that_has_ended_sends_nothing() -> None:
    async def scenario() -> None:
        def unused(_: http_connection.HttpConnection) -> None:
            raise AssertionError

        ended = http_connection.HttpConnection(asyncio.get_running_loop(), memoryview(bytearray(1)), unused, unused)
        with pytest.raises(http_connection.ExchangeError, match="closed the connection without a response"):
            await ended.exchange(request("http://127.0.0.1:9/"), b"", 0.0, 1)
        assert not ended.was_sent

    asyncio.run(scenario())


async def never(*_: Any, **__: Any) -> Any:
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("connect_timeout_s", "timeout_s", "words"),
    [(0.01, 10.0, "no connection to 127.0.0.1:9 in 0.01 s"), (10.0, 0.01, "no response in 0.01 s")],
)
def test_a_connection_that_never_comes(
    monkeypatch: pytest.MonkeyPatch, connect_timeout_s: float, timeout_s: float, words: str
) -> None:
    monkeypatch.setattr(aiohappyeyeballs, "start_connection", never)
    made = request("http://127.0.0.1:9/", connect_timeout_s=connect_timeout_s, timeout_s=timeout_s)

    async def scenario(transport: Any) -> None:
        error = await fails(transport, made, words)
        assert isinstance(error, APITimeoutError)

    run(scenario)


def test_closing_ends_what_waits_for_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aiohappyeyeballs, "start_connection", never)

    async def scenario(transport: Any) -> None:
        made = request("http://127.0.0.1:9/", connect_timeout_s=1000.0, timeout_s=1000.0)
        task = asyncio.create_task(transport.send(made))
        await asyncio.sleep(0)
        await transport.close()
        with pytest.raises(shared.APIConnectionError, match="the transport was closed"):
            await task
        with pytest.raises(shared.APIConnectionError, match="the transport was closed"):
            transport.stream(request("http://127.0.0.1:9/"))

    run(scenario)


def test_a_host_is_looked_up_once_for_many_connections() -> None:
    server = Server()
    asked: list[str] = []

    async def scenario(transport: DirectTransport, url: str) -> None:
        loop = asyncio.get_running_loop()
        port = int(url.rpartition(":")[2])

        async def look_up(host: str, *_: Any, **__: Any) -> Any:
            asked.append(host)
            await asyncio.sleep(0)
            if host == "nowhere.test":
                raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
            return socket.getaddrinfo("127.0.0.1", port, type=socket.SOCK_STREAM)

        loop.getaddrinfo = look_up  # type: ignore[method-assign]
        calls = [transport.send(request(f"http://some.test:{port}/", purpose=purpose)) for purpose in Purpose]
        await asyncio.gather(*calls)
        assert server.connections == len(Purpose)
        assert asked == ["some.test"]
        unknown: Any = transport
        await fails(unknown, request("http://nowhere.test/"), "cannot resolve the host name nowhere.test")

    serve(server, scenario)


def test_the_other_address_of_a_host_is_tried() -> None:
    server = Server()

    async def scenario(transport: DirectTransport, url: str) -> None:
        port = int(url.rpartition(":")[2])
        dead = socket.create_server(("127.0.0.2", 0))
        dead_port = dead.getsockname()[1]
        dead.close()
        found = [
            *socket.getaddrinfo("127.0.0.2", dead_port, type=socket.SOCK_STREAM),
            *socket.getaddrinfo("127.0.0.1", port, type=socket.SOCK_STREAM),
        ]

        async def look_up(*_: Any, **__: Any) -> Any:
            return found

        asyncio.get_running_loop().getaddrinfo = look_up  # type: ignore[method-assign]
        assert (await transport.send(request(f"http://two.test:{port}/"))).body == b"ok"

    serve(server, scenario)


def test_a_password_in_the_url_is_sent_as_such() -> None:
    seen: list[bytes] = []

    async def server(reader: Reader, writer: Writer) -> None:
        seen.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(OK)

    async def scenario(transport: DirectTransport, url: str) -> None:
        await transport.send(request(url.replace("//", "//user:word@")))
        assert b"authorization: basic dxnlcjp3b3jk" in seen[0].lower()

    serve(server, scenario)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    folder = tmp_path_factory.mktemp("tls")
    made = folder / "certificate.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=test"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-out", str(made[0]), "-keyout", str(made[1])]
    subprocess.run(command, check=True, capture_output=True)
    return made


@pytest.mark.parametrize("is_trusted", [True, False])
def test_tls(certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, is_trusted: bool) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    trusting = ssl.create_default_context(cafile=str(certificate[0]) if is_trusted else None)
    monkeypatch.setattr(direct_module, "_tls", lambda: trusting)
    large = OK.replace(b"2\r\n\r\nok", b"600000\r\n\r\n") + bytes(600_000)
    server = Server(OK, large, HALVES[2])

    async def scenario(transport: Any) -> None:
        listening = await asyncio.start_server(server, "127.0.0.1", 0, ssl=context)
        url = f"https://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        if is_trusted:
            assert (await transport.send(request(url))).body == b"ok"
            assert (await transport.send(request(url, "POST", body=bytes(700_000)))).body == bytes(600_000)
            await fails(transport, request(url, timeout_s=0.2), "no response")
            assert (await transport.send(request(url))).body == b"ok"
            assert server.served == [1, 1, 1, 2]
        else:
            error = await fails(transport, request(url), "is not trusted (")
            assert not error.retryable
        await transport.close()
        listening.close()
        await listening.wait_closed()

    run(scenario)


def test_ordinary_requests_load_no_http_library() -> None:
    program = """
import asyncio, sys
from tinsmith.transport.base import HttpRequest, Purpose
from tinsmith.transport.pool import DirectTransport

async def main():
    async def answer(reader, writer):
        await reader.readuntil(b"\\r\\n\\r\\n")
        writer.write(b"HTTP/1.1 200 OK\\r\\nContent-Length: 2\\r\\n\\r\\nok")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    transport = DirectTransport()
    response = await transport.send(HttpRequest(method="GET", url=url, headers={}, purpose=Purpose.REST))
    await transport.close()
    print(response.body, {"aiohttp", "yarl"} & set(sys.modules))

asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["b'ok'", "set()"]


def test_what_is_sent_is_what_was_asked_for() -> None:
    seen: list[bytes] = []

    async def server(reader: Reader, writer: Writer) -> None:
        seen.append(await reader.readuntil(b"\r\n\r\nx"))
        writer.write(OK)

    async def scenario(transport: DirectTransport, url: str) -> None:
        made = HttpRequest(
            method="POST", url=f"{url}/a%2Fb?c=d", headers={"X-Api-Key": "k"}, body=b"x", purpose=Purpose.TRAIN
        )
        await transport.send(made)
        host = url.partition("//")[2]
        assert seen == [
            f"POST /a%2Fb?c=d HTTP/1.1\r\nhost: {host}\r\naccept-encoding: gzip, deflate\r\n"
            "x-api-key: k\r\ncontent-length: 1\r\n\r\nx".encode()
        ]

    serve(server, scenario)
