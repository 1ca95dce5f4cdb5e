"""Two tenants, a real engine, processes killed under them: everybody gets what they would have got undisturbed.

The short form; `make torture` is the long one.
"""

from __future__ import annotations

from itertools import pairwise, product
from pathlib import Path

from support import torture
from support.torture import Kill, drawn_kills

from tinsmith.engine.models.tiny import make_tiny

KILLS = [
    Kill("engine", "results", 6),
    Kill("engine", "last", 0.3),
    Kill("engine", "last", 0.1),
    Kill("engine", "last", 0.1),
    Kill("engine", "last", 0.1),
    Kill("both", "results", 6),
    Kill("api", "last", 0.05),
]


def test_killed_processes_change_nothing(tmp_path: Path) -> None:
    report = torture.torture(tmp_path, make_tiny(tmp_path / "model"), KILLS)
    assert sum(report.kills.values()) == len(KILLS)
    assert report.engines_starting >= 3, "more than an engine may die in a row while it starts"
    assert report.marked == 0
    assert report.snapshots > 0
    assert all(tenant["is_same"] for tenant in report.tenants), report.table()


def test_the_long_form_kills_everything_in_any_order() -> None:
    kills = drawn_kills(100)
    assert len(kills) == 100
    assert set(pairwise(kill.what for kill in kills)) == set(product(("engine", "api", "both"), repeat=2))
    assert {kill.behind for kill in kills} == {"results", "ready", "last"}
