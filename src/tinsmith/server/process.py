"""The server process: its socket, signals, logging, and the lines that a user pastes into a shell.

SIGTERM and Ctrl-C drain: no new work is accepted, running work may finish within a bound, and waiting work stays in the
journal and resumes after the next start. A second signal exits at once.

A data directory is locked by one server: two would both resume what was accepted, each with an engine of its own. The
kernel releases the lock when the process ends, however it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import fcntl
import gc
import logging
import os
import shlex
import signal
import socket
import ssl
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import uvicorn

from tinsmith.config import LOCAL_ENGINE_FILE, SERVER_LOCK_FILE, EmbeddedConfig, ServerConfig
from tinsmith.errors import TinkerError
from tinsmith.server.app import drain, make_app, make_backend, make_services, make_store, running
from tinsmith.server.auth.start_keys import prepare_keys
from tinsmith.server.http.tls import SOON_S, seconds_left, server_context
from tinsmith.server.http.uvicorn_protocol import protocol_for
from tinsmith.server.http.web_pages import guarded
from tinsmith.server.ops.installation import begin_installation, check_installation
from tinsmith.server.services import Services
from tinsmith.store.base import Store
from tinsmith.text.printable import PrintableLines

PATIENCE_S = 3.0
"""How long a process that was just killed may take to exit."""
PAUSE_S = 0.05


@contextmanager
def sole_user(
    data_dir: Path, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
) -> Iterator[None]:
    """Lock a data directory until the end of the block; the error names the process that has it."""
    with what_the_disk_refuses(data_dir):
        lock = (data_dir / SERVER_LOCK_FILE).open("ab+", buffering=0)
    with lock as file:
        end = clock() + PATIENCE_S
        while not _is_locked(file.fileno()):
            if clock() >= end:
                file.seek(0)
                raise TinkerError(_in_use(data_dir, file.read().decode().strip()))
            sleep(PAUSE_S)
        with what_the_disk_refuses(data_dir):
            file.truncate(0)
            file.write(f"{os.getpid()}\n".encode())
        yield


def _in_use(data_dir: Path, holder: str) -> str:
    """Return which process uses a data directory, and how to stop it."""
    try:
        is_local = str(msgspec.json.decode((data_dir / LOCAL_ENGINE_FILE).read_bytes())["pid"]) == holder
    except (OSError, msgspec.DecodeError, KeyError, TypeError):
        is_local = False
    if is_local:
        option = (
            ""
            if data_dir == EmbeddedConfig.from_env(os.environ).data_dir
            else f" --data-dir {shlex.quote(str(data_dir))}"
        )
        return (
            f"{data_dir} is in use by your own local engine, process {holder}, which a client started; "
            f"stop it with: tinsmith stop{option}, or choose another --data-dir"
        )
    return (
        f"{data_dir} is in use by another server, process {holder or 'unknown'}; "
        "stop that one, or choose another --data-dir"
    )


REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free some space"),
    **dict.fromkeys((errno.EROFS, errno.EACCES, errno.EPERM), "let this user write there"),
}


@contextmanager
def what_the_disk_refuses(data_dir: Path) -> Iterator[None]:
    """At a start: turn an error of the file system into one that names the file, the cause and the remedy."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno not in REMEDIES:
            raise  # not about a file
        remedy = f"{REMEDIES[error.errno]}, or " if error.errno in REMEDIES else ""
        raise TinkerError(
            f"cannot start: {error.filename or data_dir}: {error.strerror or error}; {remedy}choose another data "
            "directory (--data-dir, TINSMITH_DATA_DIR)"
        ) from error


def _is_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


logger = logging.getLogger("tinsmith.server")

TAKEN_EXIT = 75
"""The exit code of a server that lost its database to another one (EX_TEMPFAIL in sysexits.h)."""
CLOSE_S = 2.0
"""How long open connections may take to send their answers when the server stops."""


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
"""Parameters of mallopt, as glibc's malloc.h numbers them."""
KEPT_BYTES = 64 * 1024 * 1024
LARGEST_KEPT_BYTES = 32 * 1024 * 1024
"""Free memory that is not given back, and the largest block that may be kept; glibc allows no more than 32 MB."""
ARENAS = 2
"""Each thread that allocates while the others hold theirs gets a heap ("arena") of its own, by default up to eight per
core. An arena shrinks only from its end, so one long answer that is still held keeps all the free memory below it. The
server's many threads (store, file work, large bodies) would each grow such a heap; two bound the process's memory, and
Python's lock leaves them little to contend for."""

GARBAGE = 50_000
"""New objects between two garbage collections; most objects of a request are freed by reference counting."""


def serve(config: ServerConfig, say: Callable[[str], None] = print) -> int:
    """Run until a signal arrives; return the exit code."""
    configure_logging(config.log_format)
    os.umask(0o077)  # files are for this user only, and so are those of the engine
    keep_memory()
    tls = _tls(config)
    store = make_store(config)
    with sole_user(config.data_dir), asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_serve(config, store, tls, say))


def _tls(config: ServerConfig) -> ssl.SSLContext | None:
    """Return the TLS context, checked before anything else is touched; None for plain HTTP."""
    if config.tls_cert is None or config.tls_key is None:
        return None
    context = server_context(config.tls_cert, config.tls_key)
    left_s = seconds_left(context, config.tls_cert)
    if left_s < SOON_S:
        logger.warning("the certificate %s expires in %.1f days", config.tls_cert, left_s / 86_400)
    return context


def keep_memory() -> bool:
    """Keep the memory of large bodies for the next ones, and bound how many heaps the C library grows.

    Returning a large block to the kernel and asking for it again costs as much as reading a body into it. Returns
    whether the C library accepted all settings; only glibc has them.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        return False
    wanted = ((M_TRIM_THRESHOLD, KEPT_BYTES), (M_MMAP_THRESHOLD, LARGEST_KEPT_BYTES), (M_ARENA_MAX, ARENAS))
    accepted = [mallopt(name, value) for name, value in wanted]
    return all(accepted)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return uvloop if it is installed (it does not exist for Windows), else None for Python's own."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


async def _serve(config: ServerConfig, store: Store, tls: ssl.SSLContext | None, say: Callable[[str], None]) -> int:
    await check_installation(config.data_dir, store)
    await store.open(alone=True)
    watching = asyncio.create_task(_leave_when_taken(store))
    try:
        async with contextlib.AsyncExitStack() as stack:
            with what_the_disk_refuses(config.data_dir):
                installation = await begin_installation(config.data_dir, store)
                key_file = await prepare_keys(config, store, time.time())
                services = make_services(config, store, make_backend(config), installation=installation)
                listener = stack.enter_context(_listen(config))
                server = _server(services, tls)
                _handle_signals(server, services)
                await stack.enter_async_context(running(services))
            await _run(server, services, listener, lambda: _announce(config, listener, key_file, say))
    finally:
        watching.cancel()
        await store.close()
    return 0


async def _leave_when_taken(store: Store) -> None:
    """Exit at once when another server takes over the database: accepted work continues there, and only there."""
    logger.critical("%s This server exits now", await store.taken(), extra={"event": "store_taken"})
    logging.shutdown()
    os._exit(TAKEN_EXIT)


class _Server(uvicorn.Server):
    """Does not handle signals: draining comes before the sockets close."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Config(uvicorn.Config):
    """uvicorn's settings with a TLS context that was already checked."""

    def __init__(self, app: Any, tls: ssl.SSLContext | None, **settings: Any) -> None:
        super().__init__(app, **settings)
        self._tls = tls

    def load(self) -> None:
        super().load()
        self.ssl = self._tls


def _server(services: Services, tls: ssl.SSLContext | None) -> uvicorn.Server:
    return _Server(
        _Config(
            guarded(make_app(services), services.config),
            tls,
            http=protocol_for(services.config),
            lifespan="off",  # uvicorn would log the traceback of a failed start, and exit with a code of its own
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=int(CLOSE_S),
        )
    )


async def _run(
    server: uvicorn.Server, services: Services, listener: socket.socket, announce: Callable[[], None]
) -> None:
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    if server.started:
        gc.collect()
        gc.freeze()  # modules and routes stay, so the collector need not scan them
        gc.set_threshold(GARBAGE)
        announce()
    watching = asyncio.create_task(_watch_idle(services, server))
    await serving
    watching.cancel()


async def _watch_idle(services: Services, server: uvicorn.Server) -> None:
    """Stop a server that no client has used for `exit_when_idle_s`."""
    limit = services.config.exit_when_idle_s
    while limit is not None and not server.should_exit:
        await asyncio.sleep(min(1.0, limit / 4))
        if time.monotonic() - services.metrics.last_request > limit and not services.broker.count():
            logger.info("no client has used this server for %g s: exiting", limit)
            server.should_exit = True


def _announce(config: ServerConfig, listener: socket.socket, key_file: Path | None, say: Callable[[str], None]) -> None:
    """Print where to connect and where the key is, but never a key: terminals and logs keep what they show."""
    port = listener.getsockname()[1]
    host = f"[{config.host}]" if ":" in config.host else config.host
    scheme = "http" if config.tls_cert is None else "https"
    say(f"listening on {scheme}://{host}:{port}")
    reach = "127.0.0.1" if config.host in ("0.0.0.0", "::") else host
    say(f"export TINKER_BASE_URL={scheme}://{reach}:{port}")
    if key_file is not None:
        say(f"export TINKER_API_KEY=$(cat {shlex.quote(str(key_file))})")
    else:
        whose = "the key given at start" if config.api_key else "create one with: tinsmith key create"
        say(f"# TINKER_API_KEY: {whose}")
    sys.stdout.flush()


def _handle_signals(server: uvicorn.Server, services: Services) -> None:
    loop = asyncio.get_running_loop()
    stopping: list[asyncio.Task[None]] = []

    async def stop() -> None:
        await drain(services)
        server.should_exit = True

    def on_signal(number: signal.Signals) -> None:
        if stopping:
            logger.warning("second signal: exiting at once; accepted work resumes after the next start")
            os._exit(128 + number)
        logger.info(
            "%s: accepting no new work; %d requests may finish within %g s",
            number.name,
            services.broker.count(),
            services.config.drain_s,
        )
        stopping.append(loop.create_task(stop()))

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)


def _listen(config: ServerConfig) -> socket.socket:
    """Return a listening socket; errors name the address."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        is_port = error.errno in (errno.EADDRINUSE, errno.EACCES)
        remedy = "choose another --port (0 picks one)" if is_port else "choose another --host"
        raise TinkerError(f"cannot listen on {config.host}:{config.port}: {error.strerror}; {remedy}") from error
    listener.listen(2048)
    listener.setblocking(False)
    return listener


def configure_logging(log_format: str) -> None:
    """Log to stderr, as text or as one JSON object per line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if log_format == "json" else PrintableLines(_TEXT))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    logging.getLogger("python_multipart").setLevel(logging.ERROR)  # it warns of every bad form; we refuse these


_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_PLAIN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonLines(logging.Formatter):
    """Formats a record as one line of JSON, with its `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": record.created,
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **{name: value for name, value in vars(record).items() if name not in _PLAIN},
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()
