"""Training runs and checkpoints as REST has them, and the files behind signed addresses."""

from __future__ import annotations

import hashlib
import io
import re
import tarfile
from collections.abc import Mapping
from datetime import timedelta
from email.utils import format_datetime
from typing import Any

from support.server_answers import Answer, RefusedError
from support.server_core import Call, Core, Handler, Result
from support.server_recording import Recorded
from support.server_state import START, Checkpoint, Model
from support.server_training import owned_model
from tinsmith.wire.messages.runs import CheckpointsListResponse, Cursor, TrainingRun, TrainingRunsResponse
from tinsmith.wire.messages.weights import PATH_PREFIX, ExternalWeightsUrlsResponse
from tinsmith.wire.routes import table as routes

EXTERNAL_SINCE = (0, 28)
URLS_EXPIRE = START + timedelta(days=3650)
"""Fixed, as all times here, and far off."""
FILES = "/files/"


def _plain_checkpoint(checkpoint: Checkpoint) -> dict[str, Any]:
    plain = {
        "checkpoint_id": f"{checkpoint.kind}/{checkpoint.name}",
        "checkpoint_type": checkpoint.checkpoint_type,
        "time": checkpoint.created_at,
        "tinker_path": checkpoint.path,
        "size_bytes": checkpoint.size_bytes,
        "public": checkpoint.is_public,
        "user_metadata": checkpoint.user_metadata,
        "expires_at": checkpoint.expires_at,
    }
    return {name: value for name, value in plain.items() if value is not None}


def _plain_run(core: Core, model: Model) -> dict[str, Any]:
    saved = [c for c in core.state.checkpoints.values() if c.run_id == model.model_id and not c.is_ephemeral]
    plain: dict[str, Any] = {
        "training_run_id": model.model_id,
        "base_model": model.base_model,
        "model_owner": model.owner,
        "is_lora": True,
        "lora_rank": model.lora_config.rank,
        "last_request_time": model.last_request_time,
        "user_metadata": model.user_metadata,
    }
    for name, kind in (("last_checkpoint", "weights"), ("last_sampler_checkpoint", "sampler_weights")):
        of_kind = [checkpoint for checkpoint in saved if checkpoint.kind == kind]
        plain[name] = _plain_checkpoint(of_kind[-1]) if of_kind else None
    return {name: value for name, value in plain.items() if value is not None}


async def list_training_runs(core: Core, call: Call) -> TrainingRunsResponse:
    query, state = call.query, core.state
    runs = [model for model in reversed(state.models.values()) if model.owner == call.user]
    if query.project_id is not None:
        runs = [model for model in runs if state.session(model.session_id).project_id == query.project_id]
    page = runs[query.offset : query.offset + query.limit]
    cursor = {"offset": query.offset, "limit": query.limit, "total_count": len(runs)}
    return TrainingRunsResponse.model_validate(
        {"training_runs": [_plain_run(core, model) for model in page], "cursor": cursor}
    )


async def get_training_run(core: Core, call: Call) -> TrainingRun:
    model = owned_model(core, call.parameters["training_run_id"], call.user)
    return TrainingRun.model_validate(_plain_run(core, model))


def _listed(core: Core, call: Call, run_id: str | None) -> list[dict[str, Any]]:
    """Newest first; external ones only to clients whose strict reading knows them."""
    agent = re.search(r"Python (\d+)\.(\d+)", call.recorded.headers.get("user-agent", ""))
    knows_external = agent is None or (int(agent[1]), int(agent[2])) >= EXTERNAL_SINCE
    return [
        _plain_checkpoint(checkpoint)
        for checkpoint in reversed(core.state.checkpoints.values())
        if checkpoint.owner == call.user
        and not checkpoint.is_ephemeral
        and (run_id is None or checkpoint.run_id == run_id)
        and (knows_external or checkpoint.kind != "external_weights")
    ]


async def list_checkpoints(core: Core, call: Call) -> CheckpointsListResponse:
    model = owned_model(core, call.parameters["training_run_id"], call.user)
    return CheckpointsListResponse.model_validate({"checkpoints": _listed(core, call, model.model_id)})


async def list_user_checkpoints(core: Core, call: Call) -> CheckpointsListResponse:
    listed = _listed(core, call, None)
    cursor = Cursor(offset=call.query.offset, limit=call.query.limit, total_count=len(listed))
    page = listed[call.query.offset : call.query.offset + call.query.limit]
    return CheckpointsListResponse.model_validate({"checkpoints": page, "cursor": cursor.model_dump()})


def _checkpoint(core: Core, call: Call) -> Checkpoint:
    """The checkpoint in the path, if it is the caller's own."""
    path = f"{PATH_PREFIX}{call.parameters['training_run_id']}/{call.parameters['checkpoint_id']}"
    checkpoint = core.state.checkpoint(path, call.user)
    if checkpoint.owner != call.user:
        raise RefusedError(403, f"{path} belongs to somebody else")
    return checkpoint


async def delete_checkpoint(core: Core, call: Call) -> Result:
    checkpoint = _checkpoint(core, call)
    del core.state.checkpoints[checkpoint.path]
    event = {"timestamp": core.state.now(), "event": "checkpoint_deleted", "tinker_path": checkpoint.path}
    core.state.audit.append(event)
    return None


async def publish_checkpoint(core: Core, call: Call) -> Result:
    _checkpoint(core, call).is_public = True
    return None


async def unpublish_checkpoint(core: Core, call: Call) -> Result:
    _checkpoint(core, call).is_public = False
    return None


async def set_checkpoint_ttl(core: Core, call: Call) -> Result:
    checkpoint, ttl_s = _checkpoint(core, call), call.request.ttl_seconds
    checkpoint.expires_at = None if ttl_s is None else checkpoint.created_at + timedelta(seconds=ttl_s)
    return None


async def get_external_weights_urls(core: Core, call: Call) -> ExternalWeightsUrlsResponse:
    checkpoint = _checkpoint(core, call)
    if checkpoint.kind != "external_weights":
        raise RefusedError(400, "only external weights have addresses")
    urls = {name: _publish_file(core, checkpoint, name, content) for name, content in checkpoint.files.items()}
    return ExternalWeightsUrlsResponse(urls=urls, expires=URLS_EXPIRE)


async def get_checkpoint_archive(core: Core, call: Call) -> Answer:
    checkpoint = _checkpoint(core, call)
    if core.settings.archive_pending > 0:
        core.settings.archive_pending -= 1
        raise RefusedError(503, "the archive is being built")
    url = _publish_file(core, checkpoint, "archive.tar", _archive(checkpoint))
    return Answer(302, headers={"location": url, "expires": format_datetime(URLS_EXPIRE, usegmt=True)})


def _publish_file(core: Core, checkpoint: Checkpoint, name: str, content: bytes) -> str:
    path = f"{FILES}{checkpoint.run_id}/{checkpoint.kind}/{checkpoint.name}/{name}"
    core.files[path] = content
    return f"{core.url}{path}?signature=test"


def _archive(checkpoint: Checkpoint) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in checkpoint.files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def send_file(core: Core, recorded: Recorded) -> Answer:
    """GET or HEAD of a signed address, whole or a range of bytes."""
    content = core.files.get(recorded.path)
    if content is None:
        return Answer.of_json({"detail": "Not Found"}, 404)
    etag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
    headers = {"accept-ranges": "bytes", "etag": etag}
    is_other = core.settings.heeds_if_range and recorded.headers.get("if-range", etag) != etag
    wanted = None if is_other else re.fullmatch(r"bytes=(\d*)-(\d*)", recorded.headers.get("range", ""))
    if wanted is None or wanted[0] == "bytes=-":
        return Answer(200, content, "application/octet-stream", headers)
    if wanted[1]:
        start, stop = int(wanted[1]), min(int(wanted[2]) + 1 if wanted[2] else len(content), len(content))
    else:
        start, stop = max(len(content) - int(wanted[2]), 0), len(content)
    if start >= stop:
        return Answer(416, b"", "text/plain", {"content-range": f"bytes */{len(content)}"})
    headers["content-range"] = f"bytes {start}-{stop - 1}/{len(content)}"
    return Answer(206, content[start:stop], "application/octet-stream", headers)


HANDLERS: Mapping[str, Handler] = {
    routes.LIST_TRAINING_RUNS.name: list_training_runs,
    routes.GET_TRAINING_RUN.name: get_training_run,
    routes.LIST_CHECKPOINTS.name: list_checkpoints,
    routes.LIST_MODEL_CHECKPOINTS.name: list_checkpoints,
    routes.LIST_USER_CHECKPOINTS.name: list_user_checkpoints,
    routes.DELETE_CHECKPOINT.name: delete_checkpoint,
    routes.PUBLISH_CHECKPOINT.name: publish_checkpoint,
    routes.UNPUBLISH_CHECKPOINT.name: unpublish_checkpoint,
    routes.SET_CHECKPOINT_TTL.name: set_checkpoint_ttl,
    routes.GET_EXTERNAL_WEIGHTS_URLS.name: get_external_weights_urls,
    routes.GET_CHECKPOINT_ARCHIVE.name: get_checkpoint_archive,
}
