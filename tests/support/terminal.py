"""A program in a terminal of its own: what it shows can be waited for, and keys can be pressed.

with Terminal(["python", "-m", "tinsmith", "chat"], env) as terminal:
    terminal.wait_for("> ")
    terminal.type("hello\\n")
    terminal.type(CTRL_D)
    assert terminal.end() == 0
"""

from __future__ import annotations

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

CTRL_C, CTRL_D = "\x03", "\x04"
PATIENCE_S = 120.0
"""What anything may take on a busy machine before it counts as hanging."""
AGAIN_S = 5.0
"""How long `press` waits before it presses again."""
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """80 columns wide unless told otherwise."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], *, columns: int = 80) -> None:
        self.shown = ""
        """Everything so far, without colours and cursor movements."""
        self._seen = 0
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
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        os.close(self._fd)

    def wait_for(self, pattern: str) -> str:
        """Wait until something new matches; what was shown since the last time."""
        end = time.monotonic() + PATIENCE_S
        while not (found := re.search(pattern, self.shown[self._seen :])):
            assert time.monotonic() < end, f"{pattern!r} never came; there is: {self.shown[-2000:]}"
            assert self._read(), f"it ended before {pattern!r} came: {self.shown[-2000:]}"
        new = self.shown[self._seen : self._seen + found.end()]
        self._seen += found.end()
        return new

    def press(self, keys: str, pattern: str) -> str:
        """Press keys, again every few seconds, until something new matches.

        For Ctrl-C at a prompt: a signal that arrives after CPython's readline showed the prompt and before it waits
        for input is noticed only with the next key (`readline_until_enter_or_signal` in Modules/readline.c).
        """
        for _ in range(int(PATIENCE_S / AGAIN_S)):
            self.type(keys)
            end = time.monotonic() + AGAIN_S
            while time.monotonic() < end and not re.search(pattern, self.shown[self._seen :]):
                assert self._read(), f"it ended before {pattern!r} came: {self.shown[-2000:]}"
            if re.search(pattern, self.shown[self._seen :]):
                break
        return self.wait_for(pattern)

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
        self.shown += _ESCAPES.sub("", data.decode(errors="replace"))
        return bool(data)
