"""Sampling sessions, samples, and our own token stream."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from support import server_arithmetic as arithmetic
from support.server_answers import Answer, RefusedError
from support.server_core import MODELS, Call, Core, Handler
from support.server_recording import Recorded
from support.server_state import CLONE_BLOCK, Promise, Sampler, Session
from support.server_training import owned_session
from tinsmith.errors import InvalidInputError, WireError
from tinsmith.wire.codecs import json_codec
from tinsmith.wire.messages.futures import UntypedAPIFuture
from tinsmith.wire.messages.sampling import (
    CreateSamplingSessionResponse,
    GetSamplerResponse,
    JoinSamplingSessionResponse,
    SampleRequest,
    SampleResponse,
)
from tinsmith.wire.routes import table as routes

STREAM_PATH = "/tinsmith/v1/sample_stream"
BACKPRESSURE_HEADER = "x-tinker-sampling-backpressure"


def add_sampler(
    core: Core, session: Session, number: int, base_model: str, model_path: str | None, content: bytes
) -> Sampler:
    """A sampler with the id that the hosted service documents, `<session>:sample:<number>`."""
    state = core.state
    if ("sampler", number) in session.used:
        state.violate(f"{session.session_id}: sampling session number {number} came twice")
    sampler_id = f"{session.session_id}:sample:{number}"
    if core.vintage.has_plain_ids:
        sampler_id = f"sampling_{state.number():08x}"
    session.used["sampler", number] = (content, sampler_id)
    state.samplers[sampler_id] = Sampler(sampler_id, session.session_id, base_model, model_path)
    return state.samplers[sampler_id]


async def create_sampling_session(core: Core, call: Call) -> CreateSamplingSessionResponse:
    request = call.request
    session = owned_session(core, request.session_id, call.user)
    known = core.state.known(session, "sampler", request.sampling_session_seq_id, call.content)
    if known is not None:
        return CreateSamplingSessionResponse(sampling_session_id=known)
    if (request.base_model is None) == (request.model_path is None):
        raise RefusedError(400, "give base_model or model_path, exactly one of them")
    if request.model_path is not None:
        base_model = core.state.checkpoint(request.model_path, call.user).base_model
    else:
        base_model = request.base_model
    if base_model not in MODELS:
        raise RefusedError(400, f"base_model {base_model!r} is not served here")
    number = request.sampling_session_seq_id
    sampler = add_sampler(core, session, number, base_model, request.model_path, call.content)
    return CreateSamplingSessionResponse(sampling_session_id=sampler.sampler_id)


async def join_sampling_session(core: Core, call: Call) -> JoinSamplingSessionResponse:
    if not core.has_flag("sample_join_sampling_session"):
        core.state.violate("join_sampling_session: the server did not offer it")
    sampler = owned_sampler(core, call.request.sampling_session_id, call.user)
    return JoinSamplingSessionResponse(client_counter=next(sampler.clients))


async def get_sampler(core: Core, call: Call) -> GetSamplerResponse:
    sampler = owned_sampler(core, call.parameters["sampler_id"], call.user)
    given = {} if sampler.model_path is None else {"model_path": sampler.model_path}
    return GetSamplerResponse(sampler_id=sampler.sampler_id, base_model=sampler.base_model, **given)


def owned_sampler(core: Core, sampler_id: str | None, user: str) -> Sampler:
    sampler = core.state.sampler(sampler_id)
    owned_session(core, sampler.session_id, user)
    return sampler


async def asample(core: Core, call: Call) -> UntypedAPIFuture:
    request, state = call.request, core.state
    _check_sample(core, request)
    sampler = owned_sampler(core, request.sampling_session_id, call.user)
    seq_id = request.seq_id if request.seq_id is not None else state.number()
    before, promise = sampler.requests.get(seq_id, (call.content, None))
    if before != call.content:
        state.violate(f"{sampler.sampler_id}: seq_id {seq_id} came twice with different content")
        raise RefusedError(400, f"seq_id {seq_id} is taken")
    if promise is None:
        promise = state.promise(f"{sampler.sampler_id}:{seq_id}", call.route, lambda: _run(core, sampler, request))
        promise.callbacks.append(lambda done: _completed(sampler, seq_id // CLONE_BLOCK, done))
        sampler.requests[seq_id] = (call.content, promise)
        state.start(promise)
    promise.is_lost = False
    ids = [f"{sampler.sampler_id}:{seq_id}:{i}" for i in range(request.num_samples)]
    if not core.vintage.has_sequence_ids:
        return UntypedAPIFuture(request_id=promise.request_id)
    return UntypedAPIFuture(request_id=promise.request_id, sample_sequence_ids=ids)


def _check_sample(core: Core, request: SampleRequest) -> None:
    if core.vintage.has_plain_ids and ":" in (request.sampling_session_id or ""):
        raise RefusedError(400, "sampling_session_id: a colon is not allowed")
    length = len(arithmetic.prompt_tokens(request.prompt))
    if length == 0:
        raise RefusedError(400, "prompt: is empty")
    last_n = request.prompt_logprobs_last_n
    if last_n is not None and not (request.prompt_logprobs and 1 <= last_n <= length - 1):
        raise RefusedError(
            400, f"prompt_logprobs_last_n: {last_n} is not between 1 and {length - 1} with prompt_logprobs"
        )
    target = request.target_prompt_logprobs
    if target is not None and (target.shape is None or len(target.shape) != 2 or target.shape[0] != length - 1):
        raise RefusedError(400, f"target_prompt_logprobs: the shape must be [{length - 1}, K], not {target.shape}")


def _run(core: Core, sampler: Sampler, request: SampleRequest) -> SampleResponse:
    response = arithmetic.run_sample(request)
    core.state.count(sampler.session_id, "sampling_prefill", request.prompt.length)
    sampled = sum(len(sequence.tokens) for sequence in response.sequences)
    core.state.count(sampler.session_id, "sampling_sample", sampled)
    return response


def _completed(sampler: Sampler, client: int, promise: Promise) -> None:
    sampler.completions.setdefault(client, []).append(promise)
    sampler.changed.set()
    sampler.changed.clear()


def stream(core: Core, recorded: Recorded) -> Answer:
    """POST /tinsmith/v1/sample_stream: the body of asample in, server-sent events out."""
    if not core.has_extensions.get("sample_stream"):
        return Answer.of_json({"detail": "Not Found"}, 404)
    try:
        if recorded.key not in core.users:
            raise RefusedError(401, "the API key is not valid")
        request = json_codec.decode(recorded.raw_body, SampleRequest)
        _check_sample(core, request)
        sampler = owned_sampler(core, request.sampling_session_id, core.users[recorded.key])
    except (InvalidInputError, WireError) as error:
        return Answer.of_json({"detail": str(error)}, 422)
    except RefusedError as refused:
        return Answer.of_json({"detail": refused.detail}, refused.status)
    events = list(_events(core, _run(core, sampler, request)))
    pause, error_after = core.settings.stream_pause_after, core.settings.stream_error_after
    if error_after is not None:
        failure = {"error": "the sampler stopped", "category": "server"}
        events = [*events[:error_after], _event("error", failure)]
    whole = b"".join(events)
    if pause is not None:
        first, rest = b"".join(events[:pause]), b"".join(events[pause:])
        pieces: tuple[bytes | None, ...] = (*_split(core, first), None, *_split(core, rest))
    else:
        pieces = tuple(_split(core, whole)) if core.settings.stream_split_bytes else tuple(events)
    return Answer(200, whole, "text/event-stream", {"cache-control": "no-store"}, pieces)


def _events(core: Core, response: SampleResponse) -> Iterator[bytes]:
    """Tokens of all samples in turn, as a batch that is decoded together would bring them."""
    step = core.settings.stream_tokens_per_event
    longest = max((len(sequence.tokens) for sequence in response.sequences), default=0)
    for start in range(0, longest, step):
        for index, sequence in enumerate(response.sequences):
            tokens = sequence.tokens[start : start + step]
            if tokens:
                logprobs = (sequence.logprobs or [])[start : start + step]
                piece = {"index": index, "position": start, "tokens": tokens, "logprobs": logprobs}
                if sequence.topk_logprobs is not None:
                    piece["topk"] = sequence.topk_logprobs[start : start + step]
                yield _event("token", piece)
    ends = [{"stop_reason": each.stop_reason, "tokens": len(each.tokens)} for each in response.sequences]
    yield _event("done", {"sequences": ends})


def _event(name: str, data: Any) -> bytes:
    return f"event: {name}\ndata: {json.dumps(data)}\n\n".encode()


def _split(core: Core, content: bytes) -> list[bytes]:
    size = core.settings.stream_split_bytes or max(len(content), 1)
    return [content[start : start + size] for start in range(0, len(content), size)]


HANDLERS: Mapping[str, Handler] = {
    routes.CREATE_SAMPLING_SESSION.name: create_sampling_session,
    routes.JOIN_SAMPLING_SESSION.name: join_sampling_session,
    routes.ASAMPLE.name: asample,
    routes.GET_SAMPLER.name: get_sampler,
}
