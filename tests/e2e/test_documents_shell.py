"""Run the shell blocks of the README and the how-to pages against one server with a tiny model.

NOT_RUN lists the commands that cannot run here, with reasons; SUBSTITUTED replaces placeholders. Commands that are only
mentioned in the text of a document are parsed by the command line without being run, so that a wrong option is noticed.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import pytest
from support.tiny_server import ROOT, tiny_server

from tinsmith.cli.main import main

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "howto").glob("*.md"))]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LANGUAGES = ("sh", "bash", "shell", "console")

NOT_RUN = {
    "make test": "runs these tests, among others",
    "make demo": "sets up an environment and brings a real model; tests/e2e/test_cli_use.py has the demo on a tiny one",
    "pip install ": "would change the environment of the tests; `make test` installs the package",
    "cd CHECKPOINT_DIRECTORY": "tests/attacks/test_multipart.py and tests/sdk/test_sdk_importing.py upload as forms",
    "curl -H ": "the same",
    "vllm serve ": "vLLM is not installed here",
    "ollama create ": "Ollama is not installed here",
    "lm_eval run ": "tests/clients/test_lm_eval.py runs it, in the environment that has it",
    "inspect eval ": "tests/clients/test_inspect.py runs it, in the environment that has it",
    "tinkerscope serve ": "tests/clients/test_tinkerscope.py runs it, in the environment that has it",
    "python -m tinker_cookbook.eval.": "tests/clients/test_inspect.py runs it, in the environment that has it",
    "python -m tinker_cookbook.": "tests/e2e/test_cookbook_recipe.py runs this recipe, in the environment that has it",
    "python -c 'import runpy, ": "tests/contract/test_cookbook.py runs the cookbook so, in the environment that has it",
}
"""Prefixes of commands that are not run, and why."""

SUBSTITUTED: dict[str, Callable[[Page], str]] = {
    r"tinker://\.\.\.": lambda page: page.checkpoint,
    r"\bBASE\b": lambda page: "tiny",
    r"\btinsmith doctor\b": lambda page: "tinsmith doctor --quick",
}
"""Placeholders in the documents and their values. The doctor's full check is slow, and tests/e2e/test_cli_engine.py
runs it."""

PLACEHOLDERS = {"COMMAND": "run", "ID": "1", "moved/*": ".", "tinker://...": "tinker://run/weights/name"}
"""Placeholders that the command line would not parse, and what it parses instead."""

TINSMITH = f"""#!{sys.executable}
import os, signal, subprocess, sys
command = [sys.executable, "-m", "tinsmith", *sys.argv[1:]]
if sys.argv[1:2] != ["serve"]:
    os.execv(command[0], command)
# A server does not exit by itself: stop it once it listens.
server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
line = server.stdout.readline()
print(line, flush=True)
server.send_signal(signal.SIGTERM)
sys.exit(server.wait() if line.startswith("listening on ") else 1)
"""
"""The `tinsmith` command that the blocks call."""

CHATS = [
    {"messages": [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": f"a{i % 3}"}]}
    for i in range(4)
]
"""The blocks' chats.jsonl."""

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"(?<!`)`(tinsmith [^`\n|]+)`(?!`)")


def commands_of(text: str) -> list[tuple[int, str]]:
    """Return the commands of a document's shell blocks, each with its line."""
    found = []
    for fence in _FENCE.finditer(text):
        if fence[1] not in LANGUAGES:
            continue
        line, begun = text[: fence.start(2)].count("\n") + 1, ""
        for row in fence[2].splitlines():
            if fence[1] == "console" and not begun and not row.startswith("$ "):
                continue  # output
            begun += row.removeprefix("$ ") if fence[1] == "console" and not begun else row
            if begun.endswith("\\"):
                begun = begun[:-1]
                continue
            if begun.strip() and not begun.lstrip().startswith("#"):
                found.append((line, begun.strip()))
            begun = ""
    return found


def reason_not_to_run(command: str) -> str | None:
    return next((reason for start, reason in NOT_RUN.items() if f"{command} ".startswith(start)), None)


@dataclass(frozen=True)
class Page:
    """A document that is being run, its directory and its environment."""

    place: Path
    env: dict[str, str]

    @property
    def checkpoint(self) -> str:
        """The weights that the page's own training saved; a page that does not train gets some."""
        if not (self.place / "chats-run").exists():
            assert self.run("tinsmith train chats.jsonl --epochs 1").returncode == 0
        path: str = json.loads((self.place / "chats-run" / "state.json").read_text())["sampler"]
        return path

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        for pattern, value in SUBSTITUTED.items():
            if re.search(pattern, command):
                command = re.sub(pattern, value(self).replace("\\", r"\\"), command)
        return subprocess.run(
            ["sh", "-c", command],
            cwd=self.place,
            env=self.env,
            input="hello\n",
            capture_output=True,
            text=True,
            timeout=120,
        )


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    place = tmp_path_factory.mktemp("shell")
    (place / "bin").mkdir()
    (place / "bin" / "tinsmith").write_text(TINSMITH)
    (place / "bin" / "tinsmith").chmod(0o755)
    with tiny_server(place, context=64) as environment:
        own = {
            "TINSMITH_PORT": "0",
            "TINSMITH_MODELS": f"tiny={place / 'model'}",
            "TINSMITH_MODELS_DIR": str(place / "data" / "models"),
            "TINSMITH_DTYPE": "float32",
        }
        yield {**environment, **own, "PATH": f"{place / 'bin'}{os.pathsep}{environment['PATH']}"}


WITH_BLOCKS = [path for path in PAGES if commands_of(path.read_text())]


@pytest.mark.parametrize("path", WITH_BLOCKS, ids=lambda path: path.name)
def test_shell_blocks_run(path: Path, env: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in CHATS))
    (tmp_path / "base").symlink_to(env["TINSMITH_MODELS"].partition("=")[2])
    page = Page(tmp_path, {**env, "HOME": str(tmp_path)})
    for line, command in commands_of(path.read_text()):
        if reason_not_to_run(command) is None:
            done = page.run(command)
            assert done.returncode == 0, f"{path.name}, line {line}: {command}\n{done.stdout}\n{done.stderr}"


def test_most_is_run_and_no_reason_is_left_over() -> None:
    commands = [command for path in WITH_BLOCKS for _, command in commands_of(path.read_text())]
    left_out = [command for command in commands if reason_not_to_run(command)]
    assert len(left_out) < len(commands) / 2
    for start in NOT_RUN:
        assert any(f"{command} ".startswith(start) for command in left_out), f"nothing begins with {start!r}"
    for pattern in SUBSTITUTED:
        assert any(re.search(pattern, command) for command in commands), f"{pattern} stands nowhere"


def test_blocks_are_split_into_commands() -> None:
    text = "x\n```sh\n# why\na b \\\n    c\n\nd  # e\n```\n```text\nno\n```\n```console\n$ f\nprinted\n$ g\n```\n"
    assert commands_of(text) == [(3, "a b     c"), (3, "d  # e"), (13, "f"), (13, "g")]


def test_a_command_that_fails_is_noticed(tmp_path: Path) -> None:
    assert Page(tmp_path, dict(os.environ)).run("false").returncode == 1


def read_only(arguments: list[str]) -> None:
    """Parse a command without running it; raise what a wrong one raises.

    A missing argument is not an error: a text may mention a command by name only.
    """
    command: click.Command = main
    context: click.Context | None = None
    name, rest = "tinsmith", arguments
    while True:
        try:
            made = command.make_context(name, list(rest), parent=context)
        except (click.MissingParameter, click.exceptions.NoArgsIsHelpError, click.exceptions.Exit):
            return  # Exit is raised by --help
        except click.BadOptionUsage as error:
            if "requires an argument" in error.message:
                return
            raise
        if not isinstance(command, click.Group):
            return
        left = [*made._protected_args, *made.args]
        if not left:
            return
        found, inner, rest = command.resolve_command(made, left)
        assert inner is not None
        name, command, context = found or "", inner, made


def mentioned() -> list[tuple[str, str]]:
    """Return the commands in the text and the shell blocks of all documents."""
    found = []
    for path in DOCUMENTS:
        text = path.read_text()
        inline = _INLINE.findall(_FENCE.sub("", text))
        found += [(path.name, command) for command in (*inline, *(command for _, command in commands_of(text)))]
    return [(name, command) for name, command in found if re.match(r"(?:\w+=\S+ )*tinsmith ", command)]


@pytest.mark.parametrize("name", sorted({name for name, _ in mentioned()}))
def test_commands_that_are_mentioned_can_be_read(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for document, command in mentioned():
        if document == name:
            words = shlex.split(command, comments=True)
            arguments = [PLACEHOLDERS.get(word, word) for word in words[words.index("tinsmith") + 1 :]]
            for word in arguments:
                if word.endswith(".jsonl"):
                    (tmp_path / word).write_text("{}\n")
            try:
                read_only(arguments)
            except click.ClickException as error:
                pytest.fail(f"{document}: {command}: {error.format_message()}")


@pytest.mark.parametrize("wrong", ["train X --rate 1", "nonsense", "run list --limit x", "usage --by colour"])
def test_a_wrong_command_is_noticed(wrong: str) -> None:
    with pytest.raises(click.UsageError):
        read_only(shlex.split(wrong))
