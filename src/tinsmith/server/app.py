"""Wiring: settings in, an ASGI application out. The only file that knows all the parts."""

from __future__ import annotations

import asyncio
import importlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.convertors import Convertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.routing import Route as StarletteRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from tinsmith.config import ServerConfig
from tinsmith.engine.base import Backend, SaveState
from tinsmith.errors import TinkerError
from tinsmith.server import extensions
from tinsmith.server.access import Access
from tinsmith.server.admission import DAY_S, Admission
from tinsmith.server.advice import Advice
from tinsmith.server.auth import Authenticator
from tinsmith.server.calls import JSON, Handlers
from tinsmith.server.files import Files
from tinsmith.server.finishers import make_finishers
from tinsmith.server.http import Endpoint, fault, refusal
from tinsmith.server.jobs import Jobs
from tinsmith.server.keys import create_key, digest_of, installation_secret, is_usable, local_key
from tinsmith.server.lifetimes import Sweeper
from tinsmith.server.metrics import Metrics
from tinsmith.server.promises import Broker
from tinsmith.server.recovery import recover
from tinsmith.server.refusals import NotReadyError, UnknownResourceError
from tinsmith.server.request_ids import RequestIds
from tinsmith.server.routes import administration, futures, runs, sampling, service, sessions, training, weights
from tinsmith.server.runs import Runs
from tinsmith.server.samples import Samples
from tinsmith.server.services import Services
from tinsmith.server.signing import Signer
from tinsmith.server.snapshots import SnapshotPolicy
from tinsmith.server.snapshotting import SnapshotTools
from tinsmith.server.usage import HOUR_S
from tinsmith.server.work import Work
from tinsmith.store.base import Store
from tinsmith.store.open import open_store
from tinsmith.store.rows import CountRow, KeyRow
from tinsmith.wire.routes import BY_NAME, ROUTES, Route

logger = logging.getLogger(__name__)

HANDLERS: Handlers = {
    **futures.HANDLERS,
    **sampling.HANDLERS,
    **training.HANDLERS,
    **weights.HANDLERS,
    **sessions.HANDLERS,
    **runs.HANDLERS,
    **service.HANDLERS,
    **administration.HANDLERS,
}

OPEN = frozenset({"healthz"})
"""Routes that need no key."""
_TRAIN = (
    *training.HANDLERS,
    *weights.HANDLERS,
    "delete_checkpoint",
    "publish_checkpoint",
    "unpublish_checkpoint",
    "set_checkpoint_ttl",
)
SCOPES: Mapping[str, str] = {
    **dict.fromkeys(_TRAIN, "train"),
    **dict.fromkeys(sampling.HANDLERS, "sample"),
    **dict.fromkeys(administration.HANDLERS, "read"),
    **dict.fromkeys(("list_sessions", "search_sessions", "get_session", "export_session_trace"), "read"),
    **dict.fromkeys(("list_training_runs", "get_training_run", "list_checkpoints", "list_user_checkpoints"), "read"),
    **dict.fromkeys(("get_external_weights_urls", "get_checkpoint_archive", "get_info", "weights_info"), "read"),
    "get_sampler": "read",
}
"""What a key must be allowed to do; routes that are not listed need any valid key."""


class CheckpointConvertor(Convertor[str]):
    """`<kind>/<name>` in a path."""

    regex = "[^/]+/[^/]+"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("checkpoint", CheckpointConvertor())


def make_services(
    config: ServerConfig, store: Store, backend: Backend, *, clock: Callable[[], float] = time.time
) -> Services:
    """The parts, put together; nothing has started yet."""
    files = Files(config.data_dir, config.min_free_bytes)
    files.prepare()
    secret = installation_secret(config.data_dir)
    authenticator = Authenticator(store, secret, token_ttl_s=config.token_ttl_s, clock=clock)
    broker = Broker(clock)
    finishers: dict[str, object] = {}

    metrics = Metrics()

    def on_end(work: Work, state: str) -> None:
        if isinstance(work.job, SaveState):
            services.saved(work.context.get("path", ""), work.job.directory)
        now = clock()
        started = work.started_at or now
        metrics.job(work.row.kind, state, max(0.0, started - work.row.created_at), max(0.0, now - started))

    advice = Advice(store)
    jobs = Jobs(
        store,
        broker,
        finishers,  # type: ignore[arg-type]
        clock=clock,
        new_id=RequestIds(),
        on_end=on_end,
        explain=advice.explain,
    )
    services = Services(
        config=config,
        store=store,
        backend=backend,
        authenticator=authenticator,
        access=Access(store, authenticator, clock=clock),
        admission=Admission(
            max_queued=config.max_queued, requests_per_minute=config.requests_per_minute, wall_clock=clock
        ),
        broker=broker,
        jobs=jobs,
        runs=Runs(
            SnapshotTools(
                store=store,
                backend=backend,
                jobs=jobs,
                files=files,
                policy=SnapshotPolicy(max_replay_s=config.max_replay_s, max_share=config.max_snapshot_share),
                count=metrics.snapshot,
            ),
            clock=clock,
            advise=advice.for_run,
            count_replayed=metrics.replayed.inc,
        ),
        samples=Samples(backend, jobs, clock=clock),
        files=files,
        signer=Signer(secret, clock=clock),
        metrics=metrics,
        clock=clock,
        client_flags=check_flags(config.client_flags),
    )
    finishers.update(make_finishers(services))
    return services


def check_flags(flags: Mapping[str, bool]) -> dict[str, bool]:
    """Flags that clients know; another name is a mistake."""
    known = [name for name, value in service.CLIENT_CONFIG.items() if isinstance(value, bool)]
    unknown = sorted(set(flags) - set(known))
    if unknown:
        raise TinkerError(f"client_flags: unknown {', '.join(unknown)} (known: {', '.join(known)})")
    return dict(flags)


def make_app(services: Services) -> Starlette:
    """The ASGI application of a server; its lifespan starts and stops everything."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with running(services):
            yield

    endpoints = {BY_NAME[name]: _endpoint(services, BY_NAME[name]) for name in HANDLERS}
    routes: list[BaseRoute] = [_route(route, endpoint) for route, endpoint in endpoints.items()]
    fixed = {(route.method, route.path): endpoint for route, endpoint in endpoints.items() if "{" not in route.path}
    return App(
        fixed,
        routes=[*routes, *extensions.extension_routes(services)],
        lifespan=lifespan,
        exception_handlers={HTTPException: _not_here, Exception: _fault},
    )


async def _not_here(request: Request, error: Exception) -> Response:
    """A path or a method that no route has."""
    assert isinstance(error, HTTPException)
    text = f"{request.method} {request.url.path} is not part of this server; see /openapi.json"
    body = msgspec.json.encode({"detail": text, "code": UnknownResourceError.code})
    return Response(body, error.status_code, error.headers, media_type=JSON)


async def _fault(request: Request, error: Exception) -> Response:
    """What went wrong in an endpoint outside the protocol; Starlette logs nothing, so it is logged here."""
    logger.error("%s failed", request.url.path, exc_info=error, extra={"event": "fault"})
    answer = refusal(fault(error))
    return Response(answer.body, answer.status, media_type=JSON)


class App(Starlette):
    """Starlette, with a table in front: most requests go to paths without parameters, which need no matching."""

    def __init__(self, fixed: Mapping[tuple[Any, str], ASGIApp], **settings: Any) -> None:
        super().__init__(**settings)
        self._fixed = fixed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._fixed.get((scope["method"], scope["path"])) if scope["type"] == "http" else None
        if endpoint is not None:
            await endpoint(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)


def _endpoint(services: Services, route: Route) -> Endpoint:
    return Endpoint(services, route, HANDLERS[route.name], None if route.name in OPEN else SCOPES.get(route.name, ""))


def _route(route: Route, endpoint: Endpoint) -> StarletteRoute:
    path = route.path.replace("{checkpoint_id}", "{checkpoint_id:checkpoint}")
    return StarletteRoute(path, endpoint, methods=[route.method], name=route.name)


@asynccontextmanager
async def running(services: Services) -> AsyncIterator[None]:
    """Open the store and the backend, go on with what was queued, sweep; at the end let go of all of it."""
    async with AsyncExitStack() as stack:
        await services.backend.open()
        stack.push_async_callback(_stop, services)
        await recover(services)
        await _remember_usage(services)
        await stack.enter_async_context(Sweeper(services))
        yield


async def _stop(services: Services) -> None:
    services.is_draining = True
    await services.backend.close(services.config.drain_s)
    services.samples.stop()
    await services.runs.stop()
    await services.jobs.drain()
    services.namer.close()


async def drain(services: Services) -> None:
    """Take no new work, and give what runs the time that is allowed."""
    services.is_draining = True
    deadline = time.monotonic() + services.config.drain_s
    while services.broker.count() and time.monotonic() < deadline:
        await asyncio.sleep(0.05)


async def prepare_keys(config: ServerConfig, store: Store, now: float) -> str | None:
    """Make sure that somebody can use the server; returns the key to show, if this start is to show one."""
    if config.api_key is not None:
        rows = await store.read(KeyRow, "key_by_digest", digest=digest_of(config.api_key))
        if not rows:
            await create_key(store, name="given at start", now=now, scopes=("all", "admin"), key=config.api_key)
        elif not is_usable(rows[0], now):
            raise NotReadyError("the key given at start (--api-key) was revoked or expired; give another")
        return config.api_key
    if config.is_loopback:
        return await local_key(store, config.data_dir, now)
    usable = [row for row in await store.read(KeyRow, "keys") if is_usable(row, now) and row.name != "local"]
    if not usable:
        raise NotReadyError(
            f"--host {config.host} lets others connect, and there is no key yet; make one with "
            f"'tinsmith key create NAME --data-dir {config.data_dir}', or pass --api-key"
        )
    return None


async def _remember_usage(services: Services) -> None:
    """Budgets count what was used before this process began."""
    midnight = int(services.clock() // DAY_S) * DAY_S // HOUR_S
    for row in await services.store.read(KeyRow, "keys"):
        if row.tokens_per_day is not None:
            used = await services.store.read(
                CountRow, "tokens_of_user", org_id=row.org_id, user_id=row.user_id, since_hour=midnight
            )
            services.admission.remember_tokens(row.org_id, row.user_id, used[0].count)


def make_backend(config: ServerConfig) -> Backend:
    """The backend that the settings name."""
    if config.backend == "local":
        from tinsmith.engine.local import local_backend

        backend: Backend = local_backend(config)
        return backend
    module, _, factory = config.backend.partition(":")
    if not factory:
        raise TinkerError(f"backend {config.backend!r} must be local, or module:factory")
    try:
        make: Callable[[ServerConfig], Backend] = getattr(importlib.import_module(module), factory)
    except (ImportError, AttributeError) as error:
        raise TinkerError(f"backend {config.backend!r} cannot be loaded: {error}") from error
    return make(config)


def make_store(config: ServerConfig) -> Store:
    """The store that the settings name, in a data directory that is there."""
    try:
        config.data_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TinkerError(
            f"{config.data_dir} cannot be used as data directory: {error.strerror}; choose another --data-dir"
        ) from error
    return open_store(config.database_url)


assert set(HANDLERS) == {route.name for route in ROUTES}, "every route has a handler"
