"""The reserved disk space has real blocks, whichever way the system provides them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tinsmith.store.reserve import SLICE_BYTES, SLICES, Reserve


@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_the_file_has_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, platform: str) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    if platform == "darwin":
        monkeypatch.delattr(os, "posix_fallocate")
    path = tmp_path / "reserve"
    reserve = Reserve(path)
    reserve.fill()
    assert not reserve.is_due
    assert path.stat().st_size == SLICES * SLICE_BYTES
    assert path.stat().st_blocks * 512 >= SLICES * SLICE_BYTES
    assert reserve.give_up()
    assert path.stat().st_size == (SLICES - 1) * SLICE_BYTES
    reserve.close()
    assert not path.exists()
