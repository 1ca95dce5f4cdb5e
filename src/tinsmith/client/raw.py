"""Answers as they came: status, headers and bytes, for programs that want more than the types say.

Owns: `with_raw_response` of the clients that need no session. Does not know: which calls there are.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode, urlsplit

import msgspec

from tinsmith.client.connection import Connection, promised_answer
from tinsmith.client.downloads import Progress, download
from tinsmith.client.futures import Future, awaited
from tinsmith.errors import InvalidInputError, WireError
from tinsmith.transport.base import HttpResponse, Purpose
from tinsmith.wire.routes import Route

if TYPE_CHECKING:
    from tinsmith.client.sessionless import SessionlessClient


class Headers(dict[str, str]):
    """Headers by name, in whatever case it is asked for."""

    def __getitem__(self, name: str) -> str:
        return super().__getitem__(name.lower())

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and super().__contains__(name.lower())

    def get(self, name: str, default: Any = None) -> Any:
        return super().get(name.lower(), default)


@dataclass(frozen=True, slots=True)
class RawResponse:
    """A server's answer. Failures raise the same errors as without `with_raw_response`."""

    status_code: int
    headers: Headers
    content: bytes = field(repr=False)
    url: str
    method: str
    _route: Route = field(repr=False)

    @classmethod
    def of(cls, route: Route, response: HttpResponse) -> RawResponse:
        return cls(response.status, Headers(response.headers), response.body, response.url, route.method, route)

    def read(self) -> bytes:
        """The body."""
        return self.content

    def text(self) -> str:
        """The body as text; what is not UTF-8 in it is replaced."""
        return self.content.decode(errors="replace")

    def json(self) -> Any:
        """The body as plain values, with the fields that no type here knows."""
        try:
            return msgspec.json.decode(self.content)
        except msgspec.DecodeError as error:
            raise WireError(f"the answer of {self.url} is not JSON: {error}") from None

    def parse(self) -> Any:
        """What the same call gives without `with_raw_response`; of `get`, plain values."""
        response = HttpResponse(status=self.status_code, headers=self.headers, body=self.content, url=self.url)
        return promised_answer(self._route, response)

    def write_to_file(self, file: str | PathLike[str]) -> Path:
        """The body as a file."""
        path = Path(file)
        path.write_bytes(self.content)
        return path


class RawCalls:
    """What `with_raw_response` gives: the same calls, each with its answer as it came, a RawResponse; and requests to
    any address of the server."""

    def __init__(self, client: SessionlessClient) -> None:
        self._client = copy.copy(client)
        self._client._is_raw = True

    def __getattr__(self, name: str) -> Callable[..., Any]:
        kind = type(self._client)
        if name.startswith("_") or not callable(getattr(kind, name, None)):
            raise AttributeError(f"{kind.__name__} has no call {name!r}")
        if name.removesuffix("_async") in kind._not_raw:
            raise AttributeError(f"with_raw_response has no {name}: what it gives is not the answer to one request")
        call: Callable[..., Any] = getattr(self._client, name)
        return call

    def get(
        self, path: str, *, params: Mapping[str, str | int] | None = None, headers: Mapping[str, str] | None = None
    ) -> Future[RawResponse]:
        """Ask for any path of the server, such as `/api/v1/healthz`, with the client's key and its retries."""
        connection = self._client.holder.connection
        if not _is_path(path):
            raise InvalidInputError(f"path: {path!r} does not begin with a single /", field="path")
        url = connection.config.base_url + path + (f"?{urlencode(params)}" if params else "")
        route = Route(name=f"GET {urlsplit(path).path}", method="GET", path=path, response=Any)

        async def run() -> RawResponse:
            await connection.ready()
            answer = await connection.send(route, None, url=url, headers=headers, purpose=Purpose.REST)
            return RawResponse.of(route, answer)

        return self._client.holder.submit("get", run())

    get_async = awaited(get)

    def stream_to_file(
        self,
        address: str,
        file: str | PathLike[str],
        *,
        headers: Mapping[str, str] | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> Future[Path]:
        """Write what lies at a path of the server, or at another address, into a new file, as it comes: of any size,
        going on after a cut, and checked against the digest that the server names, if any. Only addresses of the
        server get the client's key."""
        path, connection = Path(file), self._client.holder.connection
        if path.exists():
            raise InvalidInputError(f"file: {path} exists already", field="file")
        url = connection.config.base_url + address if _is_path(address) else address
        if not url.startswith(("http://", "https://")):
            raise InvalidInputError(f"address: {address!r} is neither a path nor an http(s) address", field="address")

        async def run() -> Path:
            sent = dict(headers or {})
            if _is_below(connection, url):
                await connection.ready()
                sent = await connection.headers({"accept": "*/*", **sent})
            return await download(connection.transport(), url, path, progress, sent)

        return self._client.holder.submit("stream_to_file", run())

    stream_to_file_async = awaited(stream_to_file)


def _is_path(address: str) -> bool:
    return address.startswith("/") and not address.startswith("//")


def _is_below(connection: Connection, url: str) -> bool:
    base = connection.config.base_url
    return url == base or url.startswith((f"{base}/", f"{base}?"))
