"""Checkpoints from elsewhere: files that a client uploads, in one request or before it in parts, kept under a run of
their own.

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
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tinsmith.engine.base import LoraSpec
from tinsmith.errors import InvalidInputError
from tinsmith.server.files import check_name, remove_tree
from tinsmith.server.identity import Caller
from tinsmith.server.routes.training import ADAMW, MAX_RANK, card_of
from tinsmith.server.routes.weights import IDEMPOTENCY_HEADER, check_disk_cap
from tinsmith.server.services import Services
from tinsmith.server.submitting import check_open
from tinsmith.server.uploads import FILES, place_of, sha256_of
from tinsmith.server.work import digest_of
from tinsmith.store.base import statement
from tinsmith.store.rows import AuditRow, CheckpointRow, ModelRow, SessionRow
from tinsmith.wire.weights import tinker_path

NEEDED = FILES - {"optimizer.safetensors"}


class ImportRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body, as MessagePack: what the adapter is, and its files, or the upload that holds them and their digests."""

    name: str
    base_model: str
    rank: int
    alpha: float
    files: dict[str, bytes] = {}
    upload: str | None = None
    digests: dict[str, str] = {}
    """The SHA-256 of each file of the upload."""
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True


def read_request(body: bytes) -> ImportRequest:
    try:
        return msgspec.msgpack.decode(body, type=ImportRequest)
    except msgspec.DecodeError as error:
        raise InvalidInputError(f"body: {error}", field="body") from None


async def import_checkpoint(services: Services, caller: Caller, request: ImportRequest, key: str | None = None) -> str:
    """Keep the files as a training checkpoint of the caller's; its path. A request that is sent again, which its
    idempotency key shows, finds what the first made, or waits for that."""
    check_open(services)
    _check(services, request)
    digests = request.digests or {name: hashlib.sha256(data).hexdigest() for name, data in request.files.items()}
    session_id = _session_id(caller, key)
    path = tinker_path(f"{session_id}:train:0", "weights", request.name)
    async with services.importing.setdefault(path, asyncio.Lock()):
        taken = await services.store.read(CheckpointRow, "checkpoint", path=path)
        if not taken:
            await _import(services, caller, request, session_id, path, _digest(digests))
        elif taken[0].digest != _digest(digests):
            raise InvalidInputError(f"{IDEMPOTENCY_HEADER}: it was sent before with other files; send a new one")
    return path


def _session_id(caller: Caller, key: str | None) -> str:
    if key is None:
        return str(uuid.uuid4())
    return str(uuid.UUID(digest_of(b"import", caller.user_id.encode(), key.encode())[:32]))


async def _import(
    services: Services, caller: Caller, request: ImportRequest, session_id: str, path: str, digest: str
) -> None:
    services.files.check_room()
    await check_disk_cap(services)
    source = await _source(services, caller, request)
    model_id, now = f"{session_id}:train:0", services.clock()
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
        size_bytes=source.size_bytes,
        digest=digest,
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
    await asyncio.to_thread(_keep, directory, source)
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


def _check(services: Services, request: ImportRequest) -> None:
    check_name(request.name, "name")
    card_of(services, request.base_model)
    if not 1 <= request.rank <= MAX_RANK:
        raise InvalidInputError(f"rank: {request.rank} is not between 1 and {MAX_RANK}", field="rank")
    if not (math.isfinite(request.alpha) and request.alpha > 0):
        raise InvalidInputError(f"alpha: {request.alpha} is not a number above 0", field="alpha")
    if not (request.train_attn or request.train_mlp or request.train_unembed):
        raise InvalidInputError("train_attn, train_mlp and train_unembed are all false: there is no adapter")
    if request.files and request.upload is not None:
        raise InvalidInputError("files and upload: give one of them", field="upload")
    names = set(request.files) if request.upload is None else set(request.digests)
    unknown, missing = sorted(names - FILES), sorted(NEEDED - names)
    if unknown or missing:
        wrong = f"{unknown[0][:100]!r} is not one of them" if unknown else f"{missing[0]} is missing"
        raise InvalidInputError(f"files: {wrong} (a checkpoint has {', '.join(sorted(FILES))})", field="files")


@dataclass(frozen=True, slots=True)
class Source:
    """Checked files on their way: in memory, or in an upload's directory."""

    files: Mapping[str, bytes]
    upload: Path | None
    size_bytes: int


async def _source(services: Services, caller: Caller, request: ImportRequest) -> Source:
    if request.upload is None:
        return Source(request.files, None, sum(map(len, request.files.values())))
    place = place_of(services, caller, request.upload)
    size_bytes = await asyncio.to_thread(_check_upload, place, request.digests)
    return Source({}, place, size_bytes)


def _check_upload(place: Path, digests: Mapping[str, str]) -> int:
    """Whether an upload is what its client says; its size."""
    present = {path.name: path for path in place.glob("*")}
    if set(present) != set(digests):
        there = ", ".join(sorted(present)) or "nothing"
        raise InvalidInputError(f"upload: {there} was uploaded, not {', '.join(sorted(digests))}", field="upload")
    for name, path in present.items():
        if sha256_of(path) != digests[name]:
            raise InvalidInputError(f"digests: {name} is not what was uploaded; upload it again", field="digests")
    return sum(path.stat().st_size for path in present.values())


def _digest(digests: Mapping[str, str]) -> str:
    parts = "".join(f"{name}:{digest}\n" for name, digest in sorted(digests.items()))
    return hashlib.sha256(parts.encode()).hexdigest()


def _keep(directory: Path, source: Source) -> None:
    """Whole or not at all, and on the disk when this returns."""
    partial = directory.with_name(f".{directory.name}.partial")
    try:
        if source.upload is not None:
            partial.parent.mkdir(parents=True, exist_ok=True)
            os.rename(source.upload, partial)
        else:
            partial.mkdir(parents=True)
            for name, data in source.files.items():
                (partial / name).write_bytes(data)
        for path in partial.iterdir():
            _sync(path)
        os.rename(partial, directory)
        for place in (directory, directory.parent):
            _sync(place)
    except OSError as error:
        remove_tree(partial)
        raise InvalidInputError(f"files: they could not be written: {error.strerror}", field="files") from error


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
