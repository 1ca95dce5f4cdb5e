"""Promises: asking for one result, for all completions of a sampler, and taking a request back."""

from __future__ import annotations

import asyncio

import msgspec

from tinsmith.engine.base import Position
from tinsmith.server.calls import JSON, NOTHING, PROTOBUF, Answer, Call, Handlers, reply
from tinsmith.server.identity import Caller
from tinsmith.server.promises import Completion, Outcome, Promise
from tinsmith.server.refusals import GoneError, UnknownResourceError
from tinsmith.server.services import Services
from tinsmith.server.work import CLONE_BLOCK
from tinsmith.store.base import Row
from tinsmith.store.rows import ResultRow
from tinsmith.wire import futures as wire
from tinsmith.wire import json_codec, own_routes, proto_outputs, proto_sampling

CATCH_UP_S = 120.0
"""How far before a batch poll's cursor the store is searched after a restart; clients ignore what they know."""
CATCH_UP_ROWS = 10_000
MAX_RESULTS_BYTES = 4 * 1024 * 1024
"""An answer with many results ends behind the one that goes beyond this."""


async def retrieve_future(services: Services, call: Call) -> Answer:
    request: wire.FutureRetrieveRequest = call.message
    promise, outcome = await find_outcome(services, call.caller, request.request_id)
    if outcome is None:
        outcome = await services.broker.wait(promise, services.config.poll_s)
    if outcome is None:
        return _not_yet(services, promise)
    is_large = len(outcome.body) > services.config.metadata_above_bytes
    if request.allow_metadata_only and is_large and not outcome.is_error:
        return reply(wire.CompleteMetadataResponse(response_payload_size=len(outcome.body)))
    return await _result(outcome, promise.kind, call.takes_protobuf)


async def find_outcome(services: Services, caller: Caller, request_id: str) -> tuple[Promise, Outcome | None]:
    """The promise of the caller's, and its outcome if it has one; a GoneError if it had one."""
    pending = services.broker.pending(request_id)
    recent = services.broker.recent(request_id) if pending is None else None
    promise = pending or (recent[0] if recent is not None else None)
    if promise is not None:
        if not caller.owns(promise.org_id, promise.user_id):
            raise UnknownResourceError(f"request {request_id!r} does not exist, was pruned, or is not yours")
        return promise, recent[1] if recent is not None else None
    row = await services.access.job(caller, request_id)
    results = await services.store.read(ResultRow, "result", request_id=request_id)
    if not results:
        raise GoneError(f"request {request_id} was accepted and its result is gone; send it again")
    known = Promise(
        request_id=request_id,
        kind=row.kind,
        lane=row.lane,
        org_id=row.org_id,
        user_id=row.user_id,
        created_at=row.created_at,
    )
    return known, Outcome(results[0].body, results[0].encoding)  # type: ignore[arg-type]


async def _result(outcome: Outcome, kind: str, takes_protobuf: bool) -> Answer:
    if outcome.encoding != "protobuf":
        return Answer(outcome.body)
    if takes_protobuf:
        return Answer(outcome.body, 200, PROTOBUF)
    if len(outcome.body) < 65536:
        return Answer(_as_json(outcome.body, kind), 200, JSON)
    return Answer(await asyncio.to_thread(_as_json, outcome.body, kind), 200, JSON)


def _as_json(body: bytes, kind: str) -> bytes:
    """A protobuf result for releases that read JSON."""
    if kind == "sample":
        return json_codec.encode(proto_sampling.decode_response(body))
    return json_codec.encode(proto_outputs.decode_output(body))


def _not_yet(services: Services, promise: Promise) -> Answer:
    """408 with where the request stands; clients ask again at once."""
    position = position_of(services, promise)
    ahead = f"{position.ahead} ahead of it; " if position.ahead else ""
    return reply(
        wire.TryAgainResponse(
            request_id=promise.request_id, queue_state="active", queue_state_reason=f"{ahead}{position.reason}"
        ),
        408,
    )


def position_of(services: Services, promise: Promise) -> Position:
    if promise.kind == "sample":
        return services.samples.position(promise.request_id)
    run = services.runs.known(promise.lane)
    if run is None:
        status = services.backend.status
        return Position(ahead=0, reason=status.reason or f"the engine is {status.state}")
    return run.position(promise.request_id)


class CompletionRow(Row, frozen=True, kw_only=True):
    """A finished sample as the store has it."""

    request_id: str
    encoding: str
    finished_at: float
    size_bytes: int


async def retrieve_futures(services: Services, call: Call) -> Answer:
    request: wire.FuturesRetrieveRequest = call.message
    older, events = await _completed(services, call.caller, request)
    told = set(request.retrieved_request_ids)
    completions = [
        _completion(done.request_id, done.size_bytes, done.is_error)
        for done in (*older, *events)
        if done.request_id not in told
    ]
    return reply(wire.FuturesRetrieveResponse(completions=completions, cursor=_cursor(services, request, events)))


async def finished_samples(
    services: Services, caller: Caller, request: wire.FuturesRetrieveRequest
) -> own_routes.SampleResults:
    """What `retrieve_futures` tells, with the results that are in memory, as far as one answer holds them."""
    older, events = await _completed(services, caller, request)
    told = set(request.retrieved_request_ids)
    results = [own_routes.SampleResult(done.request_id) for done in older if done.request_id not in told]
    size_bytes = count = 0
    for event in events:
        if size_bytes > MAX_RESULTS_BYTES:
            break
        count += 1
        if event.request_id not in told:
            results.append(_with_body(services, event))
            size_bytes += len(results[-1].body or b"")
    return own_routes.SampleResults(_cursor(services, request, events[:count]), results)


def _with_body(services: Services, event: Completion) -> own_routes.SampleResult:
    found = services.broker.recent(event.request_id)
    if found is None or event.size_bytes > services.config.metadata_above_bytes:
        return own_routes.SampleResult(event.request_id)
    outcome = found[1]
    return own_routes.SampleResult(event.request_id, PROTOBUF if outcome.encoding == "protobuf" else JSON, outcome.body)


async def _completed(
    services: Services, caller: Caller, request: wire.FuturesRetrieveRequest
) -> tuple[list[Completion], list[Completion]]:
    """What a sampling client's samples have come to: from the store what memory does not have, and from memory, in
    order; waits for the first."""
    target = request.target
    await services.access.live_sampler(caller, target.sampling_session_id)
    feed = services.broker.feed((target.sampling_session_id, target.cloned_sampler_id))
    older: list[Completion] = []
    was_set_back = feed.is_ahead(request.prev_cursor)
    if was_set_back:
        feed.pass_by(request.prev_cursor)
    if was_set_back or request.prev_cursor < feed.began:
        found = await _older(services, target, 0 if was_set_back else request.prev_cursor)
        recent = {event.request_id for event in feed.after(request.prev_cursor)}
        older = [done for done in found if done.request_id not in recent]
    timeout_s = min(request.timeout or services.config.poll_s, services.config.poll_s)
    is_news = any(done.request_id not in request.retrieved_request_ids for done in older)
    events = feed.after(request.prev_cursor) if is_news else await feed.wait(request.prev_cursor, timeout_s)
    return older, events


def _cursor(services: Services, request: wire.FuturesRetrieveRequest, events: list[Completion]) -> int:
    """Where the next poll goes on, when these have been told."""
    target = request.target
    began = services.broker.feed((target.sampling_session_id, target.cloned_sampler_id)).began
    return events[-1].cursor if events else max(request.prev_cursor, began)


async def _older(services: Services, target: wire.SamplingSessionFuturesTarget, cursor: int) -> list[Completion]:
    first = target.cloned_sampler_id * CLONE_BLOCK
    rows = await services.store.read(
        CompletionRow,
        "completions",
        lane=target.sampling_session_id,
        first=first,
        last=first + CLONE_BLOCK,
        after=cursor / 1e6 - CATCH_UP_S,
        limit=CATCH_UP_ROWS,
    )
    return [Completion(cursor, row.request_id, row.size_bytes, row.encoding == "error") for row in rows]


def _completion(request_id: str, size_bytes: int, is_error: bool) -> wire.FutureCompletion:
    if is_error:
        return wire.FutureFailed(request_id=request_id)
    return wire.FutureFinished(request_id=request_id, response_payload_uncompressed_size=size_bytes)


async def cancel_future(services: Services, call: Call) -> Answer:
    promise, outcome = await find_outcome(services, call.caller, call.message.request_id)
    if outcome is not None:
        return Answer(msgspec.json.encode({"cancelled": False, "reason": "it has finished"}))
    if promise.kind == "sample":
        services.samples.cancel(promise.request_id)
        return NOTHING
    run = services.runs.known(promise.lane)
    cancelled = run.cancel(promise.request_id) if run is not None else False
    return Answer(msgspec.json.encode({"cancelled": cancelled}))


HANDLERS: Handlers = {
    "retrieve_future": retrieve_future,
    "retrieve_futures": retrieve_futures,
    "cancel_future": cancel_future,
}
