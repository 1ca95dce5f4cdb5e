"""What the local engine prints when it starts for the first time."""

from __future__ import annotations

from pathlib import Path

from tinsmith.client.connection.local_engine import first_start_note
from tinsmith.engine.models.sources import NAME, PACKAGE, REQUIREMENT


def test_the_first_start_says_where_the_model_comes_from(tmp_path: Path) -> None:
    note = first_start_note(tmp_path)
    assert NAME in note
    assert str(tmp_path) in note
    assert f"the package {REQUIREMENT.partition('==')[0]}, from pip's index" in note
    assert PACKAGE.replace("_", "-") == REQUIREMENT.partition("==")[0]


def test_later_starts_say_nothing(tmp_path: Path) -> None:
    (tmp_path / NAME.partition("/")[2]).mkdir()
    assert first_start_note(tmp_path) == ""
