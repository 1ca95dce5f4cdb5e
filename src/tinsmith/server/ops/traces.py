"""A session's requests as a trace that Perfetto and Chrome open: one line per run or sampler, waiting and running."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec

from tinsmith.server.data_dir import Files, write_whole
from tinsmith.store.base import Store
from tinsmith.store.rows import JobHeadRow, ResultHeadRow, SessionRow

MICROSECONDS = 1e6
MAX_REQUESTS = 50_000
"""The newest requests of a session; browsers cannot open longer traces."""


async def write_trace(store: Store, files: Files, session: SessionRow) -> Path:
    """Write the trace of a session, and return its path."""
    asked: dict[str, Any] = {"session_id": session.session_id, "limit": MAX_REQUESTS}
    jobs = await store.read(JobHeadRow, "job_heads_of_session", **asked)
    results = await store.read(ResultHeadRow, "result_heads_of_session", **asked)
    path = files.trace(session.session_id)
    await asyncio.to_thread(_write, path, session, jobs, results)
    return path


def _write(path: Path, session: SessionRow, jobs: list[JobHeadRow], results: list[ResultHeadRow]) -> None:
    trace = trace_of(session, jobs[::-1], {result.request_id: result for result in results})
    events = [
        msgspec.Raw(msgspec.json.encode(event)) for event in trace["traceEvents"]
    ]  # one by one: encoding all at once would hold Python's lock
    write_whole(path, msgspec.json.encode({**trace, "traceEvents": events}))


def trace_of(session: SessionRow, jobs: list[JobHeadRow], results: dict[str, ResultHeadRow]) -> dict[str, Any]:
    """Return the trace in Chrome's trace event format."""
    lanes = {lane: number for number, lane in enumerate(dict.fromkeys(job.lane for job in jobs), start=1)}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": f"session {session.session_id}"}}
    ]
    for lane, number in lanes.items():
        events.append({"ph": "M", "name": "thread_name", "pid": 1, "tid": number, "args": {"name": lane}})
    for job in jobs:
        events += _spans(job, results.get(job.request_id), lanes[job.lane])
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _spans(job: JobHeadRow, result: ResultHeadRow | None, number: int) -> list[dict[str, Any]]:
    details = {
        "request_id": job.request_id,
        "seq": job.seq,
        "state": job.state,
        "request_bytes": job.size_bytes,
        "result_bytes": result.size_bytes if result is not None else 0,
    }
    common = {"pid": 1, "tid": number, "cat": job.kind, "id": job.request_id, "args": details}
    began = job.created_at * MICROSECONDS
    if result is None:
        return [{**common, "ph": "i", "name": f"{job.kind} ({job.state})", "ts": began, "s": "t"}]
    started, finished = result.started_at * MICROSECONDS, result.finished_at * MICROSECONDS
    return [
        {**common, "ph": "b", "name": job.kind, "ts": began},
        {**common, "ph": "b", "name": "running", "ts": max(began, started)},
        {**common, "ph": "e", "name": "running", "ts": finished},
        {**common, "ph": "e", "name": job.kind, "ts": finished},
    ]
