"""Accept a sample: make the sampling session it reads, check it, then write it to the journal.

The protocol's routes and the OpenAI-compatible ones both come through here, so that limits, budgets, usage and
ownership are the same for all.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from pathlib import Path

from tinsmith.engine.protocol import Sample
from tinsmith.errors import InvalidInputError
from tinsmith.server.auth.identity import Caller
from tinsmith.server.bodies.questions import SampleQuestion, SampleReading
from tinsmith.server.data_dir import link_tree
from tinsmith.server.jobs.accept import check_open
from tinsmith.server.jobs.job import Draft, Work, digest_of
from tinsmith.server.jobs.lifecycle import same_request
from tinsmith.server.jobs.token_log import TokenLog
from tinsmith.server.refusals import OverLimitError
from tinsmith.server.runs.model_spec import card_of
from tinsmith.server.services import Services
from tinsmith.store.rows import CountRow, SamplerRow

SAMPLER_BYTES = 8692
"""What a sampler takes on the disk besides its weights, which it shares with a checkpoint: two directories, a row. The
query `bytes_by_org` counts the same."""


async def new_sampler(
    services: Services,
    caller: Caller,
    sampler_id: str,
    session_id: str,
    base_model: str | None,
    model_path: str | None,
) -> SamplerRow:
    """Make a sampler on the base model, or on links to a checkpoint's files, which outlive the checkpoint."""
    await _check_count(services, session_id)
    directory = adapter_key = source = None
    if model_path is not None:
        source = await services.access.checkpoint(caller, model_path)
        if source.kind == "external_weights":
            raise InvalidInputError(
                f"model_path: {model_path} is an export; sample a sampler_weights path", field="model_path"
            )
        if base_model is not None and base_model != source.base_model:
            raise InvalidInputError(
                f"base_model: {base_model!r} is not the base model of {model_path}, which is {source.base_model!r}",
                field="base_model",
            )
        base_model, adapter_key = source.base_model, source.digest
    card = card_of(services.backend, base_model or "")
    if not card.sampleable:
        raise InvalidInputError(f"base_model: {card.name} cannot be sampled here", field="base_model")
    if source is not None:
        # Named after what is sampled: two requests may arrive at once under one number, and one will be refused.
        services.disk.check(caller.org_id, SAMPLER_BYTES, "model_path")
        place = services.files.sampler(sampler_id) / digest_of(source.directory.encode())[:16]
        await asyncio.to_thread(link_tree, Path(source.directory), place)
        services.disk.add(caller.org_id, SAMPLER_BYTES)
        directory = str(place)
    return SamplerRow(
        sampler_id=sampler_id,
        session_id=session_id,
        org_id=caller.org_id,
        user_id=caller.user_id,
        base_model=card.name,
        model_path=model_path,
        directory=directory,
        adapter_key=adapter_key,
        created_at=services.clock(),
        run_id=source.model_id if source is not None else None,
    )


async def _check_count(services: Services, session_id: str) -> None:
    """Refuse one more sampler of a session that has too many."""
    made = (await services.store.read(CountRow, "count_samplers_of_session", session_id=session_id))[0].count
    if made >= services.config.max_samplers:
        raise InvalidInputError(
            f"session_id: the session has created {made} sampling sessions (limit {services.config.max_samplers}); "
            "finish it, and create a new one",
            field="session_id",
        )


async def read_sample(services: Services, caller: Caller, body: bytes) -> SampleReading:
    """Read what a sample asks for."""
    question = SampleQuestion(cards=tuple(services.backend.cards()), max_samples=services.config.max_samples)
    reading = await services.readers.ask(caller.org_id, question, body)
    assert isinstance(reading, SampleReading)
    return reading


async def submit_sample(
    services: Services, caller: Caller, body: bytes, request: SampleReading, log: TokenLog | None = None
) -> str:
    """Journal a sample, queue it, and return its request id."""
    hashing = services.hasher.begin(b"sample", body)
    sampler = await _sampler_of(services, caller, request)
    lane, seq = sampler.sampler_id, request.seq_id
    digest = await hashing.digest()
    if seq is None:
        seq = -secrets.randbelow(2**62) - 1
    elif services.jobs.is_accepting(lane, seq):
        known = await services.jobs.known(lane, seq)
        if known is not None:
            return same_request(known, lane, seq, "sample", digest)
    check_open(services)
    services.disk.check_waiting(caller.org_id)
    card = card_of(services.backend, sampler.base_model)
    if card.name in request.faults:
        raise request.faults[card.name].error()
    most = request.max_tokens if request.max_tokens is not None else card.max_context_length - request.length
    tokens = request.length + most * request.num_samples
    try:
        services.jobs.check_queue(services.admission, caller, len(body))
        services.admission.check_tokens(caller, tokens)
    except OverLimitError:
        known = await services.jobs.known(lane, seq)
        if known is None:
            raise
        return same_request(known, lane, seq, "sample", digest)
    seed = request.seed if request.seed is not None else secrets.randbelow(2**63)
    session = services.access.sessions.get(sampler.session_id)
    draft = Draft(
        kind="sample",
        lane=lane,
        seq=seq,
        session_id=sampler.session_id,
        org_id=caller.org_id,
        user_id=caller.user_id,
        digest=digest,
        make_job=_sample_job(sampler, body, seed),
        context={
            "project_id": session.project_id if session is not None else caller.project_id,
            "run_id": sampler.run_id,
        },
        log=log,
    )
    is_new = False

    def enqueue(work: Work) -> None:
        nonlocal is_new
        is_new = True
        services.samples.put(work)

    try:
        return await services.jobs.accept(draft, enqueue)
    finally:
        if not is_new:
            services.admission.give_back(caller, tokens)


def _sample_job(sampler: SamplerRow, body: bytes, seed: int) -> Callable[[str], Sample]:
    return lambda request_id: Sample(
        job_id=request_id,
        tenant=sampler.org_id,
        base_model=sampler.base_model,
        body=body,
        seed=seed,
        directory=sampler.directory,
        adapter_key=sampler.adapter_key,
    )


async def _sampler_of(services: Services, caller: Caller, request: SampleReading) -> SamplerRow:
    """Return the sampling session that a request names."""
    if request.sampling_session_id is None:
        raise InvalidInputError(
            "sampling_session_id: missing; create one with create_sampling_session", field="sampling_session_id"
        )
    return await services.access.live_sampler(caller, request.sampling_session_id)
