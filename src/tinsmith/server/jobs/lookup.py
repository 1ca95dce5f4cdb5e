"""Find a request of the caller's: its pending promise or its result, and where it stands in the queue."""

from __future__ import annotations

from tinsmith.engine.protocol import Position
from tinsmith.server.auth.identity import Caller
from tinsmith.server.jobs.pending_results import Outcome, Promise
from tinsmith.server.redaction import redacted_text
from tinsmith.server.refusals import GoneError, UnknownResourceError
from tinsmith.server.services import Services
from tinsmith.store.rows import ResultRow


async def find_outcome(services: Services, caller: Caller, request_id: str) -> tuple[Promise, Outcome | None]:
    """Return the caller's promise, and its outcome if there is one yet; raise GoneError if the result was pruned.

    The key needs the scope that the request itself needed.
    """
    pending = services.broker.pending(request_id)
    recent = services.broker.recent(request_id) if pending is None else None
    promise = pending or (recent[0] if recent is not None else None)
    if promise is not None:
        if not await services.access.owns(caller, promise):
            raise UnknownResourceError(f"request {request_id!r} does not exist, was pruned, or is not yours")
        caller.need(_scope_of(promise.kind))
        return promise, recent[1] if recent is not None else None
    row = await services.access.job(caller, request_id)
    caller.need(_scope_of(row.kind))
    results = await services.store.read(ResultRow, "result", request_id=request_id)
    if not results:
        raise GoneError(f"the result of request {request_id} is no longer stored; send the request again")
    known = Promise(
        request_id=request_id,
        kind=row.kind,
        lane=row.lane,
        session_id=row.session_id,
        org_id=row.org_id,
        user_id=row.user_id,
        created_at=row.created_at,
    )
    return known, Outcome(results[0].body, results[0].encoding)  # type: ignore[arg-type]


def _scope_of(kind: str) -> str:
    """Return the scope that a request of this kind needs."""
    return "sample" if kind == "sample" else "train"


def position_of(services: Services, promise: Promise) -> Position:
    """Return a request's position in the queue, as clients may see it."""
    position = _position(services, promise)
    return Position(ahead=position.ahead, reason=redacted_text(position.reason))


def _position(services: Services, promise: Promise) -> Position:
    if promise.kind == "sample":
        return services.samples.position(promise.request_id)
    run = services.runs.known(promise.lane)  # None for requests that create a model: these are in their session's lane
    return services.backend.position(promise.request_id) if run is None else run.position(promise.request_id)
