"""The line editor of `tinsmith chat` in a terminal, and its history."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.terminal import ALT_ENTER, CTRL_C, CTRL_D, PROMPT, TAB, UP, Terminal

from tinsmith.cli.talk.chat import COMMANDS
from tinsmith.cli.talk.line_editor import MAX_ENTRIES, MAX_ENTRY_CHARACTERS, MessageHistory

PROGRAM = """
import sys
from pathlib import Path
from tinsmith.cli.talk.line_editor import LineEditor

editor = LineEditor(Path(sys.argv[1]), {"compare": "A B", "help": "", "hello": ""})
while True:
    try:
        print("read", ascii(editor.read()), flush=True)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    except EOFError:
        break
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data" / "history"


@pytest.fixture
def started(path: Path) -> Iterator[Callable[[], Terminal]]:
    terminals = []

    def start() -> Terminal:
        environment = {**os.environ, "TERM": "xterm-256color"}
        terminals.append(Terminal([sys.executable, "-c", PROGRAM, str(path)], environment))
        terminals[-1].wait_for(PROMPT)
        return terminals[-1]

    yield start
    for terminal in terminals:
        terminal.__exit__()


def read(terminal: Terminal, text: str) -> None:
    """Wait until this message has been read, and for the next prompt."""
    found = terminal.wait_for(r"read '.*'\r\n")
    assert found.splitlines()[-1] == f"read {text!a}"
    terminal.wait_for(PROMPT)


def test_a_paste_of_several_lines_is_one_message(started: Callable[[], Terminal]) -> None:
    terminal = started()
    terminal.paste("def f():\r\n    return 1\r\n\r\n# ünïcode")
    terminal.type("\r")
    read(terminal, "def f():\n    return 1\n\n# ünïcode")
    terminal.type("before ")
    terminal.paste("a\nb\n")
    terminal.type("after\r")
    read(terminal, "before a\nb\nafter")
    terminal.type(CTRL_D)
    assert terminal.end() == 0


def test_lines_are_typed_with_alt_enter_or_a_backslash(started: Callable[[], Terminal]) -> None:
    terminal = started()
    terminal.type(f"one{ALT_ENTER}two\\\rthree\r")
    read(terminal, "one\ntwo\nthree")
    terminal.type("\\d is a digit\r")
    read(terminal, "\\d is a digit")
    terminal.type("ends in \\\x01\r")  # Ctrl-A: the cursor is at the beginning
    read(terminal, "ends in \\")


def test_ctrl_c_drops_the_line_and_ctrl_d_ends(started: Callable[[], Terminal]) -> None:
    terminal = started()
    for _ in range(20):
        terminal.type(CTRL_C)
        terminal.wait_for("interrupted")
        terminal.wait_for(PROMPT)
    terminal.type("no" + CTRL_C)
    terminal.wait_for("interrupted")
    terminal.wait_for(PROMPT)
    terminal.type("yes\r")
    read(terminal, "yes")
    terminal.type(CTRL_D)
    assert terminal.end() == 0


@pytest.mark.parametrize("typed", ["", "half a mess"])
def test_a_terminated_prompt_leaves_the_terminal_as_it_was(typed: str, path: Path) -> None:
    ended = f"""import atexit
atexit.register(print, "cleaned up")
input("ready?")
{PROGRAM}"""
    with Terminal([sys.executable, "-c", ended, str(path)], {**os.environ, "TERM": "xterm-256color"}) as terminal:
        terminal.wait_for("ready")
        before = terminal.modes
        terminal.type("\n")
        terminal.wait_for(PROMPT)
        terminal.type("a message\r")
        read(terminal, "a message")
        terminal.type(typed)
        terminal.wait_for(typed)
        assert terminal.modes != before
        terminal.terminate()
        terminal.wait_for("cleaned up")
        assert terminal.modes == before
        assert terminal.end() == 143


def test_tab_completes_commands_and_nothing_else(started: Callable[[], Terminal]) -> None:
    terminal = started()
    terminal.type(f"/c{TAB}x y\r")
    read(terminal, "/compare x y")
    terminal.type(f"/h{TAB}")
    terminal.wait_for("/hel")
    terminal.type(TAB)
    terminal.wait_for("/help  /hello")
    terminal.type("p\r")
    read(terminal, "/help")
    terminal.type(f"c{TAB}/c{TAB}\r")
    read(terminal, "c/c")


def test_a_history_survives_being_killed(started: Callable[[], Terminal], path: Path) -> None:
    first = started()
    first.paste("two\nlines")
    first.type("\r")
    read(first, "two\nlines")
    first.kill()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    again = started()
    again.type(f"{UP}!\r")
    read(again, "two\nlines!")
    again.type(f"{UP}{UP}{UP}?\r")  # the second and the first line of one entry, then the entry before
    read(again, "two\nlines?")


def test_a_history_of_plain_text_is_read(path: Path) -> None:
    path.parent.mkdir()
    path.write_text('hello\n\n17\n"quoted\ncaf\u00e9 [1]\n')
    path.chmod(0o644)
    history = MessageHistory(path)
    assert history.load_history_strings() == ["caf\u00e9 [1]", '"quoted', "17", "hello"]
    history.append_string("new\none")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert MessageHistory(path).load_history_strings()[:2] == ["new\none", "caf\u00e9 [1]"]


def test_a_history_that_was_cut_off_is_mended(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b'"one"\n"tw\xff')
    history = MessageHistory(path)
    assert history.load_history_strings() == ['"tw\ufffd', "one"]
    history.append_string("three")
    assert MessageHistory(path).load_history_strings() == ["three", '"tw\ufffd', "one"]


def test_a_history_is_bounded(path: Path) -> None:
    path.parent.mkdir()
    entries = [f"message {number}" for number in range(2 * MAX_ENTRIES + 1)]
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    assert MessageHistory(path).load_history_strings() == entries[: -MAX_ENTRIES - 1 : -1]
    assert len(path.read_text().splitlines()) == MAX_ENTRIES
    history = MessageHistory(path)
    history.store_string("x" * (MAX_ENTRY_CHARACTERS + 1))
    history.store_string(" \n")
    assert MessageHistory(path).load_history_strings()[0] == entries[-1]


def test_a_chat_works_without_a_place_for_its_history(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    history = MessageHistory(tmp_path / "file" / "history")
    assert history.load_history_strings() == []
    history.append_string("kept in memory")
    assert history.get_strings() == ["kept in memory"]


def test_a_pipe_needs_no_line_editor() -> None:
    program = "import sys, tinsmith.cli.talk.chat as c; c._reader(); print('prompt_toolkit' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], input="", capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_help_fits_a_terminal() -> None:
    from tinsmith.cli.talk.chat import KEYS, _listed

    lines = _listed().splitlines() + KEYS.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines[: len(COMMANDS)]] == [f"/{name}" for name in COMMANDS]
