"""Taking in a numbered training request: repetitions first, then the check, then the journal.

A request that is refused closes its number, so that those behind it do not wait for ever; one that is only too much for
now (429, 503) does not, because its client will send it again.
Does not know: what the requests ask for.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from tinsmith.engine.base import AnyJob
from tinsmith.errors import InvalidInputError, TinkerError, WireError
from tinsmith.server.calls import Answer, Call, reply
from tinsmith.server.jobs import same_request
from tinsmith.server.refusals import NotReadyError, OverLimitError, UnknownResourceError
from tinsmith.server.runs import Run
from tinsmith.server.services import Services
from tinsmith.server.work import Draft, Work
from tinsmith.store.base import Statement
from tinsmith.wire import protobuf
from tinsmith.wire.futures import UntypedAPIFuture
from tinsmith.wire.message import describe, field_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A checked request: its job, what finishing needs, and how many tokens it uses."""

    make_job: Callable[[str], AnyJob]
    context: Mapping[str, Any] = field(default_factory=dict)
    statements: tuple[Statement, ...] = ()
    tokens: int = 0
    undo: Callable[[], None] | None = None
    """Takes back what preparing did, when the request is not journalled after all."""


Prepare = Callable[[Run], Awaitable[Prepared]]


MAX_LOOSE_BYTES = 8 * 1024 * 1024
"""Bodies that are not JSON are looked at a second time up to this size: Python reads them slowly."""
_NOT_JSON = re.compile(rb"\b(?:NaN|Infinity)\b")


class _Numbers(msgspec.Struct):
    model_id: str = ""
    seq_id: int | None = None


def numbers_of(call: Call) -> tuple[str, int | None]:
    """The model and number of a request, also where the rest of it cannot be read; 0 means none was given."""
    if call.is_protobuf:
        model_id, seq = "", 0
        try:
            for number, kind, value in protobuf.read_fields(memoryview(call.body), call.route.name):
                if number == 1:
                    model_id = protobuf.as_text(value, kind, "model_id")
                elif number == 2:
                    seq = protobuf.as_int(value, kind, "seq_id", 32)
        except WireError:
            if not model_id or not seq:
                raise
        return model_id, seq or None
    try:
        numbers = msgspec.json.decode(call.body or b"{}", type=_Numbers)
    except msgspec.ValidationError as error:
        raise WireError(f"{call.route.name}: {describe(error)}", field=field_of(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return _loose_numbers(call, error)
    except RecursionError:
        raise WireError(f"{call.route.name}: the JSON is nested too deeply") from None
    return numbers.model_id, numbers.seq_id or None


def _loose_numbers(call: Call, error: Exception) -> tuple[str, int | None]:
    """The same of a body that holds NaN or Infinity, which some clients write and JSON does not have."""
    try:
        numbers = msgspec.convert(_loosely(call.body), _Numbers)
    except (ValueError, RecursionError):
        raise WireError(f"{call.route.name}: {error}") from None
    return numbers.model_id, numbers.seq_id or None


def _explained(call: Call, error: TinkerError) -> TinkerError:
    """Where the number is that JSON does not have, if that is why a body cannot be read."""
    if call.is_protobuf or not isinstance(error, WireError) or not _NOT_JSON.search(call.body):
        return error
    try:
        where = _not_finite(_loosely(call.body), "")
    except (ValueError, RecursionError):
        return error
    if where is None:
        return error
    text = f"{where}: is NaN or infinite, which JSON does not have; only finite numbers are allowed"
    return WireError(text, field=where)


def _loosely(body: bytes) -> Any:
    if len(body) > MAX_LOOSE_BYTES:
        raise ValueError("too large for a second look")
    return json.loads(body)


def _not_finite(value: Any, where: str) -> str | None:
    """The place of the first number that is not finite."""
    if isinstance(value, float) and not math.isfinite(value):
        return where
    items: Iterable[tuple[str, Any]] = ()
    if isinstance(value, dict):
        items = ((f"{where}.{key}" if where else key, item) for key, item in value.items())
    elif isinstance(value, list):
        items = ((f"{where}[{index}]", item) for index, item in enumerate(value))
    return next((found for place, item in items if (found := _not_finite(item, place)) is not None), None)


async def submit_training(services: Services, call: Call, kind: str, prepare: Prepare) -> Answer:
    """Journal a request of a training run; answers with its promise."""
    naming = services.namer.begin(kind.encode(), call.body)
    model_id, number = numbers_of(call)
    row = await services.access.live_model(call.caller, model_id)
    run = await services.runs.get(row)
    services.used[model_id] = services.clock()
    if number is not None and (run.lane.knows(number) or services.jobs.is_accepting(model_id, number)):
        known = await services.jobs.known(model_id, number)
        if known is None:
            raise InvalidInputError(f"request number {number} of {model_id} has passed", field="seq_id")
        return promise(same_request(known, model_id, number, kind, await naming.digest()), model_id)
    check_open(services)
    services.admission.check_queue(call.caller, services.jobs.queued_by_org.get(row.org_id, 0))
    draft = Draft(
        kind=kind,
        lane=model_id,
        seq=number or 0,
        session_id=row.session_id,
        org_id=row.org_id,
        user_id=row.user_id,
    )
    try:
        prepared = await prepare(run)
    except (InvalidInputError, WireError, UnknownResourceError) as error:
        if number is not None:
            digest = await naming.digest()
            twin = await services.jobs.known(model_id, number)
            if twin is not None and (twin.kind, twin.digest) == (kind, digest) and twin.state != "refused":
                return promise(twin.request_id, model_id)  # it came twice at once, and took its own name away
            await services.jobs.refuse(replace(draft, digest=digest), str(_explained(call, error)))
            run.close_number(number)
        raise _explained(call, error) from None
    if number is None:
        draft = replace(draft, seq=run.lane.allot())
    is_new = False

    def enqueue(work: Work) -> None:
        nonlocal is_new
        is_new = True
        run.put(work)

    try:
        services.admission.check_tokens(call.caller, prepared.tokens)
        whole = replace(
            draft,
            digest=await naming.digest(),
            make_job=prepared.make_job,
            context={**prepared.context, "project_id": row.project_id},
            statements=prepared.statements,
        )
        request_id = await services.jobs.accept(whole, enqueue)
    except BaseException as error:
        if prepared.undo is not None:
            prepared.undo()
        if not isinstance(error, OverLimitError):
            services.admission.give_back(call.caller, prepared.tokens)
        if number is None:  # nobody will come under the number that it was given
            services.jobs.refuse_later(draft, str(error))
            run.close_number(draft.seq)
        raise
    if not is_new:  # it came twice at once: what was prepared for the second is not needed
        if prepared.undo is not None:
            prepared.undo()
        services.admission.give_back(call.caller, prepared.tokens)
    return promise(request_id, model_id)


def check_open(services: Services) -> None:
    """Refuse new work while the server goes down or has no room."""
    if services.is_draining:
        raise NotReadyError("the server is shutting down and takes no new work; it will be back after its restart")
    services.files.check_room()


def promise(request_id: str, model_id: str | None = None) -> Answer:
    answer = UntypedAPIFuture(request_id=request_id)
    return reply(answer if model_id is None else UntypedAPIFuture(request_id=request_id, model_id=model_id))
