"""The command line as a user calls it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from tinsmith.cli.main import COMMANDS, main
from tinsmith.version import PROTOCOL_VERSION, __version__

UNWANTED = ("aiohttp", "httpx", "msgspec", "numpy", "rich", "starlette", "torch", "tinsmith.client", "tinsmith.wire")
"""What neither an overview nor a version needs."""

VERSION = f"tinsmith {__version__} (protocol {PROTOCOL_VERSION})\n"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments, prog_name="tinsmith")


def started(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True)


def names() -> list[str]:
    return sorted([*COMMANDS, *main.commands])


@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_lists_every_command(option: str) -> None:
    """Each word of it is pinned by docs/reference/cli.md; see test_documents.py."""
    result = run(option)
    assert result.exit_code == 0
    assert result.output.startswith("Usage: tinsmith [OPTIONS] COMMAND [ARGS]...")
    listed = re.findall(r"^  (\w+)  ", result.output.partition("Commands:")[2], re.MULTILINE)
    assert listed == names()


def test_the_table_of_commands_says_what_they_say_of_themselves() -> None:
    assert list(COMMANDS) == sorted(COMMANDS)
    for name, (_, _, text) in COMMANDS.items():
        command = main.get_command(click.Context(main), name)
        assert command is not None
        assert command.name == name
        assert text.endswith((".", "?"))
        assert run(name, "--help").exit_code == 0


@pytest.mark.parametrize("arguments", [["--help"], ["version"], ["checkpoint", "--help"], ["run", "list", "--help"]])
def test_help_and_version_load_neither_torch_nor_http(arguments: list[str]) -> None:
    program = (
        "import sys\nfrom tinsmith.cli.main import main\n"
        f"main({arguments!r}, standalone_mode=False)\n"
        f"print('loaded:', *[name for name in {UNWANTED!r} if name in sys.modules])"
    )
    done = started(sys.executable, "-c", program)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "loaded:"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_are_for_our_command(shell: str) -> None:
    result = run("completion", shell)
    assert result.exit_code == 0
    assert f"_TINSMITH_COMPLETE={shell}_complete" in result.output
    assert "is not one of 'bash', 'zsh', 'fish'" in run("completion", "csh").output


def test_a_shell_is_told_commands_and_options() -> None:
    def told(*words: str) -> list[str]:
        asked = {
            "_TINSMITH_COMPLETE": "bash_complete",
            "COMP_WORDS": " ".join(words),
            "COMP_CWORD": str(len(words) - 1),
        }
        done = subprocess.run(
            [str(Path(sys.executable).parent / "tinsmith")], env={**os.environ, **asked}, capture_output=True, text=True
        )
        return [line.partition(",")[2] for line in done.stdout.splitlines()]

    assert told("tinsmith", "check") == ["checkpoint"]
    assert "delete" in told("tinsmith", "checkpoint", "")
    assert "--dry-run" in told("tinsmith", "checkpoint", "delete", "--")


def test_version_names_package_and_protocol() -> None:
    result = run("version")
    assert result.exit_code == 0
    assert result.output == VERSION


def test_the_version_option_names_the_package() -> None:
    result = run("--version")
    assert result.exit_code == 0
    assert result.output == f"tinsmith, version {__version__}\n"


def test_an_unknown_command_is_a_usage_error() -> None:
    result = run("versoin")
    assert result.exit_code == 2
    assert "No such command 'versoin'. Did you mean 'version'?" in result.output


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        ("trian data.jsonl", "train"),
        ("run lst", "list"),
        ("checkpoint dwonload", "download"),
        ("auth lgoin", "login"),
        ("run list --limt 3", "--limit"),
        ("train data.jsonl --epoch 3", "--epochs"),
        ("--fromat json status", "--format"),
    ],
)
def test_what_is_misspelt_is_suggested(arguments: str, meant: str) -> None:
    result = run(*arguments.split())
    assert result.exit_code == 2
    assert f"'{meant}'" in result.output.partition("Did you mean")[2]


def test_an_unknown_option_is_a_usage_error() -> None:
    result = run("version", "--loud")
    assert result.exit_code == 2
    assert "No such option" in result.output


def test_no_command_shows_the_help_as_a_usage_error() -> None:
    result = run()
    assert result.exit_code == 2
    assert result.output == run("--help").output


def test_the_installed_command_runs() -> None:
    done = started(str(Path(sys.executable).parent / "tinsmith"), "version")
    assert (done.returncode, done.stdout, done.stderr) == (0, VERSION, "")


def test_the_package_runs_as_a_module() -> None:
    done = started(sys.executable, "-m", "tinsmith", "version")
    assert (done.returncode, done.stdout, done.stderr) == (0, VERSION, "")


def test_the_module_calls_itself_by_a_name_one_can_type() -> None:
    done = started(sys.executable, "-m", "tinsmith", "--help")
    assert done.returncode == 0
    assert done.stdout.startswith("Usage: python -m tinsmith [OPTIONS]")


def test_an_unknown_command_of_the_module_exits_with_2() -> None:
    done = started(sys.executable, "-m", "tinsmith", "nonsense")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "No such command 'nonsense'" in done.stderr


TAKES_A_PATH = [
    ("chat", "--checkpoint"),
    ("sample", "hello", "--checkpoint"),
    ("eval", "data.jsonl", "--checkpoint"),
    ("checkpoint", "info"),
    ("checkpoint", "publish"),
    ("checkpoint", "unpublish"),
    ("checkpoint", "set-ttl", "--remove"),
    ("checkpoint", "delete", "--yes"),
    ("checkpoint", "download"),
    ("checkpoint", "export", "--out", "somewhere"),
    ("checkpoint", "push-hf"),
]
"""Commands up to where the path of a checkpoint stands."""


@pytest.mark.parametrize("command", TAKES_A_PATH, ids=" ".join)
@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("nonsense", "Error: Invalid tinker path 'nonsense': it must start with tinker://\n"),
        ("tinker://run", "it must be tinker://<training run>/<kind>/<name>"),
        ("tinker://run/weight/x", "the kind 'weight' is unknown (allowed: weights, sampler_weights, external_weights)"),
        ("my adapter", "Error: my adapter is a directory, not a checkpoint of the server; upload its adapter"),
        ("my adapter", "prints: tinsmith checkpoint import 'my adapter'\n"),
    ],
)
def test_a_path_is_checked_before_an_engine_starts(
    command: tuple[str, ...], path: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my adapter").mkdir()
    settings = {"TINSMITH_DATA_DIR": str(tmp_path / "data"), "TINKER_BASE_URL": "local", "HOME": str(tmp_path)}
    result = CliRunner(env=settings).invoke(main, [*command, path], prog_name="tinsmith")
    assert result.exit_code == 1
    assert says in result.stderr
    assert not (tmp_path / "data").exists(), "an engine would keep its data there"


CHECKPOINT = ("info", "publish", "unpublish", "set-ttl", "delete", "download", "export", "push-hf")


def test_every_command_that_takes_the_path_of_a_checkpoint_checks_it() -> None:
    def found(command: click.Command, *names: str) -> Iterator[tuple[str, ...]]:
        if isinstance(command, click.Group):
            context = click.Context(command)
            for name in command.list_commands(context):
                inner = command.get_command(context, name)
                assert inner is not None
                yield from found(inner, *names, name)
        elif any(one.name in ("path", "paths", "checkpoint", "checkpoints") for one in command.params):
            yield names

    listed = {tuple(word for word in command if word in names() or word in CHECKPOINT) for command in TAKES_A_PATH}
    assert set(found(main)) == listed
