"""Everything the server remembers, and how jobs run. Only the server's loop touches it.

Times are logical: a fixed start plus one second per event, so that two runs of one program read the same.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from support.server_answers import RefusedError
from support.server_queues import JobQueue, SequenceError
from support.server_vintages import Vintage
from tinsmith.wire.messages.weights import KINDS, PATH_PREFIX
from tinsmith.wire.routes.table import Route

START = datetime(2026, 1, 1, tzinfo=UTC)
CLONE_BLOCK = 10**9
"""Sequence numbers of one client of a sampling session."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an operation failed."""

    error: str
    category: str = "user"


class JobError(Exception):
    """Raised by a job: the operation was accepted and failed."""


@dataclass
class Promise:
    """A result to come."""

    request_id: str
    route: Route
    work: Callable[[], Any]
    result: Any = None
    failure: Failure | None = None
    polls: int = 0
    is_lost: bool = False
    is_cancelled: bool = False
    done: asyncio.Event = field(default_factory=asyncio.Event)
    callbacks: list[Callable[[Promise], None]] = field(default_factory=list)

    def finish(self, result: Any = None, failure: Failure | None = None) -> None:
        if not self.done.is_set():
            self.result, self.failure = result, failure
            self.done.set()
            for callback in self.callbacks:
                callback(self)


@dataclass
class Session:
    session_id: str
    owner: str
    created_at: datetime
    request: Any
    project_id: str | None = None
    status: dict[str, Any] = field(default_factory=lambda: {"type": "active"})
    heartbeats: int = 0
    used: dict[tuple[str, int], tuple[bytes, Any]] = field(default_factory=dict)
    """What each number of a kind (model, sampler, loss) was used for: the request's content and what came of it."""
    is_gone: bool = False
    """Heartbeats answer 410."""


@dataclass
class Model:
    model_id: str
    owner: str
    session_id: str
    base_model: str
    lora_config: Any
    optimizer_type: str
    user_metadata: dict[str, Any] | None
    last_request_time: datetime
    steps: int = 0
    passes: int = 0
    jobs: JobQueue[Promise] = field(default_factory=JobQueue)
    loaded_from: str | None = None
    unread: set[int] = field(default_factory=set)
    """Numbers whose request came in an encoding that the server cannot read; the client may send it in another."""


@dataclass
class Sampler:
    sampler_id: str
    session_id: str
    base_model: str
    model_path: str | None
    clients: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    requests: dict[int, tuple[Any, Promise]] = field(default_factory=dict)
    completions: dict[int, list[Promise]] = field(default_factory=dict)
    """Finished promises per client of the session, in the order they finished."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class Checkpoint:
    run_id: str
    owner: str
    kind: str
    name: str
    created_at: datetime
    base_model: str
    lora_config: Any
    optimizer_type: str
    steps: int
    is_public: bool = False
    user_metadata: dict[str, str] | None = None
    expires_at: datetime | None = None
    project_id: str | None = None
    is_ephemeral: bool = False
    files: dict[str, bytes] = field(default_factory=dict)

    @property
    def path(self) -> str:
        return f"{PATH_PREFIX}{self.run_id}/{self.kind}/{self.name}"

    @property
    def checkpoint_type(self) -> str:
        return KINDS[self.kind]

    @property
    def size_bytes(self) -> int:
        return sum(len(content) for content in self.files.values())


@dataclass
class State:
    vintage: Vintage
    sessions: dict[str, Session] = field(default_factory=dict)
    models: dict[str, Model] = field(default_factory=dict)
    samplers: dict[str, Sampler] = field(default_factory=dict)
    checkpoints: dict[str, Checkpoint] = field(default_factory=dict)
    promises: dict[str, Promise] = field(default_factory=dict)
    losses: dict[str, Any] = field(default_factory=dict)
    audit: list[dict[str, Any]] = field(default_factory=list)
    usage: dict[tuple[str, str], int] = field(default_factory=dict)
    """Counts by (session, kind of billing event)."""
    violations: list[str] = field(default_factory=list)
    telemetry_leaks: list[bytes] = field(default_factory=list)
    """Telemetry that carried the API key."""
    failures: list[tuple[str, Failure]] = field(default_factory=list)
    """Route name and failure of jobs that are told to fail, used up in order."""
    executed: list[tuple[str, int | None, str]] = field(default_factory=list)
    """(model id, seq_id, route name) of every training job, in the order they ran."""
    is_paused: bool = False
    _ready: list[Promise] = field(default_factory=list)
    _clock: Iterator[int] = field(default_factory=itertools.count)
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def now(self) -> datetime:
        return START + timedelta(seconds=next(self._clock))

    def number(self) -> int:
        return next(self._numbers)

    def model(self, model_id: str | None) -> Model:
        if model_id not in self.models:
            raise RefusedError(404, f"model {model_id} does not exist")
        return self.models[model_id]

    def session(self, session_id: str) -> Session:
        if session_id not in self.sessions:
            raise RefusedError(404, f"session {session_id} does not exist")
        return self.sessions[session_id]

    def sampler(self, sampler_id: str | None) -> Sampler:
        if sampler_id not in self.samplers:
            raise RefusedError(404, f"sampling session {sampler_id} does not exist")
        return self.samplers[sampler_id]

    def checkpoint(self, path: str, user: str) -> Checkpoint:
        """A checkpoint that the user may read."""
        found = self.checkpoints.get(path)
        if found is None or not (found.owner == user or found.is_public):
            raise RefusedError(404, f"checkpoint {path} does not exist")
        return found

    def known(self, session: Session, kind: str, number: int, content: bytes) -> Any:
        """What the same request brought before, if it is sent again; None for a new number."""
        before, made = session.used.get((kind, number), (content, None))
        if before != content:
            self.violate(f"{session.session_id}: {kind} number {number} came twice with different content")
            raise RefusedError(400, f"{kind} number {number} is taken")
        return made

    def violate(self, text: str) -> None:
        self.violations.append(text)

    def count(self, session_id: str, kind: str, amount: int) -> None:
        self.usage[session_id, kind] = self.usage.get((session_id, kind), 0) + amount

    def promise(self, request_id: str, route: Route, work: Callable[[], Any]) -> Promise:
        if self.vintage.has_plain_ids:
            request_id = str(self.number())
        promise = Promise(request_id, route, work)
        self.promises[request_id] = promise
        return promise

    def submit(self, model: Model, route: Route, seq_id: int | None, content: Any, work: Callable[[], Any]) -> Promise:
        """Queue a training job; the same number again is the same job."""
        model.last_request_time = self.now()
        if "protobuf" not in route.body_encodings:  # the client has moved on
            for number in model.unread:
                model.jobs.refuse(number)
        try:
            known = model.jobs.known(seq_id, content)
            if known is not None:
                known.is_lost = False
                return known

            def logged() -> Any:
                self.executed.append((model.model_id, seq_id, route.name))
                return work()

            suffix = str(seq_id) if seq_id is not None else f"n{self.number()}"
            promise = self.promise(f"{model.model_id}:{suffix}", route, logged)
            model.jobs.add(seq_id, content, promise)
        except SequenceError as error:
            self.violate(f"{model.model_id}: {error}")
            raise RefusedError(400, str(error)) from None
        self.start(*model.jobs.take_ready())
        return promise

    def start(self, *promises: Promise) -> None:
        """Run jobs whose turn has come, now or when work is resumed."""
        self._ready.extend(promises)
        while self._ready and not self.is_paused:
            promise = self._ready.pop(0)
            if promise.is_cancelled:
                continue
            failure = self._scripted_failure(promise.route.name)
            try:
                promise.finish(None if failure else promise.work(), failure)
            except JobError as error:
                promise.finish(failure=Failure(str(error)))

    def _scripted_failure(self, route_name: str) -> Failure | None:
        for i, (name, failure) in enumerate(self.failures):
            if name == route_name:
                del self.failures[i]
                return failure
        return None

    def cancel(self, promise: Promise) -> None:
        if not promise.done.is_set():
            promise.is_cancelled = True
            promise.finish(failure=Failure("cancelled by the client"))

    def stuck(self) -> dict[str, list[int]]:
        """Jobs that wait for a number that never came."""
        return {model.model_id: model.jobs.stuck for model in self.models.values() if model.jobs.stuck}
