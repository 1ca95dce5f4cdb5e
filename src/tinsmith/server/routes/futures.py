"""Results: retrieve one, poll all completions of a sampler, and cancel a request."""

from __future__ import annotations

import msgspec

from tinsmith.server.auth.identity import Caller
from tinsmith.server.bodies.questions import JsonQuestion, JsonReading
from tinsmith.server.call import JSON, NOTHING, PROTOBUF, Answer, Call, Handlers, reply
from tinsmith.server.jobs.job import CLONE_BLOCK
from tinsmith.server.jobs.lookup import find_outcome, position_of
from tinsmith.server.jobs.pending_results import Completion, CompletionLog, Outcome, Promise
from tinsmith.server.services import Services
from tinsmith.store.base import Row
from tinsmith.wire.messages import futures as wire
from tinsmith.wire.routes import own

CATCH_UP_S = 120.0
"""How far before a batch poll's cursor the store is searched after a restart; clients ignore repetitions."""
CATCH_UP_ROWS = 10_000
CANCEL_S = 10.0
"""How long a cancellation waits for the engine to say whether a running request could be cancelled."""
MAX_RESULTS_BYTES = 4 * 1024 * 1024
"""An answer with many results ends after the one that exceeds this."""


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
    return await _result(services, outcome, promise, call.takes_protobuf)


async def _result(services: Services, outcome: Outcome, promise: Promise, takes_protobuf: bool) -> Answer:
    if outcome.encoding != "protobuf":
        return Answer(outcome.body)
    if takes_protobuf:
        return Answer(outcome.body, 200, PROTOBUF)
    reading = await services.readers.ask(promise.org_id, JsonQuestion(kind=promise.kind), outcome.body)
    assert isinstance(reading, JsonReading)
    return Answer(reading.body, 200, JSON)


def _not_yet(services: Services, promise: Promise) -> Answer:
    """Answer 408 with the request's position in the queue; clients poll again at once."""
    position = position_of(services, promise)
    ahead = f"{position.ahead} ahead of it; " if position.ahead else ""
    return reply(
        wire.TryAgainResponse(
            request_id=promise.request_id, queue_state="active", queue_state_reason=f"{ahead}{position.reason}"
        ),
        408,
    )


class CompletionRow(Row, frozen=True, kw_only=True):
    """A finished sample in the store."""

    request_id: str
    encoding: str
    finished_at: float
    size_bytes: int


async def retrieve_futures(services: Services, call: Call) -> Answer:
    request: wire.FuturesRetrieveRequest = call.message
    older, events = await _completed(services, call.caller, request)
    known = set(request.retrieved_request_ids)
    completions = [_completion(done) for done in (*older, *events) if done.request_id not in known]
    return Answer(msgspec.json.encode(_Completions(completions, _cursor(services, call.caller, request, events))))


class _Finished(msgspec.Struct, frozen=True, gc=False, tag_field="state", tag="finished"):
    """Encode a FutureFinished without validating it: there may be thousands, all our own."""

    request_id: str
    response_payload_uncompressed_size: int


class _Failed(msgspec.Struct, frozen=True, gc=False, tag_field="state", tag="failed"):
    request_id: str


class _Completions(msgspec.Struct, frozen=True):
    completions: list[_Finished | _Failed]
    cursor: int


def _completion(done: Completion) -> _Finished | _Failed:
    return _Failed(done.request_id) if done.is_error else _Finished(done.request_id, done.size_bytes)


async def finished_samples(
    services: Services, caller: Caller, request: wire.FuturesRetrieveRequest
) -> own.SampleResults:
    """Return what `retrieve_futures` reports, with the results that are in memory, as far as they fit."""
    older, events = await _completed(services, caller, request)
    known = set(request.retrieved_request_ids)
    results = [own.SampleResult(done.request_id) for done in older if done.request_id not in known]
    size_bytes = count = 0
    for event in events:
        if size_bytes > MAX_RESULTS_BYTES:
            break
        count += 1
        if event.request_id not in known:
            results.append(_with_body(services, event))
            size_bytes += len(results[-1].body or b"")
    return own.SampleResults(_cursor(services, caller, request, events[:count]), results)


def _with_body(services: Services, event: Completion) -> own.SampleResult:
    found = services.broker.recent(event.request_id)
    if found is None or event.size_bytes > services.config.metadata_above_bytes:
        return own.SampleResult(event.request_id)
    outcome = found[1]
    return own.SampleResult(event.request_id, PROTOBUF if outcome.encoding == "protobuf" else JSON, outcome.body)


async def _completed(
    services: Services, caller: Caller, request: wire.FuturesRetrieveRequest
) -> tuple[list[Completion], list[Completion]]:
    """Return a sampling client's completions in order, from the store (older ones) and from memory; wait for the first
    if there is none."""
    target = request.target
    await services.access.live_sampler(caller, target.sampling_session_id)
    log = _completion_log(services, caller, target)
    older: list[Completion] = []
    was_set_back = log.is_ahead(request.prev_cursor)
    if was_set_back:
        log.pass_by(request.prev_cursor)
    if was_set_back or request.prev_cursor < log.began:
        found = await _older(services, target, 0 if was_set_back else request.prev_cursor)
        recent = {event.request_id for event in log.after(request.prev_cursor)}
        older = [done for done in found if done.request_id not in recent]
    timeout_s = min(request.timeout or services.config.poll_s, services.config.poll_s)
    known = set(request.retrieved_request_ids)
    is_news = any(done.request_id not in known for done in older)
    events = log.after(request.prev_cursor) if is_news else await log.wait(request.prev_cursor, timeout_s)
    return older, events


def _completion_log(services: Services, caller: Caller, target: wire.SamplingSessionFuturesTarget) -> CompletionLog:
    return services.broker.completion_log(caller.org_id, (target.sampling_session_id, target.cloned_sampler_id))


def _cursor(services: Services, caller: Caller, request: wire.FuturesRetrieveRequest, events: list[Completion]) -> int:
    """Return the cursor for the next poll."""
    began = _completion_log(services, caller, request.target).began
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


async def cancel_future(services: Services, call: Call) -> Answer:
    promise, outcome = await find_outcome(services, call.caller, call.message.request_id)
    if outcome is not None:
        return Answer(msgspec.json.encode({"cancelled": False, "reason": "it has already finished"}))
    if promise.kind == "sample":
        services.samples.cancel(promise.request_id)
        return NOTHING
    run = services.runs.known(promise.lane)
    cancelled = run.cancel(promise.request_id) if run is not None else False
    if cancelled is not None:
        return Answer(msgspec.json.encode({"cancelled": cancelled}))
    if await services.broker.wait(promise, CANCEL_S) is None:
        reason = "it is running and cannot be cancelled yet; its result will show whether it was"
        return Answer(msgspec.json.encode({"cancelled": False, "reason": reason}))
    row = await services.access.job(call.caller, promise.request_id)
    return Answer(msgspec.json.encode({"cancelled": row.state == "cancelled"}))


HANDLERS: Handlers = {
    "retrieve_future": retrieve_future,
    "retrieve_futures": retrieve_futures,
    "cancel_future": cancel_future,
}
