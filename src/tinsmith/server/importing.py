"""Checkpoints from elsewhere: files that a client uploads, kept under a run of their own.

The files are in the layout of the server's engine, digests included; whether they are good is seen, and said, when a
run loads them. What the server checks is who may, under which name, for which model, and how much.
Does not know: HTTP, what is in the files.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import os
import secrets
import uuid
from pathlib import Path

import msgspec

from tinsmith.engine.base import LoraSpec
from tinsmith.errors import InvalidInputError
from tinsmith.server.files import check_name, remove_tree
from tinsmith.server.identity import Caller
from tinsmith.server.routes.training import ADAMW, MAX_RANK, card_of
from tinsmith.server.routes.weights import check_disk_cap
from tinsmith.server.services import Services
from tinsmith.server.submitting import check_open
from tinsmith.store.base import statement
from tinsmith.store.rows import AuditRow, CheckpointRow, ModelRow, SessionRow
from tinsmith.wire.weights import tinker_path

FILES = frozenset({"adapter_model.safetensors", "adapter_config.json", "optimizer.safetensors", "manifest.json"})
NEEDED = FILES - {"optimizer.safetensors"}


class ImportRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body, as MessagePack: what the adapter is, and its files."""

    name: str
    base_model: str
    rank: int
    alpha: float
    files: dict[str, bytes]
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True


def read_request(body: bytes) -> ImportRequest:
    try:
        return msgspec.msgpack.decode(body, type=ImportRequest)
    except msgspec.DecodeError as error:
        raise InvalidInputError(f"body: {error}", field="body") from None


async def import_checkpoint(services: Services, caller: Caller, request: ImportRequest) -> str:
    """Keep the files as a training checkpoint of the caller's; its path."""
    check_open(services)
    _check(services, request)
    await check_disk_cap(services)
    session_id, now = str(uuid.uuid4()), services.clock()
    model_id = f"{session_id}:train:0"
    path = tinker_path(model_id, "weights", request.name)
    directory = services.files.checkpoint(model_id, "weights", request.name, secrets.token_hex(8))
    owner = {"org_id": caller.org_id, "user_id": caller.user_id, "project_id": caller.project_id}
    lora = LoraSpec(
        rank=request.rank,
        seed=0,
        alpha=request.alpha,
        train_attn=request.train_attn,
        train_mlp=request.train_mlp,
        train_unembed=request.train_unembed,
    )
    common = {"session_id": session_id, "base_model": request.base_model, "optimizer": ADAMW, "created_at": now}
    made = {**owner, **common, "model_id": model_id, "lora": msgspec.json.encode(lora).decode()}
    session = SessionRow(
        session_id=session_id,
        display_name=f"import of {request.name}",
        created_at=now,
        heartbeat_at=now,
        status="finished",
        status_detail="success",
        ended_at=now,
        pruned=True,
        **owner,  # type: ignore[arg-type]
    )
    row = CheckpointRow(
        path=path,
        kind="weights",
        name=request.name,
        directory=str(directory),
        size_bytes=sum(map(len, request.files.values())),
        digest=_digest(request.files),
        **made,  # type: ignore[arg-type]
    )
    model = ModelRow(used_at=now, state="unloaded", **made)  # type: ignore[arg-type]
    audit = AuditRow(
        at=now,
        org_id=caller.org_id,
        user_id=caller.user_id,
        event="checkpoint_imported",
        group_name="checkpoints",
        details=msgspec.json.encode({"size_bytes": row.size_bytes}).decode(),
        model_id=model_id,
        tinker_path=path,
    )
    await asyncio.to_thread(_write, directory, request.files)
    try:
        await services.store.write(
            statement("insert_session", session),
            statement("insert_model", model),
            statement("put_checkpoint", row),
            statement("insert_audit", audit),
        )
    except BaseException:
        remove_tree(directory)
        raise
    return path


def _check(services: Services, request: ImportRequest) -> None:
    check_name(request.name, "name")
    card_of(services, request.base_model)
    if not 1 <= request.rank <= MAX_RANK:
        raise InvalidInputError(f"rank: {request.rank} is not between 1 and {MAX_RANK}", field="rank")
    if not (math.isfinite(request.alpha) and request.alpha > 0):
        raise InvalidInputError(f"alpha: {request.alpha} is not a number above 0", field="alpha")
    if not (request.train_attn or request.train_mlp or request.train_unembed):
        raise InvalidInputError("train_attn, train_mlp and train_unembed are all false: there is no adapter")
    unknown, missing = sorted(set(request.files) - FILES), sorted(NEEDED - set(request.files))
    if unknown or missing:
        wrong = f"{unknown[0][:100]!r} is not one of them" if unknown else f"{missing[0]} is missing"
        raise InvalidInputError(f"files: {wrong} (a checkpoint has {', '.join(sorted(FILES))})", field="files")
    services.files.check_room()


def _digest(files: dict[str, bytes]) -> str:
    parts = "".join(f"{name}:{hashlib.sha256(data).hexdigest()}\n" for name, data in sorted(files.items()))
    return hashlib.sha256(parts.encode()).hexdigest()


def _write(directory: Path, files: dict[str, bytes]) -> None:
    """Whole or not at all, and on the disk when this returns."""
    partial = directory.with_name(f".{directory.name}.partial")
    partial.mkdir(parents=True)
    try:
        for name, data in files.items():
            with (partial / name).open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        os.rename(partial, directory)
        for place in (directory, directory.parent):
            descriptor = os.open(place, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
    except OSError as error:
        remove_tree(partial)
        raise InvalidInputError(f"files: they could not be written: {error.strerror}", field="files") from error
