"""A server as a process: a socket, signals, and the lines that a user pastes.

SIGTERM and Ctrl-C drain: nothing new is taken, what runs may finish within a bound, what waits is in the journal and
goes on after the next start. A second signal ends the process at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator

import msgspec
import uvicorn

from tinsmith.config import ServerConfig
from tinsmith.errors import TinkerError
from tinsmith.server.app import drain, make_app, make_backend, make_services, make_store, prepare_keys
from tinsmith.server.exchange import ExchangeProtocol
from tinsmith.server.services import Services
from tinsmith.server.sole_user import sole_user
from tinsmith.store.base import Store

logger = logging.getLogger("tinsmith.server")

CLOSE_S = 2.0
"""How long open connections may take to finish their answers when the server stops."""


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Names of glibc's malloc.h."""
KEPT_BYTES = 64 * 1024 * 1024
LARGEST_KEPT_BYTES = 32 * 1024 * 1024
"""Free memory that is not given back, and the largest piece of it; more than the second glibc does not allow."""


GARBAGE = 50_000
"""New objects until the young ones are looked at: what a request makes is mostly gone by itself when it ends."""


def serve(config: ServerConfig, say: Callable[[str], None] = print) -> int:
    """Run until a signal comes; returns the exit code."""
    configure_logging(config.log_format)
    keep_memory()
    store = make_store(config)
    with sole_user(config.data_dir), asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_serve(config, store, say))


def keep_memory() -> bool:
    """Do not give back the memory of a large body only to ask for it again: each time costs as much as reading one.

    Returns whether the C library can be told so.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        return False
    return bool(mallopt(M_TRIM_THRESHOLD, KEPT_BYTES) and mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT_BYTES))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop where it is installed (it does not exist for Windows), else Python's own."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


async def _serve(config: ServerConfig, store: Store, say: Callable[[str], None]) -> int:
    await store.open()
    try:
        key = await prepare_keys(config, store, time.time())
        services = make_services(config, store, make_backend(config))
        with _listen(config) as listener:
            await _run(config, services, listener, key, say)
    finally:
        await store.close()
    return 0


class _Server(uvicorn.Server):
    """Leaves signals alone: draining comes before the sockets close."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _run(
    config: ServerConfig, services: Services, listener: socket.socket, key: str | None, say: Callable[[str], None]
) -> None:
    server = _Server(
        uvicorn.Config(
            make_app(services),
            http=ExchangeProtocol,
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=int(CLOSE_S),
        )
    )
    _handle_signals(server, services)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    if server.started:
        gc.collect()
        gc.freeze()  # modules and routes stay, and need not be looked at again and again
        gc.set_threshold(GARBAGE)
        _announce(config, listener, key, say)
    watching = asyncio.create_task(_watch_idle(services, server))
    await serving
    watching.cancel()
    if not server.started:
        raise SystemExit(3)


async def _watch_idle(services: Services, server: uvicorn.Server) -> None:
    """End a server that was started for clients which are all gone."""
    limit = services.config.exit_when_idle_s
    while limit is not None and not server.should_exit:
        await asyncio.sleep(min(1.0, limit / 4))
        if time.monotonic() - services.metrics.last_request > limit and not services.broker.count():
            logger.info("nobody has used this server for %g s: ending", limit)
            server.should_exit = True


def _announce(config: ServerConfig, listener: socket.socket, key: str | None, say: Callable[[str], None]) -> None:
    port = listener.getsockname()[1]
    host = f"[{config.host}]" if ":" in config.host else config.host
    say(f"listening on http://{host}:{port}")
    reach = "127.0.0.1" if config.host in ("0.0.0.0", "::") else host
    say(f"export TINKER_BASE_URL=http://{reach}:{port}")
    say(f"export TINKER_API_KEY={key or '<a key from: tinsmith key create>'}")
    sys.stdout.flush()


def _handle_signals(server: uvicorn.Server, services: Services) -> None:
    loop = asyncio.get_running_loop()
    stopping: list[asyncio.Task[None]] = []

    async def stop() -> None:
        await drain(services)
        server.should_exit = True

    def on_signal(number: signal.Signals) -> None:
        if stopping:
            logger.warning("second signal: leaving at once; accepted work goes on after the next start")
            os._exit(128 + number)
        logger.info(
            "%s: no new work is taken; %d requests may finish within %g s",
            number.name,
            services.broker.count(),
            services.config.drain_s,
        )
        stopping.append(loop.create_task(stop()))

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)


def _listen(config: ServerConfig) -> socket.socket:
    """A listening socket; errors say which address."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        raise TinkerError(
            f"cannot listen on {config.host}:{config.port}: {error.strerror}; choose another --port (0 picks one)"
        ) from error
    listener.listen(2048)
    listener.setblocking(False)
    return listener


def configure_logging(log_format: str) -> None:
    """Logs go to stderr, as text or one JSON object per line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if log_format == "json" else logging.Formatter(_TEXT))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)


_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_PLAIN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonLines(logging.Formatter):
    """A record as one line of JSON, with whatever `extra` it has."""

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
