"""Endpoints of our own server that the protocol does not have, as clients call them.

Other servers lack them: `Extensions` says so by None where a figure is merely missing, and by an error where it was
asked for by name.
Does not know: what is shown to people.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import quote, urlencode

import msgspec

from tinsmith.client.operations import Operations
from tinsmith.errors import NotFoundError, RequestInfo, TinkerError
from tinsmith.transport.base import HttpRequest, HttpResponse, Purpose
from tinsmith.wire import faults

PREFIX = "/tinsmith/v1"
TIMEOUT_S = 10.0
UPLOAD_TIMEOUT_S = 600.0


class Extensions:
    """Calls beyond the protocol, over a client's connection."""

    def __init__(self, holder: Operations) -> None:
        self._holder = holder

    def open_page(self, path: str) -> HttpResponse:
        """An address that needs no key, whatever its status; raises only if nothing answers."""
        return self._holder.submit("open_page", self._get(path, {})).result()

    def page(self, path: str) -> HttpResponse:
        """An address that may need the key, whatever its status."""

        async def run() -> HttpResponse:
            await self._holder.connection.ready()
            return await self._get(path, await self._holder.connection.headers())

        return self._holder.submit("page", run()).result()

    def status(self) -> dict[str, Any] | None:
        """What the server does now; None where it does not offer that."""
        response = self.page(f"{PREFIX}/status")
        return _object(response) if response.status == 200 else None

    def run_metrics(self, training_run_id: str, after: int = -1, limit: int | None = None) -> dict[str, Any]:
        """A page of a run's metrics, and what the server knows of the run."""
        query = urlencode({"after": after, **({} if limit is None else {"limit": limit})})
        response = self.page(f"{PREFIX}/training_runs/{quote(training_run_id, safe=':')}/metrics?{query}")
        if response.status == 200 and (answer := _object(response)) is not None:
            return answer
        error = faults.status_error(response.status, response.body, response.headers, RequestInfo("GET", response.url))
        if isinstance(error, NotFoundError) and not self._holder.connection.extensions.get("run_metrics"):
            raise TinkerError(
                "this server does not offer the metrics of a run (tinsmith serve does); the loop that trains has them"
            )
        raise error

    def import_weights(self, request: dict[str, Any]) -> str:
        """Upload a checkpoint's files with what they are; its path."""

        async def run() -> HttpResponse:
            connection = self._holder.connection
            await connection.ready()
            if not connection.extensions.get("import_weights"):
                raise TinkerError("this server does not take checkpoints from elsewhere (tinsmith serve does)")
            return await connection.transport().send(
                HttpRequest(
                    method="POST",
                    url=f"{connection.config.base_url}{PREFIX}/import_weights",
                    headers={**await connection.headers(), "content-type": "application/msgpack"},
                    body=msgspec.msgpack.encode(request),
                    timeout_s=UPLOAD_TIMEOUT_S,
                    purpose=Purpose.REST,
                )
            )

        response = self._holder.submit("import_weights", run()).result()
        answer = _object(response)
        if response.status != 200 or answer is None:
            info = RequestInfo("POST", response.url)
            raise faults.status_error(response.status, response.body, response.headers, info)
        return str(answer["path"])

    async def _get(self, path: str, headers: dict[str, str]) -> HttpResponse:
        connection = self._holder.connection
        request = HttpRequest(
            method="GET",
            url=connection.config.base_url + path,
            headers=headers,
            timeout_s=TIMEOUT_S,
            purpose=Purpose.REST,
        )
        return await connection.transport().send(request)


def _object(response: HttpResponse) -> dict[str, Any] | None:
    try:
        answer = msgspec.json.decode(response.body)
    except msgspec.DecodeError:
        return None
    return answer if isinstance(answer, dict) else None
