"""How much disk space each organisation uses, and may use.

Checkpoints and their archives, samplers, snapshots and uploads count, and what the database holds: journal, results,
losses, sessions. The sweeper measures from time to time; in between, what is written is added, and what is about to be
written is reserved. An organisation over its share is refused; others are not affected.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from tinsmith.engine.protocol import LoraSpec
from tinsmith.errors import InvalidInputError
from tinsmith.server.data_dir import ARCHIVE, Files, run_places, session_of, tree_bytes, upload_bytes
from tinsmith.server.refusals import OverLimitError
from tinsmith.store.base import Row, Store
from tinsmith.store.rows import OrgRow, SessionRow

MEASURE_EVERY_S = 60.0
MEASURE_SHARE = 0.05
"""The share of time that measuring may take; a slow measurement is repeated less often."""
ALWAYS_BYTES = 64 * 1024 * 1024
"""Without a cap every organisation may use this much, as long as the disk has room."""
UNKNOWN_SAVE_BYTES = 64 * 1024 * 1024
"""Reserved for the first save of a kind."""
RETRY_S = 30.0

Kind = tuple[str, int, bool, bool, bool, bool]
"""What determines the size of a save: base model, rank, the three switches, with the optimizer or not."""


def kind_of(base_model: str, lora: str, optimizer: bool) -> Kind:
    spec = msgspec.json.decode(lora, type=LoraSpec)
    return (base_model, spec.rank, spec.train_attn, spec.train_mlp, spec.train_unembed, optimizer)


class OwnedRow(Row, frozen=True, kw_only=True):
    """How many bytes an organisation uses."""

    org_id: str
    size_bytes: int


class DiskBudget:
    """The use and the limit of each organisation."""

    def __init__(
        self,
        files: Files,
        store: Store,
        cap_bytes: int | None,
        min_free_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._files, self._store, self._clock = files, store, clock
        self._cap_bytes = cap_bytes
        self._min_free_bytes = min_free_bytes
        self._measured: Mapping[str, int] = {}
        self._since: Counter[str] = Counter()
        """Written since the last measurement."""
        self._reserved: dict[str, tuple[str, int, Kind | None]] = {}
        """What is about to be written, by directory."""
        self._sizes: dict[Kind, int] = {}
        self._has_others = False
        self._owners: dict[str, str] = {}
        """The organisations of sessions that have files."""
        self._next_at = 0.0

    def used(self, org_id: str) -> int:
        reserved = sum(size for owner, size, _ in self._reserved.values() if owner == org_id)
        return max(0, self._measured.get(org_id, 0) + self._since[org_id]) + reserved

    def limit(self, org_id: str) -> int | None:
        """Return what an organisation may use: the cap, or as much as it leaves for others; None if unlimited."""
        if self._cap_bytes is not None:
            return self._cap_bytes
        if not self._has_others:
            return None
        free = max(0, self._files.free_bytes() - self._min_free_bytes)
        return max(ALWAYS_BYTES, (self.used(org_id) + free) // 2)

    def add(self, org_id: str, size_bytes: int) -> None:
        """Count what was written, or, negative, deleted."""
        self._since[org_id] += size_bytes

    def check(self, org_id: str, size_bytes: int = 0, field: str = "path") -> None:
        """Refuse to store something for which there is no room."""
        text = self._refusal(org_id, size_bytes)
        if text is not None:
            raise InvalidInputError(text, field=field)

    def check_waiting(self, org_id: str) -> None:
        """Refuse for now (429) what can wait until there is room."""
        if self._cap_bytes is None and self.used(org_id) <= ALWAYS_BYTES:
            return
        text = self._refusal(org_id, 0)
        if text is not None:
            raise OverLimitError(text, retry_after_s=RETRY_S)

    def reserve(self, org_id: str, directory: str, kind: Kind) -> None:
        """Reserve room for a save, or refuse it."""
        limit = self.limit(org_id)
        unknown = UNKNOWN_SAVE_BYTES if limit is None else min(UNKNOWN_SAVE_BYTES, limit // 16)
        size_bytes = self._sizes.get(kind, unknown)
        self.check(org_id, size_bytes)
        self._reserved[directory] = (org_id, size_bytes, kind)

    def release(self, directory: str, size_bytes: int = 0) -> None:
        """Replace a reservation by the size of the save, 0 if it was not made; does nothing without one."""
        org_id, _, kind = self._reserved.pop(directory, ("", 0, None))
        if kind is not None and size_bytes:
            self._sizes[kind] = size_bytes
            self.add(org_id, size_bytes)

    async def measure(self, *, is_due: bool = False) -> None:
        """Measure again, if it is due."""
        began = self._clock()
        if began < self._next_at and not is_due:
            return
        before = Counter(self._since)
        counted: Counter[str] = Counter()
        for row in await self._store.read(OwnedRow, "bytes_by_org"):
            counted[row.org_id] += row.size_bytes
        by_session = await asyncio.to_thread(_bytes_by_session, self._files.root)
        self._owners = {session_id: await self._owner(session_id) for session_id in by_session}
        for session_id, size_bytes in by_session.items():
            counted[self._owners[session_id]] += size_bytes
        orgs = [row.org_id for row in await self._store.read(OrgRow, "orgs")]
        for org_id, size_bytes in (await asyncio.to_thread(upload_bytes, self._files.root, orgs)).items():
            counted[org_id] += size_bytes
        self._measured = counted
        self._since.subtract(before)
        self._since = Counter({org_id: size_bytes for org_id, size_bytes in self._since.items() if size_bytes})
        self._has_others = len(orgs) > 1
        took = self._clock() - began
        self._next_at = self._clock() + max(MEASURE_EVERY_S, took / MEASURE_SHARE)

    async def _owner(self, session_id: str) -> str:
        if session_id in self._owners:
            return self._owners[session_id]
        rows = await self._store.read(SessionRow, "session", session_id=session_id)
        return rows[0].org_id if rows else ""

    def _refusal(self, org_id: str, size_bytes: int) -> str | None:
        limit = self.limit(org_id)
        used = self.used(org_id)
        if limit is None or used + size_bytes <= limit:
            return None
        share = "disk_cap_per_org_bytes" if self._cap_bytes is not None else "it must leave as much for others"
        return (
            f"your organisation uses {_mb(used)} of the {_mb(limit)} of disk space that it may use ({share}), and "
            f"{_mb(size_bytes) + ' more do' if size_bytes else 'more does'} not fit; delete checkpoints, give them a "
            "ttl, or finish sessions that you no longer need"
        )


def _mb(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f} MB"


def _bytes_by_session(root: Path) -> dict[str, int]:
    """Return the bytes of files other than checkpoints by session; their names begin with its id.

    A file with several links counts its share for each.
    """
    found: Counter[str] = Counter()
    for place in run_places(root):
        found[session_of(place)] += tree_bytes(place)
    for folder, _, names in os.walk(root / "checkpoints"):  # unlike `glob`, it ignores directories that disappear
        if ARCHIVE in names:
            with contextlib.suppress(FileNotFoundError):
                model = Path(folder).relative_to(root / "checkpoints").parts[0]
                found[model.partition("_")[0]] += os.stat(os.path.join(folder, ARCHIVE)).st_size
    return dict(found)
