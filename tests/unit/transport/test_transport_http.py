"""The transport over the network, against tiny servers on this machine in the same loop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tinsmith.errors import APIConnectionError, APITimeoutError
from tinsmith.transport.aiohttp_transport import HttpTransport
from tinsmith.transport.base import HttpRequest, HttpResponse, Purpose, Transport
from tinsmith.transport.multipart import Multipart
from tinsmith.transport.sse import events

KEY = "tml-very-secret"
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[str]:
    """A well-behaved server."""
    server = web.Server(handler, handler_cancellation=True)
    runner = web.ServerRunner(server, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def scripted(script: Script) -> AsyncIterator[str]:
    """A server that does as it is told with each connection, and then closes it."""
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.current_task())  # type: ignore[arg-type]
        try:
            await script(reader, writer)
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await server.wait_closed()
        await asyncio.gather(*tasks, return_exceptions=True)


def request(url: str, method: str = "GET", **rest: Any) -> HttpRequest:
    made = {"method": method, "url": url, "headers": {"x-api-key": KEY}, "purpose": Purpose.REST, "timeout_s": 10.0}
    return HttpRequest(**made | rest)


def run(scenario: Callable[[HttpTransport], Coroutine[Any, Any, None]], **options: Any) -> None:
    """Run it with a transport, close that, and see that no task, socket or warning is left."""

    async def checked() -> None:
        files = set(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else set()
        transport = HttpTransport(**options)
        try:
            await scenario(transport)
        finally:
            await transport.close()
        for _ in range(5):
            await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        left = set(os.listdir("/proc/self/fd")) if files else set()
        assert left <= files

    asyncio.run(checked())
    gc.collect()


async def fails(transport: HttpTransport, made: HttpRequest, words: str) -> APIConnectionError:
    with pytest.raises(APIConnectionError) as caught:
        await transport.send(made)
    error = caught.value
    assert words in str(error)
    assert str(error).startswith(f"{made.method} {made.url}: ")
    for shown in (error, error.__cause__, error.__context__):
        assert KEY not in repr(shown)
    return error


def test_a_call() -> None:
    seen: list[Any] = []

    async def handler(got: web.Request) -> web.Response:
        seen.append((got.method, got.raw_path, got.headers["x-api-key"], got.headers["content-type"], await got.read()))
        return web.Response(body=b"\x00answer", status=418, headers=[("X-Note", "1"), ("x-note", "2")])

    async def scenario(transport: HttpTransport) -> None:
        same: Transport = transport
        async with serving(handler) as url:
            headers = {"x-api-key": KEY, "content-type": "application/json"}
            made = request(f"{url}/a%20b/run:1?x=%2F", "POST", body=b"{}", headers=headers)
            answer = await same.send(made)
        assert isinstance(answer, HttpResponse)
        assert (answer.status, answer.body, answer.url) == (418, b"\x00answer", made.url)
        assert answer.headers["x-note"] == "1, 2"
        assert all(name == name.lower() for name in answer.headers)
        assert seen == [("POST", "/a%20b/run:1?x=%2F", KEY, "application/json", b"{}")]

    run(scenario)


def test_connections_are_kept_and_cookies_are_not() -> None:
    peers: list[Any] = []

    async def handler(got: web.Request) -> web.Response:
        assert "cookie" not in got.headers
        peers.append(got.transport.get_extra_info("peername") if got.transport else None)
        return web.Response(headers={"set-cookie": "a=b"})

    async def scenario(transport: HttpTransport) -> None:
        async with serving(handler) as url:
            for purpose in (Purpose.REST, Purpose.REST, Purpose.SAMPLE):
                assert (await transport.send(request(url, purpose=purpose))).body == b""
        assert peers[0] == peers[1] != peers[2]

    run(scenario)


def test_large_bodies_go_both_ways() -> None:
    async def handler(got: web.Request) -> web.Response:
        body = b"".join([piece async for piece in got.content.iter_any()])
        return web.Response(body=body)

    async def scenario(transport: HttpTransport) -> None:
        async with serving(handler) as url:
            body = os.urandom(3_000_000)
            assert (await transport.send(request(url, "POST", body=body))).body == body

    run(scenario)


def test_compressed_answers_are_unpacked_up_to_a_limit() -> None:
    async def handler(got: web.Request) -> web.StreamResponse:
        assert "gzip" in got.headers["accept-encoding"]
        response = web.Response(body=bytes(int(got.path[1:])))
        response.enable_compression(web.ContentCoding(got.query["coding"]))
        return response

    async def scenario(transport: HttpTransport) -> None:
        async with serving(handler) as url:
            for coding in ("gzip", "deflate"):
                assert (await transport.send(request(f"{url}/50000?coding={coding}"))).body == bytes(50_000)
                bomb = request(f"{url}/20000000?coding={coding}")
                error = await fails(transport, bomb, "larger than the limit of 100000 bytes")
                assert not error.retryable

    run(scenario, max_body_bytes=100_000)


@pytest.mark.parametrize("is_chunked", [True, False])
def test_answers_are_limited_with_and_without_a_length(is_chunked: bool) -> None:
    async def handler(got: web.Request) -> web.StreamResponse:
        response = web.Response(body=bytes(11))
        if is_chunked:
            response.enable_chunked_encoding()
        return response

    async def scenario(transport: HttpTransport) -> None:
        async with serving(handler) as url:
            await fails(transport, request(url), "larger than the limit of 10 bytes")

    run(scenario, max_body_bytes=10)


def test_answers_stream() -> None:
    go_on = asyncio.Event()

    async def handler(got: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(got)
        await response.write(b"data: 1\n\n")
        await go_on.wait()
        await response.write(b"data: 2\n\n")
        return response

    async def scenario(transport: HttpTransport) -> None:
        async with serving(handler) as url, transport.stream(request(url)) as answer:
            assert answer.status == 200
            found = []
            async for event in events(answer):
                found.append(event.data)
                go_on.set()
            assert found == ["1", "2"]
            with pytest.raises(RuntimeError, match="already read"):
                answer.chunks()

    run(scenario)


@pytest.mark.parametrize("way", ["leave", "leave unread", "cancel", "cancel stream"])
def test_leaving_early_ends_the_request_and_frees_the_connection(way: str) -> None:
    gone = asyncio.Event()
    came = asyncio.Event()

    async def handler(got: web.Request) -> web.StreamResponse:
        if got.path == "/next":
            return web.Response()
        response = web.StreamResponse()
        if "cancel" not in way:
            await response.prepare(got)
            await response.write(b"x")
        came.set()
        try:
            await asyncio.Event().wait()
        finally:
            gone.set()
        return response

    async def consume(transport: HttpTransport, url: str) -> None:
        async with transport.stream(request(url)) as answer:
            if way == "leave":
                await anext(answer.chunks())

    async def scenario(transport: HttpTransport) -> None:
        async with serving(handler) as url:
            work = transport.send(request(url)) if way == "cancel" else consume(transport, url)
            task: asyncio.Task[Any] = asyncio.create_task(work)  # type: ignore[arg-type]
            await came.wait()
            if "cancel" in way:
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            else:
                await task
            await gone.wait()
            assert (await transport.send(request(f"{url}/next"))).status == 200

    run(scenario, limits={Purpose.REST: 1})


def test_timeouts() -> None:
    async def handler(got: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        if got.path == "/body":
            await response.prepare(got)
            await response.write(b"x")
        await asyncio.Event().wait()
        return response

    async def scenario(transport: HttpTransport) -> None:
        async with serving(handler) as url:
            for path in ("/head", "/body"):
                error = await fails(transport, request(url + path, timeout_s=0.05), "no response in 0.05 s")
                assert isinstance(error, APITimeoutError)
                assert error.retryable
            async with transport.stream(request(f"{url}/body", timeout_s=1.0)) as answer:  # time for its head
                with pytest.raises(APITimeoutError):
                    await answer.read(10)

    run(scenario)


def test_a_call_that_finds_all_connections_busy() -> None:
    async def handler(got: web.Request) -> web.Response:
        await asyncio.Event().wait()
        return web.Response()

    async def scenario(transport: HttpTransport) -> None:
        async with serving(handler) as url:
            first = asyncio.create_task(transport.send(request(url)))
            await asyncio.sleep(0)
            error = await fails(transport, request(url, timeout_s=0.01), "all 1 for purpose rest are in use")
            assert isinstance(error, APITimeoutError)
            first.cancel()

    run(scenario, limits={Purpose.REST: 1})


def test_results_do_not_starve_behind_slow_ones() -> None:
    done = asyncio.Event()

    async def handler(got: web.Request) -> web.Response:
        if got.path == "/slow":
            await done.wait()
        return web.Response(text=got.path)

    async def scenario(transport: HttpTransport) -> None:
        async with serving(handler) as url:
            polls = [request(f"{url}/slow", purpose=Purpose.RETRIEVE) for _ in range(60)]
            slow = [asyncio.create_task(transport.send(poll)) for poll in polls]
            await asyncio.sleep(0)
            answer = await transport.send(request(f"{url}/ready", purpose=Purpose.RETRIEVE))
            assert answer.body == b"/ready"
            assert not any(task.done() for task in slow)
            done.set()
            await asyncio.gather(*slow)

    run(scenario, limits={Purpose.RETRIEVE: 2}, grow_after_s=0.01)


def test_redirects_and_what_goes_with_them() -> None:
    seen: list[Any] = []

    async def target(got: web.Request) -> web.Response:
        seen.append((got.method, got.headers.get("x-api-key"), await got.read()))
        return web.Response(text="there")

    async def scenario(transport: HttpTransport) -> None:
        async with serving(target) as other:

            async def handler(got: web.Request) -> web.Response:
                if got.path == "/there":
                    return await target(got)
                if got.path == "/loop":
                    return web.Response(status=302, headers={"location": "/loop"})
                location = f"{other}/" if got.path == "/away" else "/there"
                return web.Response(status=int(got.query["status"]), headers={"location": location})

            async with serving(handler) as url:
                answer = await transport.send(request(f"{url}/go?status=307", "POST", body=b"x"))
                assert (answer.body, answer.url) == (b"there", f"{url}/there")
                upload = Multipart({"f": "1"}, boundary="B")
                await transport.send(request(f"{url}/go?status=308", "PUT", body=upload))
                await transport.send(request(f"{url}/go?status=303", "POST", body=b"x"))
                assert (await transport.send(request(f"{url}/away?status=302"))).url == f"{other}/"
                async with transport.stream(request(f"{url}/go?status=302")) as streamed:
                    assert await streamed.read(10) == b"there"
                error = await fails(transport, request(f"{url}/loop"), "redirected more than 10 times")
                assert not error.retryable
        body = b'--B\r\nContent-Disposition: form-data; name="f"\r\n\r\n1\r\n--B--\r\n'
        assert seen == [
            ("POST", KEY, b"x"),
            ("PUT", KEY, body),
            ("GET", KEY, b""),
            ("GET", None, b""),
            ("GET", KEY, b""),
        ]

    run(scenario)


def test_uploads(tmp_path: Path) -> None:
    path = tmp_path / "data.bin"
    path.write_bytes(bytes(700_000))

    class Reader:
        left = 3

        async def read(self, n: int) -> bytes:
            self.left -= 1
            return b"x" if self.left >= 0 else b""

    async def handler(got: web.Request) -> web.Response:
        body, length = await got.read(), got.headers.get("content-length")
        return web.Response(body=f"{length} {got.headers['content-type']} ".encode() + body[-30:])

    async def scenario(transport: HttpTransport) -> None:
        async with serving(handler) as url:
            upload = Multipart({"b": "text", "a": path}, boundary="B")
            answer = await transport.send(request(url, "POST", body=upload, headers={"Content-Type": "wrong"}))
            expected = f"{upload.length} multipart/form-data; boundary=B ".encode()
            assert answer.body == expected + bytes(21) + b"\r\n--B--\r\n"
            once = Multipart({"a": Reader()}, boundary="B")
            answer = await transport.send(request(url, "POST", body=once))
            assert answer.body.startswith(b"None multipart/form-data; boundary=B ")
            assert answer.body.endswith(b"\r\n\r\nxxx\r\n--B--\r\n")
            error = await fails(transport, request(url, "POST", body=once), "not sent: body: a reader")
            assert not error.retryable
            path.unlink()
            await fails(transport, request(url, "POST", body=upload), "not sent: body: a file cannot be read")

    run(scenario)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (b"", "without a response (Server disconnected)"),
        (b"HTTP/1.1 200 OK\r\nConte", "without a response"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nok", "the response was cut off"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n", "the response was cut off"),
        (b"SSH-2.0-OpenSSH_9.6\r\n\r\n", "not valid HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Encoding: zstd\r\nContent-Length: 2\r\n\r\nok", "zstd"),
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_servers_that_do_not_answer_properly(script: bytes, words: str, method: str) -> None:
    served = []

    async def behave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.append((await reader.readuntil(b"\r\n\r\n")).split()[0].decode())
        writer.write(script)

    async def scenario(transport: HttpTransport) -> None:
        async with scripted(behave) as url:
            error = await fails(transport, request(url, method, body=b"x" if method == "POST" else None), words)
            assert error.retryable
            assert served == [method]  # a new connection that fails is not tried again

    run(scenario)


def test_servers_that_are_not_there() -> None:
    async def nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pass

    async def scenario(transport: HttpTransport) -> None:
        async with scripted(nothing) as url:
            port = url.rpartition(":")[2]
            await fails(transport, request(url, headers={"x": "1\r\ny: 2"}), "the URL or a header is not valid")
        for host in ("127.0.0.1", "localhost"):
            await fails(transport, request(f"http://{host}:{port}/x"), f"nothing is listening at {host}:{port}")
        await fails(transport, request("http://127.0.0.1:1x/"), "the URL or a header is not valid")
        await fails(transport, request("ftp://127.0.0.1/"), "the URL or a header is not valid")

    run(scenario)


def test_a_server_that_speaks_no_tls() -> None:
    async def plain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    async def scenario(transport: HttpTransport) -> None:
        async with scripted(plain) as url:
            await fails(transport, request(url.replace("http:", "https:")), "TLS with 127.0.0.1:")

    run(scenario)


class Late(Multipart):
    """An upload that has nothing to send until the server has hung up once."""

    rounds = 0

    async def parts(self) -> AsyncIterator[bytes]:
        self.rounds += 1
        if self.rounds == 1:
            await asyncio.Event().wait()
        async for piece in super().parts():
            yield piece


@pytest.mark.parametrize(
    ("method", "body", "last_words", "served"),
    [
        ("GET", None, b"", ["GET first", "GET second", "GET second"]),
        ("DELETE", None, b"", ["GET first", "DELETE second", "DELETE second"]),
        ("PUT", b"x", b"", ["GET first", "PUT second", "PUT second"]),
        ("POST", b"x", b"", ["GET first", "POST second"]),
        ("POST", None, b"", ["GET first", "POST second"]),
        ("GET", None, b"HTTP/1.1 2", ["GET first", "GET second"]),
        ("POST", Late({}), b"", ["GET first", "POST second"]),
    ],
)
def test_a_connection_that_went_stale_is_replaced_once(
    method: str, body: Any, last_words: bytes, served: list[str]
) -> None:
    seen: list[str] = []
    connections = 0
    is_sending = asyncio.Event()

    async def behave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        is_first = connections == 1
        while True:
            if is_first and seen and isinstance(body, Late):
                await is_sending.wait()
                with contextlib.suppress(TimeoutError):  # what lies unread would turn the end into a reset
                    await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 0.5)
                return
            head = await reader.readuntil(b"\r\n\r\n")
            seen.append(head.split(b" HTTP")[0].decode().replace("/", ""))
            if is_first and len(seen) == 2:
                writer.write(last_words)
                return
            writer.write(OK)
            await writer.drain()

    async def scenario(transport: HttpTransport) -> None:
        async with scripted(behave) as url:
            await transport.send(request(f"{url}/first"))
            made = request(f"{url}/second", method, body=body)
            asyncio.get_running_loop().call_soon(is_sending.set)
            if len(served) == 3 or isinstance(body, Late):
                assert (await transport.send(made)).body == b"ok"
                assert connections == 2
            else:
                await fails(transport, made, "without a response")
                assert connections == 1
            assert seen == served
            await transport.close()

    run(scenario)


def test_proxies_of_the_environment_but_not_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, str | None]] = []

    async def handler(got: web.Request) -> web.Response:
        seen.append((got.raw_path, got.headers.get("proxy-authorization")))
        return web.Response(text="by proxy")

    async def scenario(_: HttpTransport) -> None:
        async with serving(handler) as url:
            monkeypatch.setenv("http_proxy", url.replace("//", "//user:word@"))
            monkeypatch.setenv("no_proxy", "127.0.0.2")
            transport = HttpTransport()
            assert (await transport.send(request("http://server.invalid/x"))).body == b"by proxy"
            await transport.send(request(f"{url}/local"))
            await fails(transport, request("http://127.0.0.2:1/x"), "nothing is listening at 127.0.0.2:1")
            await transport.close()
        assert seen == [("http://server.invalid/x", "Basic dXNlcjp3b3Jk"), ("/local", None)]

    run(scenario)


def test_closing_ends_what_is_under_way_and_what_waits() -> None:
    came = asyncio.Event()

    async def handler(got: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        if got.path == "/body":
            await response.prepare(got)
            await response.write(b"x")
        came.set()
        await asyncio.Event().wait()
        return response

    async def scenario(_: HttpTransport) -> None:
        async with serving(handler) as url:
            for path in ("/head", "/body"):
                transport = HttpTransport(limits={Purpose.REST: 1})
                came.clear()
                tasks = [asyncio.create_task(transport.send(request(url + path))) for _ in range(2)]
                await came.wait()
                await transport.close()
                for task in tasks:
                    with pytest.raises(APIConnectionError, match="the transport was closed") as caught:
                        await task
                    assert not caught.value.retryable
                await fails(transport, request(url), "the transport was closed")
                await transport.close()

    run(scenario)
