"""An installation: a database and a data directory that belong together.

Both hold the same id, made at the first start, and a generation that counts up while the server runs, first in the
database, then in the directory. A starting server can therefore recognise a database that is the wrong one, empty, or
older than the files (an old copy, a lost log) before it changes anything (docs/decisions/0026-installation-id.md).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from tinsmith.errors import TinkerError
from tinsmith.server.data_dir import run_names, segment, write_private
from tinsmith.store.base import Found, FoundRuns, Identity, Store, statement

logger = logging.getLogger(__name__)

FILE = "installation.json"
GENERATION_EVERY_S = 60.0
"""A database that is behind its directory by more than this is detected."""


class MismatchError(TinkerError):
    """The database and the data directory do not belong together. Nothing was changed."""

    code = "installation_mismatch"


class Installation:
    """The database and data directory that this server uses."""

    def __init__(
        self, data_dir: Path, store: Store, identity: Identity, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._path = data_dir / FILE
        self._store = store
        self._identity = identity
        self._clock = clock
        self._advanced_at = clock()

    async def advance(self, *, is_due: bool = False) -> None:
        """Count up if it is due: durably in the database first, so that the directory is never ahead."""
        now = self._clock()
        if not is_due and now - self._advanced_at < GENERATION_EVERY_S:
            return
        self._advanced_at = now
        identity = msgspec.structs.replace(self._identity, generation=self._identity.generation + 1)
        await self._store.write(statement("set_generation", identity))
        self._identity = identity
        try:
            await asyncio.to_thread(write_private, self._path, msgspec.json.encode(identity).decode())
        except OSError as error:
            logger.warning("could not write %s: %s", self._path, error.strerror, extra={"event": "installation"})


async def check_installation(data_dir: Path, store: Store) -> None:
    """Refuse a database and a directory that do not belong together, before the store is opened; changes nothing."""
    found, recorded = await store.look(), read_identity(data_dir)
    if not store.is_lasting and recorded is None:
        return
    runs = FoundRuns()
    if not found.is_new and (found.identity is None or recorded is None):
        runs = await store.look_for_runs()
    judge(data_dir, store.where, found, recorded, runs, await asyncio.to_thread(run_names, data_dir))


async def begin_installation(
    data_dir: Path, store: Store, clock: Callable[[], float] = time.time
) -> Installation | None:
    """Record that the pair belongs together, if it is new; None for a database that is lost with its process."""
    if not store.is_lasting:
        return None
    fresh = Identity(installation_id=secrets.token_hex(16), generation=0)
    await store.write(statement("insert_installation", fresh, created_at=clock()))
    [identity] = await store.read(Identity, "installation")
    installation = Installation(data_dir, store, identity)
    await installation.advance(is_due=True)
    return installation


def judge(
    data_dir: Path, where: str, found: Found, recorded: Identity | None, runs: FoundRuns, names: frozenset[str]
) -> None:
    """Check that a database and a data directory belong together; `names` are the directories of runs."""
    file = data_dir / FILE
    held = found.identity
    if recorded is not None:
        if held is None:
            what = "is new or empty" if found.is_new else "does not belong to an installation"
            raise MismatchError(
                f"the database {where} {what}, but {data_dir} belongs to installation {recorded.installation_id}. "
                "Pass the matching database with --database (SQLite: with its -wal file next to it), or start "
                f"over with another --data-dir. If you restored an old copy on purpose, delete {file} first"
            )
        if held.installation_id != recorded.installation_id:
            raise MismatchError(
                f"the database {where} belongs to installation {held.installation_id}, but {data_dir} to "
                f"{recorded.installation_id}. Pass a matching pair with --database and --data-dir"
            )
        if held.generation < recorded.generation:
            raise MismatchError(
                f"the database {where} is older than {data_dir} (generation {held.generation} of "
                f"{recorded.generation}): it is an old copy, or its last writes were lost (SQLite: its -wal file). "
                f"Restore the newest one. To continue with this one, without what came later, delete {file}"
            )
        return
    expected = {segment(model_id) for model_id in runs.with_files}
    if names and names.isdisjoint(segment(model_id) for model_id in runs.known):
        raise MismatchError(
            f"{data_dir} holds the files of {len(names)} runs, but the database {where} has none of them. Pass the "
            "matching database with --database, or start over with another --data-dir"
        )
    if expected and not names:
        text = msgspec.json.encode(held).decode() if held is not None else None
        hint = f"; if its files are lost, write {text} to {file}" if text is not None else ""
        raise MismatchError(
            f"the database {where} has {len(expected)} runs with files, but {data_dir} holds none. Pass the "
            f"matching directory with --data-dir{hint}"
        )


def read_identity(data_dir: Path) -> Identity | None:
    path = data_dir / FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=Identity)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise MismatchError(
            f"{path} cannot be read ({error}). If the database belongs to {data_dir}, delete that file and start again"
        ) from None
