"""A call as handlers get it, and the answers that they return. `http.endpoint` makes calls and sends answers."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import msgspec

from tinsmith.server.auth.identity import Caller
from tinsmith.server.services import Services
from tinsmith.wire.codecs import json_codec
from tinsmith.wire.routes.table import Route

if TYPE_CHECKING:
    from tinsmith.server.services import Services

T = TypeVar("T")

JSON = "application/json"
PROTOBUF = "application/x-protobuf"

_VERSION = re.compile(r"(?<!\d)(\d{1,6})\.(\d{1,6})(?!\d)", re.ASCII)
NEWEST = (999, 0)


async def _never() -> None:
    await asyncio.Event().wait()


class Call(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One authenticated request."""

    route: Route
    caller: Caller
    params: Mapping[str, str] = {}
    query: Any = None
    """The query as the route's type, if it has one."""
    message: Any = None
    """The body as the route's type; None for numbered requests, whose handlers decode it themselves, so that they can
    close the number of a request that they refuse."""
    body: bytes = b""
    """The body's bytes, decompressed; empty for a form."""
    form: Mapping[str, bytes] | None = None
    """The content of each field of a multipart form, by name; None for other bodies."""
    is_protobuf: bool = False
    headers: Mapping[str, str] = {}
    """By lower-case name."""
    scheme: str = "http"
    root_path: str = ""
    gone: Callable[[], Awaitable[None]] = _never
    """Returns when the client has left; for calls that are held open."""

    @property
    def base_url(self) -> str:
        """Return the URL by which the client reaches this server, for URLs in answers."""
        headers = self.headers
        scheme = headers.get("x-forwarded-proto", self.scheme).split(",")[0].strip()
        host = headers.get("x-forwarded-host") or headers.get("host") or "127.0.0.1"
        return f"{scheme}://{host}{headers.get('x-forwarded-prefix', self.root_path).rstrip('/')}"

    @property
    def sdk(self) -> tuple[int, int]:
        """Return the client's release; the newest if it does not say."""
        text = self.headers.get("x-stainless-package-version") or self.headers.get("user-agent", "")
        found = _VERSION.search(text) if "tinsmith" not in text else None
        return (int(found[1]), int(found[2])) if found else NEWEST

    @property
    def takes_protobuf(self) -> bool:
        return PROTOBUF in self.headers.get("accept", "")


class Answer(msgspec.Struct, frozen=True, gc=False):
    """A complete response."""

    body: bytes = b""
    status: int = 200
    content_type: str = JSON
    headers: Mapping[str, str] = {}


class StreamAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A response that is sent piece by piece."""

    pieces: AsyncGenerator[bytes, None]
    content_type: str
    headers: Mapping[str, str] = {}


class FileAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A file, or the ranges of it that were requested."""

    path: Path
    name: str
    """The file name for the client."""


AnyAnswer: TypeAlias = Answer | StreamAnswer | FileAnswer
Handler: TypeAlias = Callable[["Services", Call], Awaitable[AnyAnswer]]
Handlers: TypeAlias = Mapping[str, Handler]
"""By the name of the route."""

NOTHING = Answer(b"{}")
"""The answer of calls that return nothing."""


def reply(message: Any, status: int = 200) -> Answer:
    """Return a message as JSON."""
    return Answer(json_codec.encode(message), status)


async def reply_long(make: Callable[[], Any]) -> Answer:
    """Return a message that may be large as JSON, built and encoded in a thread."""
    return Answer(await asyncio.to_thread(lambda: _in_pieces(make())))


def _in_pieces(message: Any) -> bytes:
    """Encode as JSON item by item: encoding megabytes in one call would hold Python's lock, and stop the loop."""
    parts = {name: value for name, value in _parts(message) if isinstance(value, (list, dict))}
    head = json_codec.encode(msgspec.structs.replace(message, **{name: type(part)() for name, part in parts.items()}))
    pieces = msgspec.json.decode(head, type=dict[str, msgspec.Raw])
    for name, part in parts.items():
        if isinstance(part, list):
            pieces[name] = encoded_items(part)
        else:
            items = {key: msgspec.Raw(json_codec.encode(item)) for key, item in part.items()}
            pieces[name] = msgspec.Raw(msgspec.json.encode(items))
    return msgspec.json.encode(pieces)


def encoded_items(items: Iterable[Any]) -> msgspec.Raw:
    """Return a list as JSON, encoded item by item; for threads."""
    return msgspec.Raw(b"[" + b",".join([json_codec.encode(item) for item in items]) + b"]")


def _parts(message: Any) -> list[tuple[str, Any]]:
    return [(name, getattr(message, name, None)) for name in message.__struct_fields__]


IDEMPOTENCY_HEADER = "x-idempotency-key"
