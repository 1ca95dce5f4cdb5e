"""Promises: asking for one result, for all of a sampling session, and giving one up."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping

import msgspec

from support.server_answers import Answer, RefusedError
from support.server_core import Call, Core, Handler, Result
from support.server_recording import PROTOBUF
from support.server_sampling import owned_sampler
from support.server_state import Promise
from support.server_vintages import without_younger
from tinsmith.errors import InvalidInputError
from tinsmith.wire.codecs import json_codec, proto_outputs, proto_sampling
from tinsmith.wire.messages.futures import FutureFailed, FutureFinished, FuturesRetrieveResponse
from tinsmith.wire.messages.sampling import SampleResponse
from tinsmith.wire.messages.training import ForwardBackwardOutput
from tinsmith.wire.routes import table as routes


async def retrieve_future(core: Core, call: Call) -> Answer:
    promise = core.state.promises.get(call.request.request_id)
    if promise is None:
        core.state.violate(f"retrieve_future: {call.request.request_id} was never promised")
        raise RefusedError(404, f"request {call.request.request_id} does not exist")
    promise.polls += 1
    settings = core.settings
    if settings.lose_next > 0 and not promise.is_lost:
        settings.lose_next -= 1
        promise.is_lost = True
    if promise.is_lost:
        return Answer.of_json({"detail": "the promise was lost"}, 410)
    if promise.polls <= settings.pending_polls:
        return _pending(core, promise)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(promise.done.wait(), settings.poll_s)
    if not promise.done.is_set():
        return _pending(core, promise)
    if promise.failure is not None:
        return _failed(core, promise)
    answer = _encoded(core, promise, call.recorded.headers.get("accept", ""))
    limit = settings.metadata_above_bytes
    if limit is not None and len(answer.body) > limit and call.request.allow_metadata_only:
        return Answer.of_json({"status": "complete_metadata", "response_payload_size": len(answer.body)})
    return answer


def _pending(core: Core, promise: Promise) -> Answer:
    if core.vintage.has_plain_ids:
        return Answer.of_json({"detail": "Timeout waiting for result"}, 408)
    settings = core.settings
    body = {"type": "try_again", "request_id": promise.request_id, "queue_state": settings.queue_state}
    if settings.queue_state_reason is not None:
        body["queue_state_reason"] = settings.queue_state_reason
    return Answer.of_json(body, 408 if settings.pending_form == "408" else 200)


def _failed(core: Core, promise: Promise) -> Answer:
    assert promise.failure is not None
    if core.vintage.fails_with_400:
        return Answer.of_json({"detail": promise.failure.error}, 400)
    return Answer.of_json({"error": promise.failure.error, "category": promise.failure.category})


def _encoded(core: Core, promise: Promise, accept: str) -> Answer:
    """The result as the client asked for it, as far as this server can."""
    result = promise.result
    if core.vintage.has_protobuf and PROTOBUF in accept:
        if isinstance(result, ForwardBackwardOutput):
            return Answer(200, proto_outputs.encode_output(result), PROTOBUF)
        if isinstance(result, SampleResponse):
            return Answer(200, proto_sampling.encode_response(result), PROTOBUF)
    if not isinstance(result, (ForwardBackwardOutput, SampleResponse)):
        plain = msgspec.json.decode(json_codec.encode(result))
        return Answer.of_json(without_younger(plain, type(result), core.vintage.line))
    try:
        return Answer(200, json_codec.encode(result))
    except InvalidInputError as error:
        return Answer.of_json({"error": str(error), "category": "user"})


async def retrieve_futures(core: Core, call: Call) -> FuturesRetrieveResponse:
    if not core.has_flag("sample_use_retrieve_futures"):
        core.state.violate("retrieve_futures: the server did not offer it")
    request = call.request
    sampler = owned_sampler(core, request.target.sampling_session_id, call.user)
    client = request.target.cloned_sampler_id
    deadline = asyncio.get_running_loop().time() + core.settings.poll_s
    while len(sampler.completions.get(client, ())) <= request.prev_cursor:
        left = deadline - asyncio.get_running_loop().time()
        try:
            await asyncio.wait_for(sampler.changed.wait(), left)
        except TimeoutError:
            break
    done = sampler.completions.get(client, [])
    completions = [_completion(promise) for promise in done[request.prev_cursor :]]
    return FuturesRetrieveResponse(completions=completions, cursor=max(len(done), request.prev_cursor))


def _completion(promise: Promise) -> FutureFinished | FutureFailed:
    if promise.failure is not None:
        return FutureFailed(request_id=promise.request_id)
    size = len(proto_sampling.encode_response(promise.result))
    return FutureFinished(request_id=promise.request_id, response_payload_uncompressed_size=size)


async def cancel_future(core: Core, call: Call) -> Result:
    if not core.settings.dynamic_flags.get("sample_cancel_enabled"):
        core.state.violate("cancel_future: the server did not offer it")
    promise = core.state.promises.get(call.request.request_id)
    if promise is None:
        raise RefusedError(404, f"request {call.request.request_id} does not exist")
    core.state.cancel(promise)
    return None


HANDLERS: Mapping[str, Handler] = {
    routes.RETRIEVE_FUTURE.name: retrieve_future,
    routes.RETRIEVE_FUTURES.name: retrieve_futures,
    routes.CANCEL_FUTURE.name: cancel_future,
}
