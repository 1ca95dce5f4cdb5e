"""Saving, loading, exporting and copying weights."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from support.server_answers import RefusedError
from support.server_core import MODELS, Call, Core, Handler
from support.server_sampling import add_sampler
from support.server_state import Checkpoint, JobError, Model
from support.server_training import add_model, owned_model, owned_session, promised
from tinsmith.errors import InvalidInputError
from tinsmith.wire.messages.futures import UntypedAPIFuture
from tinsmith.wire.messages.weights import (
    CopyWeightsResponse,
    LoadWeightsResponse,
    ParsedCheckpointTinkerPath,
    SaveWeightsExternalResponseInternal,
    SaveWeightsForSamplerResponseInternal,
    SaveWeightsResponse,
    WeightsInfoResponse,
    tinker_path,
)
from tinsmith.wire.routes import table as routes

NAME = re.compile(r"[\w.-]{1,255}", re.ASCII)
TOKEN_HEADER = "x-tinker-weights-access-token"


async def save_weights(core: Core, call: Call) -> UntypedAPIFuture:
    request = call.request
    model = owned_model(core, request.model_id, call.user)
    name = request.path or f"{request.seq_id or 0:06d}"

    def run() -> SaveWeightsResponse:
        checkpoint = _save(core, model, "weights", name, request.ttl_seconds, request.user_metadata, request.overwrite)
        return SaveWeightsResponse(path=checkpoint.path, type="save_weights")

    _check_name(core, model, "weights", name)
    return promised(core.state.submit(model, call.route, request.seq_id, call.content, run), model.model_id)


async def save_weights_for_sampler(core: Core, call: Call) -> UntypedAPIFuture:
    request = call.request
    model = owned_model(core, request.model_id, call.user)
    number = request.sampling_session_seq_id
    name = request.path or f"ephemeral-{number}"

    def run() -> SaveWeightsForSamplerResponseInternal:
        checkpoint = _save(core, model, "sampler_weights", name, request.ttl_seconds, request.user_metadata, False)
        if request.path is not None:
            return SaveWeightsForSamplerResponseInternal(path=checkpoint.path, type="save_weights_for_sampler")
        checkpoint.is_ephemeral = True
        session = core.state.session(model.session_id)
        sampler = add_sampler(core, session, number, model.base_model, checkpoint.path, call.content)
        return SaveWeightsForSamplerResponseInternal(
            sampling_session_id=sampler.sampler_id, type="save_weights_for_sampler"
        )

    if (request.path is None) == (number is None):
        raise RefusedError(400, "give path or sampling_session_seq_id, exactly one of them")
    _check_name(core, model, "sampler_weights", name)
    return promised(core.state.submit(model, call.route, request.seq_id, call.content, run), model.model_id)


async def save_weights_external(core: Core, call: Call) -> UntypedAPIFuture:
    request = call.request
    model = owned_model(core, request.model_id, call.user)

    def run() -> SaveWeightsExternalResponseInternal:
        checkpoint = _save(core, model, "external_weights", request.path, request.ttl_seconds, None, False)
        if request.age_encryption_recipients:
            checkpoint.files = {f"{name}.age": content for name, content in checkpoint.files.items()}
        return SaveWeightsExternalResponseInternal(
            path=checkpoint.path, size_bytes=checkpoint.size_bytes, type="save_weights_external"
        )

    _check_name(core, model, "external_weights", request.path)
    return promised(core.state.submit(model, call.route, request.seq_id, call.content, run), model.model_id)


async def load_weights(core: Core, call: Call) -> UntypedAPIFuture:
    request = call.request
    reader = core.user_of(request.weights_access_token, call.user)
    if request.model_id is None:
        return _create_by_loading(core, call, reader)
    model = owned_model(core, request.model_id, call.user)

    def run() -> LoadWeightsResponse:
        if core.vintage.has_plain_ids and (model.passes or model.steps):
            raise JobError("weights can only be loaded into a model that nothing was asked of before")
        _load(core, model, request.path, reader)
        return LoadWeightsResponse(path=request.path, model_id=model.model_id, type="load_weights")

    return promised(core.state.submit(model, call.route, request.seq_id, call.content, run), model.model_id)


def _create_by_loading(core: Core, call: Call, reader: str) -> UntypedAPIFuture:
    request, state = call.request, core.state
    if not core.has_flag("create_model_via_load_weights"):
        state.violate("load_weights: creates a model though the server did not offer it")
    if request.session_id is None or request.model_seq_id is None:
        raise RefusedError(422, "give model_id, or session_id and model_seq_id")
    session = owned_session(core, request.session_id, call.user)
    promise = state.known(session, "model", request.model_seq_id, call.content)
    if promise is not None:
        return promised(promise)
    source = state.checkpoint(request.path, reader)
    optimizer = request.optimizer_config.type if request.optimizer_config is not None else source.optimizer_type
    model = add_model(core, session, request.model_seq_id, source.base_model, source.lora_config, optimizer)
    model.user_metadata = request.user_metadata

    def run() -> LoadWeightsResponse:
        _load(core, model, request.path, reader)
        return LoadWeightsResponse(path=request.path, model_id=model.model_id, type="load_weights")

    promise = state.promise(f"{model.model_id}:load", call.route, run)
    session.used["model", request.model_seq_id] = (call.content, promise)
    state.start(promise)
    return promised(promise, model.model_id)


async def weights_info(core: Core, call: Call) -> WeightsInfoResponse:
    checkpoint = core.state.checkpoint(_checked_path(call.request.tinker_path), call.user)
    lora = checkpoint.lora_config
    return WeightsInfoResponse(
        base_model=checkpoint.base_model,
        is_lora=True,
        optimizer_config={"type": checkpoint.optimizer_type},
        lora_rank=lora.rank,
        train_unembed=lora.train_unembed,
        train_mlp=lora.train_mlp,
        train_attn=lora.train_attn,
    )


async def copy_weights(core: Core, call: Call) -> CopyWeightsResponse:
    request, state = call.request, core.state
    token = call.recorded.headers.get(TOKEN_HEADER, request.weights_access_token)
    source = state.checkpoint(_checked_path(request.source_path), core.user_of(token, call.user))
    if request.destination_project_id is not None:
        run_id = f"copy-{state.number()}"
    elif request.session_id is not None and request.model_seq_id is not None:
        run_id = f"{owned_session(core, request.session_id, call.user).session_id}:train:{request.model_seq_id}"
    else:
        raise RefusedError(400, "give destination_project_id, or session_id and model_seq_id")
    now = state.now()
    expires = None if request.ttl_seconds is None else now + timedelta(seconds=request.ttl_seconds)
    copy = Checkpoint(
        **{name: getattr(source, name) for name in ("kind", "name", "base_model", "lora_config", "optimizer_type")},
        run_id=run_id,
        owner=call.user,
        created_at=now,
        steps=source.steps,
        expires_at=expires,
        project_id=request.destination_project_id,
        files=source.files,
    )
    state.checkpoints[copy.path] = copy
    return CopyWeightsResponse(tinker_path=copy.path)


def _checked_path(path: str) -> str:
    try:
        return ParsedCheckpointTinkerPath.from_tinker_path(path).tinker_path
    except InvalidInputError as error:
        raise RefusedError(400, str(error)) from None


def _check_name(core: Core, model: Model, kind: str, name: str) -> None:
    if NAME.fullmatch(name) is None:
        raise RefusedError(400, f"path: {name!r} is not a name (letters, digits, '_', '-', '.')")
    assert tinker_path(model.model_id, kind, name)


def _save(
    core: Core, model: Model, kind: str, name: str, ttl_s: int | None, metadata: dict[str, str] | None, overwrite: bool
) -> Checkpoint:
    state = core.state
    path = tinker_path(model.model_id, kind, name)
    if path in state.checkpoints and not overwrite:
        raise JobError(f"{path} exists; pass overwrite to replace it")
    now = state.now()
    checkpoint = Checkpoint(
        run_id=model.model_id,
        owner=model.owner,
        kind=kind,
        name=name,
        created_at=now,
        base_model=model.base_model,
        lora_config=model.lora_config,
        optimizer_type=model.optimizer_type,
        steps=model.steps,
        user_metadata=metadata,
        expires_at=None if ttl_s is None else now + timedelta(seconds=ttl_s),
        files=_files(model),
    )
    state.checkpoints[path] = checkpoint
    state.count(model.session_id, "checkpoint", 1)
    state.audit.append({"timestamp": now, "event": "checkpoint_saved", "model_id": model.model_id, "tinker_path": path})
    return checkpoint


def _load(core: Core, model: Model, path: str, reader: str) -> None:
    try:
        checkpoint = core.state.checkpoint(path, reader)
    except RefusedError as error:
        raise JobError(str(error)) from None
    if checkpoint.base_model not in MODELS:
        raise JobError(f"{path} is of {checkpoint.base_model}, which is not served here")
    model.steps = checkpoint.steps
    model.loaded_from = path


def _files(model: Model) -> dict[str, bytes]:
    """An adapter as tools expect it: a configuration and a small, valid safetensors file."""
    config = {"base_model_name_or_path": model.base_model, "peft_type": "LORA", "r": model.lora_config.rank}
    values = struct.pack("<1024f", *(float(model.steps + i) for i in range(1024)))
    header: dict[str, Any] = {"lora": {"dtype": "F32", "shape": [1024], "data_offsets": [0, len(values)]}}
    encoded = json.dumps(header).encode()
    return {
        "adapter_config.json": json.dumps(config).encode(),
        "adapter_model.safetensors": struct.pack("<Q", len(encoded)) + encoded + values,
    }


HANDLERS: Mapping[str, Handler] = {
    routes.SAVE_WEIGHTS.name: save_weights,
    routes.SAVE_WEIGHTS_FOR_SAMPLER.name: save_weights_for_sampler,
    routes.SAVE_WEIGHTS_EXTERNAL.name: save_weights_external,
    routes.LOAD_WEIGHTS.name: load_weights,
    routes.WEIGHTS_INFO.name: weights_info,
    routes.COPY_WEIGHTS.name: copy_weights,
}
