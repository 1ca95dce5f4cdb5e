"""The keys that a server accepts at start, besides those that were made with `tinsmith key create`.

A key given at start (`api_key`, `api_key_file`) is valid as long as every start gives it: a start without it, or with
another, revokes it. Without one, a server that listens on loopback creates a key for this machine's user.
"""

from __future__ import annotations

from pathlib import Path

from tinsmith.config import ServerConfig
from tinsmith.server.auth.keys import GIVEN, LOCAL, LOCAL_KEY_FILE, create_key, digest_of, is_usable, local_key
from tinsmith.server.refusals import NotReadyError
from tinsmith.store.base import Store, statement
from tinsmith.store.rows import KeyRow

NOT_GIVEN_AGAIN = "was not given again at a later start"
"""The note of a key that a start revoked. Unlike one that was revoked by hand, it may be given again."""


async def prepare_keys(config: ServerConfig, store: Store, now: float) -> Path | None:
    """Make sure that there is a key; return the file that holds it, if there is one."""
    key = config.given_key()
    await _revoke_given(store, now, but=digest_of(key) if key is not None else "")
    if key is not None:
        await _accept(store, key, now)
        return config.api_key_file
    if config.is_loopback:
        await local_key(store, config.data_dir, now)
        return config.data_dir / LOCAL_KEY_FILE
    usable = [row for row in await store.read(KeyRow, "keys") if is_usable(row, now) and row.name != LOCAL]
    if not usable:
        raise NotReadyError(
            f"--host {config.host} lets other machines connect, and there is no API key yet; create one with "
            f"'tinsmith key create NAME --data-dir {config.data_dir}', or pass --api-key-file"
        )
    return None


async def _revoke_given(store: Store, now: float, but: str) -> None:
    """Revoke the keys of earlier starts, except for the one with this digest."""
    for row in await store.read(KeyRow, "keys"):
        if row.name == GIVEN and row.digest != but and row.revoked_at is None:
            await store.write(
                statement("revoke_key", key_id=row.key_id, revoked_at=now),
                statement("set_key_note", key_id=row.key_id, note=NOT_GIVEN_AGAIN),
            )


async def _accept(store: Store, key: str, now: float) -> None:
    rows = await store.read(KeyRow, "key_by_digest", digest=digest_of(key))
    if not rows:
        await create_key(store, name=GIVEN, now=now, scopes=("all", "admin"), key=key)
    elif rows[0].name == GIVEN and rows[0].note == NOT_GIVEN_AGAIN:
        await store.write(
            statement("restore_key", key_id=rows[0].key_id), statement("set_key_note", key_id=rows[0].key_id, note="")
        )
    elif not is_usable(rows[0], now):
        raise NotReadyError("the key given with --api-key or --api-key-file was revoked or expired; give another")
