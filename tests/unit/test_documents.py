"""The documents: their code runs, their links lead somewhere, and what they say of the source is true.

Parts between `<!-- generated:NAME -->` and `<!-- /generated:NAME -->` are written by this file:
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
from typing import Any, NamedTuple, cast

import click
import pytest

from tinsmith import errors
from tinsmith.cli.main import main as cli
from tinsmith.config import MB, ClientConfig, ServerConfig
from tinsmith.server import extensions, http_errors
from tinsmith.version import PROTOCOL_VERSION
from tinsmith.wire import chunking, faults, numbers, protobuf, tensors, zstd
from tinsmith.wire.routes import PREFIX, ROUTES, Encoding, Route

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "tinsmith"
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
RECORDS = sorted((ROOT / "docs" / "decisions").glob("*.md"))
NEEDS_SERVER = "<!-- needs: server -->"
NEEDS_ENGINE = "<!-- needs: engine -->"
"""Before a block that is run by tests/e2e/test_embedded.py."""
REFRESH = "run: .venv/bin/python tests/unit/test_documents.py --write"

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<!!)\[[^\]\n]+\]\(([^)\s]+)\)")
_GENERATED = re.compile(r"(<!-- generated:(\w+) -->\n)(.*?)(<!-- /generated:\2 -->)", re.DOTALL)


class Block(NamedTuple):
    """A Python block, the line it begins at, and the output that a `text` block right behind it shows."""

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
    """The fragments under which a document's headings can be linked."""
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
    lines.insert(1, ["---"] * len(lines[0]))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def routes_table() -> str:
    return table(
        ("Method", "Path", "Request", "Response", "Result", "Releases"),
        (
            (
                route.method,
                f"`{route.path.removeprefix(PREFIX)}`",
                _type_cell(route.request, route.body_encodings) or _query_cell(route),
                _type_cell(route.response, ("json",)),
                _type_cell(route.result, route.result_encodings),
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
    limits = chunking.ChunkLimits()
    return table(
        ("Limit", "Value", "Where"),
        (
            ("Largest token id", f"{numbers.MAX_TOKEN_ID:,}", "`numbers.MAX_TOKEN_ID`"),
            ("Entries of one repeated protobuf field", f"{protobuf.MAX_ITEMS:,}", "`protobuf.MAX_ITEMS`"),
            ("Cells of a CSR tensor made dense", f"{tensors.MAX_DENSE_CELLS:,}", "`tensors.MAX_DENSE_CELLS`"),
            ("Window of a zstd frame, bytes", f"{zstd.MAX_WINDOW_BYTES:,}", "`zstd.MAX_WINDOW_BYTES`"),
            ("Characters of a server's answer in an error", f"{faults.MAX_TEXT:,}", "`faults.MAX_TEXT`"),
            ("Datums in one request, by default", f"{limits.max_datums:,}", "`chunking.ChunkLimits`"),
            ("Estimated bytes in one request, by default", f"{limits.max_bytes:,}", "`chunking.ChunkLimits`"),
        ),
    )


def settings_table(config: type[Any]) -> str:
    """The fields of a configuration, with the text behind each."""
    (body,) = ast.parse(inspect.getsource(config)).body
    assert isinstance(body, ast.ClassDef)
    rows = []
    for field, text in itertools.pairwise(body.body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            assert isinstance(field.target, ast.Name)
            rows.append(
                (f"`{field.target.id}`", DEFAULTS.get(field.target.id) or _default(config, field), text.value.value)
            )
    return table(("Setting", "Default", "Meaning"), rows)


DEFAULTS = {
    "base_url": "see above",
    "data_dir": "`~/.local/share/tinsmith`",
    **dict.fromkeys(("client_flags", "default_headers", "models", "tags"), "none"),
}
"""Where the source holds a call instead of a value."""


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
    """What a server may answer instead of carrying a request out."""
    return table(
        ("Code", "Status", "What it means"),
        (
            (f"`{error.code}`", str(status), (inspect.getdoc(error) or "").replace("\n", " "))
            for error, status in sorted(http_errors.STATUSES.items(), key=lambda item: item[1])
        ),
    )


def extensions_table() -> str:
    """The endpoints of our own; the text is the handler's."""
    routes = extensions.extension_routes(cast(Any, None))
    return table(
        ("Method", "Path", "What it does"),
        (
            (
                "POST" if "POST" in (route.methods or ()) else "GET",
                f"`{route.path.replace(':path', '')}`",
                inspect.getdoc(route.endpoint) or "",
            )
            for route in routes
        ),
    )


def commands_help() -> str:
    """What `--help` prints for each command, groups before their commands."""
    return "\n".join(
        f"{'#' * min(4, 2 + depth)} {path}\n\n```text\n{text}\n```\n" for depth, path, text in _helps(cli, None)
    )


def _helps(command: click.Command, parent: click.Context | None, depth: int = 0) -> Iterator[tuple[int, str, str]]:
    name = "tinsmith" if parent is None else command.name
    command = copy.copy(command)
    vars(command)["_help_option"] = None  # made once; a test that calls a command by itself makes it without -h
    context = click.Context(command, parent, name, terminal_width=100, **command.context_settings)
    yield depth, context.command_path, command.get_help(context)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from _helps(inner, context, depth + 1)


GENERATORS: dict[str, Callable[[], str]] = {
    "routes": routes_table,
    "errors": errors_table,
    "limits": limits_table,
    "settings": functools.partial(settings_table, ServerConfig),
    "client_settings": functools.partial(settings_table, ClientConfig),
    "refusals": refusals_table,
    "extensions": extensions_table,
    "commands": commands_help,
}


def with_generated(text: str) -> str:
    """The document with its generated parts made anew."""
    return _GENERATED.sub(lambda part: f"{part[1]}\n{GENERATORS[part[2]]()}\n{part[4]}", text)


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def runs_alone(path: Path) -> bool:
    """Documents that need a server are run by tests/e2e/test_documents_client.py."""
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


def test_readme_maps_every_source_file() -> None:
    section = (ROOT / "README.md").read_text().partition("\n## Map of the source\n")[2].partition("\n## ")[0]
    named = re.findall(r"^\| `(\S+\.py)` \|", section, re.MULTILINE)
    present = sorted(str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py"))
    assert sorted(named) == present, "README.md, 'Map of the source': one row for each file under src/tinsmith"


@pytest.mark.parametrize("path", DOCUMENTS, ids=_name)
def test_relative_links_resolve(path: Path) -> None:
    assert broken_links(path) == []


def test_a_broken_link_is_noticed(tmp_path: Path) -> None:
    document = tmp_path / "a.md"
    document.write_text("# One *two*\n[a](a.md) [b](#one-two) [c](https://example.org/x) [d](b.md) [e](a.md#three)\n")
    assert broken_links(document) == ["b.md", "a.md#three"]


@pytest.mark.parametrize("path", DOCUMENTS, ids=_name)
def test_generated_parts_are_current(path: Path) -> None:
    text = path.read_text()
    assert with_generated(text) == text, f"{_name(path)} is not current; {REFRESH}"


def test_each_generated_part_is_in_the_reference_once() -> None:
    text = "".join(path.read_text() for path in (ROOT / "docs" / "reference").glob("*.md"))
    assert sorted(part[2] for part in _GENERATED.finditer(text)) == sorted(GENERATORS)


def test_changelog_begins_with_unreleased_and_names_the_protocol() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert headings(text, 2)[0] == "[Unreleased]"
    line = ".".join(PROTOCOL_VERSION.split(".")[:2])
    assert f"0.3 to {line}" in text.partition("## [Unreleased]")[2].partition("\n## ")[0]


@pytest.mark.parametrize("path", RECORDS, ids=_name)
def test_decision_records_have_their_five_parts(path: Path) -> None:
    assert headings(path.read_text(), 2) == ["Status", "Context", "Decision", "Alternatives", "Consequences"]


def test_decision_records_are_numbered_and_listed() -> None:
    assert [path.name[:4] for path in RECORDS] == [f"{number:04}" for number in range(1, len(RECORDS) + 1)]
    readme = (ROOT / "README.md").read_text()
    assert [path.name for path in RECORDS if f"(docs/decisions/{path.name})" not in readme] == []


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
