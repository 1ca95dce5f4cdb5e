"""Clients that need no session, with a service client's connection or their own.

`SessionlessClient` is their base, `AdminClient` has usage, storage and the audit log, and `with_raw_response` returns
responses as they were received, with status, headers and bytes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, Self
from urllib.parse import urlencode, urlsplit

import msgspec

from tinsmith.client.connection.connection import Connection, promised_answer
from tinsmith.client.connection.downloads import DownloadProgress, download
from tinsmith.client.connection.local_engine import client_config
from tinsmith.client.connection.operations import Operations
from tinsmith.client.connection.session import Session
from tinsmith.client.runtime.futures import Future, awaited
from tinsmith.errors import InvalidInputError, WireError
from tinsmith.transport.base import HttpResponse, Purpose
from tinsmith.version import PROTOCOL_VERSION
from tinsmith.wire.message import NOT_GIVEN
from tinsmith.wire.messages.admin import (
    AuditEventType,
    AuditLogQuery,
    AuditLogResponse,
    BillingUsageResponse,
    CurrentCheckpointStorageUsageResponse,
    GetBillingUsageRequest,
    GetCurrentCheckpointStorageUsageRequest,
)
from tinsmith.wire.routes import table as routes
from tinsmith.wire.routes.door import ELSEWHERE
from tinsmith.wire.routes.table import Route


class SessionlessClient:
    """A client without a session. Every method returns a future; its `_async` twin is awaited for the value."""

    _not_raw: ClassVar[frozenset[str]] = frozenset({"close", "get_telemetry"})
    """Methods that make more than one request."""
    _is_raw = False
    """Whether calls return raw responses; see `with_raw_response`."""

    def __init__(
        self, _holder: Operations | None = None, *, base_url: str | None = None, api_key: str | None = None
    ) -> None:
        if _holder is None:
            connection = Connection(client_config(base_url=base_url, api_key=api_key))
            _holder = Operations(connection, Session(connection))
        self.holder = _holder

    @property
    def with_raw_response(self) -> RawCalls:
        """The same calls, each returning the status, headers and bytes of its response."""
        return RawCalls(self)

    def get_telemetry(self) -> Any:
        return self.holder.telemetry

    def close(self) -> None:
        """Close the client's connections and its thread."""
        self.holder.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _answer(self, route: Route, method: str, request: Any = None, **call: Any) -> Any:
        headers = {"x-sdk-version": PROTOCOL_VERSION, "x-sdk-method": method}
        answer = await self.holder.connection.answer(route, request, headers=headers, **call)
        if self._is_raw:
            return RawResponse.of(route, answer)
        return promised_answer(route, answer)

    def _call(self, route: Route, method: str, request: Any = None, **call: Any) -> Future[Any]:
        return self.holder.submit(method, self._answer(route, method, request, **call))


class Headers(dict[str, str]):
    """Headers by case-insensitive name."""

    def __getitem__(self, name: str) -> str:
        return super().__getitem__(name.lower())

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and super().__contains__(name.lower())

    def get(self, name: str, default: Any = None) -> Any:
        return super().get(name.lower(), default)


@dataclass(frozen=True, slots=True)
class RawResponse:
    """A server's response. Failures raise the same errors as without `with_raw_response`."""

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
        """The body as text; invalid UTF-8 is replaced."""
        return self.content.decode(errors="replace")

    def json(self) -> Any:
        """Decode the body into plain values, including unknown fields."""
        try:
            return msgspec.json.decode(self.content)
        except msgspec.DecodeError as error:
            raise WireError(f"the response of {self.url} is not JSON: {error}") from None

    def parse(self) -> Any:
        """Return what the same call returns without `with_raw_response`; for `get`, plain values."""
        response = HttpResponse(status=self.status_code, headers=self.headers, body=self.content, url=self.url)
        return promised_answer(self._route, response)

    def write_to_file(self, file: str | PathLike[str]) -> Path:
        """Write the body to a file."""
        path = Path(file)
        path.write_bytes(self.content)
        return path


class RawCalls:
    """The same calls as the client's, each returning a RawResponse; and requests to any path of the server."""

    def __init__(self, client: SessionlessClient) -> None:
        self._client = copy.copy(client)
        self._client._is_raw = True

    def __getattr__(self, name: str) -> Callable[..., Any]:
        kind = type(self._client)
        if name.startswith("_") or not callable(getattr(kind, name, None)):
            raise AttributeError(f"{kind.__name__} has no call {name!r}")
        if name.removesuffix("_async") in kind._not_raw:
            raise AttributeError(f"with_raw_response has no {name}: it makes more than one request")
        call: Callable[..., Any] = getattr(self._client, name)
        return call

    def get(
        self, path: str, *, params: Mapping[str, str | int] | None = None, headers: Mapping[str, str] | None = None
    ) -> Future[RawResponse]:
        """GET any path of the server, such as `/api/v1/healthz`, with the client's key and its retries."""
        connection = self._client.holder.connection
        if not _is_path(path):
            raise InvalidInputError(f"path: {path!r} does not begin with a single /", field="path")
        url = connection.config.base_url + path + (f"?{urlencode(params)}" if params else "")
        route = Route(name=f"GET {urlsplit(path).path}", method="GET", path=path, response=Any, door=ELSEWHERE)

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
        progress: Callable[[DownloadProgress], None] | None = None,
    ) -> Future[Path]:
        """Download a path of the server, or another URL, into a new file of any size. An interrupted download is
        resumed, and the server's checksum is verified if it sends one. The client's key is only sent to the server."""
        path, connection = Path(file), self._client.holder.connection
        if path.exists():
            raise InvalidInputError(f"file: {path} already exists", field="file")
        url = connection.config.base_url + address if _is_path(address) else address
        if not url.startswith(("http://", "https://")):
            raise InvalidInputError(f"address: {address!r} is neither a path nor an http(s) URL", field="address")

        async def run() -> Path:
            sent = dict(headers or {})
            if _is_below(connection, url):
                await connection.ready()
                sent = await connection.headers({"accept": "*/*", **sent})
            return await download(connection, url, path, progress, sent)

        return self._client.holder.submit("stream_to_file", run())

    stream_to_file_async = awaited(stream_to_file)


def _is_path(address: str) -> bool:
    return address.startswith("/") and not address.startswith("//")


def _is_below(connection: Connection, url: str) -> bool:
    base = connection.config.base_url
    return url == base or url.startswith((f"{base}/", f"{base}?"))


class AdminClient(SessionlessClient):
    """Usage, storage and audit log of an organisation, or of the user's part of it. It needs no session."""

    def get_audit_log(self, event_type: AuditEventType = "all", day: date | None = None) -> Future[AuditLogResponse]:
        """Return the audit log of a day, or the latest entries."""
        query = AuditLogQuery(event_type=event_type, day=NOT_GIVEN if day is None else day.isoformat())
        return self._call(routes.GET_AUDIT_LOG, "get_audit_log", query=query)

    get_audit_log_async = awaited(get_audit_log)

    def get_billing_usage(
        self, starting_on: datetime | str, ending_before: datetime | str
    ) -> Future[BillingUsageResponse]:
        """Return usage by hour, for whole UTC hours, at most 14 days."""
        query = GetBillingUsageRequest(
            starting_on=_moment(starting_on, "starting_on"), ending_before=_moment(ending_before, "ending_before")
        )
        return self._call(routes.GET_BILLING_USAGE, "get_billing_usage", query=query)

    get_billing_usage_async = awaited(get_billing_usage)

    def get_current_checkpoint_storage_usage(
        self, project_id: str | None = None
    ) -> Future[CurrentCheckpointStorageUsageResponse]:
        """Return the storage that checkpoints use now."""
        query = GetCurrentCheckpointStorageUsageRequest(project_id=NOT_GIVEN if project_id is None else project_id)
        return self._call(routes.GET_CHECKPOINT_STORAGE_USAGE, "get_current_checkpoint_storage_usage", query=query)

    get_current_checkpoint_storage_usage_async = awaited(get_current_checkpoint_storage_usage)


def _moment(value: datetime | str, name: str) -> datetime:
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value)
        except ValueError:
            raise InvalidInputError(f"{name}: {value!r} is not an ISO date and time", field=name) from None
    return value.astimezone(UTC) if value.tzinfo is not None else value.replace(tzinfo=UTC)
