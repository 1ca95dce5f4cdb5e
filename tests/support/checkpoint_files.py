"""Checks on a checkpoint's files, beyond those that loading it makes."""

from __future__ import annotations

from pathlib import Path

from tinsmith.engine.checkpoints.format import Manifest, read_manifest, verified_bytes


def verify_checkpoint(directory: Path) -> Manifest:
    """Compare every file with its digest; raise DamagedCheckpointError, which names the file."""
    manifest = read_manifest(directory)
    for name in manifest.files:
        verified_bytes(directory, name, manifest)
    return manifest
