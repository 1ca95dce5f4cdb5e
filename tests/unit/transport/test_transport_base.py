"""Requests, responses, redirects, and the error messages for a missing response."""

from __future__ import annotations

import asyncio
import dataclasses
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tinsmith.errors import APIConnectionError, APITimeoutError, InvalidInputError, LimitExceededError, RequestInfo
from tinsmith.transport.base import (
    HttpRequest,
    HttpResponse,
    Purpose,
    StreamedBody,
    Why,
    fault,
    is_redirect,
    lower_case,
    redirected,
)
from tinsmith.transport.multipart import Multipart

KEY = "tml-very-secret"


def request(url: str = "http://a.example/api", method: str = "POST", **rest: Any) -> HttpRequest:
    headers = {"X-API-Key": KEY, "Accept": "application/json", "Content-Type": "application/json", "x-other": "1"}
    return HttpRequest(**{"method": method, "url": url, "headers": headers, "purpose": Purpose.REST} | rest)


def test_purposes_are_pinned() -> None:
    assert [str(purpose) for purpose in Purpose] == ["train", "sample", "session", "retrieve", "rest", "telemetry"]


def test_a_request_has_defaults_and_is_frozen() -> None:
    made = request()
    assert (made.timeout_s, made.connect_timeout_s, made.body) == (60.0, 5.0, None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.url = "http://b.example/"  # type: ignore[misc]


def test_a_repr_shows_no_header_values_no_body_and_no_password() -> None:
    shown = repr(request("http://user:word@a.example/x", body=b"private"))
    assert shown == (
        "HttpRequest(POST http://a.example/x, headers: X-API-Key, Accept, Content-Type, x-other, body: 7 bytes, rest)"
    )
    assert KEY not in repr(request(body=Multipart({"f": KEY})))
    assert request("http://a.example/x@y?z=@").info == RequestInfo("POST", "http://a.example/x@y?z=@")


@pytest.mark.parametrize("url", ["http://a.example/a b", "http://a.example/\u00e9"])
def test_urls_must_be_encoded(url: str) -> None:
    with pytest.raises(InvalidInputError, match="percent-encoded"):
        request(url)


def test_an_upload_brings_its_content_type() -> None:
    upload = Multipart({"f": "1"}, boundary="B")
    headers = request(body=upload).all_headers()
    assert headers["content-type"] == upload.content_type
    assert "Content-Type" not in headers
    assert headers["X-API-Key"] == KEY
    assert request(body=b"x").all_headers()["Content-Type"] == "application/json"


def test_large_bodies_come_in_pieces() -> None:
    async def collect(made: HttpRequest) -> list[bytes]:
        return [piece async for piece in made.pieces()]

    assert [len(piece) for piece in asyncio.run(collect(request(body=bytes(600_000))))] == [262144, 262144, 75712]
    assert asyncio.run(collect(request())) == []
    assert asyncio.run(collect(request(body=Multipart({}, boundary="B")))) == [b"--B--\r\n"]
    assert (request().body_length, request(body=b"abc").body_length) == (0, 3)


def streamed(*chunks: bytes) -> StreamedBody:
    async def source() -> AsyncIterator[bytes]:
        for chunk in chunks:
            yield chunk

    return StreamedBody(200, {}, "http://a.example/", source())


@pytest.mark.parametrize("chunks", [(), (b"abc",), (b"ab", b"c")])
def test_a_streamed_answer_can_be_read_whole(chunks: tuple[bytes, ...]) -> None:
    assert asyncio.run(streamed(*chunks).read(3)) == b"".join(chunks)


def test_a_streamed_answer_is_read_up_to_a_limit() -> None:
    with pytest.raises(LimitExceededError, match="larger than 2 bytes"):
        asyncio.run(streamed(b"ab", b"c").read(2))


def test_a_streamed_answer_is_consumed_once() -> None:
    answer = streamed(b"a")
    answer.chunks()
    with pytest.raises(RuntimeError, match=r"http://a\.example/ was already read"):
        answer.chunks()
    with pytest.raises(RuntimeError, match="already read"):
        asyncio.run(answer.read(10))


def test_headers_are_lower_case_and_joined() -> None:
    pairs = [("Content-Type", "a"), ("X-Note", "1"), ("x-note", "2")]
    assert lower_case(pairs) == {"content-type": "a", "x-note": "1, 2"}
    assert lower_case([]) == {}


@pytest.mark.parametrize("why", Why)
def test_every_fault_names_the_url_and_never_the_key(why: Why) -> None:
    error = fault(request("http://user:word@a.example:8000/x", timeout_s=7, connect_timeout_s=3), why, "because")
    assert str(error).startswith("POST http://a.example:8000/x: ")
    assert KEY not in str(error)
    assert "word" not in str(error)
    assert "{" not in str(error)
    assert error.request == RequestInfo("POST", "http://a.example:8000/x")
    assert isinstance(error, APITimeoutError) is (why in (Why.NO_ANSWER, Why.NO_CONNECTION, Why.ALL_BUSY))
    lasting = (Why.CERTIFICATE, Why.TOO_LARGE, Why.REDIRECT, Why.INVALID, Why.NOT_SENT, Why.CLOSED)
    assert error.retryable is (why not in lasting)
    assert APIConnectionError.retryable


@pytest.mark.parametrize(
    ("status", "headers", "expected"),
    [
        *[(status, {"location": "/x"}, True) for status in (301, 302, 303, 307, 308)],
        *[(status, {"location": "/x"}, False) for status in (200, 201, 300, 304, 305, 404)],
        (302, {}, False),
        (302, {"location": ""}, False),
    ],
)
def test_what_a_redirect_is(status: int, headers: dict[str, str], expected: bool) -> None:
    assert is_redirect(status, headers) is expected


@pytest.mark.parametrize(
    ("status", "method", "expected"),
    [
        (301, "POST", "GET"),
        (302, "POST", "GET"),
        (303, "POST", "GET"),
        (307, "POST", "POST"),
        (308, "POST", "POST"),
        (301, "PUT", "PUT"),
        (302, "PUT", "GET"),
        (303, "DELETE", "GET"),
        (308, "DELETE", "DELETE"),
        (301, "GET", "GET"),
        (302, "GET", "GET"),
        (303, "HEAD", "HEAD"),
    ],
)
def test_methods_change_as_in_browsers(status: int, method: str, expected: str) -> None:
    following = redirected(request(method=method, body=b"x"), status, {"location": "/next"})
    assert following.method == expected
    has_become_get = method != expected
    assert following.body == (None if has_become_get else b"x")
    assert ("Content-Type" in following.headers) is not has_become_get
    assert following.headers["X-API-Key"] == KEY
    assert following.timeout_s == 60.0


@pytest.mark.parametrize(
    ("start", "location", "url", "keeps_key"),
    [
        ("http://a.example/api", "/next?x=1", "http://a.example/next?x=1", True),
        ("http://a.example/api/", "next", "http://a.example/api/next", True),
        ("http://a.example/api", "http://a.example:80/y", "http://a.example:80/y", True),
        ("http://a.example/api", "http://A.EXAMPLE/y", "http://A.EXAMPLE/y", True),
        ("http://a.example/api", "https://a.example/y", "https://a.example/y", True),
        ("https://a.example/api", "http://a.example/y", "http://a.example/y", False),
        ("http://a.example/api", "http://a.example:81/y", "http://a.example:81/y", False),
        ("http://a.example:81/api", "https://a.example/y", "https://a.example/y", False),
        ("http://a.example/api", "http://b.example/y", "http://b.example/y", False),
        ("http://a.example/api", "//b.example/y", "http://b.example/y", False),
        ("http://a.example/api", "http://a.example.evil/y", "http://a.example.evil/y", False),
        ("http://a.example/api", "http://a.example@evil.example/y", "http://a.example@evil.example/y", False),
        ("http://a.example/api", "/a b\u00e9%20#part", "http://a.example/a%20b%C3%A9%20", True),
    ],
)
def test_keys_stay_with_the_host(start: str, location: str, url: str, keeps_key: bool) -> None:
    following = redirected(request(start), 307, {"location": location})
    assert following.url == url
    kept = {"Accept", "Content-Type"} | ({"X-API-Key", "x-other"} if keeps_key else set())
    assert set(following.headers) == kept


@pytest.mark.parametrize(
    "location", ["ftp://a.example/", "https:///x", "http://[bad/", "http://a.example:port/", "data:,x"]
)
def test_bad_redirects_are_faults(location: str) -> None:
    with pytest.raises(APIConnectionError, match="redirected to") as caught:
        redirected(request(), 302, {"location": location})
    assert not caught.value.retryable


def test_an_answer_is_a_plain_value() -> None:
    made = HttpResponse(status=200, headers={}, body=b"x", url="http://a.example/")
    assert made == HttpResponse(status=200, headers={}, body=b"x", url="http://a.example/")


@pytest.mark.parametrize("module", ["base", "retry", "sse", "gate", "multipart"])
def test_only_http_loads_an_http_library(module: str) -> None:
    code = (
        f"import sys, tinsmith, tinsmith.transport.{module}; print({{'aiohttp', 'yarl', 'torch'}} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
