"""Settings come from `config` alone: no other module looks a variable of the environment up by its name.

Handing the whole environment to `config` or on to a child process, and setting a variable for one, is not looking up.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "tinsmith"


def lookups(source: str) -> list[int]:
    """Lines that ask for a variable by name."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and _is_environ(node.value):
            found.append(node.lineno)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            is_get = node.func.attr == "get" and _is_environ(node.func.value)
            if is_get or node.func.attr == "getenv":
                found.append(node.lineno)
    return found


def _is_environ(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "environ"


def test_only_config_looks_variables_up() -> None:
    others = [path for path in sorted(SOURCE.rglob("*.py")) if path != SOURCE / "config.py"]
    found = [f"{path.relative_to(SOURCE)}:{line}" for path in others for line in lookups(path.read_text())]
    assert found == []


@pytest.mark.parametrize("source", ["os.environ.get('A')", "os.environ['A']", "os.getenv('A')", "x = os.environ['A']"])
def test_a_lookup_is_noticed(source: str) -> None:
    assert lookups(source) == [1]


@pytest.mark.parametrize("source", ["os.environ['A'] = 'b'", "f(os.environ)", "{**os.environ}", "values.get('A')"])
def test_handing_on_is_not_looking_up(source: str) -> None:
    assert lookups(source) == []
