"""Exports that only their recipients can read: age encryption, by the pyrage library."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tinsmith.errors import InvalidInputError

SUFFIX = ".age"


def check_recipients(recipients: Sequence[str]) -> list[Any]:
    """Parse the recipients; the error names one that is not a key."""
    import pyrage

    if not recipients:
        raise InvalidInputError(
            "age_encryption_recipients: empty; leave it out for a plain export", field="age_encryption_recipients"
        )
    keys: list[Any] = []
    for index, text in enumerate(recipients):
        try:
            kind = pyrage.ssh if text.startswith("ssh-") else pyrage.x25519
            keys.append(kind.Recipient.from_str(text))
        except Exception as error:  # the library raises its own kinds for each sort of key
            raise InvalidInputError(
                f"age_encryption_recipients[{index}]: {text[:60]!r} is not an age or ssh public key: {error}",
                field=f"age_encryption_recipients[{index}]",
            ) from None
    return keys


def encrypt_directory(directory: Path, recipients: Sequence[str]) -> int:
    """Replace every file by its encrypted form, named `.age`; return the bytes of the directory after that."""
    import pyrage

    keys = check_recipients(recipients)
    total = 0
    for path in sorted(directory.iterdir()):
        if path.is_file():
            if path.suffix != SUFFIX:
                encrypted = path.with_name(path.name + SUFFIX)
                encrypted.write_bytes(pyrage.encrypt(path.read_bytes(), keys))
                path.unlink()
                path = encrypted
            total += path.stat().st_size
    return total
