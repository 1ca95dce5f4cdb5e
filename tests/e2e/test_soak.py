"""Tenants with all kinds of habits on a real server, for a few seconds: nothing fails, and nothing of theirs is left.

The short form; `make soak` is the long one, which also looks at what grows.
"""

from __future__ import annotations

from pathlib import Path

from support import soak
from support.soak import Note, Report, slope
from support.soak_actors import ACTORS

from tinsmith.engine.models.tiny import make_tiny


def test_everybody_comes_and_goes(tmp_path: Path) -> None:
    report = soak.soak(tmp_path, make_tiny(tmp_path / "model"), seconds=20, interval_s=2)
    table = report.table()
    assert set(report.done) >= {actor.__name__ for actor in ACTORS} - {"program"}, table
    assert not [status for status in report.statuses if status >= 500 and status != 503], table
    assert report.restarts == 0, table
    assert report.left == {}, table
    assert len(report.notes) > 5


def test_what_grows_is_found() -> None:
    flat = dict.fromkeys([*soak.TOLERANCES, "database MB", "history rows"], 100.0)
    report = Report(notes=[Note(30.0 * i, {**flat, "server MB": 100.0 + 5 * i, "files": 100.0 - i}) for i in range(20)])
    assert report.grown() == ["server MB"]
    assert "server MB          45.0 (24.0)  GROWS" in report.table()
    assert slope([0, 1, 2, 3], [1, 3, 5, 7]) == 2.0
