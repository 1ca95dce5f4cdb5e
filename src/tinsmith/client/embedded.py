"""The engine of this machine's user: found if it runs, started if it does not.

One per data directory, shared by all processes of the user. A lock file orders those who look for it; `embedded.json`
beside it says where it listens. A dead one is noticed (its health is asked for) and replaced. The server ends by itself
when nobody has used it for a while (`TINSMITH_KEEP`).
Does not know: what the server does; it is another process, reached like any other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from tinsmith.config import LOCAL, ClientConfig, EmbeddedConfig
from tinsmith.errors import TinkerError

if TYPE_CHECKING:
    from tinsmith.client.service import ServiceClient

START_TIMEOUT_S = 900.0
"""The first start may have to fetch and convert a model."""
HEALTH_TIMEOUT_S = 2.0
SAY_AFTER_S = 1.0
"""A start that takes longer than this is announced."""

NOT_INSTALLED = (
    "Neither a server address nor a key is set, and the local engine is not installed. "
    "Install it (pip install 'tinsmith[server]'), or set TINKER_BASE_URL and TINKER_API_KEY for a server of your own, "
    "or TINKER_API_KEY alone (a key that begins with tml-) for the hosted service."
)


@dataclass(frozen=True, slots=True)
class Address:
    """Where a local server listens, and its key."""

    url: str
    key: str = dataclasses.field(repr=False)
    pid: int


def client_config(**overrides: Any) -> ClientConfig:
    """The settings of a client, with the local engine's address where none is set."""
    config = ClientConfig.from_env(**overrides)
    if config.base_url != LOCAL:
        return config
    address = embedded_address(EmbeddedConfig.from_env(os.environ))
    return dataclasses.replace(config, base_url=address.url, api_key=address.key)


def embedded_address(config: EmbeddedConfig) -> Address:
    """The engine for these settings; it runs when this returns."""
    check_installed()
    config.data_dir.mkdir(parents=True, exist_ok=True)
    with _locked(config.data_dir / "embedded.lock"):
        found = _read(config.data_dir / "embedded.json")
        if found is not None and _is_alive(found):
            return found
        arguments = ["--data-dir", str(config.data_dir)]
        settings = {"TINSMITH_MODELS_DIR": str(config.models_dir)}
        if config.keep_s != float("inf"):
            settings["TINSMITH_EXIT_WHEN_IDLE_S"] = str(config.keep_s)
        address, process = start_server(arguments, settings, config.data_dir / "embedded.log")
        _let_go(process)
        _write(config.data_dir / "embedded.json", address)
        return address


def running_address(config: EmbeddedConfig) -> Address | None:
    """The engine for these settings if it runs; none is started."""
    found = _read(config.data_dir / "embedded.json")
    return found if found is not None and _is_alive(found) else None


@contextlib.contextmanager
def local(
    models: Mapping[str, str] | None = None,
    *,
    data_dir: str | Path | None = None,
    settings: Mapping[str, object] | None = None,
    **service: Any,
) -> Iterator[ServiceClient]:
    """A server of one's own for a `with` block, and a client of it.

    `models` maps names to sources (a directory, a GGUF file, a hub id); none: the default model. Without `data_dir`
    everything it keeps is deleted at the end, except for models fetched into the user's data directory. `settings` are
    those of a server by their names, such as `{"dtype": "float32"}`; the other arguments are those of `ServiceClient`.
    """
    from tinsmith.client.service import ServiceClient

    check_installed()
    with contextlib.ExitStack() as stack:
        place = Path(data_dir) if data_dir is not None else Path(stack.enter_context(tempfile.TemporaryDirectory()))
        place.mkdir(parents=True, exist_ok=True)
        arguments = ["--data-dir", str(place)]
        for name, source in (models or {}).items():
            arguments += ["--model", f"{name}={source}"]
        named = {"models_dir": EmbeddedConfig.from_env(os.environ).models_dir, **(settings or {})}
        environ = {f"TINSMITH_{name.upper()}": str(value) for name, value in named.items()}
        address, process = start_server(arguments, environ, place / "server.log")
        stack.callback(_end, process)
        client = ServiceClient(base_url=address.url, api_key=address.key, **service)
        stack.enter_context(client)
        yield client


def check_installed() -> None:
    """Refuse to start what is not there, saying what to install."""
    if any(importlib.util.find_spec(name) is None for name in ("starlette", "uvicorn", "torch")):
        raise TinkerError(NOT_INSTALLED)


def start_server(
    arguments: list[str], settings: Mapping[str, str], log: Path
) -> tuple[Address, subprocess.Popen[bytes]]:
    """Start `tinsmith serve` on a free port; returns when it listens. Its log goes to a file."""
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
    url, key = _announced(process, log)
    return Address(url, key, process.pid), process


def _announced(process: subprocess.Popen[bytes], log: Path) -> tuple[str, str]:
    """The address and key that a starting server prints."""
    assert process.stdout is not None
    began, said = time.monotonic(), False
    url = key = ""
    while not (url and key):
        line = _line(process.stdout, SAY_AFTER_S)
        if line is None:
            if not said:
                said = True
                sys.stderr.write(f"tinsmith: starting the local engine (log: {log})\n")
            if time.monotonic() - began > START_TIMEOUT_S:
                process.kill()
                raise TinkerError(f"the local engine did not start within {START_TIMEOUT_S:g} s; see {log}")
            continue
        if not line:
            process.wait()
            raise TinkerError(f"the local engine could not start: {_last_words(log)} (log: {log})")
        url = url or _after(line, "export TINKER_BASE_URL=")
        key = key or _after(line, "export TINKER_API_KEY=")
    if said:
        sys.stderr.write(f"tinsmith: the local engine listens on {url} ({time.monotonic() - began:.0f} s)\n")
    return url, key


def _line(stream: IO[bytes], timeout_s: float) -> str | None:
    """The next line of a pipe, an empty text at its end, None if nothing came in time."""
    import select

    ready, _, _ = select.select([stream], [], [], timeout_s)
    return stream.readline().decode(errors="replace") if ready else None


def _after(line: str, prefix: str) -> str:
    return line.removeprefix(prefix).strip() if line.startswith(prefix) else ""


def _last_words(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].removeprefix("Error: ") if lines else "it said nothing"


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
    """The server outlives this process; nobody here waits for it."""
    if process.stdout is not None:
        process.stdout.close()
    process.returncode = 0  # else Python warns that a child is still running


def _is_alive(address: Address) -> bool:
    """Whether the server answers as ours does."""
    try:
        os.kill(address.pid, 0)
        with urllib.request.urlopen(f"{address.url}/healthz", timeout=HEALTH_TIMEOUT_S) as answer:
            return bool(json.load(answer).get("status") == "ok")
    except (OSError, ValueError, urllib.error.URLError):
        return False


def _read(path: Path) -> Address | None:
    try:
        values = json.loads(path.read_text())
        return Address(values["url"], values["key"], values["pid"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(path: Path, address: Address) -> None:
    temporary = path.with_suffix(".new")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump({"url": address.url, "key": address.key, "pid": address.pid}, file)
    os.replace(temporary, path)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Only one process at a time; others wait."""
    import fcntl

    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
