"""The table of other people's programs names the versions that are tested."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = ROOT / "tests" / "clients" / "requirements"
PAGE = ROOT / "docs" / "howto" / "clients.md"
PACKAGES = {"langchain": "langchain-openai", "cookbook": "tinker-cookbook"}
"""Of environments that have another name than their program."""


def pinned(environment: Path) -> tuple[str, str]:
    """A program and its version."""
    package = PACKAGES.get(environment.stem, environment.stem)
    pins = dict(line.split("==") for line in environment.read_text().splitlines() if "==" in line)
    names = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pins.items()}
    return package, names[package]


def test_every_program_is_in_the_table_with_its_version() -> None:
    rows = re.findall(r"^\| \[([\w-]+)\]\(\S+\) \| (\S+) \|", PAGE.read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(pinned(environment) for environment in REQUIREMENTS.glob("*.txt"))
