"""Training runs and checkpoints as REST shows and changes them."""

from __future__ import annotations

import asyncio
import tarfile
from datetime import UTC, datetime
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import msgspec

from tinsmith.engine.base import LoraSpec
from tinsmith.server.calls import NOTHING, Answer, Call, Handlers, reply
from tinsmith.server.files import replacing
from tinsmith.server.retention import delete_checkpoint as delete_files
from tinsmith.server.routes.sessions import texts
from tinsmith.server.routes.weights import audit, check_ttl
from tinsmith.server.services import Services
from tinsmith.store.base import statement
from tinsmith.store.rows import CheckpointRow, CountRow, ModelRow
from tinsmith.wire import runs as wire
from tinsmith.wire.weights import (
    KINDS,
    CheckpointArchiveUrlResponse,
    ExternalWeightsUrlsResponse,
    ParsedCheckpointTinkerPath,
)

EXTERNAL_SINCE = (0, 28)
"""Older releases refuse a list that holds a checkpoint type they do not know."""
MAX_PAGE = 1000
ARCHIVE = ".archive.tar"
"""In the directory of a checkpoint, from the first time that it is asked for."""


async def list_training_runs(services: Services, call: Call) -> Answer:
    query, caller = call.query, call.caller
    limit = min(query.limit, MAX_PAGE)
    page = {"limit": limit, "offset": query.offset}
    if query.project_id is not None:
        owner: dict[str, str] = {"project_id": query.project_id, "org_id": caller.org_id}
        name = "org_project"
        if query.access_scope != "accessible":
            owner["user_id"], name = caller.user_id, "user_project"
    elif query.access_scope == "accessible":
        owner, name = {"org_id": caller.org_id}, "org"
    else:
        owner, name = {"user_id": caller.user_id}, "user"
    rows = await services.store.read(ModelRow, f"models_of_{name}", **owner, **page)
    total = await services.store.read(CountRow, f"count_models_of_{name}", **owner)
    cursor = wire.Cursor(offset=query.offset, limit=limit, total_count=total[0].count)
    found = [await _training_run(services, row, call) for row in rows]
    return reply(wire.TrainingRunsResponse(training_runs=found, cursor=cursor))


async def get_training_run(services: Services, call: Call) -> Answer:
    row = await services.access.model(
        call.caller, call.params["training_run_id"], to_read=call.query.access_scope == "accessible"
    )
    message = msgspec.json.decode(reply(await _training_run(services, row, call)).body)
    run = services.runs.known(row.model_id)
    return Answer(msgspec.json.encode({**message, "tinsmith": _more(run.row if run is not None else row)}))


def _more(row: ModelRow) -> dict[str, Any]:
    """What we say of a run beyond the protocol; clients that do not know it pass over it."""
    return {
        "fault": row.fault,
        "notice": row.notice,
        "snapshot_seq": row.snapshot_seq if row.snapshot_directory is not None else None,
        "machine": msgspec.json.decode(row.fingerprint) if row.fingerprint is not None else None,
    }


async def _training_run(services: Services, row: ModelRow, call: Call) -> wire.TrainingRun:
    checkpoints = await services.store.read(CheckpointRow, "checkpoints_of_model", model_id=row.model_id)
    lora = msgspec.json.decode(row.lora, type=LoraSpec)
    extra: dict[str, Any] = {}
    for name, kind in (("last_checkpoint", "weights"), ("last_sampler_checkpoint", "sampler_weights")):
        newest = [checkpoint for checkpoint in checkpoints if checkpoint.kind == kind][-1:]
        if newest:
            extra[name] = checkpoint_message(newest[0])
    if row.user_metadata is not None:
        extra["user_metadata"] = texts(row.user_metadata)
    run = services.runs.known(row.model_id)
    return wire.TrainingRun(
        training_run_id=row.model_id,
        base_model=row.base_model,
        model_owner=row.user_id,
        is_lora=True,
        lora_rank=lora.rank,
        corrupted=(run.row if run is not None else row).fault is not None,
        last_request_time=_time(max(row.used_at, services.used.get(row.model_id, 0.0))),
        **extra,
    )


async def list_checkpoints(services: Services, call: Call) -> Answer:
    row = await services.access.model(call.caller, call.params["training_run_id"])
    rows = await services.store.read(CheckpointRow, "checkpoints_of_model", model_id=row.model_id)
    return reply(wire.CheckpointsListResponse(checkpoints=_known_to(call, services, rows)))


async def list_user_checkpoints(services: Services, call: Call) -> Answer:
    limit = min(call.query.limit, MAX_PAGE)
    user_id = call.caller.user_id
    rows = await services.store.read(
        CheckpointRow, "checkpoints_of_user", user_id=user_id, limit=limit, offset=call.query.offset
    )
    total = await services.store.read(CountRow, "count_checkpoints_of_user", user_id=user_id)
    cursor = wire.Cursor(offset=call.query.offset, limit=limit, total_count=total[0].count)
    return reply(wire.CheckpointsListResponse(checkpoints=_known_to(call, services, rows), cursor=cursor))


def _known_to(call: Call, services: Services, rows: list[CheckpointRow]) -> list[wire.Checkpoint]:
    """Those that have not expired and whose kind the client's release can read."""
    now = services.clock()
    return [
        checkpoint_message(row)
        for row in rows
        if (row.expires_at is None or row.expires_at > now)
        and (row.kind != "external_weights" or call.sdk >= EXTERNAL_SINCE)
    ]


def checkpoint_message(row: CheckpointRow) -> wire.Checkpoint:
    extra: dict[str, Any] = {}
    if row.user_metadata is not None:
        extra["user_metadata"] = texts(row.user_metadata)
    if row.expires_at is not None:
        extra["expires_at"] = _time(row.expires_at)
    return wire.Checkpoint(
        checkpoint_id=f"{row.kind}/{row.name}",
        checkpoint_type=KINDS[row.kind],
        time=_time(row.created_at),
        tinker_path=row.path,
        size_bytes=row.size_bytes,
        public=row.public,
        **extra,
    )


async def _own(services: Services, call: Call) -> CheckpointRow:
    return await services.access.checkpoint(call.caller, _path(call), to_change=True)


def _path(call: Call) -> str:
    path = f"tinker://{call.params['training_run_id']}/{call.params['checkpoint_id']}"
    return ParsedCheckpointTinkerPath.from_tinker_path(path).tinker_path


async def delete_checkpoint(services: Services, call: Call) -> Answer:
    row = await _own(services, call)
    deleted = audit(services, call, "checkpoint_deleted", row, {"size_bytes": row.size_bytes})
    await delete_files(services, row, deleted)
    return NOTHING


async def publish_checkpoint(services: Services, call: Call) -> Answer:
    return await _set_public(services, call, True)


async def unpublish_checkpoint(services: Services, call: Call) -> Answer:
    return await _set_public(services, call, False)


async def _set_public(services: Services, call: Call, public: bool) -> Answer:
    row = await _own(services, call)
    if row.public != public:
        event = "checkpoint_published" if public else "checkpoint_unpublished"
        await services.store.write(
            statement("set_checkpoint_public", path=row.path, public=public), audit(services, call, event, row, {})
        )
    return NOTHING


async def set_checkpoint_ttl(services: Services, call: Call) -> Answer:
    row = await _own(services, call)
    ttl = call.message.ttl_seconds
    if ttl is not None:
        check_ttl(ttl)
    expires_at = services.clock() + ttl if ttl is not None else None
    await services.store.write(
        statement("set_checkpoint_expires_at", path=row.path, expires_at=expires_at),
        audit(services, call, "checkpoint_ttl_set", row, {"ttl_seconds": ttl}),
    )
    return NOTHING


async def get_external_weights_urls(services: Services, call: Call) -> Answer:
    row = await services.access.checkpoint(call.caller, _path(call))
    names = sorted(
        path.name for path in Path(row.directory).iterdir() if path.is_file() and not path.name.startswith(".")
    )
    urls, expires = {}, services.clock()
    for name in names:
        relative = services.files.relative(Path(row.directory) / name)
        urls[name], expires = services.signer.url(call.base_url, relative, services.config.download_ttl_s)
    return reply(ExternalWeightsUrlsResponse(urls=urls, expires=_time(expires)))


async def get_checkpoint_archive(services: Services, call: Call) -> Answer:
    """A tar of the checkpoint, by a redirect as releases up to 0.35 expect it."""
    row = await services.access.checkpoint(call.caller, _path(call))
    archive = Path(row.directory) / ARCHIVE
    if not archive.exists():
        services.files.check_room()
        await asyncio.to_thread(_make_archive, archive)
    url, expires = services.signer.url(call.base_url, services.files.relative(archive), services.config.download_ttl_s)
    answer = CheckpointArchiveUrlResponse(url=url, expires=_time(expires))
    headers = {"location": url, "expires": format_datetime(_time(expires), usegmt=True)}
    return Answer(reply(answer).body, 302, headers=headers)


def _make_archive(path: Path) -> None:
    """The files of a checkpoint, beside them."""
    with replacing(path) as temporary, tarfile.open(temporary, "w") as tar:
        for file in sorted(path.parent.iterdir()):
            if file.is_file() and not file.name.startswith("."):
                tar.add(file, arcname=file.name)


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


HANDLERS: Handlers = {
    "list_training_runs": list_training_runs,
    "get_training_run": get_training_run,
    "list_checkpoints": list_checkpoints,
    "list_model_checkpoints": list_checkpoints,
    "list_user_checkpoints": list_user_checkpoints,
    "delete_checkpoint": delete_checkpoint,
    "publish_checkpoint": publish_checkpoint,
    "unpublish_checkpoint": unpublish_checkpoint,
    "set_checkpoint_ttl": set_checkpoint_ttl,
    "get_external_weights_urls": get_external_weights_urls,
    "get_checkpoint_archive": get_checkpoint_archive,
}
