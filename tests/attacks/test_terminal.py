"""Names, notes and errors written by others reach a terminal as plain text, never as control characters or markup."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from support.cli_run import Cli
from support.hostile_mirror import HostileMirror
from support.server_process import ServerProcess

from tinsmith import AdamParams, Datum, ModelInput, ServiceClient
from tinsmith.cli import output
from tinsmith.cli.main import main
from tinsmith.text.printable import PrintableLines, one_line, printable

SOURCE = Path(output.__file__).parent
HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202egnp\u2066\x08\x7f\r[link=http://evil.example]x[/link][bold]y"
OBEYED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
SPARED = (
    "path", "tinker_path", "training_run_id", "run_id", "session_id", "model_id", "sampler_id", "checkpoint_id",
    "type", "checkpoint_type", "status", "state", "kind", "request_id", "next_cursor", "created_at", "url",
    "user_id", "key_id", "jwt", "queue_state", "tokenizer_id",
)  # fmt: skip
"""What a client reads as something else than text; in errors these are hostile too."""


def commands(command: click.Command = main, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every command of the command line."""
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from commands(found, (*path, name))
    else:
        yield path


LISTING: dict[str, tuple[str, ...]] = {
    "auth status": (),
    "auth whoami": (),
    "billing checkpoint-storage": (),
    "billing usage": ("2020-01-01", "2099-01-01"),
    "checkpoint info": ("{path}",),
    "checkpoint list": (),
    "checkpoint publish": ("{path}",),
    "checkpoint set-ttl": ("{path}", "--ttl", "9000"),
    "checkpoint unpublish": ("{path}",),
    "checkpoint delete": ("--run-id", "{run}", "--older-than", "3d", "--yes"),
    "model list": (),
    "run info": ("{run}",),
    "run list": (),
    "run plot": ("{run}",),
    "session finish": ("{session}", "--yes"),
    "session info": ("{session}",),
    "session list": (),
    "status": (),
    "usage": ("--by", "run"),
}
"""Commands that show what a server says, with arguments."""
OTHERS = {
    "auth login", "auth logout", "chat", "checkpoint download", "checkpoint export", "checkpoint import",
    "checkpoint push-hf", "clean", "completion", "connect", "demo", "doctor", "eval", "key create", "key list",
    "key revoke", "run delete", "run kill", "run watch", "sample", "serve", "session export-trace", "stop",
    "train", "version",
}  # fmt: skip
"""Commands that ask, write files, train or run for ever; they print by the same functions."""


def test_no_command_is_forgotten() -> None:
    assert {" ".join(path) for path in commands()} == set(LISTING) | OTHERS
    assert not set(LISTING) & OTHERS


def test_everything_is_printed_by_one_file() -> None:
    """Whoever prints past it would send what others wrote to the terminal as it is."""
    for file in SOURCE.rglob("*.py"):
        if file.name != "output.py":
            used = re.findall(
                r"\bclick\.(?:echo|secho|echo_via_pager)\b|\bprint\(|\bConsole\(|sys\.stdout\.write", file.read_text()
            )
            assert [use for use in used if use != "print("] == [], file.name
            assert not re.search(r"(?<![\w.])print\(", file.read_text()), file.name


class World:
    def __init__(self, server: ServerProcess, mirror: HostileMirror, folder: Path) -> None:
        self.mirror = mirror
        self.cli = Cli(mirror.url, server.key, folder)
        with ServiceClient(
            {f"key{HOSTILE}": HOSTILE}, "proj", display_name=HOSTILE, base_url=server.url, api_key=server.key
        ) as client:
            training = client.create_lora_training_client(
                "tinsmith/arithmetic", rank=4, user_metadata={HOSTILE: HOSTILE}
            )
            datum = Datum(ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3], "weights": [1.0, 1.0]})
            training.forward_backward([datum], "cross_entropy").result(30)
            training.optim_step(AdamParams(learning_rate=1e-3)).result(30)
            saved = training.save_state("one", user_metadata={HOSTILE: HOSTILE}).result(30)
            self.named = {"path": saved.path, "run": training.model_id, "session": training.model_id.split(":")[0]}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("terminal")
    (folder / "home").mkdir()
    with ServerProcess(folder / "data") as server, HostileMirror(server.url, HOSTILE, SPARED) as mirror:
        yield World(server, mirror, folder / "home")


@pytest.mark.parametrize("name", LISTING)
def test_what_a_server_says_does_nothing_to_the_terminal(world: World, name: str) -> None:
    arguments = [argument.format(**world.named) for argument in LISTING[name]]
    result = world.cli.run(*name.split(), *arguments)
    shown = result.stdout + result.stderr
    assert not OBEYED.search(shown), repr(shown)
    assert "Traceback" not in shown


def test_the_hostile_texts_are_there_as_texts(world: World) -> None:
    """The test above would pass for commands that fail; these do not, and show what was written."""
    for name in ("run list", "run info", "session list", "session info", "checkpoint info", "model list"):
        arguments = [argument.format(**world.named) for argument in LISTING[name]]
        shown = world.cli(*name.split(), *arguments)
        assert "\ufffd" in shown, name
        assert "[link=http" in re.sub(r"[\s│]+", "", shown), f"{name}: markup is text"


def test_errors_of_a_server_are_texts_too(world: World) -> None:
    for arguments in (
        ["run", "info", "nope:train:0"],
        ["session", "info", "nope"],
        ["checkpoint", "info", "tinker://a/b/c"],
    ):
        said = world.cli.fails(*arguments)
        assert not OBEYED.search(said), repr(said)
    with HostileMirror(world.mirror._url, HOSTILE, ()) as all_hostile:
        for name, given in LISTING.items():
            arguments = [argument.format(**world.named) for argument in given]
            result = Cli(all_hostile.url, world.cli.key, world.cli.home).run(*name.split(), *arguments)
            assert not OBEYED.search(result.stdout + result.stderr), name


def test_json_is_what_the_server_said(world: World) -> None:
    listed = world.cli("session", "list", "--format", "json")
    assert listed.isascii(), "JSON has its own way to write such characters"
    assert any(HOSTILE in str(value) for session in json.loads(listed)["sessions"] for value in session.values())


def test_terminals_get_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only pipes: what rich lays out for a real terminal is spared as well."""

    @click.command()
    def show() -> None:
        from rich.table import Table
        from rich.text import Text

        screen = output.console()
        screen._force_terminal = True
        screen.print(HOSTILE, Text(HOSTILE))
        table = Table(HOSTILE)
        table.add_row(Text(HOSTILE))
        screen.print(table)
        output.print_table([HOSTILE], [[HOSTILE]], title=f"{HOSTILE}\nforged")
        output.print_properties({HOSTILE: HOSTILE})
        marked = output.console(markup=True)
        marked.print(f"[bold]1.[/] {output.quoted(HOSTILE)}")

    result = CliRunner().invoke(show, catch_exceptions=False)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", result.stdout)  # colours are the layout's own
    assert not OBEYED.search(plain), repr(plain)
    assert "\nforged" not in plain
    assert "\x1b]8" not in result.stdout, "no link was made"


@pytest.mark.parametrize("code", [0, 7, 8, 13, 27, 127, 0x9B, 0x61C, 0x202E, 0x2066, 0x2028, 0xD800, 0xE0041])
def test_characters_that_are_obeyed(code: int) -> None:
    assert printable(f"a{chr(code)}b") == "a\ufffdb"
    assert one_line(f"a{chr(code)}\nb") == "a\ufffd b"


def test_a_name_is_one_line_of_a_table() -> None:
    assert output.cell("first\nforged row") == "first forged row"


def test_what_people_write_is_left_alone() -> None:
    text = "Grüße, 你好, שלום, مرحبا, नमस्ते, 👩‍👩‍👧, e\u0301, tab\there,\nnext line [ok]"
    assert printable(text) == text


def test_a_log_line_is_one_line() -> None:
    """Nobody's name makes up a line of the server's log, or colours it."""
    made = logging.makeLogRecord(
        {"msg": "refused %s", "args": ("x\n2026-01-01 INFO forged\x1b[2J",), "levelname": "INFO"}
    )
    assert PrintableLines("%(levelname)s %(message)s").format(made) == "INFO refused x 2026-01-01 INFO forged\ufffd[2J"
    try:
        raise ValueError("\x1b[2J")
    except ValueError as error:
        made.exc_info = (type(error), error, error.__traceback__)
    text: Any = PrintableLines("%(message)s").format(made)
    assert "\x1b" not in text
    assert "\nTraceback" in text
