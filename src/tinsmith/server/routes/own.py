"""Our own endpoints, outside the protocol: health, metrics, schema, tokenizers, token streams, quota, usage, curves,
imports, downloads.

`wire.routes.own` declares them, and they pass through the same `http.endpoint` as the protocol's. Clients learn of them
from the `tinsmith` object in the answer to client/config.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection
from pathlib import Path
from typing import Any

import msgspec

from tinsmith.errors import InvalidInputError, TinkerError, WireError
from tinsmith.server.auth.identity import Caller
from tinsmith.server.call import IDEMPOTENCY_HEADER, JSON, Answer, Call, FileAnswer, Handlers, StreamAnswer, reply
from tinsmith.server.checkpoints.import_checkpoint import import_checkpoint, read_form_request, read_request
from tinsmith.server.checkpoints.upload_parts import add_part, read_form_part
from tinsmith.server.http.endpoint import LARGE_BYTES, fault, refusal
from tinsmith.server.http.openapi import openapi
from tinsmith.server.jobs.accept_sample import read_sample, submit_sample
from tinsmith.server.jobs.streams import open_stream, read_have
from tinsmith.server.jobs.token_log import TokenLog
from tinsmith.server.ops.spending import spent
from tinsmith.server.redaction import redacted_text
from tinsmith.server.refusals import UnknownResourceError
from tinsmith.server.routes.futures import finished_samples
from tinsmith.server.routes.sampling import submit_body
from tinsmith.server.runs.delete_run import delete_ended_run
from tinsmith.server.runs.model_spec import card_of
from tinsmith.server.runs.progress import measured
from tinsmith.server.services import Services
from tinsmith.version import __version__
from tinsmith.wire.limits import check_size
from tinsmith.wire.routes.own import MAX_SAMPLES_AT_ONCE, MSGPACK_TYPE, REQUEST_ID_HEADER, SAMPLES, SubmitAnswer

logger = logging.getLogger(__name__)

PIECE_CHARACTERS = 1024 * 1024
"""What is encoded as JSON in one call, in a thread."""


async def alive(_: Services, call: Call) -> Answer:
    """Answer that the process is alive."""
    return _json({"status": "ok"})


async def readyz(services: Services, call: Call) -> Answer:
    """Whether work is accepted: 503 with the reason while the engine starts or the server shuts down."""
    status = services.backend.status
    is_ready = status.state == "ready" and not services.admission.is_draining
    reason = "draining" if services.admission.is_draining else status.reason
    return _json({"status": status.state, "reason": redacted_text(reason)}, 200 if is_ready else 503)


async def metrics(services: Services, call: Call) -> Answer:
    """Metrics for Prometheus, of all organisations together; needs no key on loopback."""
    text = await asyncio.to_thread(services.metrics.text)  # hundreds of lines: too long for the loop
    return Answer(text, content_type="text/plain; version=0.0.4; charset=utf-8")


async def schema(_: Services, call: Call) -> Answer:
    """The OpenAPI description of every route."""
    return Answer(openapi())


async def version(_: Services, call: Call) -> Answer:
    """The release of this server."""
    return _json({"tinsmith": __version__})


async def tokenizer(services: Services, call: Call) -> Answer:
    """`?model=NAME`: the files of a base model's tokenizer as one JSON object."""
    card = card_of(services.backend, call.query.model)
    if card.tokenizer_directory is None:
        raise UnknownResourceError(f"this server has no tokenizer for {card.name}")
    return Answer(await asyncio.to_thread(_tokenizer_files, Path(card.tokenizer_directory)))


async def quota(services: Services, call: Call) -> Answer:
    """What remains of the caller's rate, token, queue and disk limits."""
    org_id = call.caller.org_id
    queued = services.jobs.queued_by_org.get(org_id, 0)
    disk = {"disk_bytes": services.disk.used(org_id), "disk_limit_bytes": services.disk.limit(org_id)}
    return _json({**services.admission.remaining(call.caller, queued), **disk})


async def status(services: Services, call: Call) -> Answer:
    """Report the engine's state, and the queue, sessions and runs that the key's organisation or project owns.

    `timings` covers all organisations together, so it is there only for those who may read /metrics.
    """
    caller = call.caller
    sees_timings = services.config.is_loopback or caller.may("admin")
    sessions = [row for row in services.access.sessions.values() if caller.sees(row.org_id, row.project_id)]
    runs = [run for run in services.runs.all() if await services.access.sees(caller, run.row)]
    return _json(
        {
            "version": __version__,
            "engine": {"state": services.backend.status.state, "reason": redacted_text(services.backend.status.reason)},
            "models": [card.name for card in services.backend.cards()],
            "queued": _queued(services, caller, {row.session_id for row in sessions}),
            "sessions": [
                {
                    "session_id": row.session_id,
                    "heartbeat_age_s": services.clock()
                    - services.activity.heartbeats.get(row.session_id, row.heartbeat_at),
                    "expires_after_s": services.config.session_timeout_s,
                }
                for row in sessions
            ],
            "runs": [
                {
                    "model_id": run.row.model_id,
                    "base_model": run.row.base_model,
                    "fault": redacted_text(run.row.fault) if run.row.fault is not None else None,
                    "notice": redacted_text(run.row.notice) if run.row.notice is not None else None,
                    "waits_for": redacted_text(run.reason),
                }
                for run in runs
            ],
            **({"timings": services.metrics.timings()} if sees_timings else {}),
        }
    )


def _queued(services: Services, caller: Caller, sessions: Collection[str]) -> int:
    """Return how many requests of the organisation wait; for a key of a project, those of its sessions."""
    if caller.project_id is None:
        return services.jobs.queued_by_org.get(caller.org_id, 0)
    return sum(promise.session_id in sessions for promise in services.broker.all_pending())


async def usage(services: Services, call: Call) -> Answer:
    """`?by=NAME&starting_on=T&ending_before=T`: tokens, device seconds and storage by run, project, model ..."""
    return _json(await spent(services, call.caller, call.query))


async def run_metrics(services: Services, call: Call) -> Answer:
    """`?after=N&limit=N`: a run's metrics after a request's number, and its state."""
    run_id, query = call.params["training_run_id"], call.query
    return _json(await measured(services, call.caller, run_id, after=query.after, limit=query.limit))


async def delete_run(services: Services, call: Call) -> Answer:
    """Delete a run that has ended, with its checkpoints, snapshots and curve."""
    return reply(await delete_ended_run(services, call.caller, call.params["training_run_id"]))


async def import_weights(services: Services, call: Call) -> Answer:
    """Make a checkpoint of files sent as MessagePack or a multipart form, or uploaded before with import_parts."""
    if call.form is not None:
        message = await asyncio.to_thread(read_form_request, call.form)
    else:
        message = await asyncio.to_thread(read_request, call.body)
    path = await import_checkpoint(services, call.caller, message, call.headers.get(IDEMPOTENCY_HEADER))
    return _json({"path": path})


async def import_parts(services: Services, call: Call) -> Answer:
    """`?upload=NAME&file=NAME&offset=N`: store a part of a file, at most `max_body_bytes`, for import_weights."""
    body = call.body if call.form is None else read_form_part(call.form, call.query.file)
    return _json({"size_bytes": await add_part(services, call.caller, call.query, body)})


async def sample_stream(services: Services, call: Call) -> StreamAnswer:
    """A sample as server-sent events `token`, `wait`, `done`; `?have=3,0` resumes after that many tokens."""
    sample = await read_sample(services, call.caller, call.body)
    have = read_have(call.query.have, sample.num_samples)
    request_id = await submit_sample(services, call.caller, call.body, sample, TokenLog(sample.num_samples))
    stream = await open_stream(services, call.caller, request_id, have, is_numbered=sample.seq_id is not None)
    headers = {"cache-control": "no-store", REQUEST_ID_HEADER: request_id}
    return StreamAnswer(pieces=stream.events(), content_type="text/event-stream; charset=utf-8", headers=headers)


async def samples(services: Services, call: Call) -> Answer:
    """Many asample bodies in one request (a MessagePack array), with an answer for each."""
    is_large = len(call.body) > LARGE_BYTES
    bodies = await asyncio.to_thread(_bodies, call.body) if is_large else _bodies(call.body)
    answers = await asyncio.gather(*(_sample(services, call.caller, *item) for item in enumerate(bodies)))
    return Answer(msgspec.msgpack.encode(answers), content_type=MSGPACK_TYPE)


async def _sample(services: Services, caller: Caller, index: int, body: bytes) -> SubmitAnswer:
    try:
        if index:  # the first was counted with the request
            services.admission.check_rate(caller)
        answer = await submit_body(services, caller, body)
    except TinkerError as error:
        answer = refusal(error)
        services.refusals.add(SAMPLES.name, answer.status, caller, error)
    except Exception as error:
        logger.exception("samples failed", extra={"event": "fault", "route": SAMPLES.name})
        answer = refusal(fault(error))
    return SubmitAnswer(answer.status, answer.body, dict(answer.headers))


async def sample_results(services: Services, call: Call) -> Answer:
    """Like retrieve_futures, with the results in the answer (MessagePack)."""
    results = await finished_samples(services, call.caller, call.message)
    return Answer(msgspec.msgpack.encode(results), content_type=MSGPACK_TYPE)


async def download(services: Services, call: Call) -> FileAnswer:
    """A file by a signed URL that an earlier answer gave; ranges work, so downloads can be resumed."""
    name = call.params["name"]
    services.signer.check(name, call.query.expires, call.query.signature)
    try:
        path = services.files.resolve(name)
    except InvalidInputError:
        raise UnknownResourceError(f"{name!r} no longer exists") from None
    return FileAnswer(path=path, name=path.name.lstrip("."))


def _bodies(packed: bytes) -> list[bytes]:
    check_size(_array_length(packed), MAX_SAMPLES_AT_ONCE, "body", "samples at once")
    try:
        bodies: list[bytes] = msgspec.msgpack.decode(packed, type=list[bytes])
    except (msgspec.DecodeError, RecursionError) as error:
        raise WireError(f"samples: the body is not a MessagePack array of bodies: {error}") from None
    return bodies


def _array_length(packed: bytes) -> int:
    """Return the declared length of a MessagePack array before it is decoded; 0 if it is not one."""
    first = packed[:1]
    if b"\x90" <= first <= b"\x9f":
        return first[0] - 0x90
    width = {b"\xdc": 2, b"\xdd": 4}.get(first, 0)
    return int.from_bytes(packed[1 : 1 + width], "big")


def _tokenizer_files(directory: Path) -> bytes:
    """Return the files of a tokenizer as one JSON object."""
    answer = {"tokenizer_json": _json_string((directory / "tokenizer.json").read_text())}
    with contextlib.suppress(FileNotFoundError):
        config = msgspec.json.decode((directory / "tokenizer_config.json").read_bytes())
        answer["tokenizer_config"] = msgspec.Raw(msgspec.json.encode(config))
    with contextlib.suppress(FileNotFoundError):
        answer["chat_template"] = _json_string((directory / "chat_template.jinja").read_text())
    return msgspec.json.encode(answer)


def _json_string(text: str) -> msgspec.Raw:
    """Return a long string as JSON, encoded in pieces: encoding it in one call would hold Python's lock for long."""
    pieces = (text[start : start + PIECE_CHARACTERS] for start in range(0, len(text), PIECE_CHARACTERS))
    return msgspec.Raw(b'"' + b"".join([msgspec.json.encode(piece)[1:-1] for piece in pieces]) + b'"')


def _json(answer: Any, status: int = 200) -> Answer:
    return Answer(msgspec.json.encode(answer), status, JSON)


HANDLERS: Handlers = {
    "alive": alive,
    "readyz": readyz,
    "metrics": metrics,
    "openapi": schema,
    "version": version,
    "tokenizer": tokenizer,
    "quota": quota,
    "status": status,
    "usage": usage,
    "run_metrics": run_metrics,
    "delete_run": delete_run,
    "import_weights": import_weights,
    "import_parts": import_parts,
    "sample_stream": sample_stream,
    "samples": samples,
    "sample_results": sample_results,
    "download": download,
}
