"""The transport into an application in the same process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest
from support.asgi_transport import AsgiTransport, Message, Receive, Send

from tinsmith.errors import APIConnectionError, APITimeoutError
from tinsmith.transport.base import HttpRequest, Purpose, Transport
from tinsmith.transport.multipart import Multipart

Handler = Callable[[Message, Receive, Send], Awaitable[None]]


def request(path: str = "/", method: str = "GET", **rest: Any) -> HttpRequest:
    headers = {"x-api-key": "k", "Accept-Encoding": "gzip"}
    made = {"method": method, "url": f"http://server:8000{path}", "headers": headers, "purpose": Purpose.REST}
    return HttpRequest(**made | rest)


class App:
    """An application with a handler for each path, which records its lifespan."""

    def __init__(self, **handlers: Handler) -> None:
        self.handlers = handlers
        self.log: list[str] = []
        self.scopes: list[Message] = []

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            scope["state"]["shared"] = "yes"
            for stage in ("startup", "shutdown"):
                assert (await receive())["type"] == f"lifespan.{stage}"
                self.log.append(stage)
                await send({"type": f"lifespan.{stage}.complete"})
            return
        self.scopes.append(scope)
        await self.handlers[scope["path"].strip("/") or "root"](scope, receive, send)


async def reply(send: Send, body: bytes = b"", status: int = 200, **headers: str) -> None:
    encoded = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": encoded})
    await send({"type": "http.response.body", "body": body})


async def echo(scope: Message, receive: Receive, send: Send) -> None:
    body = b""
    while True:
        message = await receive()
        body += message["body"]
        if not message["more_body"]:
            break
    await reply(send, body, content_type="text/plain")


async def crash(scope: Message, receive: Receive, send: Send) -> None:
    raise ZeroDivisionError


async def hang(scope: Message, receive: Receive, send: Send) -> None:
    await asyncio.Event().wait()


def run(scenario: Coroutine[Any, Any, None]) -> None:
    """Run it, and see that no task is left."""

    async def checked() -> None:
        await scenario
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(checked())


def test_it_is_a_transport() -> None:
    transport: Transport = AsgiTransport(App())
    asyncio.run(transport.close())


def test_a_call_and_its_scope() -> None:
    async def scenario() -> None:
        app = App(**{"a b": echo})
        async with AsgiTransport(app) as transport:
            answer = await transport.send(request("/a%20b?x=1&y=%20", "POST", body=b"hello"))
        assert (answer.status, answer.body, answer.headers) == (200, b"hello", {"content-type": "text/plain"})
        assert answer.url == "http://server:8000/a%20b?x=1&y=%20"
        [scope] = app.scopes
        assert {key: scope[key] for key in ("method", "path", "raw_path", "query_string", "scheme", "server")} == {
            "method": "POST",
            "path": "/a b",
            "raw_path": b"/a%20b",
            "query_string": b"x=1&y=%20",
            "scheme": "http",
            "server": ("server", 8000),
        }
        assert scope["headers"] == [(b"x-api-key", b"k"), (b"host", b"server:8000"), (b"content-length", b"5")]
        assert scope["state"] == {"shared": "yes"}
        assert app.log == ["startup", "shutdown"]

    run(scenario())


def test_first_use_starts_the_application_once() -> None:
    async def scenario() -> None:
        app = App(root=echo)
        transport = AsgiTransport(app)
        await asyncio.gather(*(transport.send(request()) for _ in range(5)))
        assert app.log == ["startup"]
        await transport.close()
        await transport.close()
        assert app.log == ["startup", "shutdown"]
        with pytest.raises(APIConnectionError, match="transport was closed") as caught:
            await transport.send(request())
        assert not caught.value.retryable

    run(scenario())


def test_an_application_without_lifespan_is_taken_as_it_is() -> None:
    async def bare(scope: Message, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        await echo(scope, receive, send)

    async def scenario() -> None:
        async with AsgiTransport(bare) as transport:
            assert (await transport.send(request(method="POST", body=b"x"))).body == b"x"

    run(scenario())


def test_an_application_that_does_not_start() -> None:
    async def broken(scope: Message, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "lifespan.startup.failed", "message": "no disk"})

    async def scenario() -> None:
        transport = AsgiTransport(broken)
        with pytest.raises(APIConnectionError, match="did not start: no disk") as caught:
            await transport.send(request())
        assert not caught.value.retryable
        await transport.close()

    run(scenario())


def test_a_failing_end_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def broken(scope: Message, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        raise ZeroDivisionError

    async def scenario() -> None:
        async with AsgiTransport(broken):
            pass

    run(scenario())
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


def test_status_codes_are_answers_and_crashes_are_500(caplog: pytest.LogCaptureFixture) -> None:
    async def teapot(scope: Message, receive: Receive, send: Send) -> None:
        await reply(send, b"no", 418, X_Note="1")

    async def silent(scope: Message, receive: Receive, send: Send) -> None:
        pass

    async def scenario() -> None:
        async with AsgiTransport(App(teapot=teapot, crash=crash, silent=silent)) as transport:
            answer = await transport.send(request("/teapot"))
            assert (answer.status, answer.body, answer.headers) == (418, b"no", {"x-note": "1"})
            assert (await transport.send(request("/crash"))).status == 500
            assert (await transport.send(request("/silent"))).body == b"Internal Server Error"

    run(scenario())
    assert ["k" in record.getMessage().split() for record in caplog.records] == [False]
    assert "/crash" in caplog.text


def test_an_answer_cut_off_is_a_fault() -> None:
    async def half(scope: Message, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})

    async def scenario() -> None:
        async with AsgiTransport(App(root=half)) as transport:
            with pytest.raises(APIConnectionError, match="cut off") as caught:
                await transport.send(request())
            assert caught.value.retryable

    run(scenario())


def test_answers_stream_with_backpressure() -> None:
    sent: list[int] = []

    async def count(scope: Message, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for number in range(100):
            await send({"type": "http.response.body", "body": b"%d," % number, "more_body": True})
            sent.append(number)
        await send({"type": "http.response.body"})

    async def scenario() -> None:
        async with AsgiTransport(App(root=count)) as transport, transport.stream(request()) as answer:
            chunks = answer.chunks()
            assert await anext(chunks) == b"0,"
            assert len(sent) < 20
            assert len([chunk async for chunk in chunks]) == 99
            with pytest.raises(RuntimeError, match="already read"):
                answer.chunks()

    run(scenario())


@pytest.mark.parametrize("way", ["leave", "cancel", "timeout"])
def test_the_application_hears_that_the_client_has_gone(way: str) -> None:
    heard = asyncio.Event()

    async def listen(scope: Message, receive: Receive, send: Send) -> None:
        await receive()
        if way == "leave":
            await send({"type": "http.response.start", "status": 200, "headers": []})
        assert (await receive())["type"] == "http.disconnect"
        with pytest.raises(OSError, match="gone"):
            await send({"type": "http.response.body"})
        heard.set()

    async def scenario() -> None:
        async with AsgiTransport(App(root=listen)) as transport:
            if way == "leave":
                async with transport.stream(request()):
                    pass
            elif way == "cancel":
                task = asyncio.create_task(transport.send(request()))
                while not transport._exchanges:
                    await asyncio.sleep(0)
                await asyncio.sleep(0)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            else:
                with pytest.raises(APITimeoutError, match=r"http://server:8000/: no response in 0\.01 s"):
                    await transport.send(request(timeout_s=0.01))
            await heard.wait()

    run(scenario())


def test_a_sender_that_nobody_hears_any_more_is_freed() -> None:
    async def flood(scope: Message, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while True:
            await send({"type": "http.response.body", "body": b"x", "more_body": True})

    async def scenario() -> None:
        async with AsgiTransport(App(root=flood)) as transport:
            async with transport.stream(request()) as answer:
                await anext(answer.chunks())
            while transport._exchanges:
                await asyncio.sleep(0)

    run(scenario())


def test_closing_cancels_what_does_not_end() -> None:
    async def scenario() -> None:
        transport = AsgiTransport(App(root=hang), closing_grace_s=0.0)
        task = asyncio.create_task(transport.send(request()))
        while not transport._exchanges:
            await asyncio.sleep(0)
        await transport.close()
        with pytest.raises(APIConnectionError, match="transport was closed"):
            await task

    run(scenario())


def test_redirects() -> None:
    async def go(scope: Message, receive: Receive, send: Send) -> None:
        await reply(send, status=302, location="/there")

    async def loop(scope: Message, receive: Receive, send: Send) -> None:
        await reply(send, status=302, location="/loop")

    async def scenario() -> None:
        app = App(go=go, loop=loop, there=echo)
        async with AsgiTransport(app) as transport:
            answer = await transport.send(request("/go", "POST", body=b"x"))
            assert (answer.status, answer.body, answer.url) == (200, b"", "http://server:8000/there")
            with pytest.raises(APIConnectionError, match="more than 10 times"):
                await transport.send(request("/loop"))

    run(scenario())


def test_uploads_stream_into_the_application() -> None:
    class Reader:
        left = 3

        async def read(self, n: int) -> bytes:
            self.left -= 1
            return b"x" if self.left >= 0 else b""

    async def scenario() -> None:
        app = App(root=echo)
        async with AsgiTransport(app) as transport:
            upload = Multipart({"f": Reader()}, boundary="B")
            answer = await transport.send(request(method="POST", body=upload))
            assert b"\r\n\r\nxxx\r\n--B--" in answer.body
            assert (b"transfer-encoding", b"chunked") in app.scopes[0]["headers"]
            assert (b"content-type", b"multipart/form-data; boundary=B") in app.scopes[0]["headers"]
            with pytest.raises(APIConnectionError, match=r"not sent: body: .* cannot be rewound") as caught:
                await transport.send(request(method="POST", body=upload))
            assert not caught.value.retryable

    run(scenario())
