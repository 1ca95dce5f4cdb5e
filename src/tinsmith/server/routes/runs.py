"""Training runs and checkpoints: list, show, delete, publish, download."""

from __future__ import annotations

import asyncio
import tarfile
from datetime import UTC, datetime
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import msgspec

from tinsmith.engine.protocol import LoraSpec
from tinsmith.errors import LimitExceededError
from tinsmith.server.call import NOTHING, Answer, Call, Handlers, reply, reply_long
from tinsmith.server.checkpoints.retention import delete_checkpoint as delete_files
from tinsmith.server.data_dir import ARCHIVE, replacing, still_there
from tinsmith.server.redaction import redacted_text
from tinsmith.server.routes.sessions import MAX_PAGE_BYTES, check_page, texts
from tinsmith.server.routes.weights import audit, check_ttl
from tinsmith.server.services import Services
from tinsmith.store.base import statement
from tinsmith.store.rows import CheckpointRow, CountRow, ModelRow, SessionRow, SizeRow
from tinsmith.wire.message import Message
from tinsmith.wire.messages import runs as wire
from tinsmith.wire.messages.weights import (
    KINDS,
    CheckpointArchiveUrlResponse,
    ExternalWeightsUrlsResponse,
    ParsedCheckpointTinkerPath,
)

EXTERNAL_SINCE = (0, 28)
"""Older releases reject a list with a checkpoint type they do not know."""
MAX_PAGE = 1000


async def list_training_runs(services: Services, call: Call) -> Answer:
    query, caller = call.query, call.caller
    limit = min(query.limit, MAX_PAGE)
    project_id = query.project_id if query.project_id is not None else caller.project_id
    if not caller.sees(caller.org_id, project_id):
        return reply(wire.TrainingRunsResponse(training_runs=[], cursor=_cursor(query.offset, limit, 0)))
    owner: dict[str, str | None] = {"org_id": caller.org_id, "project_id": project_id}
    name = "org"
    if query.access_scope != "accessible":
        owner["user_id"], name = caller.user_id, "user"
    rows = await services.store.read(ModelRow, f"models_of_{name}", **owner, limit=limit, offset=query.offset)
    check_page(row.user_metadata for row in rows)
    total = await services.store.read(CountRow, f"count_models_of_{name}", **owner)
    cursor = _cursor(query.offset, limit, total[0].count)
    found = [await _training_run(services, row, {"status": await _status(services, row)}) for row in rows]
    return await reply_long(lambda: ReportedRuns(training_runs=found, cursor=cursor))


async def get_training_run(services: Services, call: Call) -> Answer:
    row = await services.access.model(
        call.caller, call.params["training_run_id"], to_read=call.query.access_scope == "accessible"
    )
    run = services.runs.known(row.model_id)
    status = await _status(services, row)
    return reply(await _training_run(services, row, _more(run.row if run is not None else row, status)))


class ReportedRun(wire.TrainingRun, frozen=True, kw_only=True):
    """A run with what we report of it beyond the protocol; other clients ignore it."""

    tinsmith: dict[str, Any]


class ReportedRuns(Message, frozen=True, kw_only=True):
    """The protocol's list of runs, each with what we report of it."""

    training_runs: list[ReportedRun]
    cursor: wire.Cursor


async def _status(services: Services, row: ModelRow) -> str:
    """Return whether a run is active, has finished, or expired with its session, whose client may still come back."""
    if row.state != "parked":
        return "active" if row.state == "live" else "finished"
    sessions = await services.store.read(SessionRow, "session", session_id=row.session_id)
    return "expired" if sessions and sessions[0].status == "expired" and not sessions[0].pruned else "finished"


def _more(row: ModelRow, status: str) -> dict[str, Any]:
    return {
        "status": status,
        "fault": redacted_text(row.fault) if row.fault is not None else None,
        "notice": redacted_text(row.notice) if row.notice is not None else None,
        "snapshot_seq": row.snapshot_seq if row.snapshot_directory is not None else None,
        "machine": msgspec.json.decode(row.fingerprint) if row.fingerprint is not None else None,
    }


async def _training_run(services: Services, row: ModelRow, more: dict[str, Any]) -> ReportedRun:
    lora = msgspec.json.decode(row.lora, type=LoraSpec)
    extra: dict[str, Any] = {}
    for name, kind in (("last_checkpoint", "weights"), ("last_sampler_checkpoint", "sampler_weights")):
        newest = await services.store.read(CheckpointRow, "newest_checkpoint", model_id=row.model_id, kind=kind)
        if newest:
            extra[name] = checkpoint_message(newest[0])
    if row.user_metadata is not None:
        extra["user_metadata"] = texts(row.user_metadata)
    run = services.runs.known(row.model_id)
    return ReportedRun(
        tinsmith=more,
        training_run_id=row.model_id,
        base_model=row.base_model,
        model_owner=row.user_id,
        is_lora=True,
        lora_rank=lora.rank,
        corrupted=(run.row if run is not None else row).fault is not None,
        last_request_time=_time(max(row.used_at, services.activity.model_used_at(row.model_id))),
        **extra,
    )


async def list_checkpoints(services: Services, call: Call) -> Answer:
    row = await services.access.model(call.caller, call.params["training_run_id"])
    size = await services.store.read(SizeRow, "checkpoint_metadata_bytes", model_id=row.model_id)
    if size[0].size_bytes > MAX_PAGE_BYTES:
        raise LimitExceededError(
            f"training_run_id: the checkpoints of {row.model_id} have {size[0].size_bytes // 2**20} MB of metadata; "
            "list those of all runs, a page at a time",
            field="training_run_id",
        )
    rows = await services.store.read(CheckpointRow, "checkpoints_of_model", model_id=row.model_id)
    return await reply_long(lambda: wire.CheckpointsListResponse(checkpoints=_known_to(call, services, rows)))


async def list_user_checkpoints(services: Services, call: Call) -> Answer:
    limit = min(call.query.limit, MAX_PAGE)
    caller = call.caller
    owner = {"org_id": caller.org_id, "user_id": caller.user_id, "project_id": caller.project_id}
    rows = await services.store.read(
        CheckpointRow, "checkpoints_of_user", **owner, limit=limit, offset=call.query.offset
    )
    check_page(row.user_metadata for row in rows)
    total = await services.store.read(CountRow, "count_checkpoints_of_user", **owner)
    cursor = _cursor(call.query.offset, limit, total[0].count)
    return await reply_long(
        lambda: wire.CheckpointsListResponse(checkpoints=_known_to(call, services, rows), cursor=cursor)
    )


def _cursor(offset: int, limit: int, total: int) -> wire.Cursor:
    return wire.Cursor(offset=offset, limit=limit, total_count=total)


def _known_to(call: Call, services: Services, rows: list[CheckpointRow]) -> list[wire.Checkpoint]:
    """Return those that have not expired and whose kind the client's release knows."""
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
    with still_there():
        names = sorted(path.name for path in Path(row.directory).iterdir() if path.is_file())
    urls, expires = {}, services.clock()
    for name in (name for name in names if not name.startswith(".")):
        relative = services.files.relative(Path(row.directory) / name)
        urls[name], expires = services.signer.url(call.base_url, relative, services.config.download_ttl_s)
    return reply(ExternalWeightsUrlsResponse(urls=urls, expires=_time(expires)))


async def get_checkpoint_archive(services: Services, call: Call) -> Answer:
    """Redirect to a tar archive of the checkpoint, as releases up to 0.35 expect."""
    row = await services.access.checkpoint(call.caller, _path(call))
    archive = Path(row.directory) / ARCHIVE
    if not archive.exists():
        services.files.check_room()
        services.disk.check(row.org_id, row.size_bytes, "checkpoint_id")
        await asyncio.to_thread(_make_archive, archive)
        services.disk.add(row.org_id, row.size_bytes)
    url, expires = services.signer.url(call.base_url, services.files.relative(archive), services.config.download_ttl_s)
    answer = CheckpointArchiveUrlResponse(url=url, expires=_time(expires))
    headers = {"location": url, "expires": format_datetime(_time(expires), usegmt=True)}
    return Answer(reply(answer).body, 302, headers=headers)


def _make_archive(path: Path) -> None:
    """Write the archive of a checkpoint's files, next to them."""
    with still_there(), replacing(path) as temporary, tarfile.open(temporary, "w") as tar:
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
