"""Snapshots of one run: taken behind an `optim_step`, made to count once everything in them has its result.

The order is what keeps operations from being applied twice: files on the disk, results of all that they contain in the
store, then the row that names the snapshot, then the journal's payloads and the old snapshot away. A crash between any
two leaves a run that can be restored, and at most a directory that the next start removes.
Does not know: when one is worth while (`snapshots`), how runs are restored (`runs`).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tinsmith.engine.base import Backend, BackendLostError, Done, JobCancelledError, JobFailedError, SaveState
from tinsmith.errors import StoreError
from tinsmith.server.files import Files, remove_tree
from tinsmith.server.jobs import Jobs
from tinsmith.server.refusals import NotReadyError
from tinsmith.server.replaying import fingerprint_text, for_sure
from tinsmith.server.snapshots import ReplayCost, SnapshotPolicy
from tinsmith.store.base import Statement, Store, statement
from tinsmith.store.rows import ModelRow

logger = logging.getLogger(__name__)

PRUNE_ROWS = 64
"""Payloads dropped in one write, so that others do not wait for long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotTools:
    """What taking snapshots needs, shared by all runs."""

    store: Store
    backend: Backend
    jobs: Jobs
    files: Files
    policy: SnapshotPolicy
    count: Callable[[str, float], None]
    """Told how each one ended: kept, failed or dropped."""


class Snapshots:
    """Takes the snapshots of one run, one at a time. `on_kept` hears of each that counts: directory and number."""

    def __init__(self, tools: SnapshotTools, row: ModelRow, on_kept: Callable[[str, int], None]) -> None:
        self.cost = ReplayCost()
        self.fingerprint: Mapping[str, str] = {}
        """Of the engine that holds the run now."""
        self._tools = tools
        self._row = row
        self._on_kept = on_kept
        self._directory = row.snapshot_directory
        self._pruned = -1
        self._taking: asyncio.Task[None] | None = None

    def consider(self, seq: int, stepped: asyncio.Future[Done]) -> None:
        """A step was just handed over; take a snapshot behind it if that is worth while."""
        if self._taking is not None or not self.cost.is_due(self._tools.policy):
            return
        try:
            self._tools.files.check_room()
        except NotReadyError:
            return  # what room there is belongs to results
        directory = self._tools.files.snapshot(self._row.model_id, f"{seq}-{secrets.token_hex(4)}")
        job = SaveState(
            job_id=f"snapshot-{secrets.token_hex(8)}",
            tenant=self._row.org_id,
            base_model=self._row.base_model,
            model_id=self._row.model_id,
            directory=str(directory),
            optimizer=True,
            beside=True,
        )
        self.cost.cut()
        saving = self._tools.backend.submit(job)
        self._taking = asyncio.get_running_loop().create_task(self._take(seq, directory, stepped, saving))
        self._taking.add_done_callback(self._taken)

    async def settled(self) -> None:
        """Wait until the one that is under way counts or does not."""
        if self._taking is not None:
            await asyncio.wait([self._taking])

    async def stop(self) -> None:
        """The server goes down; what the files of an unfinished one are worth is decided at the next start."""
        if self._taking is not None:
            self._taking.cancel()
            await asyncio.wait([self._taking])

    def _taken(self, task: asyncio.Task[None]) -> None:
        self._taking = None
        if not task.cancelled() and task.exception() is not None:
            logger.error("a snapshot of %s failed", self._row.model_id, exc_info=task.exception())

    async def _take(
        self, seq: int, directory: Path, stepped: asyncio.Future[Done], saving: asyncio.Future[Done]
    ) -> None:
        try:
            saved = await saving
        except (BackendLostError, JobCancelledError):
            await self._drop(directory, "dropped")
            return
        except JobFailedError as error:
            logger.warning("no snapshot of %s, its journal stays longer: %s", self._row.model_id, error)
            await self._drop(directory, "failed")
            return
        if stepped.cancelled() or stepped.exception() is not None:
            await self._drop(directory, "dropped")  # gradients are still there, and a snapshot has none
            return
        await self._tools.jobs.kept_so_far(self._row.model_id)
        if not await self._make_it_count(seq, directory):
            await self._drop(directory, "dropped")
            return
        self.cost.kept(saved.device_s)
        self._tools.count("kept", saved.device_s)
        old, self._directory = self._directory, str(directory)
        self._on_kept(str(directory), seq)
        logger.info("snapshot of %s at request %d", self._row.model_id, seq, extra={"event": "snapshot"})
        await self._prune(seq)
        if old is not None:
            await asyncio.to_thread(remove_tree, Path(old))

    async def _make_it_count(self, seq: int, directory: Path) -> bool:
        """Name it in the run's row; the row says whether that worked, since a failed write may have been made."""
        model_id = self._row.model_id
        name = statement("set_model_snapshot", model_id=model_id, snapshot_directory=str(directory), snapshot_seq=seq)
        statements: list[Statement] = [name]
        text = fingerprint_text(self.fingerprint)
        if text is not None:
            statements.append(statement("set_model_fingerprint", model_id=model_id, fingerprint=text))

        async def write() -> list[ModelRow]:
            await self._tools.store.write(*statements)
            return await self._tools.store.read(ModelRow, "model", model_id=model_id)

        rows = await for_sure(write, f"a snapshot of {model_id} cannot be written down")
        return bool(rows) and rows[0].snapshot_directory == str(directory)

    async def _drop(self, directory: Path, how: str) -> None:
        self.cost.failed()
        self._tools.count(how, 0.0)
        await asyncio.to_thread(remove_tree, directory)

    async def _prune(self, seq: int) -> None:
        """Drop the payloads that the snapshot contains. Numbers and results stay."""
        some = statement("prune_journal_some", lane=self._row.model_id, after=self._pruned, seq=seq, limit=PRUNE_ROWS)
        try:
            while await self._tools.store.write(some):
                pass
            self._pruned = seq
        except StoreError as error:
            logger.warning("payloads of %s stay for now: %s", self._row.model_id, error)
