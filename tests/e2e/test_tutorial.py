"""The tutorial's scripts run and learn on a tiny model, and its pages show the same code."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.tiny_server import ROOT, tiny_server

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
HOWTOS = ("resume",)
RUN_BLOCKS = """
import sys
sys.path.insert(0, {unit!r})
from test_documents import run_blocks
from pathlib import Path
run_blocks(Path({path!r}).read_text(), {path!r}, with_engine=True)
"""
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with tiny_server(tmp_path_factory.mktemp("tiny")) as environment:
        yield environment


def learned(name: str, env: dict[str, str], steps: int, rate: float = 2e-2) -> list[float]:
    """Return the numbers that a script prints step by step; a tiny model needs other constants than a real one."""
    program = (ROOT / "examples" / f"{name}.py").read_text()
    for constant, value in (("STEPS", steps), ("LEARNING_RATE", rate)):
        program, count = re.subn(rf"^{constant} = .*$", f"{constant} = {value}", program, flags=re.MULTILINE)
        assert count == 1
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return [float(value) for value in re.findall(r"^step \d+: \w+ (-?[\d.]+)", done.stdout, re.MULTILINE)]


def test_sft(env: dict[str, str]) -> None:
    losses = learned("sft", env, 12)
    assert len(losses) == 12
    assert losses[-1] < losses[0] / 2


def test_rl(env: dict[str, str]) -> None:
    rewards = learned("rl", env, 10)
    assert sum(rewards[-2:]) > sum(rewards[:2])


def test_dpo(env: dict[str, str]) -> None:
    losses = learned("dpo", env, 4)
    assert losses[0] == 0.6931
    assert losses[-1] < losses[0] / 2


def test_custom_loss(env: dict[str, str]) -> None:
    losses = learned("custom_loss", env, 5)
    assert len(losses) == 10
    assert losses[4] < losses[0]
    assert losses[5] < losses[4]
    assert losses[-1] < losses[5]


def test_every_script_is_run() -> None:
    assert [path.stem for path in EXAMPLES] == ["custom_loss", "dpo", "rl", "sft"]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_a_page_is_its_script_in_pieces(path: Path) -> None:
    page = ROOT / "docs" / "tutorial" / f"{path.stem.replace('_', '-')}.md"
    shown = "".join(_BLOCK.findall(page.read_text()))
    assert [line for line in shown.splitlines() if line] == [line for line in path.read_text().splitlines() if line]


@pytest.mark.parametrize("name", HOWTOS)
def test_blocks_of_how_tos_run(name: str, env: dict[str, str], tmp_path: Path) -> None:
    program = RUN_BLOCKS.format(unit=str(ROOT / "tests" / "unit"), path=str(ROOT / "docs" / "howto" / f"{name}.md"))
    done = subprocess.run([sys.executable, "-c", program], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def test_no_block_is_left_out() -> None:
    """test_embedded.py runs the README's on the real model."""
    docs = ROOT / "docs"
    pages = {path.relative_to(docs) for path in docs.rglob("*.md") if "<!-- needs: engine -->" in path.read_text()}
    tutorial = {Path("tutorial", f"{path.stem.replace('_', '-')}.md") for path in EXAMPLES}
    assert pages == tutorial | {Path("howto", f"{name}.md") for name in HOWTOS}
