"""The environments of the small programs have what their files list, no more and no less."""

from __future__ import annotations

import subprocess

import pytest
from support.clients import CLIENTS, REQUIREMENTS


@pytest.mark.parametrize("name", ["anthropic", "openai", "openapiopenai"])
def test_an_environment_has_what_its_file_says(name: str) -> None:
    lines = (REQUIREMENTS / f"{name}.txt").read_text().splitlines()
    command = [CLIENTS / name / "bin" / "python", "-m", "pip", "freeze"]
    listed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert listed.stdout.splitlines() == [line for line in lines if not line.startswith("#")]
