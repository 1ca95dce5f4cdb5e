"""The line editor of `tinsmith chat`: it reads messages of one or several lines, and keeps a history.

A paste of several lines is one message, because terminals mark where a paste begins and ends ("bracketed paste").
`chat` imports this module only in a terminal, since prompt_toolkit takes a moment to load.

The history is a file of JSON strings, one per line, so that an entry may have several lines. Each entry is appended
when it is sent, so a chat that is killed loses none. Lines that are not JSON are entries, too: earlier versions wrote
plain text.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Iterable, Mapping
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.filters import Condition
from prompt_toolkit.history import History
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output.defaults import create_output
from prompt_toolkit.output.vt100 import Vt100_Output
from prompt_toolkit.shortcuts import CompleteStyle

MAX_ENTRIES = 1000
MAX_ENTRY_CHARACTERS = 100_000
"""A longer message is not kept in the history."""
TERMINATED_CODE = 128 + signal.SIGTERM
"""The exit code that shells give to a process that SIGTERM ended."""


class TerminatedError(Exception):
    """SIGTERM arrived at the prompt."""


class LineEditor:
    """A prompt that returns one message at a time; Ctrl-C raises KeyboardInterrupt, Ctrl-D EOFError.

    SIGTERM raises SystemExit, when the terminal is as it was before the prompt: without that, the shell would be left
    with a terminal that does not show what is typed.
    """

    def __init__(self, history: Path, commands: Mapping[str, str]) -> None:
        output = create_output(always_prefer_tty=True)  # stderr if answers go to a file
        if isinstance(output, Vt100_Output):
            output.enable_cpr = False  # it asks where the cursor is, and warns if a terminal does not answer
        self._session: PromptSession[str] = PromptSession(
            "> ",
            prompt_continuation="  ",
            history=MessageHistory(history),
            completer=CommandCompleter(commands),
            complete_style=CompleteStyle.READLINE_LIKE,
            enable_suspend=True,
            key_bindings=_keys(),
            output=output,
        )

    def read(self) -> str:
        try:
            return self._session.prompt(pre_run=self._end_when_terminated)
        except TerminatedError:
            raise SystemExit(TERMINATED_CODE) from None

    def _end_when_terminated(self) -> None:
        """Leave the prompt at SIGTERM. The loop, which runs as long as the prompt, takes the handler with it."""
        with contextlib.suppress(NotImplementedError):  # Windows, where nothing can catch it
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._leave)

    def _leave(self) -> None:
        application = self._session.app
        if application.is_running and not application.is_done:
            application.exit(exception=TerminatedError())


class CommandCompleter(Completer):
    """Completes the name of a command, given each with its arguments, at the beginning of a message."""

    def __init__(self, commands: Mapping[str, str]) -> None:
        self._commands = commands

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        typed = document.text_before_cursor
        for name, arguments in self._commands.items():
            if typed.startswith("/") and f"/{name}".startswith(typed):
                yield Completion(f"/{name} " if arguments else f"/{name}", start_position=-len(typed))


def _keys() -> KeyBindings:
    """Start a new line with Alt-Enter, or with Enter after a backslash: not every terminal sends Alt-Enter."""
    keys = KeyBindings()

    @keys.add("escape", "enter")
    def start_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("enter", filter=Condition(_is_continued))
    def replace_backslash(event: KeyPressEvent) -> None:
        event.current_buffer.delete_before_cursor()
        event.current_buffer.insert_text("\n")

    return keys


def _is_continued() -> bool:
    document = get_app().current_buffer.document
    return document.is_cursor_at_the_end and document.text.endswith("\\")


class MessageHistory(History):
    """The messages of earlier chats, in a file that only its user can read."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def load_history_strings(self) -> list[str]:
        """Return the latest messages, newest first; rewrite a file that is twice as long or was cut off."""
        try:
            text = self._path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return []
        entries = [_entry(line) for line in text.splitlines() if line.strip()]
        if len(entries) > 2 * MAX_ENTRIES or not text.endswith("\n"):
            self._replace(entries[-MAX_ENTRIES:])
        return entries[: -MAX_ENTRIES - 1 : -1]

    def store_string(self, string: str) -> None:
        if not string.strip() or len(string) > MAX_ENTRY_CHARACTERS:
            return
        with contextlib.suppress(OSError):  # a chat works without a history
            self._path.parent.mkdir(parents=True, exist_ok=True)
            _write(self._path, os.O_APPEND, [string])

    def _replace(self, entries: Iterable[str]) -> None:
        temporary = self._path.with_name(self._path.name + ".new")
        with contextlib.suppress(OSError):
            _write(temporary, os.O_TRUNC, entries)
            os.replace(temporary, self._path)


def _write(path: Path, flag: int, entries: Iterable[str]) -> None:
    """Write entries with one call, so that those of two chats do not mix."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | flag, 0o600)
    try:
        path.chmod(0o600)
        os.write(descriptor, "".join(json.dumps(entry) + "\n" for entry in entries).encode())
    finally:
        os.close(descriptor)


def _entry(line: str) -> str:
    try:
        entry = json.loads(line)
    except ValueError:
        return line
    return entry if isinstance(entry, str) else line
