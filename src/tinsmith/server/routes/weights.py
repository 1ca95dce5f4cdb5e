"""Saving, loading, exporting and copying weights."""

from __future__ import annotations

import asyncio
import secrets
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from tinsmith.engine.protocol import LoadState, LoraSpec, SaveState
from tinsmith.errors import InvalidInputError, StoreError
from tinsmith.server.auth.access import project_statement
from tinsmith.server.call import IDEMPOTENCY_HEADER, Answer, Call, Handlers, reply
from tinsmith.server.checkpoints.disk_budget import kind_of
from tinsmith.server.checkpoints.encryption import check_recipients
from tinsmith.server.checkpoints.retention import check_disk_cap
from tinsmith.server.data_dir import check_name, link_tree, remove_tree
from tinsmith.server.jobs.accept import Prepared, check_open, submit_training
from tinsmith.server.jobs.job import digest_of
from tinsmith.server.routes.sampling import number_taken
from tinsmith.server.routes.sessions import MAX_METADATA_BYTES
from tinsmith.server.routes.training import create
from tinsmith.server.runs.model_spec import ADAMW, card_of
from tinsmith.server.runs.registry import Run
from tinsmith.server.services import Services
from tinsmith.store.base import statement
from tinsmith.store.rows import AuditRow, CheckpointRow, ModelRow, SamplerRow, SessionRow
from tinsmith.wire.codecs import json_codec
from tinsmith.wire.messages import weights as wire

MAX_TTL_S = 10 * 366 * 86_400
ACCESS_TOKEN_HEADER = "x-tinker-weights-access-token"


async def save_weights(services: Services, call: Call) -> Answer:
    async def prepare(run: Run) -> Prepared:
        request = json_codec.decode(call.body, wire.SaveWeightsRequest)
        return await _prepare_save(
            services,
            run,
            kind="weights",
            name=request.path or f"checkpoint-{request.seq_id or secrets.token_hex(4)}",
            overwrite=request.overwrite,
            ttl_seconds=request.ttl_seconds,
            user_metadata=request.user_metadata,
            optimizer=True,
        )

    return await submit_training(services, call, "save_weights", prepare)


async def save_weights_for_sampler(services: Services, call: Call) -> Answer:
    async def prepare(run: Run) -> Prepared:
        request = json_codec.decode(call.body, wire.SaveWeightsForSamplerRequest)
        if request.path is not None and request.sampling_session_seq_id is not None:
            raise InvalidInputError(
                "give path (a lasting checkpoint) or sampling_session_seq_id (a temporary sampler), not both"
            )
        if request.sampling_session_seq_id is not None:
            return await _prepare_sampler(services, run, request.sampling_session_seq_id)
        return await _prepare_save(
            services,
            run,
            kind="sampler_weights",
            name=request.path or f"sampler-{request.seq_id or secrets.token_hex(4)}",
            overwrite=False,
            ttl_seconds=request.ttl_seconds,
            user_metadata=request.user_metadata,
            optimizer=False,
        )

    return await submit_training(services, call, "save_weights_for_sampler", prepare)


async def save_weights_external(services: Services, call: Call) -> Answer:
    async def prepare(run: Run) -> Prepared:
        request = json_codec.decode(call.body, wire.SaveWeightsExternalRequest)
        recipients = request.age_encryption_recipients
        if recipients is not None:
            check_recipients(recipients)
        return await _prepare_save(
            services,
            run,
            kind="external_weights",
            name=request.path,
            overwrite=False,
            ttl_seconds=request.ttl_seconds,
            user_metadata=None,
            optimizer=False,
            context={"recipients": recipients},
        )

    return await submit_training(services, call, "save_weights_external", prepare)


async def _prepare_save(
    services: Services,
    run: Run,
    *,
    kind: str,
    name: str,
    overwrite: bool,
    ttl_seconds: int | None,
    user_metadata: Mapping[str, str] | None,
    optimizer: bool,
    context: Mapping[str, Any] | None = None,
) -> Prepared:
    row = run.row
    path = wire.tinker_path(row.model_id, kind, check_name(name))
    if ttl_seconds is not None:
        check_ttl(ttl_seconds)
    metadata = msgspec.json.encode(user_metadata).decode() if user_metadata is not None else None
    if metadata is not None and len(metadata) > MAX_METADATA_BYTES:
        raise InvalidInputError(f"user_metadata: larger than {MAX_METADATA_BYTES} bytes", field="user_metadata")
    taken = await services.store.read(CheckpointRow, "checkpoint", path=path)
    if (taken or path in services.saves) and not overwrite:
        raise InvalidInputError(
            f"path: {path} already exists; choose another name, or set overwrite=True", field="path"
        )
    await check_disk_cap(services)
    directory = str(services.files.checkpoint(row.model_id, kind, name, secrets.token_hex(8)))
    services.disk.reserve(row.org_id, directory, kind_of(row.base_model, row.lora, optimizer))
    replaces = [*(found.directory for found in taken), *services.saves.directories(path)]
    services.saves.begin(path, directory)
    return Prepared(
        make_job=lambda request_id: SaveState(
            job_id=request_id,
            tenant=row.org_id,
            base_model=row.base_model,
            model_id=row.model_id,
            directory=directory,
            optimizer=optimizer,
        ),
        context={
            "path": path,
            "kind": kind,
            "name": name,
            "ttl_seconds": ttl_seconds,
            "user_metadata": metadata,
            "replaces": replaces,
            "lora": row.lora,
            "optimizer": row.optimizer,
            **(context or {}),
        },
        undo=lambda: services.saves.end(path, directory),
    )


async def _prepare_sampler(services: Services, run: Run, number: int) -> Prepared:
    row = run.row
    sampler_id = f"{row.session_id}:sample:{number}"
    if await services.store.read(SamplerRow, "sampler", sampler_id=sampler_id):
        raise number_taken(number)
    directory = services.files.sampler(sampler_id)
    services.disk.reserve(row.org_id, str(directory), kind_of(row.base_model, row.lora, False))
    return Prepared(
        make_job=lambda request_id: SaveState(
            job_id=request_id,
            tenant=row.org_id,
            base_model=row.base_model,
            model_id=row.model_id,
            directory=str(directory),
            optimizer=False,
        ),
        context={"sampler_id": sampler_id},
        undo=lambda: services.disk.release(str(directory)),
    )


def check_ttl(ttl_seconds: int) -> None:
    if not 0 < ttl_seconds <= MAX_TTL_S:
        raise InvalidInputError(
            f"ttl_seconds: {ttl_seconds} is not between 1 and {MAX_TTL_S} (10 years)", field="ttl_seconds"
        )


async def load_weights(services: Services, call: Call) -> Answer:
    request = json_codec.decode(call.body, wire.LoadWeightsRequest)
    if request.session_id is not None:
        return await _create_via_load(services, call, request)

    async def prepare(run: Run) -> Prepared:
        source = await _loadable(services, call, request)
        row = run.row
        _check_fits(row, source)
        place = _second_name(services, row.model_id, source)
        await asyncio.to_thread(link_tree, Path(source.directory), place)
        return Prepared(
            make_job=lambda request_id: LoadState(
                job_id=request_id,
                tenant=row.org_id,
                base_model=row.base_model,
                model_id=row.model_id,
                directory=str(place),
                optimizer=request.optimizer,
            ),
            context={"path": source.path, "model_id": row.model_id},
        )

    return await submit_training(services, call, "load_weights", prepare)


def _second_name(services: Services, model_id: str, source: CheckpointRow) -> Path:
    """Return where a run's links to a checkpoint are. They are named after what is loaded, which never changes, so a
    request that is sent again has the same; they stay as long as the run."""
    return services.files.loads(model_id) / digest_of(source.directory.encode())[:16]


async def _create_via_load(services: Services, call: Call, request: wire.LoadWeightsRequest) -> Answer:
    if request.model_seq_id is None or request.model_id is not None:
        raise InvalidInputError("load_weights needs model_id and seq_id, or session_id and model_seq_id")
    session = await services.access.live_session(call.caller, request.session_id or "")
    source = await _loadable(services, call, request)
    if request.base_model is not None and request.base_model != source.base_model:
        raise InvalidInputError(
            f"base_model: {request.base_model!r}, but {source.path} was trained on {source.base_model}",
            field="base_model",
        )
    card_of(services.backend, source.base_model)
    place = _second_name(services, f"{session.session_id}:train:{request.model_seq_id}", source)
    await asyncio.to_thread(link_tree, Path(source.directory), place)
    return await create(
        services,
        call,
        session,
        kind="load_weights",
        model_seq_id=request.model_seq_id,
        lora=msgspec.json.decode(source.lora, type=LoraSpec),
        base_model=source.base_model,
        user_metadata=request.user_metadata,
        directory=str(place),
        optimizer=request.optimizer,
        context={"path": source.path},
    )


async def _loadable(services: Services, call: Call, request: wire.LoadWeightsRequest) -> CheckpointRow:
    token = request.weights_access_token or call.headers.get(ACCESS_TOKEN_HEADER)
    source = await services.access.checkpoint(call.caller, request.path, token=token)
    if source.kind == "external_weights":
        raise InvalidInputError(
            f"path: {source.path} is an export and cannot be loaded; use a weights path", field="path"
        )
    if not Path(source.directory).is_dir():
        raise InvalidInputError(
            f"path: the files of {source.path} no longer exist; use another checkpoint", field="path"
        )
    if source.kind != "weights" and request.optimizer:
        raise InvalidInputError(
            f"path: {source.path} has no optimizer state; load it without one, or use a weights path", field="path"
        )
    return source


def _check_fits(row: ModelRow, source: CheckpointRow) -> None:
    mine, theirs = (msgspec.json.decode(text, type=LoraSpec) for text in (row.lora, source.lora))
    wrong = [
        f"{name} {getattr(theirs, name)} instead of {getattr(mine, name)}"
        for name in ("rank", "train_attn", "train_mlp", "train_unembed", "alpha")
        if getattr(mine, name) != getattr(theirs, name)
    ]
    if source.base_model != row.base_model:
        wrong.append(f"base model {source.base_model} instead of {row.base_model}")
    if wrong:
        raise InvalidInputError(
            f"path: {source.path} does not fit {row.model_id}: {', '.join(wrong)}; "
            "create_training_client_from_state creates a model that fits",
            field="path",
        )


async def weights_info(services: Services, call: Call) -> Answer:
    row = await services.access.checkpoint(
        call.caller, call.message.tinker_path, token=call.headers.get(ACCESS_TOKEN_HEADER)
    )
    lora = msgspec.json.decode(row.lora, type=LoraSpec)
    return reply(
        wire.WeightsInfoResponse(
            base_model=row.base_model,
            is_lora=True,
            lora_rank=lora.rank,
            train_unembed=lora.train_unembed,
            train_mlp=lora.train_mlp,
            train_attn=lora.train_attn,
        )
    )


async def copy_weights(services: Services, call: Call) -> Answer:
    """Copy a checkpoint to a run of the caller, in a project or a session."""
    check_open(services)
    request: wire.CopyWeightsRequest = call.message
    token = request.weights_access_token or call.headers.get(ACCESS_TOKEN_HEADER)
    source = await services.access.checkpoint(call.caller, request.source_path, token=token)
    if request.ttl_seconds is not None:
        check_ttl(request.ttl_seconds)
    await check_disk_cap(services)
    now = services.clock()
    session, statements = await _copy_target(services, call, request, now)
    model_id = f"{session.session_id}:train:{request.model_seq_id or 0}"
    path = wire.tinker_path(model_id, source.kind, source.name)
    taken = await services.store.read(CheckpointRow, "checkpoint", path=path)
    if taken and taken[0].digest == source.digest:
        return reply(wire.CopyWeightsResponse(tinker_path=path))
    if taken or path in services.saves:
        raise InvalidInputError(f"source_path: {path} already exists; use another model_seq_id", field="source_path")
    services.disk.check(session.org_id, source.size_bytes, "source_path")
    directory = services.files.checkpoint(model_id, source.kind, source.name, secrets.token_hex(8))
    await asyncio.to_thread(link_tree, Path(source.directory), directory)
    owner = {"org_id": session.org_id, "user_id": session.user_id, "project_id": session.project_id}
    model = ModelRow(
        model_id=model_id,
        session_id=session.session_id,
        base_model=source.base_model,
        lora=source.lora,
        optimizer=ADAMW,
        created_at=now,
        used_at=now,
        state="unloaded",
        **owner,  # type: ignore[arg-type]
    )
    changed = {
        **owner,
        "path": path,
        "model_id": model_id,
        "session_id": session.session_id,
        "directory": str(directory),
        "public": False,
        "created_at": now,
        "expires_at": now + request.ttl_seconds if request.ttl_seconds is not None else None,
    }
    copied = CheckpointRow(**{**source.parameters(), **changed})  # type: ignore[arg-type]
    try:
        await services.store.write(
            *statements,
            statement("insert_model_if_absent", model),
            statement("put_checkpoint", copied),
            audit(services, call, "checkpoint_copied", copied, {"source": source.path}),
        )
    except StoreError:
        await asyncio.to_thread(remove_tree, directory)
        raise
    services.disk.add(session.org_id, source.size_bytes)
    return reply(wire.CopyWeightsResponse(tinker_path=path))


async def _copy_target(
    services: Services, call: Call, request: wire.CopyWeightsRequest, now: float
) -> tuple[SessionRow, list[Any]]:
    """Return the session of a copy. A copy into a project gets a session of its own, which has ended at once; a
    request that is sent again finds it by its idempotency key."""
    if request.session_id is not None:
        return await services.access.live_session(call.caller, request.session_id), []
    key = call.headers.get(IDEMPOTENCY_HEADER)
    project_id = call.caller.project_for(request.destination_project_id or None)
    names = call.caller.namespace
    session_id = str(uuid.uuid4() if key is None else uuid.UUID(digest_of(*names, key.encode())[:32]))
    known = await services.store.read(SessionRow, "session", session_id=session_id)
    if known:
        return known[0], []
    session = SessionRow(
        session_id=session_id,
        org_id=call.caller.org_id,
        user_id=call.caller.user_id,
        project_id=project_id,
        display_name=f"copy of {request.source_path}"[:200],
        created_at=now,
        heartbeat_at=now,
        status="finished",
        status_detail="success",
        ended_at=now,
        pruned=True,
    )
    statements = [statement("insert_session", session)]
    if project_id is not None:
        statements.insert(0, project_statement(call.caller.org_id, project_id, services.clock()))
    return session, statements


def audit(services: Services, call: Call, event: str, row: CheckpointRow, details: Mapping[str, Any]) -> Any:
    """Return the audit entry for what was done to a checkpoint."""
    return statement(
        "insert_audit",
        AuditRow(
            at=services.clock(),
            org_id=row.org_id,
            user_id=call.caller.user_id,
            event=event,
            group_name="checkpoints",
            details=msgspec.json.encode(dict(details)).decode(),
            model_id=row.model_id,
            tinker_path=row.path,
            project_id=row.project_id,
        ),
    )


HANDLERS: Handlers = {
    "save_weights": save_weights,
    "save_weights_for_sampler": save_weights_for_sampler,
    "save_weights_external": save_weights_external,
    "load_weights": load_weights,
    "weights_info": weights_info,
    "copy_weights": copy_weights,
}
