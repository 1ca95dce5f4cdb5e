"""Wiring: makes an ASGI application from settings. The only file that knows all the parts."""

from __future__ import annotations

import asyncio
import importlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.convertors import Convertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.routing import Route as StarletteRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from tinsmith.config import ServerConfig
from tinsmith.engine.protocol import Backend, SaveState
from tinsmith.errors import TinkerError
from tinsmith.server.auth.access import Access
from tinsmith.server.auth.admission import DAY_S, Admission
from tinsmith.server.auth.authenticator import Authenticator
from tinsmith.server.auth.budgets import Budgets
from tinsmith.server.auth.keys import installation_secret
from tinsmith.server.auth.signed_urls import Signer
from tinsmith.server.bodies.reader_pool import ReaderPool
from tinsmith.server.call import JSON, Handlers
from tinsmith.server.checkpoints.disk_budget import DiskBudget
from tinsmith.server.checkpoints.file_work import FileWork
from tinsmith.server.checkpoints.saves import Saves
from tinsmith.server.data_dir import Files
from tinsmith.server.dialects.caller_session import CallerSessions
from tinsmith.server.dialects.vocabulary import Vocabularies
from tinsmith.server.http import errors
from tinsmith.server.http.endpoint import Endpoint, fault, refusal
from tinsmith.server.jobs.job import RequestIds, Work
from tinsmith.server.jobs.lifecycle import Jobs
from tinsmith.server.jobs.on_finished import make_finishers
from tinsmith.server.jobs.pending_results import Broker
from tinsmith.server.jobs.samples import Samples
from tinsmith.server.ops.activity import Activity
from tinsmith.server.ops.clock import SteadyClock
from tinsmith.server.ops.installation import Installation
from tinsmith.server.ops.metrics import Metrics
from tinsmith.server.ops.sweeper import Sweeper
from tinsmith.server.ops.usage import HOUR_S
from tinsmith.server.refusals import UnknownResourceError
from tinsmith.server.routes import (
    admin,
    anthropic,
    futures,
    openai,
    own,
    runs,
    sampling,
    service,
    sessions,
    training,
    weights,
)
from tinsmith.server.runs.checkpoint_advice import Advice
from tinsmith.server.runs.registry import Runs
from tinsmith.server.runs.restart import recover
from tinsmith.server.runs.snapshot_policy import SnapshotPolicy
from tinsmith.server.runs.snapshots import SnapshotTools
from tinsmith.server.services import Services
from tinsmith.store.base import Store
from tinsmith.store.open import open_store
from tinsmith.store.rows import CountRow, KeyRow
from tinsmith.wire.routes.anthropic import ANTHROPIC_PREFIXES, VERSION_HEADER
from tinsmith.wire.routes.openai import PREFIXES
from tinsmith.wire.routes.own import DOWNLOAD
from tinsmith.wire.routes.served import SERVED_ROUTES
from tinsmith.wire.routes.table import Dialect, Route

logger = logging.getLogger(__name__)

HANDLERS: Handlers = {
    **futures.HANDLERS,
    **sampling.HANDLERS,
    **training.HANDLERS,
    **weights.HANDLERS,
    **sessions.HANDLERS,
    **runs.HANDLERS,
    **service.HANDLERS,
    **admin.HANDLERS,
    **own.HANDLERS,
    **openai.HANDLERS,
    **anthropic.HANDLERS,
}


class CheckpointConvertor(Convertor[str]):
    """`<kind>/<name>` in a path."""

    regex = "[^/]+/[^/]+"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("checkpoint", CheckpointConvertor())


def make_services(
    config: ServerConfig,
    store: Store,
    backend: Backend,
    *,
    clock: Callable[[], float] | None = None,
    ticks: Callable[[], float] = time.monotonic,
    installation: Installation | None = None,
) -> Services:
    """Make the parts and put them together; nothing is started."""
    clock = clock or SteadyClock()
    files = Files(config.data_dir, config.min_free_bytes)
    files.prepare()
    secret = installation_secret(config.data_dir)
    authenticator = Authenticator(store, secret, token_ttl_s=config.token_ttl_s, clock=clock, ticks=ticks)
    access = Access(store, authenticator, clock=clock)
    broker = Broker(clock)
    metrics = Metrics()
    disk = DiskBudget(files, store, config.disk_cap_per_org_bytes, config.min_free_bytes)
    saves = Saves(disk)

    def on_end(work: Work, state: str) -> None:
        if isinstance(work.job, SaveState):
            saves.end(work.context.get("path", ""), work.job.directory)
        now = clock()
        started = work.started_at or now
        metrics.job(work.row.kind, state, max(0.0, started - work.row.created_at), max(0.0, now - started))

    def forget_run(model_id: str) -> None:  # runs need jobs, and finishing a job may end its run
        registry.forget_soon(model_id)

    file_work = FileWork()
    advice = Advice(store, file_work)
    jobs = Jobs(
        store,
        broker,
        make_finishers(access=access, files=files, disk=disk, saves=saves, clock=clock, forget_run=forget_run),
        clock=clock,
        new_id=RequestIds(),
        on_end=on_end,
        explain=advice.explain,
        count_bytes=disk.add,
    )
    registry = Runs(
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
    )
    readers, activity = ReaderPool(), Activity(config.max_telemetry_rows)
    return Services(
        config=config,
        store=store,
        backend=backend,
        authenticator=authenticator,
        access=access,
        admission=Admission(
            max_queued=config.max_queued,
            max_queued_bytes=config.max_queued_bytes,
            requests_per_minute=config.requests_per_minute,
            wall_clock=clock,
        ),
        budgets=Budgets(max_held_bytes=config.max_held_bytes, max_waits=config.max_waits),
        broker=broker,
        jobs=jobs,
        runs=registry,
        samples=Samples(backend, jobs, clock=clock),
        files=files,
        disk=disk,
        file_work=file_work,
        signer=Signer(secret, clock=clock),
        metrics=metrics,
        clock=clock,
        client_flags=check_flags(config.client_flags),
        readers=readers,
        activity=activity,
        saves=saves,
        caller_sessions=CallerSessions(access, activity, clock),
        vocabularies=Vocabularies(readers),
        installation=installation,
    )


def check_flags(flags: Mapping[str, bool]) -> dict[str, bool]:
    """Validate the names of client flags, and return them."""
    known = [name for name, value in service.CLIENT_CONFIG.items() if isinstance(value, bool)]
    unknown = sorted(set(flags) - set(known))
    if unknown:
        raise TinkerError(f"client_flags: unknown {', '.join(unknown)} (allowed: {', '.join(known)})")
    return dict(flags)


def make_app(services: Services) -> Starlette:
    """Return the ASGI application of a server; it answers while `running` is entered."""
    endpoints = {route: Endpoint(services, route, HANDLERS[route.name]) for route in SERVED_ROUTES}
    routes: list[BaseRoute] = [_route(route, endpoint) for route, endpoint in endpoints.items()]
    fixed = {(route.method, route.path): endpoint for route, endpoint in endpoints.items() if "{" not in route.path}
    return App(fixed, routes=routes, exception_handlers={HTTPException: _not_here, Exception: _fault})


async def _not_here(request: Request, error: Exception) -> Response:
    """Answer a path or method that no route has."""
    assert isinstance(error, HTTPException)
    text = f"{request.method} {request.url.path} is not a route of this server; see /openapi.json"
    body = errors.body_of(UnknownResourceError(text), _dialect(request))
    return Response(body, error.status_code, error.headers, media_type=JSON)


def _dialect(request: Request) -> Dialect:
    """Return the dialect of a path that no route has: that of the routes beside it, and where they have two, that of
    the client."""
    path = request.url.path
    prefixes: dict[Dialect, Mapping[str, str]] = {"openai": PREFIXES, "anthropic": ANTHROPIC_PREFIXES}
    order: tuple[Dialect, ...] = ("openai", "anthropic")
    for dialect in reversed(order) if VERSION_HEADER in request.headers else order:
        if path.startswith(tuple(f"{prefix}/" for prefix in prefixes[dialect].values())):
            return dialect
    return "tinker"


async def _fault(request: Request, error: Exception) -> Response:
    """Answer an exception outside of an endpoint, and log it: Starlette does not."""
    logger.error("%s failed", request.url.path, exc_info=error, extra={"event": "fault"})
    answer = refusal(fault(error))
    return Response(answer.body, answer.status, media_type=JSON)


class App(Starlette):
    """Starlette with a lookup table in front: most requests go to paths without parameters."""

    def __init__(self, fixed: Mapping[tuple[Any, str], ASGIApp], **settings: Any) -> None:
        super().__init__(**settings)
        self._fixed = fixed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._fixed.get((scope["method"], scope["path"])) if scope["type"] == "http" else None
        if endpoint is not None:
            await endpoint(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)


def _route(route: Route, endpoint: Endpoint) -> StarletteRoute:
    path = route.path.replace("{checkpoint_id}", "{checkpoint_id:checkpoint}")
    if route is DOWNLOAD or route.dialect == "openai":
        path = path.replace("{name}", "{name:path}").replace("{model}", "{model:path}")
    return StarletteRoute(path, endpoint, methods=[route.method], name=route.name)


@asynccontextmanager
async def running(services: Services) -> AsyncIterator[None]:
    """Open the backend, resume what was queued, and run the sweeper; stop everything at the end."""
    async with AsyncExitStack() as stack:
        await services.backend.open()
        stack.push_async_callback(_stop, services)
        await recover(services)
        await _remember_usage(services)
        await services.disk.measure(is_due=True)
        await stack.enter_async_context(Sweeper(services))
        watching = asyncio.create_task(services.metrics.watch_loop())
        stack.callback(watching.cancel)
        yield


async def _stop(services: Services) -> None:
    services.admission.is_draining = True
    services.file_work.close()
    await services.backend.close(services.config.drain_s)
    services.samples.stop()
    await services.runs.stop()
    await services.jobs.drain()
    services.hasher.close()
    await services.readers.close()


async def drain(services: Services) -> None:
    """Accept no new work, and give running work `drain_s` to finish."""
    services.admission.is_draining = True
    deadline = time.monotonic() + services.config.drain_s
    while services.broker.count() and time.monotonic() < deadline:
        await asyncio.sleep(0.05)


async def _remember_usage(services: Services) -> None:
    """Count tokens that were used today before this process started."""
    midnight = int(services.clock() // DAY_S) * DAY_S // HOUR_S
    for row in await services.store.read(KeyRow, "keys"):
        if row.tokens_per_day is not None:
            used = await services.store.read(
                CountRow, "tokens_of_user", org_id=row.org_id, user_id=row.user_id, since_hour=midnight
            )
            services.admission.remember_tokens(row.org_id, row.user_id, used[0].count)


def make_backend(config: ServerConfig) -> Backend:
    """Return the backend that the settings name."""
    if config.backend == "local":
        from tinsmith.engine.backend.local import local_backend

        backend: Backend = local_backend(config)
        return backend
    module, _, factory = config.backend.partition(":")
    if not factory:
        raise TinkerError(f"backend: {config.backend!r} is neither 'local' nor 'module:factory'")
    try:
        make: Callable[[ServerConfig], Backend] = getattr(importlib.import_module(module), factory)
    except (ImportError, AttributeError) as error:
        raise TinkerError(f"backend: {config.backend!r} cannot be loaded: {error}") from error
    return make(config)


def make_store(config: ServerConfig) -> Store:
    """Create the data directory, and return the store that the settings name."""
    try:
        config.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise TinkerError(
            f"cannot use {config.data_dir} as the data directory: {error.strerror}; choose another one (--data-dir, "
            "TINSMITH_DATA_DIR)"
        ) from error
    return open_store(config.database_url)


assert set(HANDLERS) == {route.name for route in SERVED_ROUTES}, "every route has a handler"
