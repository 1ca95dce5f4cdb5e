"""API keys: creating, finding and revoking them. Only digests are stored.

A key is `tml-` and 32 random bytes, so a plain SHA-256 is enough to protect it: there is nothing to guess.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tinsmith.errors import InvalidInputError, TinkerError
from tinsmith.server.auth.identity import SCOPES, Caller
from tinsmith.server.data_dir import write_private
from tinsmith.store.base import Store, statement
from tinsmith.store.rows import KeyRow, OrgRow, ProjectRow, UserRow

PREFIX = "tml-"
LOCAL_KEY_FILE = "local.key"
SECRET_BYTES = 32
_SECRET = re.compile(f"[0-9a-f]{{{2 * SECRET_BYTES}}}")
LOCAL, GIVEN = "local", "given at start"
"""Names of keys that the server creates at start, and recognises by name; no other key may have them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewKey:
    """A key that was just created; it can be shown only now."""

    row: KeyRow
    key: str = field(repr=False)


def new_key_text() -> str:
    return PREFIX + secrets.token_urlsafe(32)


def digest_of(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def hint_of(key: str) -> str:
    """Return enough of a key to recognise it in a list."""
    return f"{key[:8]}...{key[-2:]}"


async def create_key(
    store: Store,
    *,
    name: str,
    now: float,
    org: str = "local",
    user: str = "local",
    email: str | None = None,
    project: str | None = None,
    scopes: Sequence[str] = ("all",),
    note: str = "",
    expires_at: float | None = None,
    requests_per_minute: int | None = None,
    tokens_per_day: int | None = None,
    key: str | None = None,
) -> NewKey:
    """Create a key, and its organisation, user and project if they are new."""
    unknown = sorted(set(scopes) - set(SCOPES))
    if unknown or not scopes:
        raise InvalidInputError(f"scopes: {unknown or 'none given'}; allowed are {', '.join(SCOPES)}", field="scopes")
    if key is None and name in (LOCAL, GIVEN):
        raise InvalidInputError(
            f"name: {name!r} is reserved for keys that the server creates; choose another", field="name"
        )
    key = key or new_key_text()
    if not key.startswith(PREFIX) or len(key) < 12:
        raise InvalidInputError(f"key: must begin with {PREFIX} and have at least 12 characters", field="key")
    user_id = user if org == "local" else f"{org}.{user}"
    await _check_owner(store, org, user, user_id)
    row = KeyRow(
        key_id=secrets.randbelow(2**52) + 1,
        digest=digest_of(key),
        hint=hint_of(key),
        org_id=org,
        user_id=user_id,
        project_id=project,
        name=name,
        note=note,
        scopes=json.dumps(sorted(set(scopes))),
        created_at=now,
        expires_at=expires_at,
        requests_per_minute=requests_per_minute,
        tokens_per_day=tokens_per_day,
    )
    statements = [
        statement("insert_org", OrgRow(org_id=org, name=org, created_at=now)),
        statement("insert_user", UserRow(user_id=user_id, org_id=org, name=user, email=email, created_at=now)),
    ]
    if project is not None:
        statements.append(
            statement("insert_project", ProjectRow(project_id=project, org_id=org, name=project, created_at=now))
        )
    await store.write(*statements, statement("insert_key", row))
    return NewKey(row=row, key=key)


async def _check_owner(store: Store, org: str, user: str, user_id: str) -> None:
    """Refuse a user id of another organisation: what is listed by user must not mix."""
    if not org or not user:
        raise InvalidInputError("org and user must not be empty", field="org" if user else "user")
    users = await store.read(UserRow, "user", user_id=user_id)
    if users and users[0].org_id != org:
        raise InvalidInputError(f"user: {user_id!r} belongs to another organisation; choose another", field="user")


def caller_of(row: KeyRow, email: str | None) -> Caller:
    return Caller(
        org_id=row.org_id,
        user_id=row.user_id,
        key_id=row.key_id,
        project_id=row.project_id,
        scopes=frozenset(json.loads(row.scopes)),
        requests_per_minute=row.requests_per_minute,
        tokens_per_day=row.tokens_per_day,
        email=email,
    )


def is_usable(row: KeyRow, now: float) -> bool:
    return row.revoked_at is None and (row.expires_at is None or row.expires_at > now)


async def local_key(store: Store, data_dir: Path, now: float) -> str:
    """Return the key of this machine's user: created once, in a file that only they can read."""
    path = data_dir / LOCAL_KEY_FILE
    try:
        key = path.read_text().strip()
    except FileNotFoundError:
        key = ""
    rows = await store.read(KeyRow, "key_by_digest", digest=digest_of(key))
    if not key or (rows and not is_usable(rows[0], now)):
        key, rows = new_key_text(), []
        write_private(path, key + "\n")
    if not rows:
        await create_key(store, name=LOCAL, now=now, scopes=("all", "admin"), note="made at first start", key=key)
    return key


def installation_secret(data_dir: Path) -> bytes:
    """Return the secret that signs this installation's tokens and download URLs; created once."""
    path = data_dir / "secret"
    try:
        text = path.read_text(errors="replace").strip()
    except FileNotFoundError:
        secret = secrets.token_bytes(SECRET_BYTES)
        write_private(path, secret.hex() + "\n")
        return secret
    if not _SECRET.fullmatch(text):
        raise TinkerError(
            f"{path} does not hold {2 * SECRET_BYTES} hexadecimal digits. It signs tokens and download URLs, so the "
            "server does not start with a weak one. Restore it from a backup, or delete it: the server then creates a "
            "new one, and what the old one signed becomes invalid"
        )
    os.chmod(path, 0o600)
    return bytes.fromhex(text)
