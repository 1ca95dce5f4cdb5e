"""Models and training: create_model, get_info, the passes, optimizer steps, custom losses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from support import server_arithmetic as arithmetic
from support.server_answers import RefusedError
from support.server_core import MODELS, Call, Core, Handler
from support.server_state import Model, Promise, Session
from tinsmith.wire.messages.futures import UntypedAPIFuture
from tinsmith.wire.messages.training import (
    CreateCustomLossResponse,
    CreateModelResponse,
    ForwardBackwardInput,
    ForwardBackwardOutput,
    GetInfoResponse,
    LoraConfig,
    ModelData,
    OptimStepResponse,
    UnloadModelResponse,
)
from tinsmith.wire.routes import table as routes


def promised(promise: Promise, model_id: str | None = None) -> UntypedAPIFuture:
    return UntypedAPIFuture(request_id=promise.request_id, model_id=model_id)


def owned_model(core: Core, model_id: str | None, user: str) -> Model:
    model = core.state.model(model_id)
    if model.owner != user:
        raise RefusedError(404, f"model {model_id} does not exist")
    return model


def owned_session(core: Core, session_id: str, user: str) -> Session:
    session = core.state.session(session_id)
    if session.owner != user:
        raise RefusedError(404, f"session {session_id} does not exist")
    return session


def add_model(core: Core, session: Session, model_seq_id: int, base_model: str, lora: Any, optimizer: str) -> Model:
    """A model with the id that clients rely on, `<session>:train:<number>`."""
    state = core.state
    model_id = f"{session.session_id}:train:{model_seq_id}"
    if core.vintage.has_plain_ids:
        model_id = f"model_{state.number():08x}"
    model = Model(model_id, session.owner, session.session_id, base_model, lora, optimizer, None, state.now())
    state.models[model_id] = model
    return model


async def create_model(core: Core, call: Call) -> UntypedAPIFuture:
    request, state = call.request, core.state
    session = owned_session(core, request.session_id, call.user)
    if request.base_model not in MODELS:
        raise RefusedError(400, f"base_model {request.base_model!r} is not served here")
    promise = state.known(session, "model", request.model_seq_id, call.content)
    if promise is not None:
        return promised(promise)
    lora = request.lora_config or LoraConfig(rank=32)
    model = add_model(core, session, request.model_seq_id, request.base_model, lora, request.optimizer_config.type)
    model.user_metadata = request.user_metadata
    request_id = f"{session.session_id}:create:{request.model_seq_id}"
    promise = state.promise(request_id, call.route, lambda: CreateModelResponse(model_id=model.model_id))
    session.used["model", request.model_seq_id] = (call.content, promise)
    state.start(promise)
    return promised(promise, model.model_id)


async def get_info(core: Core, call: Call) -> GetInfoResponse:
    model = owned_model(core, call.request.model_id, call.user)
    return GetInfoResponse(
        model_id=model.model_id,
        model_data=ModelData(arch="stub", model_name=model.base_model, tokenizer_id=model.base_model),
        optimizer_config={"type": model.optimizer_type},
        is_lora=True,
        lora_rank=model.lora_config.rank,
        model_name=model.base_model,
        type="get_info",
    )


async def forward_backward(core: Core, call: Call) -> UntypedAPIFuture:
    return _submit_pass(core, call, call.request.forward_backward_input, not call.request.forward_only)


async def forward(core: Core, call: Call) -> UntypedAPIFuture:
    return _submit_pass(core, call, call.request.forward_input, is_backward=False)


def _submit_pass(core: Core, call: Call, work: ForwardBackwardInput, is_backward: bool) -> UntypedAPIFuture:
    model = owned_model(core, call.request.model_id, call.user)
    _check_data(core, work)

    def run() -> ForwardBackwardOutput:
        model.passes += is_backward
        core.state.count(model.session_id, "training", sum(datum.model_input.length for datum in work.data))
        return arithmetic.run_loss(work.data, core.settings.extra_metrics)

    promise = core.state.submit(model, call.route, call.request.seq_id, call.content, run)
    return promised(promise, model.model_id)


def _check_data(core: Core, work: ForwardBackwardInput) -> None:
    limit = core.settings.flags.get("fwdbwd_max_chunk_len", 1024)
    if len(work.data) > limit:
        core.state.violate(f"forward_backward: {len(work.data)} datums, the limit is {limit}")
    if work.loss_fn == "custom" and str((work.loss_fn_config or {}).get("loss_id")) not in core.state.losses:
        raise RefusedError(400, "loss_fn_config: loss_id names no loss")
    for i, datum in enumerate(work.data):
        if "target_tokens" not in datum.loss_fn_inputs:
            raise RefusedError(400, f"data[{i}].loss_fn_inputs: target_tokens is missing")


async def optim_step(core: Core, call: Call) -> UntypedAPIFuture:
    model = owned_model(core, call.request.model_id, call.user)

    def run() -> OptimStepResponse:
        model.steps += 1
        return OptimStepResponse(metrics={"step": float(model.steps), **core.settings.optim_metrics})

    promise = core.state.submit(model, call.route, call.request.seq_id, call.content, run)
    return promised(promise, model.model_id)


async def unload_model(core: Core, call: Call) -> UntypedAPIFuture:
    model = owned_model(core, call.request.model_id, call.user)
    run = lambda: UnloadModelResponse(model_id=model.model_id, type="unload_model")  # noqa: E731
    return promised(core.state.submit(model, call.route, None, call.content, run), model.model_id)


async def create_custom_loss(core: Core, call: Call) -> UntypedAPIFuture:
    request, state = call.request, core.state
    if not core.has_flag("custom_loss_server_side"):
        state.violate("create_custom_loss: the server did not offer it")
    session = owned_session(core, request.session_id, call.user)
    promise = state.known(session, "loss", request.custom_loss_seq_id, call.content)
    if promise is None:
        loss_id = f"{session.session_id}:loss:{request.custom_loss_seq_id}"
        state.losses[loss_id] = request
        promise = state.promise(loss_id, call.route, lambda: CreateCustomLossResponse(loss_id=loss_id))
        session.used["loss", request.custom_loss_seq_id] = (call.content, promise)
        state.start(promise)
    return promised(promise)


HANDLERS: Mapping[str, Handler] = {
    routes.CREATE_MODEL.name: create_model,
    routes.GET_INFO.name: get_info,
    routes.FORWARD_BACKWARD.name: forward_backward,
    routes.FORWARD.name: forward,
    routes.OPTIM_STEP.name: optim_step,
    routes.UNLOAD_MODEL.name: unload_model,
    routes.CREATE_CUSTOM_LOSS.name: create_custom_loss,
}
