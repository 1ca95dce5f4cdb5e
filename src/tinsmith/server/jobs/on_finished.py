"""What a finished job means: the answer that its client gets, and the rows that are written with it.

There is one function for each kind of request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from tinsmith.engine.protocol import CreateModel, Done, SavedFiles, SaveState
from tinsmith.server.auth.access import Access
from tinsmith.server.checkpoints.disk_budget import DiskBudget
from tinsmith.server.checkpoints.encryption import encrypt_directory
from tinsmith.server.checkpoints.saves import Saves
from tinsmith.server.data_dir import Files
from tinsmith.server.jobs.job import Completed, Finisher, Work
from tinsmith.server.jobs.pending_results import Outcome
from tinsmith.server.runs.replay import fingerprint_in, fingerprint_text
from tinsmith.store.base import Statement, statement
from tinsmith.store.rows import AuditRow, CheckpointRow, SamplerRow


def make_finishers(
    *,
    access: Access,
    files: Files,
    disk: DiskBudget,
    saves: Saves,
    clock: Callable[[], float],
    forget_run: Callable[[str], None],
) -> Mapping[str, Finisher]:
    """Return the finisher of each kind of request."""

    async def as_it_is(work: Work, done: Done) -> Completed:
        return Completed(Outcome(done.body, done.encoding))

    async def created(work: Work, done: Done) -> Completed:
        answer = {"model_id": work.context["model_id"], "type": "create_model"}
        return Completed(_outcome(answer), _machine(work, done))

    async def loaded(work: Work, done: Done) -> Completed:
        answer = {"path": work.context["path"], "model_id": work.context["model_id"], "type": "load_weights"}
        return Completed(_outcome(answer), _machine(work, done) if is_creation(work) else ())

    async def unloaded(work: Work, done: Done) -> Completed:
        model_id = work.row.lane

        def forget() -> None:
            access.models.pop(model_id, None)
            forget_run(model_id)

        state = statement("set_model_state", model_id=model_id, state="unloaded")
        return Completed(_outcome({"model_id": model_id, "type": "unload_model"}), (state,), forget)

    async def saved(work: Work, done: Done) -> Completed:
        written = msgspec.json.decode(done.body, type=SavedFiles)
        assert isinstance(work.job, SaveState)
        disk.release(work.job.directory, written.size_bytes)
        if work.context.get("sampler_id") is not None:
            return _new_sampler(work, written, clock())
        return await _new_checkpoint(work, written, clock(), files, saves)

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


def _new_sampler(work: Work, written: SavedFiles, now: float) -> Completed:
    assert isinstance(work.job, SaveState)
    row = SamplerRow(
        sampler_id=work.context["sampler_id"],
        session_id=work.row.session_id,
        org_id=work.row.org_id,
        user_id=work.row.user_id,
        base_model=work.job.base_model,
        directory=work.job.directory,
        adapter_key=written.digest,
        created_at=now,
        run_id=work.job.model_id,
    )
    answer = {"sampling_session_id": row.sampler_id, "type": "save_weights_for_sampler"}
    return Completed(_outcome(answer), (statement("insert_sampler_if_absent", row),))


async def _new_checkpoint(work: Work, written: SavedFiles, now: float, files: Files, saves: Saves) -> Completed:
    assert isinstance(work.job, SaveState)
    context, size_bytes = work.context, written.size_bytes
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
        digest=written.digest,
        user_metadata=context["user_metadata"],
        created_at=now,
        expires_at=now + ttl if ttl is not None else None,
    )
    answer: dict[str, Any] = {"path": row.path, "type": work.row.kind}
    if row.kind == "external_weights":
        answer["size_bytes"] = size_bytes

    def clean() -> None:
        for directory in context["replaces"]:
            if directory not in saves.directories(row.path):  # else it was accepted earlier and runs later
                files.remove(directory)

    return Completed(_outcome(answer), (statement("put_checkpoint", row), _audit(work, row, now)), clean)


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
            project_id=row.project_id,
        ),
    )


def _outcome(answer: Mapping[str, Any]) -> Outcome:
    return Outcome(msgspec.json.encode(answer), "json")


def _machine(work: Work, done: Done) -> tuple[Statement, ...]:
    """Record which machine a new model is computed on, if the engine says so."""
    text = fingerprint_text(fingerprint_in(done))
    if text is None:
        return ()
    return (statement("set_model_fingerprint", model_id=work.context["model_id"], fingerprint=text),)


def is_creation(work: Work) -> bool:
    """Whether a request creates a model; a load can, too."""
    return isinstance(work.job, CreateModel)
