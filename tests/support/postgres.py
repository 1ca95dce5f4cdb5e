"""A PostgreSQL server of the tests' own: made in a temporary folder, on a free port, gone at the end.

PostgreSQL refuses to run as root; then it runs as the user `postgres`, or `nobody`.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import uuid
from pathlib import Path
from typing import Any

import psycopg

_SETTINGS = {
    "fsync": "off",
    "full_page_writes": "off",
    "deadlock_timeout": "20ms",
    "max_connections": "50",
    "shared_buffers": "16MB",
    "listen_addresses": "127.0.0.1",
}


class PostgresMissingError(Exception):
    """The binaries are not there."""


def binaries() -> Path:
    """The folder of the newest PostgreSQL on this machine."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    on_path = shutil.which("initdb")
    if found:
        return found[-1].parent
    if on_path:
        return Path(on_path).resolve().parent
    raise PostgresMissingError(
        "PostgreSQL is not installed, and these tests need a real one: run tools/postgres (make test does)"
    )


def _user() -> str | None:
    """Whom to run as; None: as ourselves."""
    if os.geteuid() != 0:
        return None
    return next(name for name in ("postgres", "nobody") if _exists(name))


def _exists(user: str) -> bool:
    with contextlib.suppress(KeyError):
        return bool(pwd.getpwnam(user))
    return False


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


class PostgresServer:
    """A throw-away cluster. `database` makes an empty database in it and gives its DSN; `schema` is the same for a
    schema in a database that tests share, and much cheaper."""

    def __init__(self) -> None:
        self._binaries = binaries()
        self._user = _user()
        self._folder = Path(tempfile.mkdtemp(prefix="tinsmith-postgres-"))
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        if self._user is not None:
            shutil.chown(self._folder, self._user)
        self._run("initdb", "--auth=trust", "--username=tester", "--encoding=UTF8", "--locale=C", "--no-sync")
        self.start()

    def start(self) -> None:
        settings = [part for name, value in _SETTINGS.items() for part in ("-c", f"{name}={value}")]
        settings += ["-c", f"unix_socket_directories={self._folder}", "-p", str(self.port)]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._binaries / "postgres", "-D", self._folder / "data", *settings],
                stdout=log,
                stderr=log,
                **self._identity(),
            )
        self._wait_until_ready()

    def stop(self) -> None:
        """Stop at once, as a crash would; `start` may follow."""
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(signal.SIGQUIT)
            process.wait(60)

    def close(self) -> None:
        self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def database(self) -> str:
        name = f"test_{uuid.uuid4().hex}"
        with psycopg.connect(self.dsn("postgres"), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        return self.dsn(name)

    def schema(self) -> str:
        name = f"test_{uuid.uuid4().hex}"
        with psycopg.connect(self.dsn("postgres"), autocommit=True) as connection:
            connection.execute(f"CREATE SCHEMA {name}")
        return f"{self.dsn('postgres')}?options=-csearch_path%3D{name}"

    def dsn(self, database: str) -> str:
        return f"postgresql://tester@127.0.0.1:{self.port}/{database}"

    def _wait_until_ready(self) -> None:
        ready = [self._binaries / "pg_isready", "-q", "-h", "127.0.0.1", "-p", str(self.port), "-t", "1"]
        while subprocess.run(ready).returncode != 0:
            assert self._process is not None
            if self._process.poll() is not None:
                raise AssertionError(f"PostgreSQL did not start:\n{(self._folder / 'log').read_text()}")

    def _run(self, program: str, *arguments: str) -> None:
        done = subprocess.run(
            [self._binaries / program, "-D", self._folder / "data", *arguments],
            capture_output=True,
            text=True,
            **self._identity(),
        )
        if done.returncode:
            raise AssertionError(f"{program} failed:\n{done.stdout}{done.stderr}")

    def _identity(self) -> dict[str, Any]:
        if self._user is None:
            return {"cwd": self._folder}
        account = pwd.getpwnam(self._user)
        return {"cwd": self._folder, "user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
