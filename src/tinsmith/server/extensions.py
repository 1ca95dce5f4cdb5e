"""Endpoints of our own, outside the protocol: health, metrics, schema, tokenizers, token streams, quota, usage,
curves, imports, downloads.

Clients learn of those that concern them from the `tinsmith` object in the answer to client/config.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Route

from tinsmith.errors import InvalidInputError, LimitExceededError, TinkerError, WireError
from tinsmith.server.calls import JSON
from tinsmith.server.exchange import exchange_of
from tinsmith.server.http import fault, read_body, refusal, unpacked
from tinsmith.server.identity import Caller
from tinsmith.server.importing import import_checkpoint, read_request
from tinsmith.server.measured import MAX_POINTS, measured
from tinsmith.server.openapi import openapi
from tinsmith.server.refusals import UnknownResourceError
from tinsmith.server.routes.futures import finished_samples
from tinsmith.server.routes.sampling import submit_body, submit_sample
from tinsmith.server.routes.training import card_of
from tinsmith.server.routes.weights import IDEMPOTENCY_HEADER
from tinsmith.server.services import Services
from tinsmith.server.signing import DOWNLOAD_PREFIX
from tinsmith.server.sockets import close_gently
from tinsmith.server.spending import read_query, spent
from tinsmith.server.streams import open_stream, read_have
from tinsmith.server.token_log import TokenLog
from tinsmith.server.uploads import add_part, read_part
from tinsmith.version import __version__
from tinsmith.wire import json_codec
from tinsmith.wire.futures import FuturesRetrieveRequest
from tinsmith.wire.own_routes import (
    MAX_SAMPLES_AT_ONCE,
    MSGPACK_TYPE,
    OWN_PREFIX,
    REQUEST_ID_HEADER,
    SAMPLE_RESULTS,
    SAMPLE_STREAM,
    SAMPLES,
    SubmitAnswer,
)
from tinsmith.wire.sampling import SampleRequest

logger = logging.getLogger(__name__)


def extension_routes(services: Services) -> list[Route]:
    """The routes, bound to a server."""
    extensions = Extensions(services)
    return [
        Route("/healthz", extensions.healthz),
        Route("/readyz", extensions.readyz),
        Route("/metrics", extensions.metrics),
        Route("/openapi.json", extensions.openapi),
        Route(f"{OWN_PREFIX}/version", extensions.version),
        Route(f"{OWN_PREFIX}/tokenizer", extensions.tokenizer),
        Route(f"{OWN_PREFIX}/quota", extensions.quota),
        Route(f"{OWN_PREFIX}/status", extensions.status),
        Route(f"{OWN_PREFIX}/usage", extensions.usage),
        Route(f"{OWN_PREFIX}/training_runs/{{training_run_id}}/metrics", extensions.run_metrics),
        Route(f"{OWN_PREFIX}/import_weights", extensions.import_weights, methods=["POST"]),
        Route(f"{OWN_PREFIX}/import_parts", extensions.import_parts, methods=["POST"]),
        Route(SAMPLE_STREAM.path, extensions.sample_stream, methods=["POST"]),
        Route(SAMPLES.path, extensions.samples, methods=["POST"]),
        Route(SAMPLE_RESULTS.path, extensions.sample_results, methods=["POST"]),
        Route(DOWNLOAD_PREFIX + "{name:path}", extensions.download),
    ]


class Extensions:
    """Handlers with the server that they belong to."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def healthz(self, request: Request) -> Response:
        """Whether the process is alive; needs no key."""
        return _json({"status": "ok"})

    async def readyz(self, request: Request) -> Response:
        """Whether work is taken: 503 with the reason while the engine starts or the server drains; needs no key."""
        status = self._services.backend.status
        is_ready = status.state == "ready" and not self._services.is_draining
        reason = "draining" if self._services.is_draining else status.reason
        return _json({"status": status.state, "reason": reason}, 200 if is_ready else 503)

    async def metrics(self, request: Request) -> Response:
        """Counters for Prometheus; needs no key on loopback."""
        if not self._services.config.is_loopback:
            try:
                await self._caller(request)
            except TinkerError as error:
                return _refused(error)
        return Response(self._services.metrics.text(), media_type="text/plain; version=0.0.4")

    async def openapi(self, request: Request) -> Response:
        """The schema of the protocol, made from the route table; needs no key."""
        return Response(openapi(), media_type=JSON)

    async def version(self, request: Request) -> Response:
        """The release of this server; needs no key."""
        return _json({"tinsmith": __version__})

    async def tokenizer(self, request: Request) -> Response:
        """`?model=NAME`: the files of a base model's tokenizer as one JSON object."""
        try:
            await self._caller(request)
            card = card_of(self._services, request.query_params.get("model", ""))
            if card.tokenizer_directory is None:
                raise UnknownResourceError(f"this server has no tokenizer for {card.name}")
            files = await asyncio.to_thread(_tokenizer_files, Path(card.tokenizer_directory))
        except TinkerError as error:
            return _refused(error)
        return _json(files)

    async def quota(self, request: Request) -> Response:
        """What is left of the caller's rate, tokens and queue."""
        try:
            caller = await self._caller(request)
        except TinkerError as error:
            return _refused(error)
        queued = self._services.jobs.queued_by_org.get(caller.org_id, 0)
        return _json(self._services.admission.remaining(caller, queued))

    async def status(self, request: Request) -> Response:
        """What the server does now: its engine, and the caller's organisation's queue, sessions and runs."""
        try:
            caller = await self._caller(request)
        except TinkerError as error:
            return _refused(error)
        services = self._services
        sessions = [row for row in services.access.sessions.values() if caller.sees(row.org_id)]
        runs = [run for run in services.runs.all() if caller.sees(run.row.org_id)]
        return _json(
            {
                "version": __version__,
                "engine": {"state": services.backend.status.state, "reason": services.backend.status.reason},
                "models": [card.name for card in services.backend.cards()],
                "queued": services.jobs.queued_by_org.get(caller.org_id, 0),
                "sessions": [
                    {
                        "session_id": row.session_id,
                        "heartbeat_age_s": services.clock() - services.heartbeats.get(row.session_id, row.heartbeat_at),
                        "expires_after_s": services.config.session_timeout_s,
                    }
                    for row in sessions
                ],
                "runs": [
                    {
                        "model_id": run.row.model_id,
                        "base_model": run.row.base_model,
                        "fault": run.row.fault,
                        "notice": run.row.notice,
                        "waits_for": run.reason,
                    }
                    for run in runs
                ],
            }
        )

    async def usage(self, request: Request) -> Response:
        """`?by=NAME&starting_on=T&ending_before=T`: tokens, device seconds and storage by run, project, model ..."""
        try:
            caller = await self._caller(request)
            caller.need("read")
            query = read_query(request.query_params)
            answer = await spent(self._services, caller, query)
        except TinkerError as error:
            return _refused(error)
        return _json(answer)

    async def run_metrics(self, request: Request) -> Response:
        """`?after=N&limit=N`: what a run's steps measured, behind a request's number, and how the run stands."""
        try:
            caller = await self._caller(request)
            caller.need("read")
            answer = await measured(
                self._services,
                caller,
                request.path_params["training_run_id"],
                after=_number(request, "after", -1),
                limit=_number(request, "limit", MAX_POINTS),
            )
        except TinkerError as error:
            return _refused(error)
        return _json(answer)

    async def import_weights(self, request: Request) -> Response:
        """A checkpoint's files as MessagePack, or the name of an upload that has them; they become a checkpoint."""
        try:
            caller = await self._caller(request)
            caller.need("train")
            body = await self._body(request)
            message = await asyncio.to_thread(read_request, body)
            key = request.headers.get(IDEMPOTENCY_HEADER)
            path = await import_checkpoint(self._services, caller, message, key)
        except TinkerError as error:
            return _refused(error)
        return _json({"path": path})

    async def import_parts(self, request: Request) -> Response:
        """`?upload=NAME&file=NAME&offset=N`: a part of a file, at most `max_body_bytes`, for import_weights."""
        try:
            caller = await self._caller(request)
            caller.need("train")
            part = read_part(request.query_params)
            size_bytes = await add_part(self._services, caller, part, await self._body(request))
        except TinkerError as error:
            return _refused(error)
        return _json({"size_bytes": size_bytes})

    async def sample_stream(self, request: Request) -> Response:
        """A sample as server-sent events `token`, `wait`, `done`; again: the same, behind `?have=3,0` tokens."""
        services = self._services
        try:
            caller = await self._caller(request)
            caller.need("sample")
            body = await self._body(request)
            sample = json_codec.decode(body, SampleRequest)
            have = read_have(request.query_params.get("have"), sample.num_samples)
            request_id = await submit_sample(services, caller, body, sample, TokenLog(sample.num_samples))
            stream = await open_stream(services, caller, request_id, have, is_numbered=sample.seq_id is not None)
        except TinkerError as error:
            return _refused(error)
        headers = {"cache-control": "no-store", REQUEST_ID_HEADER: request_id}
        return StreamingResponse(stream.events(), media_type="text/event-stream", headers=headers)

    async def samples(self, request: Request) -> Response:
        """Many bodies of asample at once (a msgpack array); the answer has one of asample's for each."""
        try:
            caller = await self._caller(request)
            caller.need("sample")
            bodies = _bodies(await self._body(request))
        except TinkerError as error:
            return _refused(error)
        answers = await asyncio.gather(*(self._sample(caller, index, body) for index, body in enumerate(bodies)))
        return Response(msgspec.msgpack.encode(answers), media_type=MSGPACK_TYPE)

    async def _sample(self, caller: Caller, index: int, body: bytes) -> SubmitAnswer:
        try:
            if index:  # the first was counted with the request
                self._services.admission.check_rate(caller)
            answer = await submit_body(self._services, caller, body)
        except TinkerError as error:
            answer = refusal(error)
        except Exception as error:
            logger.exception("samples failed", extra={"event": "fault", "route": SAMPLES.name})
            answer = refusal(fault(error))
        return SubmitAnswer(answer.status, answer.body, dict(answer.headers))

    async def sample_results(self, request: Request) -> Response:
        """As retrieve_futures, with the results in the answer (msgpack): one request brings many samples."""
        try:
            caller = await self._caller(request)
            caller.need("sample")
            asked = json_codec.decode(await self._body(request), FuturesRetrieveRequest)
            results = await finished_samples(self._services, caller, asked)
        except TinkerError as error:
            return _refused(error)
        return Response(msgspec.msgpack.encode(results), media_type=MSGPACK_TYPE)

    async def download(self, request: Request) -> Response:
        """A file behind a signed address that some answer gave; ranges work, so downloads can be resumed."""
        name = request.path_params["name"]
        query = request.query_params
        try:
            self._services.signer.check(name, query.get("expires", ""), query.get("signature", ""))
            path = self._services.files.resolve(name)
        except InvalidInputError:
            return _refused(UnknownResourceError(f"{name!r} is gone"))
        except TinkerError as error:
            return _refused(error)
        return FileResponse(path, filename=path.name.lstrip("."))

    async def _body(self, request: Request) -> bytes:
        """The body, within the limits."""
        config, headers = self._services.config, dict(request.headers)
        raw = await read_body(request.receive, headers, config.max_body_bytes, config.body_timeout_s)
        return unpacked(raw, headers, config.max_unpacked_bytes)

    async def _caller(self, request: Request) -> Caller:
        close_gently(exchange_of(request.scope))
        kind, _, bearer = request.headers.get("authorization", "").partition(" ")
        credential = request.headers.get("x-api-key") or (bearer if kind.lower() == "bearer" else None)
        caller = await self._services.authenticator.caller(credential)
        self._services.admission.check_rate(caller)
        return caller


def _bodies(packed: bytes) -> list[bytes]:
    try:
        bodies = msgspec.msgpack.decode(packed, type=list[bytes])
    except (msgspec.DecodeError, RecursionError) as error:
        raise WireError(f"samples: the body is not a msgpack array of bodies: {error}") from None
    if len(bodies) > MAX_SAMPLES_AT_ONCE:
        raise LimitExceededError(f"samples: {len(bodies)} at once are more than {MAX_SAMPLES_AT_ONCE}", field="body")
    return bodies


def _number(request: Request, name: str, default: int) -> int:
    text = request.query_params.get(name)
    if text is None:
        return default
    if not re.fullmatch(r"-?[0-9]{1,15}", text):
        raise InvalidInputError(f"{name}: {text[:40]!r} is not a whole number", field=name)
    return int(text)


def _tokenizer_files(directory: Path) -> dict[str, Any]:
    """The files of a tokenizer as one object."""
    answer: dict[str, Any] = {"tokenizer_json": (directory / "tokenizer.json").read_text()}
    with contextlib.suppress(FileNotFoundError):
        answer["tokenizer_config"] = msgspec.json.decode((directory / "tokenizer_config.json").read_bytes())
    with contextlib.suppress(FileNotFoundError):
        answer["chat_template"] = (directory / "chat_template.jinja").read_text()
    return answer


def _json(answer: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(answer), status, media_type=JSON)


def _refused(error: TinkerError) -> Response:
    answer = refusal(error)
    return Response(answer.body, answer.status, dict(answer.headers), media_type=JSON)
