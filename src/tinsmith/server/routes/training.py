"""Models: create, info, forward and backward passes, optimizer steps, unload; uploaded losses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from tinsmith.engine.protocol import AnyJob, CreateModel, ForwardBackward, LoraSpec, ModelCard, OptimStep, Unload
from tinsmith.errors import InvalidInputError
from tinsmith.server.bodies.questions import LossQuestion, LossReading, PassQuestion, PassReading
from tinsmith.server.call import Answer, Call, Handlers
from tinsmith.server.jobs.accept import Prepared, check_open, promise, submit_training
from tinsmith.server.jobs.job import Draft, Work, digest_of
from tinsmith.server.refusals import OverLimitError
from tinsmith.server.runs.model_spec import ADAMW, card_of, lora_spec
from tinsmith.server.runs.registry import Run, creation_lane, loss_lane
from tinsmith.server.services import Services
from tinsmith.store.base import statement
from tinsmith.store.rows import CustomLossRow, ModelRow, SessionRow
from tinsmith.wire.codecs import json_codec
from tinsmith.wire.messages import training as wire
from tinsmith.wire.rules.adam_rules import adam_params


async def create_model(services: Services, call: Call) -> Answer:
    request = json_codec.decode(call.body, wire.CreateModelRequest)
    session = await services.access.live_session(call.caller, request.session_id)
    card = card_of(services.backend, request.base_model)
    if not card.trainable:
        raise InvalidInputError(f"base_model: {card.name} cannot be trained here", field="base_model")
    if not isinstance(request.optimizer_config, wire.AdamOptimizerConfig):
        raise InvalidInputError("optimizer_config: only adamw is supported", field="optimizer_config")
    lora = lora_spec(request.lora_config, card)
    return await create(
        services,
        call,
        session,
        kind="create_model",
        model_seq_id=request.model_seq_id,
        lora=lora,
        base_model=card.name,
        user_metadata=request.user_metadata,
    )


async def create(
    services: Services,
    call: Call,
    session: SessionRow,
    *,
    kind: str,
    model_seq_id: int,
    lora: LoraSpec,
    base_model: str,
    user_metadata: dict[str, Any] | None,
    directory: str | None = None,
    optimizer: bool = False,
    context: dict[str, Any] | None = None,
) -> Answer:
    """Journal the creation of a model, new or from a checkpoint, and answer with its request id."""
    model_id = f"{session.session_id}:train:{model_seq_id}"
    now = services.clock()
    row = ModelRow(
        model_id=model_id,
        session_id=session.session_id,
        org_id=session.org_id,
        user_id=session.user_id,
        project_id=session.project_id,
        base_model=base_model,
        lora=msgspec.json.encode(lora).decode(),
        optimizer=ADAMW,
        user_metadata=msgspec.json.encode(user_metadata).decode() if user_metadata is not None else None,
        created_at=now,
        used_at=now,
    )

    def make_job(request_id: str) -> CreateModel:
        return CreateModel(
            job_id=request_id,
            tenant=session.org_id,
            base_model=base_model,
            model_id=model_id,
            lora=lora,
            directory=directory,
            optimizer=optimizer,
        )

    draft = Draft(
        kind=kind,
        lane=creation_lane(session.session_id),
        seq=model_seq_id,
        session_id=session.session_id,
        org_id=session.org_id,
        user_id=session.user_id,
        digest=digest_of(kind.encode(), call.body),
        make_job=make_job,
        context={"model_id": model_id, "project_id": session.project_id, **(context or {})},
        statements=(statement("insert_model", row),),
    )
    if await services.jobs.known(draft.lane, draft.seq) is None:
        check_open(services)
        _check_models(services, session)

    def enqueue(work: Work) -> None:
        assert isinstance(work.job, CreateModel)
        services.access.models[model_id] = row
        services.runs.add(row, work.job).create(work)

    return promise(await services.jobs.accept(draft, enqueue), model_id)


def _check_models(services: Services, session: SessionRow) -> None:
    live = sum(row.user_id == session.user_id for row in services.access.models.values())
    if live >= services.config.max_models:
        raise OverLimitError(
            f"you have {live} live models (limit {services.config.max_models}); finish sessions you no longer need",
            retry_after_s=10,
        )


async def get_info(services: Services, call: Call) -> Answer:
    row = await services.access.model(call.caller, call.message.model_id)
    cards = {card.name: card for card in services.backend.cards()}
    card = cards.get(row.base_model)
    lora = msgspec.json.decode(row.lora, type=LoraSpec)
    answer = wire.GetInfoResponse(
        model_id=row.model_id,
        model_data=wire.ModelData(
            arch=card.arch if card is not None else None,
            model_name=row.base_model,
            tokenizer_id=(card.tokenizer_id if card is not None else None) or row.base_model,
        ),
        is_lora=True,
        lora_rank=lora.rank,
        model_name=row.base_model,
        type="get_info",
    )
    shown = msgspec.json.decode(json_codec.encode(answer))
    shown["lora_alpha"] = lora.alpha
    return Answer(msgspec.json.encode(shown))


async def forward_backward(services: Services, call: Call) -> Answer:
    return await _submit_pass(services, call, "forward_backward")


async def forward(services: Services, call: Call) -> Answer:
    return await _submit_pass(services, call, "forward")


async def _submit_pass(services: Services, call: Call, kind: str) -> Answer:
    reading: PassReading | None = None

    async def numbers() -> tuple[str, int | None]:
        nonlocal reading
        reading = await _read_pass(services, call, services.backend.cards())
        return reading.model_id, reading.seq_id

    async def prepare(run: Run) -> Prepared:
        assert reading is not None
        return await _prepare_pass(services, call, run, reading)

    return await submit_training(services, call, kind, prepare, numbers)


async def _read_pass(
    services: Services, call: Call, cards: Sequence[ModelCard], graph: bytes | None = None
) -> PassReading:
    question = PassQuestion(
        route=call.route.name,
        encoding="protobuf" if call.is_protobuf else "json",
        cards=tuple(cards),
        max_datums=services.config.max_datums,
        max_tokens=services.config.max_request_tokens,
        custom_inputs=msgspec.json.decode(graph, type=_Inputs).inputs if graph is not None else None,
    )
    reading = await services.readers.ask(call.caller.org_id, question, call.body)
    assert isinstance(reading, PassReading)
    return reading


async def _prepare_pass(services: Services, call: Call, run: Run, reading: PassReading) -> Prepared:
    row = run.row
    card = card_of(services.backend, row.base_model)
    graph = None
    if reading.fault is None and reading.is_custom:
        graph = await _custom_loss(services, call, reading)
        reading = await _read_pass(services, call, (card,), graph)
    fault = reading.fault or reading.faults.get(card.name)
    if fault is not None:
        raise fault.error()

    def make_job(request_id: str) -> AnyJob:
        return ForwardBackward(
            job_id=request_id,
            tenant=row.org_id,
            base_model=row.base_model,
            model_id=row.model_id,
            body=call.body,
            encoding="protobuf" if call.is_protobuf else "json",
            is_forward=reading.is_forward,
            custom_loss=graph,
            max_device_s=services.config.max_job_device_s,
            max_loss_device_s=services.config.max_loss_device_s,
        )

    return Prepared(
        make_job=make_job, tokens=reading.tokens, context={"is_forward": True} if reading.is_forward else {}
    )


class _Inputs(msgspec.Struct):
    inputs: list[dict[str, Any]]


async def _custom_loss(services: Services, call: Call, reading: PassReading) -> bytes:
    """Return the uploaded loss that a pass names."""
    if reading.loss_id is None:
        raise InvalidInputError("loss_fn_config: a custom loss needs loss_id, a string", field="loss_fn_config")
    return (await services.access.custom_loss(call.caller, reading.loss_id)).request


async def optim_step(services: Services, call: Call) -> Answer:
    async def prepare(run: Run) -> Prepared:
        adam_params(json_codec.decode(call.body, wire.OptimStepRequest))
        row = run.row
        return Prepared(
            make_job=lambda request_id: OptimStep(
                job_id=request_id,
                tenant=row.org_id,
                base_model=row.base_model,
                model_id=row.model_id,
                body=call.body,
            )
        )

    return await submit_training(services, call, "optim_step", prepare)


async def unload_model(services: Services, call: Call) -> Answer:
    async def prepare(run: Run) -> Prepared:
        row = run.row
        return Prepared(
            make_job=lambda request_id: Unload(
                job_id=request_id, tenant=row.org_id, base_model=row.base_model, model_id=row.model_id
            )
        )

    return await submit_training(services, call, "unload_model", prepare)


async def create_custom_loss(services: Services, call: Call) -> Answer:
    """Store an uploaded loss."""
    request = await services.readers.ask(call.caller.org_id, LossQuestion(), call.body)
    assert isinstance(request, LossReading)
    session = await services.access.live_session(call.caller, request.session_id)
    check_open(services)
    lane = loss_lane(session.session_id)
    digest = digest_of(b"create_custom_loss", call.body)
    loss_id = f"loss-{digest_of(lane.encode(), str(request.number).encode(), digest.encode())[:32]}"
    row = CustomLossRow(
        loss_id=loss_id,
        session_id=session.session_id,
        org_id=session.org_id,
        user_id=session.user_id,
        name=request.name,
        request=call.body,
        created_at=services.clock(),
    )
    draft = Draft(
        kind="create_custom_loss",
        lane=lane,
        seq=request.number,
        session_id=session.session_id,
        org_id=session.org_id,
        user_id=session.user_id,
        digest=digest,
        statements=(statement("insert_custom_loss", row),),
    )
    answer = wire.CreateCustomLossResponse(loss_id=loss_id)
    return promise(await services.jobs.settle_at_once(draft, answer))


HANDLERS: Handlers = {
    "create_model": create_model,
    "get_info": get_info,
    "forward_backward": forward_backward,
    "forward": forward,
    "optim_step": optim_step,
    "unload_model": unload_model,
    "create_custom_loss": create_custom_loss,
}
