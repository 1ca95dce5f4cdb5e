"""Run the examples of the documents that need a server against a scripted one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.tinker_server import TinkerServer

ROOT = Path(__file__).resolve().parents[2]
RUN = """
import sys
sys.path.insert(0, {unit!r})
from test_documents import run_blocks
from pathlib import Path
run_blocks(Path({path!r}).read_text(), {path!r})
"""
DOCUMENTS = [path for path in (ROOT / "docs").rglob("*.md") if "<!-- needs: server -->" in path.read_text()]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_examples_run(path: Path) -> None:
    program = RUN.format(unit=str(ROOT / "tests" / "unit"), path=str(path))
    with TinkerServer() as server:
        environment = {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": server.key, "PATH": "/usr/bin:/bin"}
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", program], env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert server.violations == []


def test_there_are_such_documents() -> None:
    assert DOCUMENTS
