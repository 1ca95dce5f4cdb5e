"""The command line as a user calls it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tinsmith.cli.main import main
from tinsmith.version import PROTOCOL_VERSION, __version__

HELP = """\
Usage: tinsmith [OPTIONS] COMMAND [ARGS]...

  Train and sample language models through the Tinker protocol.

Options:
  --version   Show the version and exit.
  -h, --help  Show this message and exit.

Commands:
  demo     Fine-tune a small model here and compare it with what it was.
  key      Keys of a server: create, list, revoke.
  serve    Run a Tinker server for official and own clients.
  version  Print the version of tinsmith and of the protocol it speaks.
"""

VERSION = f"tinsmith {__version__} (protocol {PROTOCOL_VERSION})\n"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments, prog_name="tinsmith")


def started(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_is_this_text(option: str) -> None:
    result = run(option)
    assert result.exit_code == 0
    assert result.output == HELP


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
    assert "No such command 'versoin'" in result.output


def test_an_unknown_option_is_a_usage_error() -> None:
    result = run("version", "--loud")
    assert result.exit_code == 2
    assert "No such option" in result.output


def test_no_command_shows_the_help_as_a_usage_error() -> None:
    result = run()
    assert result.exit_code == 2
    assert result.output == HELP


def test_the_installed_command_runs() -> None:
    done = started(str(Path(sys.executable).parent / "tinsmith"), "version")
    assert (done.returncode, done.stdout, done.stderr) == (0, VERSION, "")


def test_the_package_runs_as_a_module() -> None:
    done = started(sys.executable, "-m", "tinsmith", "version")
    assert (done.returncode, done.stdout, done.stderr) == (0, VERSION, "")


def test_the_module_calls_itself_by_a_name_one_can_type() -> None:
    done = started(sys.executable, "-m", "tinsmith", "--help")
    assert done.returncode == 0
    assert done.stdout == HELP.replace("Usage: tinsmith", "Usage: python -m tinsmith")


def test_an_unknown_command_of_the_module_exits_with_2() -> None:
    done = started(sys.executable, "-m", "tinsmith", "nonsense")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "No such command 'nonsense'" in done.stderr
