"""Accept a numbered training request: recognise a repetition, validate, then write it to the journal.

A model's requests run in the order of their numbers. A request that is refused for good (4xx) therefore closes its
number, or the requests after it would wait forever. One that is refused for now (429, 503) does not: its client will
send it again under the same number.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tinsmith.engine.protocol import AnyJob
from tinsmith.errors import InvalidInputError, TinkerError, WireError
from tinsmith.server.bodies.read import explain, read_numbers
from tinsmith.server.call import Answer, Call, reply
from tinsmith.server.jobs.job import Draft, Work
from tinsmith.server.jobs.lifecycle import same_request
from tinsmith.server.refusals import NotReadyError, OverBudgetError, OverLimitError, UnknownResourceError
from tinsmith.server.runs.order import Arrival
from tinsmith.server.runs.registry import Run
from tinsmith.server.services import Services
from tinsmith.store.base import Statement
from tinsmith.wire.messages.futures import UntypedAPIFuture


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A valid request: its job, what finishing it needs, and how many tokens it uses."""

    make_job: Callable[[str], AnyJob]
    context: Mapping[str, Any] = field(default_factory=dict)
    statements: tuple[Statement, ...] = ()
    tokens: int = 0
    undo: Callable[[], None] | None = None
    """Reverts what preparing did, if the request is not journalled after all."""


LARGE = frozenset({"forward", "forward_backward"})
"""Kinds of requests whose payloads and results are large enough to count against the disk budget."""

MAX_NUMBER = 2**63 - 1
Prepare = Callable[[Run], Awaitable[Prepared]]
ReadNumbers = Callable[[], Awaitable[tuple[str, int | None]]]


async def submit_training(
    services: Services, call: Call, kind: str, prepare: Prepare, read: ReadNumbers | None = None
) -> Answer:
    """Journal a request of a training run, and answer with its request id.

    `read` finds the model and the number of a request whose body may be large.
    """
    arrival = services.arrivals.enter(call.caller.org_id)
    try:
        return await _submit(services, call, kind, prepare, read, arrival)
    finally:
        arrival.leave()


async def _submit(
    services: Services, call: Call, kind: str, prepare: Prepare, read: ReadNumbers | None, arrival: Arrival
) -> Answer:
    hashing = services.hasher.begin(kind.encode(), call.body)
    model_id, number = read_numbers(call.body, call.route.name) if read is None else await read()
    if number is not None:
        arrival.leave()
    row = await services.access.live_model(call.caller, model_id)
    run = await services.runs.get(row)
    services.activity.use_model(model_id, services.clock())
    if number is not None and (run.lane.knows(number) or services.jobs.is_accepting(model_id, number)):
        known = await services.jobs.known(model_id, number)
        if known is None:
            raise InvalidInputError(
                f"seq_id: {number} of {model_id} was used by a request that is no longer stored; use a new one",
                field="seq_id",
            )
        return promise(same_request(known, model_id, number, kind, await hashing.digest()), model_id)
    check_open(services)
    if kind in LARGE:
        services.disk.check_waiting(row.org_id)
    services.jobs.check_queue(services.admission, call.caller, len(call.body))
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
    except (InvalidInputError, WireError, UnknownResourceError) as raised:
        error = explain(raised, call.body) if read is None and isinstance(raised, WireError) else raised
        if number is None:
            raise error from None
        return await _refused(services, run, replace(draft, digest=await hashing.digest()), error)
    if number is None:
        await arrival.turn()
        draft = replace(draft, seq=_next_number(run))
        arrival.leave()
    is_new = False

    def enqueue(work: Work) -> None:
        nonlocal is_new
        is_new = True
        run.put(work)

    try:
        services.admission.check_tokens(call.caller, prepared.tokens)
        whole = replace(
            draft,
            digest=await hashing.digest(),
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
        if number is None:  # we chose the number, so nobody will send it again
            services.jobs.refuse_later(draft, str(error))
            run.close_number(draft.seq)
        elif isinstance(error, OverBudgetError):
            return await _refused(services, run, replace(draft, digest=await hashing.digest()), error)
        raise
    if not is_new:  # it was sent twice at once: the second preparation is not needed
        if prepared.undo is not None:
            prepared.undo()
        services.admission.give_back(call.caller, prepared.tokens)
    return promise(request_id, model_id)


async def _refused(services: Services, run: Run, draft: Draft, error: TinkerError) -> Answer:
    """Close the number of a request that is refused for good, and raise the error.

    If it was sent twice at once and the first was accepted, the answer is that one's promise.
    """
    twin = await services.jobs.known(draft.lane, draft.seq)
    if twin is not None and (twin.kind, twin.digest) == (draft.kind, draft.digest) and twin.state != "refused":
        return promise(twin.request_id, draft.lane)
    await services.jobs.refuse(draft, str(error))
    run.close_number(draft.seq)
    raise error from None


def _next_number(run: Run) -> int:
    number = run.lane.allot()
    if number > MAX_NUMBER:
        raise InvalidInputError(
            f"seq_id: {MAX_NUMBER} is the largest number, and it is taken; number requests 1, 2, 3 and so on",
            field="seq_id",
        )
    return number


def check_open(services: Services) -> None:
    """Refuse new work while the server shuts down or its disk is full."""
    if services.admission.is_draining:
        raise NotReadyError("the server is shutting down and accepts no new work; retry after its restart")
    services.files.check_room()


def promise(request_id: str, model_id: str | None = None) -> Answer:
    answer = UntypedAPIFuture(request_id=request_id)
    return reply(answer if model_id is None else UntypedAPIFuture(request_id=request_id, model_id=model_id))
