"""Endpoints of our own server that the protocol does not have, as clients call them.

Other servers lack them: `Extensions` says so by None where a figure is merely missing, and by an error where it was
asked for by name.
Does not know: what is shown to people.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote, urlencode

import msgspec

from tinsmith.client.connection import decode_answer
from tinsmith.client.operations import Operations
from tinsmith.errors import NotFoundError, RequestInfo, TinkerError
from tinsmith.transport.base import HttpRequest, HttpResponse, Purpose
from tinsmith.wire import faults
from tinsmith.wire.routes import Route

PREFIX = "/tinsmith/v1"
TIMEOUT_S = 10.0
UPLOAD_TIMEOUT_S = 600.0
PART_BYTES = 8 * 1024 * 1024
"""Of a large upload, in one request."""


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

    def usage(self, by: str, starting_on: datetime, ending_before: datetime) -> dict[str, Any] | None:
        """Usage in a period of whole hours, summed up by `by`; None where the server does not offer that."""
        period = {"starting_on": starting_on.isoformat(), "ending_before": ending_before.isoformat()}

        async def run() -> HttpResponse | None:
            connection = self._holder.connection
            await connection.ready()
            if not connection.extensions.get("usage"):
                return None
            return await self._get(f"{PREFIX}/usage?{urlencode({'by': by, **period})}", await connection.headers())

        response = self._holder.submit("usage", run()).result()
        if response is None:
            return None
        if response.status != 200 or (answer := _object(response)) is None:
            info = RequestInfo("GET", response.url)
            raise faults.status_error(response.status, response.body, response.headers, info)
        return answer

    def import_weights(self, facts: dict[str, Any], files: Mapping[str, Path]) -> str:
        """Upload a checkpoint's files with what they are; its path. Large ones go in parts if the server takes them."""

        async def run() -> str:
            connection = self._holder.connection
            await connection.ready()
            if not connection.extensions.get("import_weights"):
                raise TinkerError("this server does not take checkpoints from elsewhere (tinsmith serve does)")
            is_large = sum(path.stat().st_size for path in files.values()) > PART_BYTES
            if is_large and connection.extensions.get("import_parts"):
                upload = secrets.token_hex(16)
                digests = {name: await self._upload(upload, name, path) for name, path in files.items()}
                request = {**facts, "upload": upload, "digests": digests}
            else:
                request = {**facts, "files": {name: path.read_bytes() for name, path in files.items()}}
            return str((await self._post("import_weights", msgspec.msgpack.encode(request)))["path"])

        return self._holder.submit("import_weights", run()).result()

    async def _upload(self, upload: str, name: str, path: Path) -> str:
        """Send a file in parts; its digest."""
        digest, offset = hashlib.sha256(), 0
        with path.open("rb") as file:
            part = file.read(PART_BYTES)
            while part or not offset:  # an empty file is a part of its own
                await self._post("import_parts", part, upload=upload, file=name, offset=offset)
                digest.update(part)
                offset += max(1, len(part))
                part = file.read(PART_BYTES)
        return digest.hexdigest()

    async def _post(self, name: str, body: bytes, **query: str | int) -> dict[str, Any]:
        """Send a piece of an import, again and again if need be: a server takes each one once."""
        connection = self._holder.connection
        route = Route(name=name, method="POST", path=f"{PREFIX}/{name}")
        response = await connection.send(
            route,
            body,
            url=f"{connection.config.base_url}{route.path}{'?' if query else ''}{urlencode(query)}",
            headers={"content-type": "application/msgpack"},
            purpose=Purpose.REST,
            timeout_s=UPLOAD_TIMEOUT_S,
        )
        return cast(dict[str, Any], decode_answer(route, response, dict[str, Any]))

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
