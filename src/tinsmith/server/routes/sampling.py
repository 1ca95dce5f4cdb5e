"""Sampling sessions and samples."""

from __future__ import annotations

import msgspec

from tinsmith.errors import InvalidInputError
from tinsmith.server.auth.identity import Caller
from tinsmith.server.call import Answer, Call, Handlers, reply
from tinsmith.server.jobs.accept_sample import new_sampler, read_sample, submit_sample
from tinsmith.server.services import Services
from tinsmith.store.base import statement
from tinsmith.store.rows import SamplerRow
from tinsmith.wire.messages import sampling as wire


async def create_sampling_session(services: Services, call: Call) -> Answer:
    request: wire.CreateSamplingSessionRequest = call.message
    session = await services.access.live_session(call.caller, request.session_id)
    if request.base_model is None and request.model_path is None:
        raise InvalidInputError("model_path: is missing; give model_path or base_model", field="model_path")
    sampler_id = f"{session.session_id}:sample:{request.sampling_session_seq_id}"
    known = await services.store.read(SamplerRow, "sampler", sampler_id=sampler_id)
    if not known:
        row = await new_sampler(
            services, call.caller, sampler_id, session.session_id, request.base_model, request.model_path
        )
        await services.store.write(statement("insert_sampler_if_absent", row))
        known = await services.store.read(SamplerRow, "sampler", sampler_id=sampler_id)
    if not _is_same(known[0], request):
        raise number_taken(request.sampling_session_seq_id)
    return reply(wire.CreateSamplingSessionResponse(sampling_session_id=sampler_id))


def _is_same(row: SamplerRow, request: wire.CreateSamplingSessionRequest) -> bool:
    """Whether a sampler is the one that is requested."""
    if request.model_path is not None:
        return row.model_path == request.model_path
    return row.directory is None and row.base_model == request.base_model


def number_taken(number: int) -> InvalidInputError:
    return InvalidInputError(
        f"sampling_session_seq_id: {number} was used for another sampler; use a new number",
        field="sampling_session_seq_id",
    )


async def join_sampling_session(services: Services, call: Call) -> Answer:
    row = await services.access.live_sampler(call.caller, call.message.sampling_session_id)
    rows = await services.store.write_returning(SamplerRow, "add_sampler_clone", sampler_id=row.sampler_id)
    return reply(wire.JoinSamplingSessionResponse(client_counter=rows[0].clones))


async def get_sampler(services: Services, call: Call) -> Answer:
    row = await services.access.sampler(call.caller, call.params["sampler_id"])
    if row.model_path is None:
        return reply(wire.GetSamplerResponse(sampler_id=row.sampler_id, base_model=row.base_model))
    return reply(
        wire.GetSamplerResponse(sampler_id=row.sampler_id, base_model=row.base_model, model_path=row.model_path)
    )


async def asample(services: Services, call: Call) -> Answer:
    return await submit_body(services, call.caller, call.body)


async def submit_body(services: Services, caller: Caller, body: bytes) -> Answer:
    """Accept the body of a sample, and answer with its request id."""
    request = await read_sample(services, caller, body)
    request_id = await submit_sample(services, caller, body, request)
    ids = [f"{request_id}:{index}" for index in range(request.num_samples)]
    return Answer(msgspec.json.encode(_Promised(request_id, ids)))


class _Promised(msgspec.Struct, frozen=True):
    """Encode an UntypedAPIFuture without validating it: both values are our own."""

    request_id: str
    sample_sequence_ids: list[str]


HANDLERS: Handlers = {
    "create_sampling_session": create_sampling_session,
    "join_sampling_session": join_sampling_session,
    "get_sampler": get_sampler,
    "asample": asample,
}
