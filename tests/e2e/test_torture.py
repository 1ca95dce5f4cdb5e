"""Two tenants, a real engine, processes killed under them: everybody gets what they would have got undisturbed.

The short form; `make torture` is the long one.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from support import torture
from support.torture import drawn_kills

from tinsmith.engine.models.tiny import make_tiny


def test_killed_processes_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torture, "PROGRESS_SHARE", 1.0)
    monkeypatch.setattr(torture, "MOST_RESULTS", 12)
    report = torture.torture(tmp_path, make_tiny(tmp_path / "model"), ["engine", "both"])
    assert sum(report.kills.values()) == 2
    assert report.marked == 0
    assert report.snapshots > 0
    assert all(tenant["is_same"] for tenant in report.tenants), report.table()


def test_the_long_form_kills_everything_in_any_order() -> None:
    kills = drawn_kills(100)
    assert set(pairwise(kills)) == {
        (one, other) for one in ("engine", "api", "both") for other in ("engine", "api", "both")
    }
