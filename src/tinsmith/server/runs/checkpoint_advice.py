"""What to resume from when files are damaged: the newest intact checkpoint of the same run."""

from __future__ import annotations

from pathlib import Path

from tinsmith.engine.protocol import CreateModel, JobFailedError, LoadState, Sample
from tinsmith.errors import StoreError
from tinsmith.server.checkpoints.file_work import FileWork
from tinsmith.server.checkpoints.manifest import is_intact
from tinsmith.server.jobs.job import Work
from tinsmith.store.base import Store
from tinsmith.store.rows import CheckpointRow, SamplerRow


class Advice:
    """Finds what can still be used; asked only after a failure."""

    def __init__(self, store: Store, file_work: FileWork) -> None:
        self._store = store
        self._file_work = file_work

    async def explain(self, work: Work, error: JobFailedError) -> str:
        """Return the message for a failed job: if its files are damaged, which checkpoint to use instead."""
        directory = work.job.directory if isinstance(work.job, (CreateModel, LoadState, Sample)) else None
        if isinstance(work.job, Sample) and error.category == "user":
            return str(error)  # there may be thousands of these, and files are not the reason
        if directory is None or await self._is_intact(work.row.org_id, directory):
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
        """Return what to resume from when a run cannot be restored."""
        try:
            return await self._newest(model_id, "weights", None)
        except StoreError:
            return "resume from its last checkpoint"

    async def _is_intact(self, org_id: str, directory: str) -> bool:
        return await self._file_work.run(org_id, is_intact, Path(directory))

    async def _sampled_path(self, work: Work) -> str | None:
        rows = await self._store.read(SamplerRow, "sampler", sampler_id=work.row.lane)
        return rows[0].model_path if rows else None

    async def _newest(self, model_id: str, kind: str, damaged: str | None) -> str:
        rows = await self._store.read(CheckpointRow, "checkpoints_of_model", model_id=model_id)
        for row in reversed(rows):
            usable = row.kind == kind and row.path != damaged
            if usable and await self._is_intact(row.org_id, row.directory):
                return f"The newest intact checkpoint of that run is {row.path}"
        return "No other checkpoint of that run is intact"
