"""Collect the pages of the documentation's site: `python tools/docs_pages.py .docs-build`.

The README becomes the first page, and files beside it (changelog, examples) come along where a page links to them.
Relative links are rewritten to where their targets are in the site. The pages of the API reference list the package's
public names; the site generator fills them in from signatures and docstrings.
"""

from __future__ import annotations

import inspect
import os
import re
import shutil
import sys
from collections import defaultdict
from pathlib import Path

import tinsmith
from tinsmith import types

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)

CLIENTS = ("ServiceClient", "TrainingClient", "SamplingClient", "RestClient", "AdminClient")
RECORDS_LINE = "    # the records, one by one\n"


def place_of(path: Path) -> Path:
    """Where a file of the repository is in the site."""
    if path == ROOT / "README.md":
        return Path("index.md")
    return path.relative_to(DOCS if path.is_relative_to(DOCS) else ROOT)


def page(path: Path) -> tuple[str, set[Path]]:
    """A page with its links rewritten, and the files outside docs/ that it links to."""
    outside: set[Path] = set()

    def rewritten(match: re.Match[str]) -> str:
        target, _, fragment = match[2].partition("#")
        if not target or re.match(r"[a-z]+:", target):
            return match[0]
        linked = (path.parent / target).resolve()
        if not linked.is_relative_to(DOCS):
            outside.add(linked)
        relative = os.path.relpath(place_of(linked), place_of(path).parent)
        return match[1] + relative + (f"#{fragment}" if fragment else "") + match[3]

    text = path.read_text()
    parts, end = [], 0
    for fence in FENCE.finditer(text):  # code stays as it is
        parts += [LINK.sub(rewritten, text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, LINK.sub(rewritten, text[end:])]), outside


def collect(pages: Path) -> None:
    """Copy every page, and what the pages link to."""
    waiting = [ROOT / "README.md", *DOCS.rglob("*.md")]
    done: set[Path] = set()
    while waiting:
        path = waiting.pop()
        if path in done:
            continue
        done.add(path)
        place = pages / place_of(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            text, outside = page(path)
            place.write_text(text)
            waiting += outside
        else:
            shutil.copyfile(path, place)
    shutil.copytree(DOCS / "assets", pages / "assets")


def directive(name: str, *options: str) -> str:
    """Ask the site generator for the documentation of a class, function or module."""
    return "\n".join(
        [f"::: {name}", *(["    options:"] if options else []), *(f"      {line}" for line in options), ""]
    )


def home(name: str) -> str:
    """The module that defines a public name, with the name."""
    value = getattr(tinsmith, name)
    return f"{value.__module__}.{value.__qualname__}"


def api_pages() -> dict[str, str]:
    """The pages of the API reference by file name."""
    public = [name for name in tinsmith.__all__ if not name.startswith("__")]
    values = {name: getattr(tinsmith, name) for name in public}
    failures = [
        name for name in public if inspect.isclass(values[name]) and issubclass(values[name], (Exception, Warning))
    ]
    own = [
        name
        for name in public
        if name not in (*CLIENTS, *failures)
        and not hasattr(types, name)
        and (inspect.isclass(values[name]) or inspect.isfunction(values[name]))
    ]
    by_module: dict[str, list[str]] = defaultdict(list)
    for name in types.__all__:
        value = getattr(types, name)
        if inspect.isclass(value) and value.__module__.startswith("tinsmith.wire"):
            by_module[value.__module__].append(value.__name__)
    return {
        "index.md": API_INDEX,
        "clients.md": "\n".join(["# Clients\n", CLIENTS_INTRO, *(directive(home(name)) for name in (*CLIENTS, *own))]),
        "errors.md": "\n".join(["# Errors\n", ERRORS_INTRO, *(directive(home(name)) for name in failures)]),
        "types.md": "\n".join(
            [
                "# Types\n",
                TYPES_INTRO,
                *(
                    f"## {module.rpartition('.')[2].replace('_', ' ').capitalize()}\n\n"
                    + "\n".join(
                        directive(
                            f"{module}.{name}",
                            "show_if_no_docstring: true",
                            "show_bases: false",
                            "inherited_members: false",
                        )
                        for name in sorted(set(names))
                    )
                    for module, names in sorted(by_module.items())
                ),
            ]
        ),
        "extending.md": "\n".join(
            [
                "# Extending\n",
                EXTENDING_INTRO,
                *(directive(name) for name in ("tinsmith.engine.protocol", "tinsmith.testing.backend")),
            ]
        ),
    }


API_INDEX = """# API

Everything here is made from signatures and docstrings.

- [Clients](clients.md): `ServiceClient` and the clients it makes, futures, deadlines, settings.
- [Types](types.md): the messages and values of the protocol, `tinsmith.types`.
- [Errors](errors.md): the exception tree.
- [Extending](extending.md): the interface between server and engine, and the backend for tests.

The names in `tinsmith.__all__` and `tinsmith.types` are public and stable. Import them from there: the module paths
shown here are where they are defined, and may change.
"""
CLIENTS_INTRO = """Every operation `name` has a twin `name_async` with the same arguments.
See [how to use the client](../howto/client.md).
"""
ERRORS_INTRO = """`code` is stable, and `retryable` says whether the same call may succeed later.
The [wire reference](../reference/wire.md#errors) has them as a table, with HTTP statuses.
"""
TYPES_INTRO = """Messages are immutable. Creating one is strict: unknown arguments and wrong types raise an
`InvalidInputError`.
"""
EXTENDING_INTRO = """A server computes through a `Backend`. `MemoryBackend` is one without torch, for tests.
"""


def main() -> None:
    build = ROOT / sys.argv[1]
    shutil.rmtree(build, ignore_errors=True)
    pages = build / "pages"
    collect(pages)
    (pages / "api").mkdir()
    for name, text in api_pages().items():
        (pages / "api" / name).write_text(text)
    config = (DOCS / "zensical.toml").read_text()
    assert RECORDS_LINE in config
    records = "".join(f'    "decisions/{path.name}",\n' for path in sorted((DOCS / "decisions").glob("[0-9]*.md")))
    (build / "zensical.toml").write_text(config.replace(RECORDS_LINE, records))


if __name__ == "__main__":
    main()
