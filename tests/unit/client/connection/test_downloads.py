"""Which version of a file an interrupted download resumes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tinsmith.client.connection.downloads import download
from tinsmith.errors import APIConnectionError
from tinsmith.transport.base import HttpRequest, HttpResponse, StreamedBody

DATE = "Tue, 01 Jul 2025 00:00:00 GMT"
URL = "http://127.0.0.1:1/file?signature=s"


class FakeStore:
    """Answers from a list: status, headers, body, and whether the body is cut off at its end."""

    def __init__(self, *answers: tuple[int, dict[str, str], bytes, bool]) -> None:
        self._answers = list(answers)
        self.asked: list[dict[str, str]] = []

    async def send(self, request: HttpRequest) -> HttpResponse:
        raise AssertionError("files are streamed")

    @contextlib.asynccontextmanager
    async def stream(self, request: HttpRequest) -> AsyncIterator[StreamedBody]:
        self.asked.append({name: value for name, value in request.headers.items() if name != "accept-encoding"})
        status, headers, body, is_cut = self._answers.pop(0)

        async def source() -> AsyncIterator[bytes]:
            yield body
            if is_cut:
                raise APIConnectionError(None, "cut off")

        yield StreamedBody(status, headers, request.url, source())

    async def close(self) -> None: ...


def fetched(store: FakeStore, path: Path) -> bytes:
    return asyncio.run(download(store, URL, path)).read_bytes()


@pytest.mark.parametrize(
    ("given", "validator"),
    [
        ({"etag": '"strong"', "last-modified": DATE}, '"strong"'),
        ({"etag": 'W/"weak"', "last-modified": DATE}, DATE),
        ({"last-modified": DATE}, DATE),
    ],
)
def test_a_version_that_can_be_told_is_gone_on_with(given: Any, validator: str, tmp_path: Path) -> None:
    rest = (206, {**given, "content-range": "bytes 3-5/6"}, b"def", False)
    store = FakeStore((200, given, b"abc", True), rest)

    assert fetched(store, tmp_path / "file") == b"abcdef"
    assert store.asked == [{}, {"range": "bytes=3-", "if-range": validator}]
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("given", [{"etag": 'W/"weak"'}, {}])
def test_a_version_that_cannot_be_told_is_fetched_anew(given: Any, tmp_path: Path) -> None:
    store = FakeStore((200, given, b"abc", True), (200, given, b"abcdef", False))

    assert fetched(store, tmp_path / "file") == b"abcdef"
    assert store.asked == [{}, {}]


@pytest.mark.parametrize(
    "wrong",
    [
        (206, {"etag": '"b"', "content-range": "bytes 3-5/6"}, b"xyz", False),
        (206, {"etag": '"a"', "content-range": "bytes 0-5/6"}, b"abcdef", False),
        (206, {"etag": '"a"'}, b"def", False),
        (416, {"content-range": "bytes */2"}, b"", False),
    ],
)
def test_an_answer_that_does_not_follow_is_not_appended(wrong: Any, tmp_path: Path) -> None:
    store = FakeStore((200, {"etag": '"a"'}, b"abc", True), wrong, (200, {"etag": '"b"'}, b"uvwxyz", False))

    assert fetched(store, tmp_path / "file") == b"uvwxyz"
    assert store.asked[2] == {}


def test_a_new_version_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    store = FakeStore(
        (200, {"etag": '"a"'}, b"abcd", True),
        (200, {"etag": '"b"'}, b"uv", True),
        (206, {"etag": '"b"', "content-range": "bytes 2-3/4"}, b"wx", False),
    )

    assert fetched(store, tmp_path / "file") == b"uvwx"
    assert store.asked[2] == {"range": "bytes=2-", "if-range": '"b"'}
