"""API keys: making, finding and revoking them. Only digests are kept.

A key is `tml-` and 32 random bytes, so a plain SHA-256 is enough to hide it: there is nothing to guess.
Does not know: HTTP, tokens.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tinsmith.errors import InvalidInputError
from tinsmith.server.identity import SCOPES, Caller
from tinsmith.store.base import Store, statement
from tinsmith.store.rows import KeyRow, OrgRow, ProjectRow, UserRow

PREFIX = "tml-"
LOCAL_KEY_FILE = "local.key"


@dataclass(frozen=True, slots=True, kw_only=True)
class NewKey:
    """A key just made; the only moment at which it can be shown."""

    row: KeyRow
    key: str = field(repr=False)


def new_key_text() -> str:
    return PREFIX + secrets.token_urlsafe(32)


def digest_of(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def hint_of(key: str) -> str:
    """Enough of a key to recognise it in a list."""
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
    """Make a key, and its organisation, user and project where they are new."""
    unknown = sorted(set(scopes) - set(SCOPES))
    if unknown or not scopes:
        raise InvalidInputError(f"scopes: {unknown or 'none given'}; known are {', '.join(SCOPES)}", field="scopes")
    key = key or new_key_text()
    if not key.startswith(PREFIX) or len(key) < 12:
        raise InvalidInputError(f"a key begins with {PREFIX} and has at least 12 characters", field="key")
    user_id = user if org == "local" else f"{org}.{user}"
    await _check_owner(store, org, user, user_id, project)
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


async def _check_owner(store: Store, org: str, user: str, user_id: str, project: str | None) -> None:
    """Names that two organisations would share are refused: what is listed by user or project must not mix."""
    if not org or not user:
        raise InvalidInputError("org and user: must not be empty", field="org" if user else "user")
    users = await store.read(UserRow, "user", user_id=user_id)
    if users and users[0].org_id != org:
        raise InvalidInputError(f"user: {user_id!r} belongs to another organisation; choose another", field="user")
    projects = await store.read(ProjectRow, "project", project_id=project) if project is not None else []
    if projects and projects[0].org_id != org:
        raise InvalidInputError(f"project: {project!r} belongs to another organisation", field="project")


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
    """The key of this machine's user: made once, kept in a file that only they can read."""
    path = data_dir / LOCAL_KEY_FILE
    try:
        key = path.read_text().strip()
    except FileNotFoundError:
        key = ""
    rows = await store.read(KeyRow, "key_by_digest", digest=digest_of(key))
    if not key or (rows and not is_usable(rows[0], now)):
        key, rows = new_key_text(), []
        _write_private(path, key + "\n")
    if not rows:
        await create_key(store, name="local", now=now, scopes=("all", "admin"), note="made at first start", key=key)
    return key


def installation_secret(data_dir: Path) -> bytes:
    """The secret that signs this installation's tokens and download addresses; made once."""
    path = data_dir / "secret"
    try:
        return bytes.fromhex(path.read_text().strip())
    except FileNotFoundError:
        secret = secrets.token_bytes(32)
        _write_private(path, secret.hex() + "\n")
        return secret


def _write_private(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".new")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
