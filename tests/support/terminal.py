"""A program in a terminal of its own: what it shows can be waited for, and keys can be pressed.

with Terminal(["python", "-m", "tinsmith", "chat"], env) as terminal:
    terminal.wait_for(PROMPT)
    terminal.type("hello\\n")
    terminal.type(CTRL_D)
    assert terminal.end() == 0
"""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import termios
import time
from collections.abc import Mapping, Sequence
from typing import Self

CTRL_C, CTRL_D, TAB, UP, ALT_ENTER = "\x03", "\x04", "\t", "\x1b[A", "\x1b\r"
PROMPT = ">\b"
"""An empty prompt of `tinsmith chat` that waits for keys: its space is a movement of the cursor. A prompt with text
in it is shown again when it is sent."""
PATIENCE_S = 120.0
"""What anything may take on a busy machine before it counts as hanging."""
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_CUT_OFF = re.compile(r"\x1b(\[[0-9;?]*)?$")
"""An escape sequence whose end has not been read yet."""


class Terminal:
    """80 columns wide unless told otherwise."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], *, columns: int = 80) -> None:
        self.shown = ""
        """Everything so far, without colours and cursor movements."""
        self._seen = 0
        self._rest = ""
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._pid, self._fd = pty.fork()
        if self._pid == 0:
            try:
                os.execvpe(command[0], list(command), dict(env))
            finally:
                os._exit(127)
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        os.close(self._fd)

    @property
    def modes(self) -> list[object]:
        """Its settings: whether it shows what is typed, hands over whole lines, and so on."""
        return termios.tcgetattr(self._fd)

    def terminate(self) -> None:
        os.kill(self._pid, signal.SIGTERM)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)

    def wait_for(self, pattern: str) -> str:
        """Wait until something new matches; what was shown since the last time."""
        end = time.monotonic() + PATIENCE_S
        while not (found := re.search(pattern, self.shown[self._seen :])):
            assert time.monotonic() < end, f"{pattern!r} never came; there is: {self.shown[-2000:]}"
            assert self._read(), f"it ended before {pattern!r} came: {self.shown[-2000:]}"
        new = self.shown[self._seen : self._seen + found.end()]
        self._seen += found.end()
        return new

    def paste(self, text: str) -> None:
        """Paste as terminals do when a program has asked for marks around what is pasted."""
        self.type(f"\x1b[200~{text}\x1b[201~")

    def type(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def end(self) -> int:
        """Wait for the end; the exit code."""
        limit = time.monotonic() + PATIENCE_S
        while self._read():
            assert time.monotonic() < limit, f"it goes on: {self.shown[-2000:]}"
        _, status = os.waitpid(self._pid, 0)
        return os.waitstatus_to_exitcode(status)

    def _read(self) -> bool:
        """Take in what is there; False at the end."""
        if not select.select([self._fd], [], [], 0.1)[0]:
            return True
        try:
            data = os.read(self._fd, 65536)
        except OSError:  # how Linux says that the other end is closed
            return False
        text = self._rest + self._decode(data)
        end = cut.start() if (cut := _CUT_OFF.search(text)) else len(text)
        self._rest = text[end:]
        self.shown += _ESCAPES.sub("", text[:end])
        return bool(data)
