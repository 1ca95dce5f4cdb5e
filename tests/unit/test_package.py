"""The package that users install: what is in the wheel and the sdist, and that the command works from the wheel alone.

`make wheel-test` (tests/support/wheel_trial.py) is the long form: an empty environment, every dependency, the demo.
"""

from __future__ import annotations

import configparser
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path, PurePosixPath

import pytest
from support.wheel_trial import ROOT, Built, build, unpack_sdist

from tinsmith.version import PROTOCOL_VERSION, __version__

SOURCE = ROOT / "src" / "tinsmith"
DATA = {"tinsmith/py.typed", "tinsmith/store/queries.sql", "tinsmith/cli/train/data/workshop.jsonl"}
"""Files that the program opens; migrations are compared one by one."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build(ROOT, tmp_path_factory.mktemp("dist"))


def names_of(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as opened:
        return set(opened.namelist())


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as opened:
        return Parser().parsestr(opened.read(f"tinsmith-{__version__}.dist-info/METADATA").decode())


def test_the_wheel_has_every_source_file_and_nothing_else(built: Built) -> None:
    here = {f"tinsmith/{path.relative_to(SOURCE).as_posix()}" for path in SOURCE.rglob("*") if path.is_file()}
    packed = {name for name in names_of(built.wheel) if not name.startswith(f"tinsmith-{__version__}.dist-info/")}
    assert packed == {name for name in here if "__pycache__" not in name}
    assert packed >= DATA


def test_the_sdist_holds_the_source_and_no_tests(built: Built) -> None:
    with tarfile.open(built.sdist) as opened:
        names = {PurePosixPath(name).relative_to(f"tinsmith-{__version__}") for name in opened.getnames()}
    assert {name.parts[0] for name in names} == {
        *("src", "tools", "pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "PKG-INFO", ".gitignore"),
    }
    assert {name for name in names if name.parts[0] == "tools"} == {PurePosixPath("tools/project_urls.py")}


def test_the_sdist_builds_the_same_wheel(built: Built, tmp_path: Path) -> None:
    again = build(unpack_sdist(built.sdist, tmp_path), tmp_path / "dist")
    with zipfile.ZipFile(built.wheel) as one, zipfile.ZipFile(again.wheel) as other:
        assert {name: one.read(name) for name in one.namelist()} == {
            name: other.read(name) for name in other.namelist()
        }


def test_the_metadata_says_what_it_is(built: Built) -> None:
    found = metadata(built.wheel)
    assert (found["Name"], found["Version"]) == ("tinsmith", __version__)
    assert found["License-Expression"] == "Apache-2.0"
    assert found["Description-Content-Type"] == "text/markdown"
    assert re.fullmatch(r">=3\.\d+", found["Requires-Python"])
    assert {"server", "postgres", "plot", "tokenizers"} <= set(found.get_all("Provides-Extra") or ())
    assert found.get_payload() == (ROOT / "README.md").read_text()


def test_a_release_names_the_addresses_of_its_repository(tmp_path: Path) -> None:
    """The workflow's repository is the only address that is sure to be right; a build elsewhere has none."""
    workflow = {"GITHUB_SERVER_URL": "https://git.example", "GITHUB_REPOSITORY": "smiths/tinsmith"}
    nowhere = dict.fromkeys(workflow, "")
    source = metadata(build(ROOT, tmp_path / "release", workflow).wheel).get_all("Project-URL") or []
    assert {
        "Source, https://git.example/smiths/tinsmith",
        "Issues, https://git.example/smiths/tinsmith/issues",
        "Changelog, https://git.example/smiths/tinsmith/blob/main/CHANGELOG.md",
    } <= set(source)
    assert metadata(build(ROOT, tmp_path / "other", nowhere).wheel).get_all("Project-URL") is None


def test_the_base_install_has_no_server(built: Built) -> None:
    required = metadata(built.wheel).get_all("Requires-Dist") or []
    base = [line for line in required if "extra ==" not in line]
    assert base
    assert not any(re.match(r"(torch|starlette|uvicorn|transformers)\b", line) for line in base)


def test_a_wheel_without_its_dependencies_runs_the_command(built: Built, tmp_path: Path) -> None:
    """The dependencies are those of this environment; the package is the wheel's, not the clone's."""
    target = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(target)]
    subprocess.run([*pip, str(built.wheel)], check=True, capture_output=True, text=True)
    script = target / "bin" / "tinsmith"
    env = {name: value for name, value in os.environ.items() if not name.startswith(("TINSMITH_", "TINKER_"))}

    def run(*arguments: str) -> str:
        return subprocess.run(
            [sys.executable, str(script), *arguments],
            env={**env, "PYTHONPATH": str(target)},
            cwd=tmp_path,
            check=True,
            capture_output=True,
            text=True,
        ).stdout

    assert run("version") == f"tinsmith {__version__} (protocol {PROTOCOL_VERSION})\n"
    assert run("--help").startswith("Usage: tinsmith ")
    place = "import tinsmith, tinsmith.store.schema as s; print(tinsmith.__file__, len(s.load_migrations()))"
    used = subprocess.run(
        [sys.executable, "-c", place],
        env={**env, "PYTHONPATH": str(target)},
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    assert Path(used[0]).is_relative_to(target)
    assert int(used[1]) == len(list((SOURCE / "store" / "migrations").glob("*.sql")))


def test_the_entry_point_is_the_command_line(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as opened:
        points = configparser.ConfigParser()
        points.read_string(opened.read(f"tinsmith-{__version__}.dist-info/entry_points.txt").decode())
    assert dict(points["console_scripts"]) == {"tinsmith": "tinsmith.cli.main:main"}
