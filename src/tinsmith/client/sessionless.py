"""Clients that need no session: of a service client, or with a connection of their own."""

from __future__ import annotations

from typing import Any, ClassVar, Self

from tinsmith.client.connection import Connection, promised_answer
from tinsmith.client.embedded import client_config
from tinsmith.client.futures import Future
from tinsmith.client.operations import Operations
from tinsmith.client.raw import RawCalls, RawResponse
from tinsmith.client.session import Session
from tinsmith.version import PROTOCOL_VERSION
from tinsmith.wire.routes import Route


class SessionlessClient:
    """Every method returns a future; its `_async` twin is awaited for the value."""

    _not_raw: ClassVar[frozenset[str]] = frozenset({"close", "get_telemetry"})
    """Methods whose value is not the answer to one request."""
    _is_raw = False
    """Whether calls give answers as they come; see `with_raw_response`."""

    def __init__(
        self, _holder: Operations | None = None, *, base_url: str | None = None, api_key: str | None = None
    ) -> None:
        if _holder is None:
            connection = Connection(client_config(base_url=base_url, api_key=api_key))
            _holder = Operations(connection, Session(connection))
        self.holder = _holder

    @property
    def with_raw_response(self) -> RawCalls:
        """The same calls, each giving status, headers and bytes of its answer."""
        return RawCalls(self)

    def get_telemetry(self) -> Any:
        return self.holder.telemetry

    def close(self) -> None:
        """End the client's connections and its thread."""
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
