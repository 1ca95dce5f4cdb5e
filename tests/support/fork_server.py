"""`tinsmith` commands in processes that are forked from one which has imported everything: a start takes a tenth.

    with ForkServer() as forks:
        server = ServerProcess(folder, forks=forks)

Each command is a process of its own, with its own memory, and is killed like any other; only its imports were made
before. What is spawned has the methods of `subprocess.Popen` that `ServerProcess` uses.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO, Any, Self

MODULES = (
    "tinsmith.cli.main",
    "tinsmith.cli.server.serve",
    "tinsmith.server.process",
    "tinsmith.testing.backend",
    "uvloop",
)
LINE_BYTES = 65536


class Forked:
    """One command's process; the fork server is its parent."""

    def __init__(self, forks: ForkServer, pid: int, stdout: IO[str]) -> None:
        self.pid = pid
        self.stdout = stdout
        self.returncode: int | None = None
        self._forks = forks

    def send_signal(self, number: signal.Signals) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """As subprocess does: the exit code, or minus the signal."""
        if self.returncode is None:
            self.returncode = self._forks.ask({"wait": self.pid}, timeout=timeout)
        return self.returncode


class ForkServer:
    """The parent of forked commands."""

    def __enter__(self) -> Self:
        self._socket, other = socket.socketpair()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.fork_server", str(other.fileno())],
            pass_fds=[other.fileno()],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        other.close()
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._process.kill()
        self._process.wait()

    def spawn(self, arguments: Sequence[str], environment: Mapping[str, str], log: IO[bytes]) -> Forked:
        """`tinsmith ARGUMENTS`, with stderr in a log."""
        ours, its = os.pipe()
        asked = {"arguments": list(arguments), "environment": dict(environment)}
        pid = self.ask(asked, [its, log.fileno()])
        os.close(its)
        return Forked(self, pid, os.fdopen(ours))

    def ask(self, message: Any, descriptors: Sequence[int] = (), timeout: float | None = None) -> int:
        self._socket.settimeout(timeout)
        socket.send_fds(self._socket, [json.dumps(message).encode()], descriptors)
        answer = self._socket.recv(LINE_BYTES)
        assert answer, "the fork server ended"
        return int(answer)


def run_command(arguments: list[str], environment: dict[str, str], stdout: int, log: int) -> int:
    """In the child: what `python -m tinsmith` does."""
    os.dup2(stdout, 1)
    os.dup2(log, 2)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["tinsmith", *arguments]
    from tinsmith.cli.main import main

    try:
        main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def serve_forks(asked: socket.socket) -> None:
    for module in MODULES:
        __import__(module)
    while True:
        data, descriptors, _, _ = socket.recv_fds(asked, LINE_BYTES, 2)
        if not data:
            return
        message = json.loads(data)
        if "wait" in message:
            _, status = os.waitpid(message["wait"], 0)
            asked.send(str(os.waitstatus_to_exitcode(status)).encode())
            continue
        pid = os.fork()
        if pid == 0:
            asked.close()
            code = 1
            try:
                code = run_command(message["arguments"], message["environment"], *descriptors)
            finally:
                sys.stdout.flush()
                os._exit(code)
        asked.send(str(pid).encode())
        for descriptor in descriptors:
            os.close(descriptor)


if __name__ == "__main__":
    serve_forks(socket.socket(fileno=int(sys.argv[1])))
