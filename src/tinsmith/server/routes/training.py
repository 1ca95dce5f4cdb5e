"""Models and what is done with them: create, look, forward, backward, step, unload; uploaded losses."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable
from typing import Any

import msgspec

from tinsmith.engine.base import AnyJob, CreateModel, ForwardBackward, LoraSpec, ModelCard, OptimStep, Unload
from tinsmith.errors import InvalidInputError
from tinsmith.server.calls import Answer, Call, Handlers
from tinsmith.server.refusals import OverLimitError
from tinsmith.server.runs import Run, creation_lane
from tinsmith.server.services import Services
from tinsmith.server.submitting import Prepared, check_open, promise, submit_training
from tinsmith.server.work import Draft, Work, digest_of
from tinsmith.store.base import statement
from tinsmith.store.rows import CustomLossRow, ModelRow, SessionRow
from tinsmith.wire import json_codec, proto_training
from tinsmith.wire import training as wire
from tinsmith.wire.losses import check_loss

MAX_RANK = 512
MAX_GRAPH_BYTES = 1024 * 1024
ADAMW = '{"type":"adamw"}'


async def create_model(services: Services, call: Call) -> Answer:
    request = json_codec.decode(call.body, wire.CreateModelRequest)
    session = await services.access.live_session(call.caller, request.session_id)
    card = card_of(services, request.base_model)
    if not card.trainable:
        raise InvalidInputError(f"base_model: {card.name} cannot be trained here", field="base_model")
    if not isinstance(request.optimizer_config, wire.AdamOptimizerConfig):
        raise InvalidInputError("optimizer_config: only adamw is offered here", field="optimizer_config")
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
    """Journal the making of a model, from nothing or from a checkpoint; answers with its promise."""
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
            f"you have {live} live models (limit {services.config.max_models}); close sessions you are done with",
            retry_after_s=10,
        )


def card_of(services: Services, name: str) -> ModelCard:
    """A base model by name, or an error that lists those there are."""
    cards = services.backend.cards()
    for card in cards:
        if card.name == name:
            return card
    known = ", ".join(card.name for card in cards) or "none"
    raise InvalidInputError(f"base_model: {name!r} is not served here (served: {known})", field="base_model")


def lora_spec(config: wire.LoraConfig | None, card: ModelCard) -> LoraSpec:
    """The adapter that is asked for, with a seed drawn where none was given."""
    if config is None:
        raise InvalidInputError("lora_config: is missing; this server trains LoRA adapters", field="lora_config")
    if config.rank > MAX_RANK:
        raise InvalidInputError(
            f"lora_config.rank: {config.rank} is not between 1 and {MAX_RANK}", field="lora_config.rank"
        )
    if not (config.train_attn or config.train_mlp or config.train_unembed):
        raise InvalidInputError("lora_config: train_attn, train_mlp and train_unembed are all false: nothing to train")
    seed = config.seed if config.seed is not None else secrets.randbelow(2**31)
    if not -(2**63) <= seed < 2**63:
        raise InvalidInputError(f"lora_config.seed: {seed} has more than 64 bits", field="lora_config.seed")
    return LoraSpec(
        rank=config.rank,
        seed=seed,
        train_attn=config.train_attn,
        train_mlp=config.train_mlp,
        train_unembed=config.train_unembed,
        alpha=card.lora_alpha,
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
    return await submit_training(services, call, "forward_backward", lambda run: _prepare_pass(services, call, run))


async def forward(services: Services, call: Call) -> Answer:
    return await submit_training(services, call, "forward", lambda run: _prepare_pass(services, call, run))


async def _prepare_pass(services: Services, call: Call, run: Run) -> Prepared:
    if call.is_protobuf:
        request: Any = proto_training.decode_request(call.body, services.config.max_datums)
    else:
        request = json_codec.decode(call.body, call.route.request or wire.ForwardBackwardRequest)
    is_forward = isinstance(request, wire.ForwardRequest) or bool(request.forward_only)
    work = request.forward_input if isinstance(request, wire.ForwardRequest) else request.forward_backward_input
    if len(work.data) > services.config.max_datums:
        raise InvalidInputError(
            f"data: {len(work.data)} datums in one request (limit {services.config.max_datums})", field="data"
        )
    card = card_of(services, run.row.base_model)
    graph = await _custom_loss(services, call, work)
    inputs = msgspec.json.decode(graph, type=_Inputs).inputs if graph is not None else None
    check_loss(
        request,
        vocab_size=card.vocab_size,
        max_context_length=card.max_context_length,
        custom_inputs=[wire.CustomLossInput(**item) for item in inputs] if inputs is not None else None,
    )
    tokens = sum(datum.model_input.length for datum in work.data)
    if tokens > services.config.max_request_tokens:
        raise InvalidInputError(
            f"data: {tokens} tokens in one request (limit {services.config.max_request_tokens})", field="data"
        )
    row = run.row

    def make_job(request_id: str) -> AnyJob:
        return ForwardBackward(
            job_id=request_id,
            tenant=row.org_id,
            base_model=row.base_model,
            model_id=row.model_id,
            body=call.body,
            encoding="protobuf" if call.is_protobuf else "json",
            is_forward=is_forward,
            custom_loss=graph,
        )

    return Prepared(make_job=make_job, tokens=tokens, context={"is_forward": True} if is_forward else {})


class _Inputs(msgspec.Struct):
    inputs: list[dict[str, Any]]


async def _custom_loss(services: Services, call: Call, work: wire.ForwardBackwardInput) -> bytes | None:
    """The uploaded loss that a pass names."""
    if work.loss_fn != "custom":
        return None
    loss_id = (work.loss_fn_config or {}).get("loss_id")
    if not isinstance(loss_id, str):
        raise InvalidInputError("loss_fn_config: a custom loss needs loss_id, a text", field="loss_fn_config")
    return (await services.access.custom_loss(call.caller, loss_id)).request


async def optim_step(services: Services, call: Call) -> Answer:
    async def prepare(run: Run) -> Prepared:
        request = json_codec.decode(call.body, wire.OptimStepRequest)
        if request.adam_params is None:
            raise InvalidInputError(
                "optimizer_params: Dimuon has no public definition and is not offered; send adam_params",
                field="optimizer_params",
            )
        _check_adam(request.adam_params)
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


_ADAM_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "learning_rate": (lambda value: value >= 0, "0 or more"),
    "beta1": (lambda value: 0 <= value < 1, "in [0, 1)"),
    "beta2": (lambda value: 0 <= value < 1, "in [0, 1)"),
    "eps": (lambda value: value >= 0, "0 or more"),
    "weight_decay": (lambda value: value >= 0, "0 or more"),
    "grad_clip_norm": (lambda value: value >= 0, "0 (off) or more"),
}


def _check_adam(params: wire.AdamParams) -> None:
    for name, (is_good, allowed) in _ADAM_RANGES.items():
        value = getattr(params, name)
        if not math.isfinite(value) or not is_good(value):
            raise InvalidInputError(f"adam_params.{name}: {value} is not {allowed}", field=f"adam_params.{name}")


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
    """Keep an uploaded loss. The engine runs it through an allow-list; nothing of it is executed here."""
    request = json_codec.decode(call.body, wire.CreateCustomLossRequest)
    session = await services.access.live_session(call.caller, request.session_id)
    check_open(services)
    if len(call.body) > MAX_GRAPH_BYTES:
        raise InvalidInputError(f"graph: larger than {MAX_GRAPH_BYTES} bytes", field="graph")
    if not request.inputs or request.inputs[0].name != "logprobs":
        raise InvalidInputError("inputs: the first input of a loss must be logprobs", field="inputs")
    if not any(node.op == "output" for node in request.graph.nodes):
        raise InvalidInputError("graph: has no output node", field="graph")
    lane = f"{session.session_id}/losses"
    digest = digest_of(b"create_custom_loss", call.body)
    loss_id = f"loss-{digest_of(lane.encode(), str(request.custom_loss_seq_id).encode(), digest.encode())[:32]}"
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
        seq=request.custom_loss_seq_id,
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
