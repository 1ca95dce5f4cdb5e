"""The list of mutants matches the tree; without this test, only `make mutants` would notice."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.mutants import MUTANTS, ROOT, Mutant, table_row

AREAS = {
    "losses", "optimizer", "LoRA", "packing", "drawing", "order", "journal", "replay", "access", "keys", "retry",
    "codecs",
}  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.file}: {' '.join(mutant.right.split())[:40]}")
def test_a_mistake_can_be_made_and_is_one(mutant: Mutant) -> None:
    text = (ROOT / mutant.path).read_text()
    changed = mutant.made_in(text)
    assert changed != text
    compile(changed, mutant.path, "exec")
    for test in mutant.tests:
        assert Path(ROOT, test).exists(), test


def test_every_area_has_some() -> None:
    assert {mutant.area for mutant in MUTANTS} == AREAS
    assert len(MUTANTS) == len(set(MUTANTS)) >= 44


def test_the_table_in_the_documents_has_every_mutant() -> None:
    """Whoever adds one runs it, and adds its line."""
    text = (ROOT / "docs" / "explanation" / "proofs.md").read_text()
    assert [table_row(mutant, True) for mutant in MUTANTS if table_row(mutant, True) not in text] == []
    assert f"{len(MUTANTS)} of {len(MUTANTS)} killed" in text


def test_text_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ValueError, match="is there 0 times"):
        Mutant("x", "x.py", "a", "b", ()).made_in("c")
    with pytest.raises(ValueError, match="is there 2 times"):
        Mutant("x", "x.py", "a", "b", ()).made_in("aa")
