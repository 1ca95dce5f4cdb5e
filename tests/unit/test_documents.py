"""The documentation: its code runs, its links resolve, and what it says about the source is true.

Sections between `<!-- generated:NAME -->` and `<!-- /generated:NAME -->` are written by this file:
`.venv/bin/python tests/unit/test_documents.py --write`.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import dataclasses
import functools
import inspect
import io
import itertools
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
import limit_tables
import pytest
import test_layers

from tinsmith import errors
from tinsmith.cli.main import main as cli
from tinsmith.client.connection import telemetry
from tinsmith.config import DEFAULT_MODEL_PACKAGE, MB, ClientConfig, ServerConfig
from tinsmith.server.call import Handlers
from tinsmith.server.http import errors as http_errors
from tinsmith.server.routes import anthropic, openai, own
from tinsmith.version import PROTOCOL_VERSION, __version__
from tinsmith.wire import limits
from tinsmith.wire.codecs import protobuf, zstd
from tinsmith.wire.routes import door
from tinsmith.wire.routes.anthropic import ANTHROPIC_PREFIXES, ANTHROPIC_ROUTES
from tinsmith.wire.routes.door import SCOPES, Door
from tinsmith.wire.routes.openai import OPENAI_ROUTES, PREFIXES
from tinsmith.wire.routes.own import OWN_ROUTES
from tinsmith.wire.routes.table import PREFIX, ROUTES, Encoding, Route
from tinsmith.wire.rules import faults, split_join
from tinsmith.wire.values import numbers, tensors

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "tinsmith"
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
RECORDS = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))
MAX_README_LINES = 150
NEEDS_SERVER = "<!-- needs: server -->"
NEEDS_ENGINE = "<!-- needs: engine -->"
"""Marks a block that needs an engine; tests/e2e runs those."""
REFRESH = "run: .venv/bin/python tests/unit/test_documents.py --write"

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]+\]\(([^)\s]+)\)")
"""Links and pictures. A link's text may run over the end of a line."""
_GENERATED = re.compile(r"(<!-- generated:(\w+) -->\n)(.*?)(<!-- /generated:\2 -->)", re.DOTALL)


class Block(NamedTuple):
    """A Python block, the line it starts at, and the output that a `text` block right after it shows."""

    line: int
    code: str
    output: str | None
    needs_engine: bool


def python_blocks(text: str) -> Iterator[Block]:
    for fence, following in itertools.pairwise([*_FENCE.finditer(text), None]):
        if fence[1] != "python":
            continue
        has_output = (
            following is not None and following[1] == "text" and not text[fence.end() : following.start()].strip()
        )
        yield Block(
            text[: fence.start(2)].count("\n"),
            fence[2],
            following[2] if following and has_output else None,
            text[: fence.start()].rstrip().endswith(NEEDS_ENGINE),
        )


def run_blocks(text: str, name: str, *, with_engine: bool = False) -> None:
    """Run a document's Python blocks in one namespace; a traceback shows the document's own lines."""
    namespace: dict[str, Any] = {"__name__": "document"}
    for block in python_blocks(text):
        if block.needs_engine != with_engine:
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * block.line + block.code, name, "exec"), namespace)
        if block.output is not None:
            assert printed.getvalue() == block.output, (
                f"{name}, line {block.line + 1}: the output shown is not what is printed"
            )


def headings(text: str, level: int) -> list[str]:
    return re.findall(rf"^{'#' * level} (.+)$", _FENCE.sub("", text), re.MULTILINE)


def anchors(text: str) -> set[str]:
    """Return the fragments by which a document's headings can be linked."""
    titles = re.findall(r"^#+ (.+)$", _FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(path: Path) -> list[str]:
    broken = []
    for target in _LINK.findall(_FENCE.sub("", path.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, fragment = target.partition("#")
        linked = (path.parent / file).resolve() if file else path
        if not linked.exists() or (fragment and fragment not in anchors(linked.read_text())):
            broken.append(target)
    return broken


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(head), *map(list, rows)]
    assert not any("\n" in cell for line in lines for cell in line), "a line break would end the table"
    lines.insert(1, ["---"] * len(lines[0]))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def routes_table() -> str:
    return table(
        ("Method", "Path", "Request", "Response", "Result", "Scope", "Body", "Releases"),
        (
            (
                route.method,
                f"`{route.path.removeprefix(PREFIX)}`",
                _type_cell(route.request, route.body_encodings) or _query_cell(route),
                _type_cell(route.response, ("json",)),
                _type_cell(route.result, route.result_encodings),
                _scope_cell(route.door),
                route.door.body.name,
                _releases(route),
            )
            for route in ROUTES
        ),
    )


def _type_cell(type_: type[Any] | None, encodings: tuple[Encoding, ...]) -> str:
    if type_ is None:
        return ""
    return f"`{type_.__name__}`" + (" (JSON or protobuf)" if "protobuf" in encodings else "")


def _query_cell(route: Route) -> str:
    return f"query: `{route.query.__name__}`" if route.query else ""


def _scope_cell(door: Door) -> str:
    if door.open_to == "everybody":
        return "signed address" if door.owner == "signature" else "no key"
    scopes = "any" if door.scopes == set(SCOPES) else " or ".join(f"`{name}`" for name in SCOPES if name in door.scopes)
    return f"{scopes}; no key on loopback" if door.open_to == "machine" else scopes


def bodies_table() -> str:
    """Return the size classes of bodies."""
    return table(
        ("Body", "As sent", "Unpacked"),
        (
            (body.name, _size(body.max_bytes, "max_body_bytes"), _size(body.max_unpacked_bytes, "max_unpacked_bytes"))
            for body in (door.SMALL, door.IDS, door.MEDIUM, door.LARGE, door.BULK)
        ),
    )


def _size(size_bytes: int | None, setting: str) -> str:
    if size_bytes is None:
        return f"`{setting}`"
    return f"{size_bytes // MB} MB" if size_bytes >= MB else f"{size_bytes // 1024} KB"


def _releases(route: Route) -> str:
    if route.until is None:
        return f"{route.since} on"
    return f"{route.since} only" if route.until == route.since else f"{route.since} to {route.until}"


def errors_table() -> str:
    statuses = {error: str(status) for status, error in errors.STATUS_ERRORS.items()}
    statuses[errors.InternalServerError] = "5xx"
    classes = [value for value in vars(errors).values() if inspect.isclass(value) and hasattr(value, "code")]
    return table(
        ("Class", "Below", "Code", "Status", "Retryable", "What it means"),
        (
            (
                f"`{error.__name__}`",
                f"`{error.__bases__[0].__name__}`",
                f"`{error.code}`",
                statuses.get(error, ""),
                "yes" if error.retryable else "no",
                re.sub(r"^[45]\w\w: (.)", lambda start: start[1].upper(), inspect.getdoc(error) or ""),
            )
            for error in classes
        ),
    )


def limits_table() -> str:
    chunks = split_join.ChunkLimits()
    return table(
        ("Limit", "Value", "Where"),
        (
            ("Largest token id", f"{numbers.MAX_TOKEN_ID:,}", "`numbers.MAX_TOKEN_ID`"),
            ("Entries of one repeated protobuf field", f"{protobuf.MAX_ITEMS:,}", "`protobuf.MAX_ITEMS`"),
            ("Cells of a CSR tensor made dense", f"{tensors.MAX_DENSE_CELLS:,}", "`tensors.MAX_DENSE_CELLS`"),
            ("Window of a zstd frame, bytes", f"{zstd.MAX_WINDOW_BYTES:,}", "`zstd.MAX_WINDOW_BYTES`"),
            ("Characters of a server's answer in an error", f"{faults.MAX_TEXT:,}", "`faults.MAX_TEXT`"),
            ("Datums in one request, by default", f"{chunks.max_datums:,}", "`split_join.ChunkLimits`"),
            ("Estimated bytes in one request, by default", f"{chunks.max_bytes:,}", "`split_join.ChunkLimits`"),
        ),
    )


def limits_of(rows: list[limit_tables.Limit]) -> str:
    """Return limits as a user meets them."""
    filled = limit_tables.rows_of(rows)
    columns = ("What", "Limit", "Setting", "Error")
    return table(
        columns if any(row[3] for row in filled) else columns[:3], (row[: 4 if row[3] else 3] for row in filled)
    )


def settings_table(config: type[Any]) -> str:
    """Return the fields of a configuration, with the docstring after each."""
    (body,) = ast.parse(inspect.getsource(config)).body
    assert isinstance(body, ast.ClassDef)
    rows = []
    for field, text in itertools.pairwise(body.body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            assert isinstance(field.target, ast.Name)
            default = DEFAULTS.get(field.target.id) or _default(config, field)
            rows.append((f"`{field.target.id}`", default, " ".join(str(text.value.value).split())))
    return table(("Setting", "Default", "Meaning"), rows)


DEFAULTS = {
    "base_url": "see above",
    "data_dir": "`~/.local/share/tinsmith`",
    **dict.fromkeys(("aliases", "chat_templates", "client_flags", "default_headers", "models", "tags"), "none"),
}
"""Defaults that the source computes."""


def _default(config: type[Any], field: ast.AnnAssign) -> str:
    assert isinstance(field.target, ast.Name)
    default = next(spec.default for spec in dataclasses.fields(config) if spec.name == field.target.id)
    if default is None:
        return "none"
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, (int, float)):
        is_size = field.target.id.endswith("_bytes")
        return f"{default // MB} MB" if is_size else f"{default:g}" if default < 1e4 else f"{default:,}"
    return f"`{default}`"


def refusals_table() -> str:
    """Return the errors with which a server refuses a request."""
    return table(
        ("Code", "Status", "What it means"),
        (
            (f"`{error.code}`", str(status), (inspect.getdoc(error) or "").replace("\n", " "))
            for error, status in sorted(http_errors.STATUSES.items(), key=lambda item: item[1])
        ),
    )


def extensions_table() -> str:
    """Return our own endpoints, each with its handler's docstring."""
    return _endpoints(OWN_ROUTES, own.HANDLERS)


def openai_table() -> str:
    """Return the endpoints of OpenAI's clients, at the first of their two paths."""
    first = PREFIXES["openai"] + "/"
    return _endpoints([route for route in OPENAI_ROUTES if route.path.startswith(first)], openai.HANDLERS)


def anthropic_table() -> str:
    """Return the endpoints of Anthropic's clients, at the first of their two paths."""
    first = ANTHROPIC_PREFIXES["anthropic"] + "/"
    return _endpoints([route for route in ANTHROPIC_ROUTES if route.path.startswith(first)], anthropic.HANDLERS)


def _endpoints(routes: Iterable[Route], handlers: Handlers) -> str:
    return table(
        ("Method", "Path", "Scope", "Body", "What it does"),
        (
            (
                route.method,
                f"`{route.path}`",
                _scope_cell(route.door),
                route.door.body.name,
                _first_paragraph(inspect.getdoc(handlers[route.name]) or ""),
            )
            for route in routes
        ),
    )


def _first_paragraph(text: str) -> str:
    """Return what fits into a cell: a blank line would end the table."""
    return " ".join(text.partition("\n\n")[0].split())


def commands_help() -> str:
    """Return what `--help` prints for each command, groups before their commands."""
    return "\n".join(
        f"{'#' * min(4, 2 + depth)} {path}\n\n```text\n{text}\n```\n" for depth, path, text in _helps(cli, None)
    )


def _helps(command: click.Command, parent: click.Context | None, depth: int = 0) -> Iterator[tuple[int, str, str]]:
    name = "tinsmith" if parent is None else command.name
    command = copy.copy(command)
    vars(command)["_help_option"] = None  # cached; a test that calls a command directly caches it without -h
    context = click.Context(command, parent, name, terminal_width=100, **command.context_settings)
    yield depth, context.command_path, command.get_help(context)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from _helps(inner, context, depth + 1)


def decisions_table() -> str:
    """Return the decision records, each with its status."""
    return table(
        ("Record", "Status"),
        (
            (f"[{headings(text, 1)[0]}]({path.name})", _status(text))
            for path, text in ((path, path.read_text()) for path in RECORDS)
        ),
    )


def rooms_table() -> str:
    """Return the order of the sub-packages in each layer, as the layer test enforces it."""
    return table(
        ("Layer", "Floors, bottom to top"),
        (
            (f"`{layer}`", " → ".join(", ".join(f"`{room}`" for room in sorted(rooms)) for rooms in floors))
            for layer, floors in test_layers.ROOMS.items()
        ),
    )


def _status(text: str) -> str:
    status = text.partition("\n## Status\n")[2].partition("\n## ")[0]
    return " ".join(status.split())


GENERATORS: dict[str, Callable[[], str]] = {
    "routes": routes_table,
    "bodies": bodies_table,
    "errors": errors_table,
    "limits": limits_table,
    "limits_of_a_request": functools.partial(limits_of, limit_tables.REQUEST),
    "limits_of_a_holder": functools.partial(limits_of, limit_tables.HOLDER),
    "limits_of_time": functools.partial(limits_of, limit_tables.TIME),
    "settings": functools.partial(settings_table, ServerConfig),
    "client_settings": functools.partial(settings_table, ClientConfig),
    "refusals": refusals_table,
    "extensions": extensions_table,
    "openai": openai_table,
    "anthropic": anthropic_table,
    "commands": commands_help,
    "decisions": decisions_table,
    "rooms": rooms_table,
}


def with_generated(text: str) -> str:
    """Return the document with its generated sections refreshed."""
    return _GENERATED.sub(lambda part: f"{part[1]}\n{GENERATORS[part[2]]()}\n{part[4]}", text)


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def runs_alone(path: Path) -> bool:
    """Documents that need a server are run by tests/sdk/test_documents_client.py."""
    return "```python" in path.read_text() and NEEDS_SERVER not in path.read_text()


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if runs_alone(path)], ids=_name)
def test_python_blocks_run_and_print_what_is_shown(path: Path) -> None:
    run_blocks(path.read_text(), _name(path))


def test_a_block_that_fails_or_prints_something_else_is_noticed() -> None:
    run_blocks("```python\nprint(1)\n```\n\n```text\n1\n```\n", "good.md")
    with pytest.raises(AssertionError, match=r"bad\.md, line 2: the output shown"):
        run_blocks("```python\nprint(1)\n```\n\n```text\n2\n```\n", "bad.md")
    with pytest.raises(ZeroDivisionError):
        run_blocks("```python\nx = 0\n```\n```python\n1 / x\n```\n", "bad.md")


def test_the_readme_is_one_that_is_run() -> None:
    assert list(python_blocks((ROOT / "README.md").read_text()))


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= MAX_README_LINES


def test_the_readme_links_every_page() -> None:
    """The decision records are listed on a page of their own."""
    linked = {(ROOT / target).resolve() for target in _LINK.findall((ROOT / "README.md").read_text())}
    pages = {path for path in DOCUMENTS if path.name != "README.md"} - set(RECORDS)
    assert sorted(map(_name, pages - linked)) == []


def test_every_page_is_in_the_sites_navigation() -> None:
    """The README is the first page; tools/docs_pages.py adds the decision records."""
    config = (ROOT / "docs" / "zensical.toml").read_text()
    places = {
        path: path.relative_to(ROOT / "docs" if path.is_relative_to(ROOT / "docs") else ROOT) for path in DOCUMENTS
    }
    named = [str(place) for path, place in places.items() if path not in RECORDS and path.name != "README.md"]
    assert [name for name in named if f'"{name}"' not in config] == []


def test_readme_maps_the_folders() -> None:
    section = (ROOT / "README.md").read_text().partition("\n## Map of the source\n")[2].partition("\n## ")[0]
    named = re.findall(r"^\| `(\S+)` \|", section, re.MULTILINE)
    present = {path.name for path in SOURCE.iterdir() if path.is_dir() and (path / "__init__.py").exists()}
    assert {name.partition("/")[0] for name in named} == present - {"types"}
    assert [name for name in named if not (SOURCE / name).is_dir()] == []


def test_the_security_model_names_the_tests_that_show_it() -> None:
    text = (ROOT / "docs" / "explanation" / "security.md").read_text()
    named = set(re.findall(r"`attacks/(test_\w+\.py)`", text))
    present = {path.name for path in (ROOT / "tests" / "attacks").glob("test_*.py")}
    elsewhere = {"test_starts.py", "test_fuzz.py"}  # in the proofs
    assert named == present - elsewhere


@pytest.mark.parametrize("path", DOCUMENTS, ids=_name)
def test_relative_links_resolve(path: Path) -> None:
    assert broken_links(path) == []


_TEST_FILE = re.compile(r"`(tests/[\w/]+\.py)`")
_SOURCE_FILE = re.compile(r"`((?:wire|server|client|engine|cli|store|transport|testing)/[\w/]+\.(?:py|sql))`")


@pytest.mark.parametrize("path", sorted(set(DOCUMENTS) - set(RECORDS)), ids=_name)
def test_files_that_are_named_exist(path: Path) -> None:
    """Decision records keep the names of their time."""
    text = path.read_text()
    named = [ROOT / name for name in _TEST_FILE.findall(text)] + [SOURCE / name for name in _SOURCE_FILE.findall(text)]
    assert [_name(file) for file in named if not file.exists()] == []


def test_a_broken_link_is_noticed(tmp_path: Path) -> None:
    document = tmp_path / "a.md"
    document.write_text("# One *two*\n[a](a.md) [b](#one-two) [c](https://example.org/x) [d](b.md) [e](a.md#three)\n")
    assert broken_links(document) == ["b.md", "a.md#three"]


@pytest.mark.parametrize("path", DOCUMENTS, ids=_name)
def test_generated_parts_are_current(path: Path) -> None:
    text = path.read_text()
    assert with_generated(text) == text, f"{_name(path)} is not current; {REFRESH}"


def test_each_generated_part_is_in_the_documents_once() -> None:
    text = "".join(path.read_text() for path in (ROOT / "docs").rglob("*.md"))
    assert sorted(part[2] for part in _GENERATED.finditer(text)) == sorted(GENERATORS)


def test_every_limit_that_a_user_meets_is_listed() -> None:
    rows = [*limit_tables.REQUEST, *limit_tables.HOLDER, *limit_tables.TIME]
    settings = {field.name for field in dataclasses.fields(ServerConfig) if field.name.startswith("max_")}
    assert settings - {row.setting for row in rows} == set(limit_tables.OTHER_AMOUNTS)
    constants = {name: f"{value:,}" for name, value in vars(limits).items() if name.startswith("MAX_")}
    shown = {row.fixed for row in rows if row.setting is None}
    assert {name for name, value in constants.items() if value not in shown} <= set(limit_tables.OTHER_CONSTANTS)
    assert set(limit_tables.OTHER_CONSTANTS) <= set(constants)


def test_troubleshooting_quotes_what_the_program_says() -> None:
    """Phrases in the first column are messages, error classes, codes or fields; `...` stands for a value."""
    text = (ROOT / "docs" / "howto" / "troubleshooting.md").read_text()
    seen = re.findall(r"^\| (.+?) \|", text.partition("\n## It does not start")[2], re.MULTILINE)
    quoted = [phrase for cell in seen for phrase in re.findall(r"`([^`]+)`", cell)]
    ours = [phrase for phrase in quoted if not phrase.startswith(("tinsmith ", "pip ")) and phrase not in NOT_OURS]
    assert len(ours) > 10
    said = _said()
    parts = [part.strip(" :") for phrase in ours for part in phrase.split("...")]
    assert [part for part in parts if part not in said and part not in NOT_OURS] == []


NOT_OURS = ("Address already in use", "result()", "nan", "inf")
"""Phrases of the operating system and of Python."""


def _said() -> str:
    """Return every string of the source, and the names of its classes and their fields."""
    trees = [ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    texts = [str(node.value) for node in nodes if isinstance(node, ast.Constant)]
    fields = [ast.unparse(node.target) for node in nodes if isinstance(node, ast.AnnAssign)]
    return "\n".join([*texts, *fields, *(node.name for node in nodes if isinstance(node, ast.ClassDef))])


def test_the_telemetry_policy_has_the_clients_and_the_servers_numbers() -> None:
    text = (ROOT / "docs" / "reference" / "telemetry.md").read_text()
    assert f"every {telemetry.FLUSH_S:g} seconds, at most {telemetry.BATCH} at a time" in text
    assert f"fails {telemetry.MAX_FAILURES} times in a row" in text
    assert f"The newest {ServerConfig().max_telemetry_rows:,} batches" in text
    assert f"the wheel `{DEFAULT_MODEL_PACKAGE.partition('==')[0]}`" in text


def test_changelog_begins_with_unreleased_and_the_release_names_the_protocol() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    unreleased, newest = headings(text, 2)[:2]
    assert unreleased == "[Unreleased]"
    assert re.fullmatch(rf"\[{re.escape(__version__)}\] - \d{{4}}-\d\d-\d\d", newest)
    line = ".".join(PROTOCOL_VERSION.split(".")[:2])
    assert f"0.3 to {line}" in text.partition(f"## {newest}")[2].partition("\n## ")[0]


@pytest.mark.parametrize("path", RECORDS, ids=_name)
def test_decision_records_have_their_five_parts(path: Path) -> None:
    assert headings(path.read_text(), 2) == ["Status", "Context", "Decision", "Alternatives", "Consequences"]


def test_decision_records_are_numbered() -> None:
    assert [path.name[:4] for path in RECORDS] == [f"{number:04}" for number in range(1, len(RECORDS) + 1)]


@pytest.mark.parametrize("path", DOCUMENTS, ids=_name)
def test_make_commands_exist(path: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:`|^)make ([a-z-]+)", path.read_text(), re.MULTILINE))
    assert named <= targets


def write() -> None:
    for path in DOCUMENTS:
        text = path.read_text()
        if with_generated(text) != text:
            path.write_text(with_generated(text))
            print(f"wrote {_name(path)}")


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("usage: test_documents.py --write")
    write()
