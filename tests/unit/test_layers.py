"""Which part of the package may import which. CONTRIBUTING.md shows the same as a table."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"

BOTTOM = {"errors", "config", "version", "text"}
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "version": set(),
    "text": {"errors", "text"},
    "config": {"errors", "version"},
    "wire": {"errors", "version", "wire"},
    "types": {"errors", "wire", "types", "compat"},
    "auth": BOTTOM,
    "compat": set(),
    "transport": BOTTOM | {"wire", "transport"},
    "client": BOTTOM | {"wire", "transport", "client"},
    "cli": BOTTOM | {"wire", "transport", "client", "cli", "types", "__init__"},
    "store": BOTTOM | {"wire", "store"},
    "server": BOTTOM | {"wire", "store", "server"},
    "engine": BOTTOM | {"wire", "store", "engine"},
    "testing": BOTTOM | {"wire", "engine", "testing"},
    "web": {"web"},
    "__init__": {"version", "compat"},
    "__main__": {"cli"},
}
ALLOWED_LAZILY: dict[str, set[str]] = {
    "tinsmith": {"errors", "types", "client", "auth", "config"},
    "tinsmith.auth": {"client"},
    "tinsmith.compat": {"__init__", "types"},
    "tinsmith.cli.server.serve": {"server"},
    "tinsmith.cli.checkpoint.export": {"engine"},
    "tinsmith.cli.checkpoint.import_": {"engine"},
    "tinsmith.cli.server.clean": {"engine", "server", "store"},
    "tinsmith.cli.server.doctor": {"engine"},
    "tinsmith.cli.server.key": {"server", "store"},
    "tinsmith.cli.server.storage": {"engine", "server"},
    "tinsmith.server.app": {"engine"},
}
ROOMS: dict[str, list[set[str]]] = {
    "wire": [
        {"limits", "losses", "message", "model_methods"},
        {"values"},
        {"messages"},
        {"codecs"},
        {"rules"},
        {"routes"},
    ],
    "client": [
        {"runtime"},
        {"connection"},
        {"find_tokenizer", "losses", "submit"},
        {"admin", "rest", "sampling"},
        {"training"},
        {"recovery"},
        {"service"},
    ],
    "cli": [
        {"dataset", "output", "progress", "report"},
        {"connection", "dpo", "models", "plots"},
        {"main"},
        {"checkpoint", "manage", "server", "talk", "train"},
    ],
    "engine": [
        {"eviction", "machine", "protocol"},
        {"cpu", "ipc"},
        {"models"},
        {"lora"},
        {"checkpoints"},
        {"sampling", "training"},
        {"general"},
        {"worker"},
        {"backend"},
    ],
}
"""The sub-packages of each package from bottom to top: one may import its own floor and those below, never above."""
SERVER_DOORS: dict[str, set[str]] = {
    "tinsmith.server.routes": {"tinsmith.server.app", "tinsmith.server.routes"},
    "tinsmith.server.http": {
        "tinsmith.server.app",
        "tinsmith.server.http",
        "tinsmith.server.process",
        "tinsmith.server.routes",
    },
    "tinsmith.server.app": {"tinsmith.server.process"},
    "tinsmith.server.process": {"tinsmith.cli.server.clean", "tinsmith.cli.server.serve"},
}
"""The server's sub-packages share one value (`Services`), so they have no floors. But only the listed modules may
import these."""
IN_CIRCLES = {"tinsmith", "tinsmith.compat", "tinsmith.types"}
"""Modules that may import each other, because the package's public names are loaded when they are first used."""
OFFICIAL = {"tinker", "tinker_cookbook"}
WITHOUT_UNIT_TESTS = {
    Path("cli/manage"),  # tests/e2e/test_cli_*.py call the commands against a server
    Path("types"),  # names only; tests/unit/test_public_names.py
}
"""Sub-packages whose tests are elsewhere."""


@dataclass(frozen=True)
class Import:
    """One imported module, and whether importing the importer leaves it unloaded."""

    target: str
    line: int
    in_function: bool
    for_types: bool
    is_relative: bool = False

    @property
    def is_lazy(self) -> bool:
        return self.in_function or self.for_types


def imports(source: str) -> Iterator[Import]:
    yield from _walk(ast.parse(source), in_function=False, for_types=False)


def _walk(node: ast.AST, *, in_function: bool, for_types: bool) -> Iterator[Import]:
    if isinstance(node, ast.If) and _tests_type_checking(node.test):
        for child in node.body:
            yield from _walk(child, in_function=in_function, for_types=True)
        for child in node.orelse:
            yield from _walk(child, in_function=in_function, for_types=for_types)
        return
    for target, is_relative in _targets(node):
        yield Import(target, getattr(node, "lineno", 0), in_function, for_types, is_relative)
    in_function = in_function or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
    for child in ast.iter_child_nodes(node):
        yield from _walk(child, in_function=in_function, for_types=for_types)


def _targets(node: ast.AST) -> list[tuple[str, bool]]:
    if isinstance(node, ast.Import):
        return [(alias.name, False) for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = node.module or ""
        return [(f"{base}.{alias.name}".strip("."), node.level > 0) for alias in node.names]
    if isinstance(node, ast.Call) and ast.unparse(node.func) in (
        "importlib.import_module",
        "import_module",
        "__import__",
    ):
        named = [
            part.value for argument in node.args[:1] for part in ast.walk(argument) if isinstance(part, ast.Constant)
        ]
        return [(name, name.startswith(".")) for name in named if isinstance(name, str)]
    return []


def _tests_type_checking(test: ast.expr) -> bool:
    return ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def violations(module: str, source: str) -> list[str]:
    """What is wrong with a module's imports, one line each."""
    layer = module.split(".")[1] if "." in module else "__init__"
    if layer not in ALLOWED:
        return [f"{module}: {layer} is not a known part of the package"]
    found = [(item, _problem(module, layer, item)) for item in imports(source)]
    return [f"{module}:{item.line}: {problem}" for item, problem in found if problem]


def _problem(module: str, layer: str, item: Import) -> str | None:
    top = item.target.partition(".")[0]
    if item.is_relative:
        return f"relative import of {item.target}"
    if top in OFFICIAL:
        return f"imports the official package {top}"
    if top == "torch" and layer != "engine" and not item.is_lazy:
        return "imports torch when it is loaded"
    if top != "tinsmith":
        return None
    target = _imported_layer(item.target)
    if target in ALLOWED[layer] or (target == "__init__" and item.target == "tinsmith.__version__"):
        return None
    if layer == "server" and (item.target + ".").startswith("tinsmith.engine.protocol."):
        return None
    if target in ALLOWED_LAZILY.get(module, ()):
        return None if _is_lazy_enough(module, item) else f"imports {item.target} when it is loaded"
    return f"{layer} may not import {item.target}"


def _is_lazy_enough(module: str, item: Import) -> bool:
    return item.is_lazy if module == "tinsmith" else item.in_function


def _imported_layer(target: str) -> str:
    """The part that a target belongs to; a bare name such as tinsmith.Datum belongs to the package's own file."""
    parts = target.split(".")
    return parts[1] if len(parts) > 2 or (len(parts) == 2 and parts[1] in ALLOWED) else "__init__"


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = sorted(SOURCE.glob("tinsmith/**/*.py"))


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_every_import_follows_the_arrows(path: Path) -> None:
    assert violations(module_name(path), path.read_text()) == []


def test_the_walk_finds_the_package() -> None:
    names = {module_name(path) for path in MODULES}
    assert {"tinsmith", "tinsmith.errors", "tinsmith.wire.routes.table", "tinsmith.types", "tinsmith.cli.main"} <= names


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("tinsmith.wire.values.tensors", "from tinsmith.errors import WireError\nfrom tinsmith.wire import numbers"),
        ("tinsmith.wire.values.tensors", "from tinsmith.version import PROTOCOL_VERSION"),
        ("tinsmith.wire.values.tensors", "def f():\n    import torch"),
        ("tinsmith.wire.values.tensors", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
        (
            "tinsmith.transport.aiohttp_transport",
            "from tinsmith.config import ClientConfig\nfrom tinsmith.wire import routes",
        ),
        ("tinsmith.client.training", "from tinsmith.transport.base import Transport"),
        ("tinsmith.cli.manage.run", "from tinsmith.client.rest import RestClient"),
        ("tinsmith.cli.server.serve", "def serve():\n    from tinsmith.server.app import create_app"),
        ("tinsmith.cli.server.doctor", "def trial():\n    from tinsmith.engine.models.tiny import make_tiny"),
        ("tinsmith.store.sqlite", "import sqlite3\nfrom tinsmith.wire import runs"),
        ("tinsmith.server.routes.training", "from tinsmith.engine.protocol import Backend"),
        ("tinsmith.server.routes.training", "from tinsmith.engine import protocol"),
        ("tinsmith.server.app", "def make():\n    from tinsmith.engine.backend.local import Process"),
        ("tinsmith.engine.training.trainer", "import torch\nfrom tinsmith.store.base import Store"),
        ("tinsmith.types", "from tinsmith.errors import TinkerError\nfrom tinsmith.wire.values.inputs import Datum"),
        ("tinsmith", "import importlib\ndef f():\n    importlib.import_module('tinsmith.client')"),
        ("tinsmith", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from tinsmith.types import Datum"),
        ("tinsmith.__main__", "from tinsmith.cli.main import main"),
    ],
)
def test_the_checker_accepts(module: str, source: str) -> None:
    assert violations(module, source) == []


@pytest.mark.parametrize(
    ("module", "source", "problem"),
    [
        ("tinsmith.errors", "from tinsmith.wire import message", "errors may not import tinsmith.wire.message"),
        ("tinsmith.wire.values.tensors", "import torch", "imports torch when it is loaded"),
        ("tinsmith.wire.values.tensors", "from torch.nn import functional", "imports torch when it is loaded"),
        ("tinsmith.wire.values.tensors", "class A:\n    import torch", "imports torch when it is loaded"),
        ("tinsmith.wire.values.tensors", "try:\n    import torch\nexcept ImportError:\n    pass", "imports torch"),
        (
            "tinsmith.wire.values.tensors",
            "from typing import TYPE_CHECKING\nif not TYPE_CHECKING:\n    import torch",
            "imports torch when it is loaded",
        ),
        (
            "tinsmith.wire.values.tensors",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    pass\nelse:\n    import torch",
            "imports torch when it is loaded",
        ),
        (
            "tinsmith.wire.routes.table",
            "from tinsmith.config import ClientConfig",
            "wire may not import tinsmith.config",
        ),
        (
            "tinsmith.wire.routes.table",
            "def f():\n    from tinsmith import client",
            "wire may not import tinsmith.client",
        ),
        ("tinsmith.wire.routes.table", "from tinsmith import Datum", "wire may not import tinsmith.Datum"),
        ("tinsmith.wire.routes.table", "import tinsmith", "wire may not import tinsmith"),
        ("tinsmith.wire.routes.table", "from . import message", "relative import of message"),
        ("tinsmith.wire.routes.table", "from .message import Message", "relative import of message.Message"),
        ("tinsmith.wire.routes.table", "from tinsmith.types import Datum", "wire may not import tinsmith.types.Datum"),
        ("tinsmith.types", "from tinsmith.version import __version__", "types may not import tinsmith.version"),
        ("tinsmith.types", "from tinsmith.client import service", "types may not import tinsmith.client.service"),
        (
            "tinsmith.transport.aiohttp_transport",
            "from tinsmith.client import futures",
            "transport may not import tinsmith.client",
        ),
        ("tinsmith.client.rest", "from tinsmith.store import sqlite", "client may not import tinsmith.store.sqlite"),
        (
            "tinsmith.cli.manage.run",
            "def f():\n    from tinsmith.server import app",
            "cli may not import tinsmith.server.app",
        ),
        (
            "tinsmith.cli.server.serve",
            "from tinsmith.server import app",
            "imports tinsmith.server.app when it is loaded",
        ),
        (
            "tinsmith.cli.server.doctor",
            "from tinsmith.engine import lora",
            "imports tinsmith.engine.lora when it is loaded",
        ),
        (
            "tinsmith.cli.manage.run",
            "def f():\n    from tinsmith.engine import lora",
            "cli may not import tinsmith.engine.lora",
        ),
        (
            "tinsmith.store.sqlite",
            "from tinsmith.engine import protocol",
            "store may not import tinsmith.engine.protocol",
        ),
        (
            "tinsmith.server.auth.authenticator",
            "from tinsmith.engine.training.adamw import step",
            "server may not import tinsmith.engine.training.adamw",
        ),
        ("tinsmith.server.auth.authenticator", "from tinsmith.engine.protocols import x", "server may not import"),
        ("tinsmith.server.auth.authenticator", "import torch", "imports torch when it is loaded"),
        ("tinsmith.server.app", "from tinsmith.engine.backend.local import Process", "when it is loaded"),
        ("tinsmith.server.app", "from tinsmith.client import rest", "server may not import tinsmith.client.rest"),
        (
            "tinsmith.engine.training.trainer",
            "from tinsmith.server import app",
            "engine may not import tinsmith.server.app",
        ),
        ("tinsmith.engine.training.trainer", "def f():\n    from tinsmith.server import app", "engine may not import"),
        (
            "tinsmith.engine.training.trainer",
            "from tinsmith.client import rest",
            "engine may not import tinsmith.client.rest",
        ),
        ("tinsmith.engine.training.trainer", "def f():\n    import tinker", "imports the official package tinker"),
        ("tinsmith.cli.main", "from tinker_cookbook.rl import train", "imports the official package tinker_cookbook"),
        ("tinsmith", "from tinsmith.types import Datum", "imports tinsmith.types.Datum when it is loaded"),
        ("tinsmith", "def f():\n    from tinsmith.server import app", "__init__ may not import tinsmith.server.app"),
        (
            "tinsmith.client.rest",
            "import importlib\ndef f():\n    importlib.import_module('tinsmith.engine.lora')",
            "client may not import tinsmith.engine.lora",
        ),
        ("tinsmith.novelty.thing", "import os", "novelty is not a known part"),
        ("tinsmith.novelty", "import os", "novelty is not a known part"),
    ],
)
def test_the_checker_refuses(module: str, source: str, problem: str) -> None:
    found = violations(module, source)
    assert len(found) == 1
    assert problem in found[0]


def test_the_checker_gives_the_line() -> None:
    assert violations("tinsmith.wire.x", "import os\n\nimport tinker\n") == [
        "tinsmith.wire.x:3: imports the official package tinker"
    ]


def modules_imported(path: Path) -> set[str]:
    """The modules of ours that a file imports, at any time, for any reason."""
    known = {module_name(other) for other in MODULES}
    found = set()
    for item in imports(path.read_text()):
        target = item.target
        while target and target not in known:
            target = target.rpartition(".")[0]
        if target.startswith("tinsmith."):
            found.add(target)
    return found


GRAPH = {module_name(path): modules_imported(path) - {module_name(path)} for path in MODULES}


def test_no_import_goes_around_in_a_circle() -> None:
    order = graphlib.TopologicalSorter(
        {module: targets - IN_CIRCLES for module, targets in GRAPH.items() if module not in IN_CIRCLES}
    )
    order.prepare()


def floor(module: str) -> tuple[str, int] | None:
    """The package of a module, and its floor in it; None where the package has no floors."""
    parts = module.split(".")
    if len(parts) < 3 or parts[1] not in ROOMS:
        return None
    return next((parts[1], number) for number, rooms in enumerate(ROOMS[parts[1]]) if parts[2] in rooms)


def test_no_import_goes_up_the_stairs() -> None:
    upward = []
    for module, targets in GRAPH.items():
        for target in targets:
            here, there = floor(module), floor(target)
            if here and there and here[0] == there[0] and here[1] < there[1]:
                upward.append(f"{module} imports {target}")
    assert upward == []


def test_rooms_of_one_floor_do_not_import_each_other_both_ways() -> None:
    def room(module: str) -> str:
        return ".".join(module.split(".")[:3])

    arrows = {
        (room(module), room(target))
        for module, targets in GRAPH.items()
        for target in targets
        if floor(module) and floor(target) and room(module) != room(target)
    }
    assert {(a, b) for a, b in arrows if (b, a) in arrows} == set()


def test_routes_and_http_are_above_the_rest_of_the_server() -> None:
    found = []
    for module, targets in GRAPH.items():
        for target in targets:
            for door, allowed in SERVER_DOORS.items():
                is_behind = (target + ".").startswith(door + ".")
                if is_behind and not any((module + ".").startswith(one + ".") for one in allowed):
                    found.append(f"{module} imports {target}")
    assert found == []


FOLDERS = sorted({path.parent for path in MODULES})


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_folder_is_an_idea_with_few_entries_and_says_which(folder: Path) -> None:
    entries = [path for path in folder.iterdir() if path.name not in ("__pycache__", "__init__.py", "py.typed")]
    assert len(entries) <= 16
    if folder.name not in ("tinsmith", "types"):
        said = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
        assert len(said.splitlines()) >= 3, f"{folder}/__init__.py does not say what is in the folder"


def test_the_unit_tests_mirror_the_tree() -> None:
    ours = Path(__file__).parent
    folders = {path.parent.relative_to(ours) for path in ours.rglob("test_*.py")}
    assert sorted(str(folder) for folder in folders if not (SOURCE / "tinsmith" / folder).is_dir()) == []
    parts = {folder.relative_to(SOURCE / "tinsmith") for folder in FOLDERS} - WITHOUT_UNIT_TESTS
    assert sorted(str(part) for part in parts if part not in folders) == []


def test_no_two_public_classes_have_one_name() -> None:
    places: dict[str, list[str]] = {}
    for path in MODULES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(module_name(path))
    assert {name: modules for name, modules in places.items() if len(modules) > 1} == {}
