"""Calls to endpoints that only a tinsmith server has.

On other servers `Extensions` returns None where information is merely missing, and raises where the user asked for it.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlencode

import msgspec

from tinsmith.client.connection.connection import decode_answer
from tinsmith.client.connection.operations import Operations
from tinsmith.errors import NotFoundError, RequestInfo, TinkerError
from tinsmith.transport.base import HttpRequest, HttpResponse, Purpose
from tinsmith.transport.multipart import Multipart
from tinsmith.wire.routes.own import (
    DELETE_RUN,
    IMPORT_MULTIPART,
    IMPORT_PARTS,
    IMPORT_WEIGHTS,
    MSGPACK_TYPE,
    QUOTA,
    RUN_METRICS,
    STATUS,
    USAGE,
    DeletedRun,
)
from tinsmith.wire.routes.table import Route
from tinsmith.wire.rules import faults

TIMEOUT_S = 10.0
UPLOAD_TIMEOUT_S = 600.0
PART_BYTES = 8 * 1024 * 1024
"""How much of a large upload goes in one request."""


class Extensions:
    """Calls beyond the protocol, over a client's connection."""

    def __init__(self, holder: Operations) -> None:
        self._holder = holder

    def open_page(self, path: str) -> HttpResponse:
        """Fetch a path without a key and return the response, whatever its status."""
        return self._holder.submit("open_page", self._get(path, {})).result()

    def page(self, path: str) -> HttpResponse:
        """Fetch a path with the key and return the response, whatever its status."""

        async def run() -> HttpResponse:
            await self._holder.connection.ready()
            return await self._get(path, await self._holder.connection.headers())

        return self._holder.submit("page", run()).result()

    def status(self) -> dict[str, Any] | None:
        """Return what the server is doing now; None if it does not report that."""
        response = self.page(STATUS.path)
        return _object(response) if response.status == 200 else None

    def quota(self) -> dict[str, Any] | None:
        """Return the caller's limits and what is left of them; None if the server does not report that."""
        response = self.page(QUOTA.path)
        return _object(response) if response.status == 200 else None

    def delete_run(self, training_run_id: str) -> DeletedRun:
        """Delete a run that has ended, with everything that belongs to it."""

        async def run() -> DeletedRun:
            connection = self._holder.connection
            await connection.ready()
            if not connection.extensions.get(DELETE_RUN.name):
                raise TinkerError(
                    f"{connection.config.base_url} cannot delete runs (tinsmith serve can); to delete a run's "
                    f"checkpoints: tinsmith checkpoint delete --run-id {training_run_id}"
                )
            return cast(DeletedRun, await connection.call(DELETE_RUN, path={"training_run_id": training_run_id}))

        return self._holder.submit(DELETE_RUN.name, run()).result()

    def run_metrics(self, training_run_id: str, after: int = -1, limit: int | None = None) -> dict[str, Any]:
        """Return a page of a run's metrics, and the state of the run."""
        query = urlencode({"after": after, **({} if limit is None else {"limit": limit})})
        response = self.page(f"{RUN_METRICS.url_path(training_run_id=training_run_id)}?{query}")
        if response.status == 200 and (answer := _object(response)) is not None:
            return answer
        error = faults.status_error(response.status, response.body, response.headers, RequestInfo("GET", response.url))
        if isinstance(error, NotFoundError) and not self._holder.connection.extensions.get("run_metrics"):
            raise TinkerError(
                "this server does not record the metrics of runs (tinsmith serve does); log them in your training loop"
            )
        raise error

    def usage(self, by: str, starting_on: datetime, ending_before: datetime) -> dict[str, Any] | None:
        """Return the usage in a period of whole hours, grouped by `by`; None if the server does not report that."""
        period = {"starting_on": starting_on.isoformat(), "ending_before": ending_before.isoformat()}

        async def run() -> HttpResponse | None:
            connection = self._holder.connection
            await connection.ready()
            if not connection.extensions.get("usage"):
                return None
            return await self._get(f"{USAGE.path}?{urlencode({'by': by, **period})}", await connection.headers())

        response = self._holder.submit("usage", run()).result()
        if response is None:
            return None
        if response.status != 200 or (answer := _object(response)) is None:
            info = RequestInfo("GET", response.url)
            raise faults.status_error(response.status, response.body, response.headers, info)
        return answer

    def import_weights(self, facts: dict[str, Any], files: Mapping[str, Path]) -> str:
        """Upload a checkpoint's files and return its path.

        Files that are large together go in parts; others as one form, streamed from disk, or as one MessagePack body,
        whatever the server announces.
        """

        async def run() -> str:
            connection = self._holder.connection
            await connection.ready()
            if not connection.extensions.get("import_weights"):
                url = connection.config.base_url
                raise TinkerError(f"{url} does not accept imported checkpoints; only `tinsmith serve` does")
            is_large = sum(path.stat().st_size for path in files.values()) > PART_BYTES
            if is_large and connection.extensions.get("import_parts"):
                upload = secrets.token_hex(16)
                digests = {name: await self._upload(upload, name, path) for name, path in files.items()}
                body: bytes | Multipart = msgspec.msgpack.encode({**facts, "upload": upload, "digests": digests})
            elif connection.extensions.get(IMPORT_MULTIPART):
                body = Multipart([*((name, _form_text(value)) for name, value in facts.items()), *files.items()])
            else:
                content = {name: path.read_bytes() for name, path in files.items()}
                body = msgspec.msgpack.encode({**facts, "files": content})
            return str((await self._post(IMPORT_WEIGHTS, body))["path"])

        return self._holder.submit("import_weights", run()).result()

    async def _upload(self, upload: str, name: str, path: Path) -> str:
        """Send a file in parts and return its SHA-256."""
        digest, offset = hashlib.sha256(), 0
        with path.open("rb") as file:
            part = file.read(PART_BYTES)
            while part or not offset:  # an empty file is a part of its own
                await self._post(IMPORT_PARTS, part, upload=upload, file=name, offset=offset)
                digest.update(part)
                offset += max(1, len(part))
                part = file.read(PART_BYTES)
        return digest.hexdigest()

    async def _post(self, route: Route, body: bytes | Multipart, **query: str | int) -> dict[str, Any]:
        """Send a piece of an import, with retries: its idempotency key makes the server take it once."""
        connection = self._holder.connection
        response = await connection.send(
            route,
            body,
            url=f"{connection.config.base_url}{route.path}{'?' if query else ''}{urlencode(query)}",
            headers={"content-type": body.content_type if isinstance(body, Multipart) else MSGPACK_TYPE},
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
        return await connection.roundtrip(path.partition("?")[0], request)


def _form_text(value: object) -> str:
    """Return a value as a field of a form; booleans as in JSON."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _object(response: HttpResponse) -> dict[str, Any] | None:
    try:
        answer = msgspec.json.decode(response.body)
    except msgspec.DecodeError:
        return None
    return answer if isinstance(answer, dict) else None
