"""Keys that a user stored on this machine: `~/.tinker/credentials.json`, shared with the official client.

The file is replaced atomically and readable only by its owner. `config.stored_key` reads the default key for clients. A
key is stored with the URL of its server, a field that official clients ignore and keep.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tinsmith.config import HOSTED_URL
from tinsmith.errors import TinkerError

VERSION = 1


def credentials_path(environ: Mapping[str, str]) -> Path:
    return Path(environ.get("HOME", "~")).expanduser() / ".tinker" / "credentials.json"


@dataclass(frozen=True, slots=True)
class StoredKey:
    """A key and what the server reported about it; the key is never shown."""

    key_id: str
    key: str = field(repr=False)
    name: str
    kind: str = "manual"
    note: str | None = None
    details: Mapping[str, Any] | None = None
    base_url: str = HOSTED_URL
    """The server that the key is for."""

    @property
    def email(self) -> str | None:
        return self._detail("user_details", "email")

    @property
    def organization(self) -> str | None:
        return self._detail("org_details", "name")

    def _detail(self, part: str, name: str) -> str | None:
        found = (self.details or {}).get(part)
        value = found.get(name) if isinstance(found, Mapping) else None
        return value if isinstance(value, str) else None


class Credentials:
    """The credentials file. Each method reads it again and replaces it as a whole."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def default(self) -> StoredKey | None:
        """Return the key that clients use."""
        content = self._read()
        key_id = content.get("default")
        record = content["keys"].get(key_id) if isinstance(key_id, str) else None
        if not isinstance(record, dict) or not isinstance(record.get("key"), str):
            return None
        return StoredKey(
            key_id=str(key_id),
            key=record["key"],
            name=str(record.get("name", "")),
            kind=str(record.get("type", "manual")),
            note=record.get("note"),
            details=record.get("details"),
            base_url=str(record.get("base_url", HOSTED_URL)),
        )

    def store_default(self, key: StoredKey) -> None:
        """Store a key and make it the default."""
        content = self._read()
        record = {
            "type": key.kind, "key": key.key, "name": key.name, "note": key.note, "details": key.details,
            "base_url": key.base_url,
        }  # fmt: skip
        content["keys"][key.key_id] = {name: value for name, value in record.items() if value is not None}
        content["default"] = key.key_id
        self._write(content)

    def remove(self, key_id: str) -> None:
        """Delete a key."""
        content = self._read()
        content["keys"].pop(key_id, None)
        if content.get("default") == key_id:
            del content["default"]
        self._write(content)

    def _read(self) -> dict[str, Any]:
        try:
            content = json.loads(self.path.read_text())
        except FileNotFoundError:
            return {"version": VERSION, "keys": {}}
        except (OSError, ValueError) as error:
            raise TinkerError(f"{self.path} cannot be read ({error}); fix or delete it") from error
        if not isinstance(content, dict) or not isinstance(content.get("keys", {}), dict):
            raise TinkerError(f"{self.path} is not a credentials file; fix or delete it")
        if content.get("version", VERSION) != VERSION:
            raise TinkerError(f"{self.path} was written by a newer client (version {content['version']!r}); upgrade")
        content.setdefault("keys", {})
        return content

    def _write(self, content: dict[str, Any]) -> None:
        folder = self.path.parent
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.chmod(0o700)
            descriptor, temporary = tempfile.mkstemp(dir=folder, prefix=f".{self.path.name}.")  # mode 0600
        except OSError as error:
            raise TinkerError(f"{self.path} cannot be written: {error.strerror}") from error
        try:
            with os.fdopen(descriptor, "w") as file:
                json.dump({"version": VERSION, **content}, file, indent=2)
            os.replace(temporary, self.path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
