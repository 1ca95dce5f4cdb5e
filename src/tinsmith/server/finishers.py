"""What a finished job means: the answer its client gets, and the rows that come into being with it.

One function per kind of request. Does not know: HTTP, how results are stored.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from tinsmith.engine.base import CreateModel, Done, SavedFiles, SaveState
from tinsmith.server.encryption import encrypt_directory
from tinsmith.server.files import remove_tree
from tinsmith.server.promises import Outcome
from tinsmith.server.replaying import fingerprint_in, fingerprint_text
from tinsmith.server.services import Services
from tinsmith.server.work import Finished, Finisher, Work
from tinsmith.store.base import Statement, statement
from tinsmith.store.rows import AuditRow, CheckpointRow, SamplerRow


def make_finishers(services: Services) -> Mapping[str, Finisher]:
    """The finisher of each kind, for these services."""

    async def as_it_is(work: Work, done: Done) -> Finished:
        return Finished(Outcome(done.body, done.encoding))

    async def created(work: Work, done: Done) -> Finished:
        answer = {"model_id": work.context["model_id"], "type": "create_model"}
        return Finished(_outcome(answer), _machine(work, done))

    async def loaded(work: Work, done: Done) -> Finished:
        answer = {"path": work.context["path"], "model_id": work.context["model_id"], "type": "load_weights"}
        return Finished(_outcome(answer), _machine(work, done) if is_creation(work) else ())

    async def unloaded(work: Work, done: Done) -> Finished:
        model_id = work.row.lane

        def forget() -> None:
            services.access.models.pop(model_id, None)
            services.runs.forget_soon(model_id)

        state = statement("set_model_state", model_id=model_id, state="unloaded")
        return Finished(_outcome({"model_id": model_id, "type": "unload_model"}), (state,), forget)

    async def saved(work: Work, done: Done) -> Finished:
        files = msgspec.json.decode(done.body, type=SavedFiles)
        if work.context.get("sampler_id") is not None:
            return _new_sampler(services, work, files)
        return await _new_checkpoint(services, work, files)

    return {
        "create_model": created,
        "load_weights": loaded,
        "forward_backward": as_it_is,
        "forward": as_it_is,
        "optim_step": as_it_is,
        "sample": as_it_is,
        "unload_model": unloaded,
        "save_weights": saved,
        "save_weights_for_sampler": saved,
        "save_weights_external": saved,
    }


def _new_sampler(services: Services, work: Work, files: SavedFiles) -> Finished:
    assert isinstance(work.job, SaveState)
    row = SamplerRow(
        sampler_id=work.context["sampler_id"],
        session_id=work.row.session_id,
        org_id=work.row.org_id,
        user_id=work.row.user_id,
        base_model=work.job.base_model,
        directory=work.job.directory,
        adapter_key=files.digest,
        created_at=services.clock(),
        run_id=work.job.model_id,
    )
    answer = {"sampling_session_id": row.sampler_id, "type": "save_weights_for_sampler"}
    return Finished(_outcome(answer), (statement("insert_sampler_if_absent", row),))


async def _new_checkpoint(services: Services, work: Work, files: SavedFiles) -> Finished:
    assert isinstance(work.job, SaveState)
    context, now, size_bytes = work.context, services.clock(), files.size_bytes
    if context.get("recipients"):
        size_bytes = await asyncio.to_thread(encrypt_directory, Path(work.job.directory), context["recipients"])
    ttl = context["ttl_seconds"]
    row = CheckpointRow(
        path=context["path"],
        model_id=work.job.model_id,
        kind=context["kind"],
        name=context["name"],
        session_id=work.row.session_id,
        org_id=work.row.org_id,
        user_id=work.row.user_id,
        project_id=context["project_id"],
        base_model=work.job.base_model,
        lora=context["lora"],
        optimizer=context["optimizer"],
        directory=work.job.directory,
        size_bytes=size_bytes,
        digest=files.digest,
        user_metadata=context["user_metadata"],
        created_at=now,
        expires_at=now + ttl if ttl is not None else None,
    )
    answer: dict[str, Any] = {"path": row.path, "type": work.row.kind}
    if row.kind == "external_weights":
        answer["size_bytes"] = size_bytes

    def clean() -> None:
        for directory in context["replaces"]:
            if directory not in services.saving.get(row.path, ()):  # else it arrived earlier and runs later
                remove_tree(Path(directory))

    return Finished(_outcome(answer), (statement("put_checkpoint", row), _audit(work, row, now)), clean)


def _audit(work: Work, row: CheckpointRow, now: float) -> Statement:
    return statement(
        "insert_audit",
        AuditRow(
            at=now,
            org_id=row.org_id,
            user_id=row.user_id,
            event="checkpoint_created",
            group_name="checkpoints",
            details=msgspec.json.encode({"size_bytes": row.size_bytes, "request": work.row.kind}).decode(),
            model_id=row.model_id,
            tinker_path=row.path,
        ),
    )


def _outcome(answer: Mapping[str, Any]) -> Outcome:
    return Outcome(msgspec.json.encode(answer), "json")


def _machine(work: Work, done: Done) -> tuple[Statement, ...]:
    """Remembers what a new model is computed on, where the engine says it."""
    text = fingerprint_text(fingerprint_in(done))
    if text is None:
        return ()
    return (statement("set_model_fingerprint", model_id=work.context["model_id"], fingerprint=text),)


def is_creation(work: Work) -> bool:
    """Whether a request makes a model (a load can, too)."""
    return isinstance(work.job, CreateModel)
