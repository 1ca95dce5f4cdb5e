"""What to go on with when files turn out damaged: the newest checkpoint of the same run that is what was written.

Reads the manifest that every backend puts beside a checkpoint: the SHA-256 of each file, alone or beside its length.
Does not know: what is in the other files.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from tinsmith.engine.base import CreateModel, JobFailedError, LoadState, Sample
from tinsmith.errors import StoreError
from tinsmith.server.work import Work
from tinsmith.store.base import Store
from tinsmith.store.rows import CheckpointRow, SamplerRow

MANIFEST = "manifest.json"
CHUNK_BYTES = 1 << 20


def is_intact(directory: Path) -> bool:
    """Whether every file that the manifest lists has the digest that it lists."""
    try:
        files: Mapping[str, Any] = msgspec.json.decode((directory / MANIFEST).read_bytes())["files"]
        return all(_sha256(directory / name) == _expected(record) for name, record in files.items())
    except (OSError, msgspec.DecodeError, KeyError, TypeError, AttributeError):
        return False


def _expected(record: Any) -> str:
    return str(record["sha256"] if isinstance(record, Mapping) else record)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(CHUNK_BYTES):
            digest.update(data)
    return digest.hexdigest()


class Advice:
    """Says what can still be used. Asked only when something failed."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def explain(self, work: Work, error: JobFailedError) -> str:
        """What the owner of a failed job is told: where its files are damaged, which to use instead."""
        directory = work.job.directory if isinstance(work.job, (CreateModel, LoadState, Sample)) else None
        if isinstance(work.job, Sample) and error.category == "user":
            return str(error)  # there may be thousands of them, and their files are not the reason
        if directory is None or await asyncio.to_thread(is_intact, Path(directory)):
            return str(error)
        try:
            path = work.context.get("path") or await self._sampled_path(work)
            if path is None:
                return str(error)
            rows = await self._store.read(CheckpointRow, "checkpoint", path=path)
            advice = await self._newest(rows[0].model_id, rows[0].kind, path) if rows else ""
        except StoreError:
            return str(error)
        return f"{path} is damaged and was not loaded: {error}. {advice}".rstrip()

    async def for_run(self, model_id: str) -> str:
        """What to go on with when a run cannot be restored."""
        try:
            return await self._newest(model_id, "weights", None)
        except StoreError:
            return "go on from its last checkpoint"

    async def _sampled_path(self, work: Work) -> str | None:
        rows = await self._store.read(SamplerRow, "sampler", sampler_id=work.row.lane)
        return rows[0].model_path if rows else None

    async def _newest(self, model_id: str, kind: str, damaged: str | None) -> str:
        rows = await self._store.read(CheckpointRow, "checkpoints_of_model", model_id=model_id)
        for row in reversed(rows):
            usable = row.kind == kind and row.path != damaged
            if usable and await asyncio.to_thread(is_intact, Path(row.directory)):
                return f"The newest intact checkpoint of that run is {row.path}"
        return "No other checkpoint of that run is intact"
