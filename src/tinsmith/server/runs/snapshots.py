"""Snapshots of one run: its weights and optimizer state after an `optim_step`, so that a replay can begin there.

The order of the steps keeps every operation applied exactly once:

1. The engine writes the files, and syncs them.
2. The results of all operations that the snapshot contains are in the store. (Otherwise an operation could be in the
   snapshot and still be `queued` in the journal, and would be applied again.)
3. One row update makes the snapshot the run's origin.
4. Only then are the payloads that it replaces deleted from the journal, and the previous snapshot's files.

A crash between any two leaves a run that can be restored, and at most a directory that the next start removes.
`snapshot_policy` decides when a snapshot is worth its cost.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tinsmith.engine.protocol import Backend, BackendLostError, Done, JobCancelledError, JobFailedError, SaveState
from tinsmith.errors import StoreError
from tinsmith.server.data_dir import Files, remove_tree
from tinsmith.server.jobs.lifecycle import Jobs
from tinsmith.server.jobs.pruning import delete_in_pieces
from tinsmith.server.refusals import NotReadyError
from tinsmith.server.runs.replay import fingerprint_text, for_sure
from tinsmith.server.runs.snapshot_policy import ReplayCost, SnapshotPolicy
from tinsmith.store.base import Statement, Store, statement
from tinsmith.store.rows import ModelRow

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotTools:
    """What taking snapshots needs, shared by all runs."""

    store: Store
    backend: Backend
    jobs: Jobs
    files: Files
    policy: SnapshotPolicy
    count: Callable[[str, float], None]
    """Called with how each one ended (kept, failed or dropped) and its engine time."""


class Snapshots:
    """Takes the snapshots of one run, one at a time; calls `on_kept` with the directory and number of each."""

    def __init__(self, tools: SnapshotTools, row: ModelRow, on_kept: Callable[[str, int], None]) -> None:
        self.cost = ReplayCost()
        self.fingerprint: Mapping[str, str] = {}
        """Of the engine that has the run now."""
        self._tools = tools
        self._row = row
        self._on_kept = on_kept
        self._directory = row.snapshot_directory
        self._pruned = -1
        self._taking: asyncio.Task[None] | None = None

    def consider(self, seq: int, stepped: asyncio.Future[Done]) -> None:
        """Take a snapshot after the step that was just submitted, if one is due."""
        if self._taking is not None or not self.cost.is_due(self._tools.policy):
            return
        try:
            self._tools.files.check_room()
        except NotReadyError:
            return  # the room that is left is for results
        directory = self._tools.files.snapshot(self._row.model_id, f"{seq}-{secrets.token_hex(4)}")
        job = SaveState(
            job_id=f"snapshot-{self._row.model_id}",  # the same each time: if it kills the engine, that is noticed
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
        """Wait until the snapshot that is being taken is kept or dropped."""
        if self._taking is not None:
            await asyncio.wait([self._taking])

    async def stop(self) -> None:
        """Stop; the next start removes the files of an unfinished snapshot."""
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
            logger.warning("could not take a snapshot of %s, keeping its journal: %s", self._row.model_id, error)
            await self._drop(directory, "failed")
            return
        if stepped.cancelled() or stepped.exception() is not None:
            await self._drop(directory, "dropped")  # accumulated gradients are still there, and a snapshot has none
            return
        await self._tools.jobs.kept_so_far(self._row.model_id)
        if not await self._commit(seq, directory):
            await self._drop(directory, "dropped")
            return
        self.cost.kept(saved.device_s)
        self._tools.count("kept", saved.device_s)
        old, self._directory = self._directory, str(directory)
        self._on_kept(str(directory), seq)
        logger.info("snapshot of %s at request %d", self._row.model_id, seq, extra={"event": "snapshot"})
        await self._prune(seq)
        if old is not None:
            await asyncio.to_thread(self._tools.files.remove, old)

    async def _commit(self, seq: int, directory: Path) -> bool:
        """Write it to the run's row, and read that back: a write that failed may have been made all the same."""
        model_id = self._row.model_id
        name = statement("set_model_snapshot", model_id=model_id, snapshot_directory=str(directory), snapshot_seq=seq)
        statements: list[Statement] = [name]
        text = fingerprint_text(self.fingerprint)
        if text is not None:
            statements.append(statement("set_model_fingerprint", model_id=model_id, fingerprint=text))

        async def write() -> list[ModelRow]:
            await self._tools.store.write(*statements)
            return await self._tools.store.read(ModelRow, "model", model_id=model_id)

        rows = await for_sure(write, f"a snapshot of {model_id} cannot be recorded")
        return bool(rows) and rows[0].snapshot_directory == str(directory)

    async def _drop(self, directory: Path, how: str) -> None:
        self.cost.failed()
        self._tools.count(how, 0.0)
        await asyncio.to_thread(remove_tree, directory)

    async def _prune(self, seq: int) -> None:
        """Delete the payloads that the snapshot contains; numbers and results stay."""
        store, lane = self._tools.store, self._row.model_id
        try:
            await delete_in_pieces(store, "payloads_of_lane", "delete_payload", lane=lane, after=self._pruned, seq=seq)
            self._pruned = seq
        except StoreError as error:
            logger.warning("could not prune the journal of %s: %s", self._row.model_id, error)
