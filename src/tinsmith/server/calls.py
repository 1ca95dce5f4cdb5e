"""A call as handlers see it, and the answers they give.

Does not know: ASGI, authentication; `http` makes calls and sends answers.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from tinsmith.server.identity import Caller
from tinsmith.wire import json_codec
from tinsmith.wire.routes import Route

if TYPE_CHECKING:
    from tinsmith.server.services import Services

JSON = "application/json"
PROTOBUF = "application/x-protobuf"

_VERSION = re.compile(r"(\d+)\.(\d+)")
NEWEST = (999, 0)


class Call(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One authenticated request."""

    route: Route
    caller: Caller
    params: Mapping[str, str] = {}
    query: Any = None
    """The query as the route's type, where it has one."""
    message: Any = None
    """The body as the route's type; None where the route makes a promise: its handler decodes, to close the number."""
    body: bytes = b""
    """The body's bytes, decompressed."""
    is_protobuf: bool = False
    headers: Mapping[str, str] = {}
    """By lower-case name."""
    scheme: str = "http"
    root_path: str = ""

    @property
    def base_url(self) -> str:
        """How the client reaches this server, for addresses in answers."""
        headers = self.headers
        scheme = headers.get("x-forwarded-proto", self.scheme).split(",")[0].strip()
        host = headers.get("x-forwarded-host") or headers.get("host") or "127.0.0.1"
        return f"{scheme}://{host}{headers.get('x-forwarded-prefix', self.root_path).rstrip('/')}"

    @property
    def sdk(self) -> tuple[int, int]:
        """The release line of the client; the newest where it does not say."""
        text = self.headers.get("x-stainless-package-version") or self.headers.get("user-agent", "")
        found = _VERSION.search(text) if "tinsmith" not in text else None
        return (int(found[1]), int(found[2])) if found else NEWEST

    @property
    def takes_protobuf(self) -> bool:
        return PROTOBUF in self.headers.get("accept", "")


class Answer(msgspec.Struct, frozen=True, gc=False):
    """What goes back."""

    body: bytes = b""
    status: int = 200
    content_type: str = JSON
    headers: Mapping[str, str] = {}


Handler: TypeAlias = Callable[["Services", Call], Awaitable[Answer]]
Handlers: TypeAlias = Mapping[str, Handler]
"""By the name of the route."""

NOTHING = Answer(b"{}")
"""For calls whose result is that they worked."""


def reply(message: Any, status: int = 200) -> Answer:
    """A message as JSON."""
    return Answer(json_codec.encode(message), status)
