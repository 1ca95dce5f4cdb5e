"""Import a checkpoint: files that a client uploads, in one request or in parts before it, stored as a run of their own.

The files have the layout of the server's engine. What the client claims about them (digests, lengths, names, the
manifest) is compared with the files once nobody can write to them any more, and only what was computed here is stored.
Whether the tensors are usable is only known when a run loads them.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import os
import secrets
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from tinsmith.engine.protocol import LoraSpec
from tinsmith.errors import InvalidInputError
from tinsmith.server.auth.identity import Caller
from tinsmith.server.bodies.packed_shape import check_shape
from tinsmith.server.call import IDEMPOTENCY_HEADER
from tinsmith.server.checkpoints.manifest import (
    FILES,
    NEEDED,
    FileRecord,
    StopCheck,
    check_checkpoint,
    digest_of_digests,
    digest_of_files,
    read_records,
)
from tinsmith.server.checkpoints.retention import check_disk_cap
from tinsmith.server.checkpoints.upload_parts import place_of
from tinsmith.server.data_dir import check_name, is_disk_full, remove_tree
from tinsmith.server.jobs.accept import check_open
from tinsmith.server.jobs.job import digest_of
from tinsmith.server.runs.model_spec import ADAMW, MAX_RANK, card_of
from tinsmith.server.services import Services
from tinsmith.store.base import statement
from tinsmith.store.rows import AuditRow, CheckpointRow, ModelRow, SessionRow
from tinsmith.wire.message import field_of
from tinsmith.wire.messages.weights import tinker_path

FACTS = ("base_model", "rank", "alpha", "train_attn", "train_mlp", "train_unembed")
"""What a request and a manifest both state about the adapter."""


MAX_NAMES = 16
"""How many files a request may name; those that no checkpoint has are refused by name."""
MAX_TEXT_BYTES = 4096
"""Limit of each form field that is not a file."""
FileName = Annotated[str, Meta(max_length=255)]


class ImportRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the adapter is, and its files, or the upload that holds them and their digests."""

    name: Annotated[str, Meta(max_length=255)]
    base_model: Annotated[str, Meta(max_length=255)]
    rank: int
    alpha: float
    files: Annotated[dict[FileName, bytes], Meta(max_length=MAX_NAMES)] = {}
    upload: Annotated[str, Meta(max_length=64)] | None = None
    digests: Annotated[dict[FileName, Annotated[str, Meta(max_length=64)]], Meta(max_length=MAX_NAMES)] = {}
    """The SHA-256 of each file of the upload, according to the client."""
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True


def read_request(body: bytes) -> ImportRequest:
    check_shape(body, MAX_NAMES)
    try:
        return msgspec.msgpack.decode(body, type=ImportRequest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidInputError(f"body: {error}", field="body") from None


def read_form_request(form: Mapping[str, bytes]) -> ImportRequest:
    """Read the request from the fields of a multipart form: files under their own names, the rest as text."""
    files = {name: data for name, data in form.items() if name in FILES}
    texts = {name: _text(name, data) for name, data in form.items() if name not in FILES}
    if "files" in texts:
        raise InvalidInputError("files: send each file as a field with the file's name", field="files")
    values: dict[str, Any] = {**texts, "files": files}
    try:
        if "digests" in texts:
            values["digests"] = msgspec.json.decode(texts["digests"])
        return msgspec.convert(values, ImportRequest, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidInputError(f"form: {error}", field=field_of(error)) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidInputError(f"digests: not a JSON object: {error}", field="digests") from None


def _text(name: str, data: bytes) -> str:
    if len(data) > MAX_TEXT_BYTES:
        raise InvalidInputError(
            f"{name[:100]!r}: {len(data)} bytes in a field that holds text; at most {MAX_TEXT_BYTES} are allowed, and "
            f"files go by the names {', '.join(sorted(FILES))}",
            field=name,
        )
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise InvalidInputError(f"{name[:100]!r}: not UTF-8", field=name) from None


async def import_checkpoint(services: Services, caller: Caller, request: ImportRequest, key: str | None = None) -> str:
    """Store the files as a training checkpoint of the caller and return its path.

    A request that is sent again with the same idempotency key returns what the first one made, or waits for it.
    """
    check_open(services)
    _check(services, request)
    # Shielded: a client that disconnects must not leave files that nothing refers to.
    return await asyncio.shield(asyncio.ensure_future(_import_once(services, caller, request, key)))


async def _import_once(services: Services, caller: Caller, request: ImportRequest, key: str | None) -> str:
    session_id = _session_id(caller, key)
    path = tinker_path(f"{session_id}:train:0", "weights", request.name)
    async with services.saves.import_lock(path):
        taken = await services.store.read(CheckpointRow, "checkpoint", path=path)
        if not taken:
            await _import(services, caller, request, session_id, path)
        elif taken[0].digest != await services.file_work.run(caller.org_id, _claimed, request):
            raise InvalidInputError(f"{IDEMPOTENCY_HEADER}: this key was sent before with other files; send a new one")
    return path


def _claimed(_: StopCheck, request: ImportRequest) -> str:
    """Return the digest that a request's files would have; for an upload, according to the client."""
    if request.upload is not None:
        return digest_of_digests(request.digests)
    return digest_of_digests({name: hashlib.sha256(data).hexdigest() for name, data in request.files.items()})


def _session_id(caller: Caller, key: str | None) -> str:
    if key is None:
        return str(uuid.uuid4())
    return str(uuid.UUID(digest_of(b"import", *caller.namespace, key.encode())[:32]))


async def _import(services: Services, caller: Caller, request: ImportRequest, session_id: str, path: str) -> None:
    services.files.check_room()
    await check_disk_cap(services)
    coming = sum(map(len, request.files.values()))
    services.disk.check(caller.org_id, coming, "files")
    model_id, now = f"{session_id}:train:0", services.clock()
    directory = services.files.checkpoint(model_id, "weights", request.name, secrets.token_hex(8))
    upload = place_of(services.files, caller, request.upload) if request.upload is not None else None
    records = await services.file_work.run(caller.org_id, _keep, directory, request, upload)
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
        size_bytes=sum(record.size_bytes for record in records.values()),
        digest=digest_of_files(records),
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
        project_id=caller.project_id,
    )
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
    services.disk.add(caller.org_id, coming)  # files that came in parts were counted as they arrived


def _check(services: Services, request: ImportRequest) -> None:
    check_name(request.name, "name")
    card_of(services.backend, request.base_model)
    if not 1 <= request.rank <= MAX_RANK:
        raise InvalidInputError(f"rank: {request.rank} is not between 1 and {MAX_RANK}", field="rank")
    if not (math.isfinite(request.alpha) and request.alpha > 0):
        raise InvalidInputError(f"alpha: {request.alpha} is not a number above 0", field="alpha")
    if not (request.train_attn or request.train_mlp or request.train_unembed):
        raise InvalidInputError("train_attn, train_mlp and train_unembed are all false, so there is no adapter")
    if request.files and request.upload is not None:
        raise InvalidInputError("upload: give files or upload, not both", field="upload")
    names = set(request.files) if request.upload is None else set(request.digests)
    unknown, missing = sorted(names - FILES), sorted(NEEDED - names)
    if unknown or missing:
        wrong = f"{unknown[0][:100]!r} is not one of them" if unknown else f"{missing[0]} is missing"
        raise InvalidInputError(f"files: {wrong} (a checkpoint has {', '.join(sorted(FILES))})", field="files")


def _keep(check: StopCheck, directory: Path, request: ImportRequest, upload: Path | None) -> dict[str, FileRecord]:
    """Move the files to their place, all or none, and durably; return their records.

    They are checked where no further part can reach them: parts are written to the upload's directory, one at a time
    for each organisation (`FileWork`), and the rename has taken that directory away.
    """
    partial = directory.with_name(f".{directory.name}.partial")
    try:
        partial.parent.mkdir(parents=True, exist_ok=True)
        if upload is not None:
            _take(upload, partial)
        else:
            partial.mkdir()
            for name, data in request.files.items():
                check()
                (partial / name).write_bytes(data)
        records = _checked(check, partial, request)
        for path in partial.iterdir():
            _sync(path)
        os.rename(partial, directory)
        for place in (directory, directory.parent):
            _sync(place)
    except OSError as error:
        _put_back(partial, upload)
        if is_disk_full(error):
            raise
        raise InvalidInputError(f"files: could not be written: {error.strerror}", field="files") from error
    except BaseException:
        _put_back(partial, upload)
        raise
    return records


def _take(upload: Path, partial: Path) -> None:
    try:
        os.rename(upload, partial)
    except FileNotFoundError:
        raise InvalidInputError("upload: nothing was uploaded under this name", field="upload") from None


def _put_back(partial: Path, upload: Path | None) -> None:
    """Restore an upload that was refused, so that it can be fixed and imported again."""
    if upload is not None:
        with contextlib.suppress(OSError):
            os.rename(partial, upload)
    remove_tree(partial)


def _checked(check: StopCheck, place: Path, request: ImportRequest) -> dict[str, FileRecord]:
    """Return lengths and digests of the files; refuse them if the client or the manifest claims something else."""
    records = read_records(check, place)
    if request.upload is not None and set(records) != set(request.digests):
        there = ", ".join(sorted(records)) or "nothing"
        raise InvalidInputError(
            f"upload: it holds {there}, but digests names {', '.join(sorted(request.digests))}", field="upload"
        )
    for name, digest in request.digests.items():
        if name in records and records[name].sha256 != digest:
            raise InvalidInputError(
                f"digests: the SHA-256 of {name} differs from what was uploaded; upload it again", field="digests"
            )
    check_checkpoint(place, records, {name: getattr(request, name) for name in FACTS})
    return records


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
