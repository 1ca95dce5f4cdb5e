"""The life of a request in the server, from its acceptance to its stored result.

Two rules make sure that nothing accepted is lost. A request is committed to the journal (the `jobs` table) before its
client gets a request id, so whatever a client holds an id for survives a crash. A result is committed, together with
everything that follows from it (checkpoints, usage, the job's state), in one transaction before a client can read it,
so no client acts on a result that a crash could take back.

Requests are idempotent by their number (`lane`, `seq`): sent again, they get the id of the first. Jobs reach the
backend through `runs` (training, in order) and `samples`; `on_finished` says what a finished job means.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec

from tinsmith.engine.protocol import Done, JobCancelledError, JobFailedError, encode_job
from tinsmith.errors import ConstraintError, InvalidInputError, StoreError, UnstorableError
from tinsmith.server.auth.admission import Admission
from tinsmith.server.auth.identity import Caller
from tinsmith.server.jobs.job import Completed, Draft, Finisher, Work, digest_of, error_outcome, readable, text_of
from tinsmith.server.jobs.pending_results import Broker, Outcome, Promise
from tinsmith.server.ops.usage import usage_statements
from tinsmith.server.redaction import redacted_text
from tinsmith.server.runs.replay import changes_state
from tinsmith.store.base import Statement, Store, statement
from tinsmith.store.rows import JobRow, ResultRow

logger = logging.getLogger(__name__)

STORE_RETRY_S = (0.2, 0.5, 1.0, 2.0, 5.0)
"""Pauses between attempts to write a result, which is kept in memory meanwhile; the last one repeats."""

TURN = 128
"""Jobs that are ended in one turn of the loop."""
MAX_TOGETHER = 256
"""Results of samples that one transaction writes."""
EXPLAIN_S = 10.0
"""How long to look for the reason of a failure; after that the client gets the error as it is."""

T = TypeVar("T")
Enqueue = Callable[[Work], None]
Ended = list[tuple[Work, Done | BaseException]]


async def in_turns(items: Iterable[T]) -> AsyncIterator[T]:
    """Yield items, and let other tasks run after every `TURN` of them."""
    for index, item in enumerate(items, 1):
        yield item
        if index % TURN == 0:
            await asyncio.sleep(0)


def new_request_id() -> str:
    return secrets.token_hex(16)


@dataclass(frozen=True, slots=True)
class Meaning:
    """A job that has ended, the answer to its client, and the state that its row gets."""

    work: Work
    result: Done | BaseException
    finished: Completed
    state: str


class Jobs:
    """Journals requests, and stores and delivers their results."""

    def __init__(
        self,
        store: Store,
        broker: Broker,
        finishers: Mapping[str, Finisher],
        *,
        clock: Callable[[], float] = time.time,
        new_id: Callable[[], str] = new_request_id,
        on_end: Callable[[Work, str], None] | None = None,
        explain: Callable[[Work, JobFailedError], Awaitable[str]] | None = None,
        count_bytes: Callable[[str, int], None] | None = None,
    ) -> None:
        """`explain` returns the message for a failed job's client; `count_bytes` is called with what is stored for an
        organisation."""
        self._store = store
        self._broker = broker
        self._finishers = finishers
        self._clock = clock
        self._new_id = new_id
        self._on_end = on_end
        self._explain = explain
        self._count_bytes = count_bytes or (lambda org_id, size_bytes: None)
        self._accepting: dict[tuple[str, int], asyncio.Future[JobRow]] = {}
        self._tasks: dict[asyncio.Task[None], str] = {}
        """Tasks that write results, each with its lane."""
        self.queued_by_org: dict[str, int] = {}
        """How many requests of each organisation have no result yet."""
        self.queued_bytes_by_org: dict[str, int] = {}
        """How many bytes those take together."""
        self._store_is_down = False
        self._samples: Ended | None = None
        """Samples that have ended, and whose results the next task will write."""

    async def accept(self, draft: Draft, enqueue: Enqueue) -> str:
        """Journal a request, queue it, and return its id. The same number again returns the same id."""
        number = (draft.lane, draft.seq)
        accepting = self._accepting.get(number)
        if accepting is not None:
            return _same(await asyncio.shield(accepting), draft)
        promised: asyncio.Future[JobRow] = asyncio.get_running_loop().create_future()
        self._accepting[number] = promised
        try:
            row = await self._journal(draft, enqueue)
        except BaseException as error:
            promised.set_exception(
                error
                if isinstance(error, Exception)
                else StoreError("the request was cancelled before it was journalled")
            )
            promised.exception()  # mark it as retrieved: often nobody else waits for it
            raise
        else:
            promised.set_result(row)
        finally:
            del self._accepting[number]
        return _same(row, draft)

    async def known(self, lane: str, seq: int) -> JobRow | None:
        """Return the request that has this number, or is being journalled under it."""
        accepting = self._accepting.get((lane, seq))
        if accepting is not None:
            return await asyncio.shield(accepting)
        rows = await self._store.read(JobRow, "job_by_number", lane=lane, seq=seq)
        return rows[0] if rows else None

    def is_accepting(self, lane: str, seq: int) -> bool:
        return (lane, seq) in self._accepting

    async def settle_at_once(self, draft: Draft, result: Any) -> str:
        """Journal a request together with its result, which is already known."""
        request_id = self._new_id()
        row = self._row(draft, request_id, "done")
        body = msgspec.json.encode(result)
        now = self._clock()
        kept = ResultRow(
            request_id=request_id, body=body, encoding="json", digest=digest_of(body), started_at=now, finished_at=now
        )
        try:
            await self._store.write(statement("insert_job", row), statement("insert_result", kept), *draft.statements)
        except ConstraintError:
            return _same(await self._existing(draft), draft)
        self._broker.open(_promise(row, None))
        self._broker.settle(request_id, Outcome(body, "json"))
        return request_id

    async def refuse(self, draft: Draft, reason: str) -> None:
        """Close a number: nothing will run under it, so later ones need not wait for it."""
        await self._store.write(self._refusal(draft, reason))

    def refuse_later(self, draft: Draft, reason: str) -> None:
        """Close a number in the background, as soon as the store can write."""
        self._keep(draft.lane, self._write_for_sure(self._refusal(draft, reason)))

    def _refusal(self, draft: Draft, reason: str) -> Statement:
        row = self._row(replace(draft, context={"reason": readable(reason)}), self._new_id(), "refused")
        return statement("insert_job_if_absent", row)

    def reopen(self, work: Work) -> None:
        """Let clients wait for a journalled request, for example one from before a restart."""
        self._count(work.row, 1)
        self._broker.open(_promise(work.row, work.sampling_client))

    def finish(self, work: Work, result: Done | BaseException) -> None:
        """Store the result of a job that has ended, then deliver it to the clients that wait for it.

        Samples that end together are written together, except failed ones: finding the reason can take a while, and
        the others should not wait for that.
        """
        is_sample = work.row.kind == "sample"
        if not is_sample or (isinstance(result, JobFailedError) and self._explain is not None):
            self._keep("" if is_sample else work.row.lane, self._finish([(work, result)]))
            return
        if self._samples is None or len(self._samples) == MAX_TOGETHER:
            self._samples = []
            self._keep("", self._finish(self._samples))
        self._samples.append((work, result))

    async def drain(self) -> None:
        """Wait until all results are stored."""
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def kept(self, lane: str) -> None:
        """Wait until no result of this lane is waiting to be stored."""
        while tasks := [task for task, of in self._tasks.items() if of == lane]:
            await asyncio.gather(*tasks, return_exceptions=True)

    async def kept_so_far(self, lane: str) -> None:
        """Wait until the results of this lane that are being stored now have been; others may follow."""
        tasks = [task for task, of in self._tasks.items() if of == lane]
        await asyncio.gather(*tasks, return_exceptions=True)

    def _keep(self, lane: str, writing: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(writing)
        self._tasks[task] = lane
        task.add_done_callback(self._tasks.pop)

    async def _journal(self, draft: Draft, enqueue: Enqueue) -> JobRow:
        assert draft.make_job is not None
        job = draft.make_job(self._new_id())
        row = self._row(draft, job.job_id, "queued", encode_job(job))
        try:
            await self._store.write(statement("insert_job", row), *draft.statements)
        except ConstraintError:
            existing = await self._existing(draft)
            self._take_up(existing, draft, enqueue)
            return existing
        self._count_bytes(row.org_id, len(row.job))
        work = Work(row=row, job=job, context=dict(draft.context), log=draft.log)
        self.reopen(work)
        enqueue(work)
        return row

    def _take_up(self, row: JobRow, draft: Draft, enqueue: Enqueue) -> None:
        """Queue a request that was journalled by a write that seemed to fail, now that its client has sent it again."""
        is_same = (row.digest, row.kind, row.state) == (draft.digest, draft.kind, "queued")
        is_known = self._broker.pending(row.request_id) or self._broker.recent(row.request_id)
        if is_same and not is_known:
            work = Work.from_row(row)
            work.log = draft.log
            self.reopen(work)
            enqueue(work)

    def _row(self, draft: Draft, request_id: str, state: str, job: bytes = b"") -> JobRow:
        return JobRow(
            request_id=request_id,
            lane=draft.lane,
            seq=draft.seq,
            kind=draft.kind,
            session_id=draft.session_id,
            org_id=draft.org_id,
            user_id=draft.user_id,
            digest=draft.digest,
            job=job,
            context=msgspec.json.encode(draft.context).decode(),
            state=state,
            created_at=self._clock(),
        )

    async def _existing(self, draft: Draft) -> JobRow:
        rows = await self._store.read(JobRow, "job_by_number", lane=draft.lane, seq=draft.seq)
        if not rows:
            raise InvalidInputError(
                f"seq_id: what request {draft.seq} of {draft.lane} would create exists already; use another number",
                field="seq_id",
            )
        return rows[0]

    async def _finish(self, ended: Ended) -> None:
        """Store and deliver results. Many samples end at the same time, and one transaction stores them all."""
        if ended is self._samples:
            self._samples = None
        meanings = [Meaning(work, result, *await self._meaning(work, result)) for work, result in ended]
        if len(meanings) > 1:
            try:
                await self._store.write(*self._statements(meanings))
            except Exception as error:  # one by one, so that a result that cannot be written does not lose the others
                logger.warning(
                    "could not write results together, writing them one by one: %s",
                    text_of(error),
                    extra={"event": "finish"},
                )
            else:
                for meaning in meanings:
                    self._deliver(meaning)
                return
        await asyncio.gather(*(self._finish_one(meaning) for meaning in meanings))

    async def _finish_one(self, meaning: Meaning) -> None:
        """Store and deliver one result, or, if it cannot be stored, an error that says so.

        The state of the job stays as it was: a training step that was applied is applied.
        """
        try:
            await self._write_for_sure(*self._statements([meaning]))
        except Exception as error:
            _log_unfinished(meaning.work, "a result could not be stored")
            text = f"the result of this request could not be stored: {text_of(error)}"
            meaning = replace(meaning, finished=Completed(error_outcome(text, "server"), (), meaning.finished.after))
            try:
                await self._write_for_sure(self._kept(meaning), _ended(meaning))
            except Exception:
                _log_unfinished(meaning.work, "the error that replaces a result could not be stored either")
        self._deliver(meaning)

    def _statements(self, meanings: Sequence[Meaning]) -> list[Statement]:
        done = [
            (meaning.work, meaning.result)
            for meaning in meanings
            if meaning.state == "done" and isinstance(meaning.result, Done)
        ]
        statements = [self._kept(meaning) for meaning in meanings]
        statements += usage_statements(done, self._clock())
        for meaning in meanings:
            statements += meaning.work.beside if meaning.state == "done" else ()
            statements.append(_ended(meaning))
            statements += meaning.finished.statements
        return statements

    def _kept(self, meaning: Meaning) -> Statement:
        work, result, outcome = meaning.work, meaning.result, meaning.finished.outcome
        row = ResultRow(
            request_id=work.row.request_id,
            body=outcome.body,
            encoding=outcome.encoding,
            digest=digest_of(result.body) if isinstance(result, Done) else digest_of(outcome.body),
            started_at=work.started_at or work.row.created_at,
            finished_at=self._clock(),
        )
        return statement("insert_result", row)

    def _deliver(self, meaning: Meaning) -> None:
        work, finished = meaning.work, meaning.finished
        self._count(work.row, -1)
        self._count_bytes(work.row.org_id, len(finished.outcome.body))
        self._broker.settle(work.row.request_id, finished.outcome)
        try:
            if finished.after is not None:
                finished.after()
            if self._on_end is not None:
                self._on_end(work, meaning.state)
        except Exception:
            _log_unfinished(work, "a step after a result was delivered failed")

    async def _meaning(self, work: Work, result: Done | BaseException) -> tuple[Completed, str]:
        """Return the answer to the client; never raises, so that no other result is lost with this one."""
        if isinstance(result, Done):
            try:
                return await self._finishers[work.row.kind](work, result), "done"
            except Exception as error:
                _log_unfinished(work, "a finished job could not be turned into an answer")
                result = error
                if changes_state(work.job):  # the model has changed, so a replay must change it, too
                    return Completed(_server_fault(error)), "done"
        if isinstance(result, JobCancelledError):
            return Completed(error_outcome(work.cancel_reason, "user")), "cancelled"
        if isinstance(result, JobFailedError):
            text = await self._explained(work, result)
            if redacted_text(text) != text:  # the client gets a shorter message
                logger.warning("job %s (%s) failed: %s", work.job.job_id, work.row.kind, text)
            return Completed(error_outcome(text, result.category)), "failed"
        logger.error("job %s (%s) failed: %s", work.job.job_id, work.row.kind, text_of(result))
        return Completed(_server_fault(result)), "failed"

    async def _explained(self, work: Work, error: JobFailedError) -> str:
        """Return the message for the client of a failed job: with advice if there is any, or the error as it is."""
        if self._explain is None:
            return text_of(error)
        try:
            return readable(await asyncio.wait_for(self._explain(work, error), EXPLAIN_S))
        except Exception:
            _log_unfinished(work, "the reason of a failed job could not be found")
            return text_of(error)

    async def _write_for_sure(self, *statements: Statement) -> None:
        """Write until it succeeds: a computed result must not be lost because the disk is full for a while."""
        for attempt in range(10**9):
            try:
                await self._store.write(*statements)
            except (ConstraintError, UnstorableError):
                raise  # trying again would fail again
            except StoreError as error:
                if not self._store_is_down:
                    logger.error("the journal cannot be written, retrying until it can: %s", error)
                self._store_is_down = True
                await asyncio.sleep(STORE_RETRY_S[min(attempt, len(STORE_RETRY_S) - 1)])
            else:
                if self._store_is_down:
                    logger.info("the journal can be written again")
                self._store_is_down = False
                return

    def check_queue(self, admission: Admission, caller: Caller, size: int) -> None:
        """Refuse a request that would exceed its organisation's queue."""
        queued, queued_bytes = self.queued_by_org.get(caller.org_id, 0), self.queued_bytes_by_org.get(caller.org_id, 0)
        admission.check_queue(caller, queued, queued_bytes, size)

    def _count(self, row: JobRow, change: int) -> None:
        org_id = row.org_id
        self.queued_by_org[org_id] = self.queued_by_org.get(org_id, 0) + change
        self.queued_bytes_by_org[org_id] = self.queued_bytes_by_org.get(org_id, 0) + change * len(row.job)


def _server_fault(error: BaseException) -> Outcome:
    return error_outcome(
        f"internal error while handling this request: {type(error).__name__}: {text_of(error)}", "server"
    )


def _ended(meaning: Meaning) -> Statement:
    return statement("set_job_state", request_id=meaning.work.row.request_id, state=meaning.state)


def _log_unfinished(work: Work, what: str) -> None:
    logger.exception("%s", what, extra={"event": "finish", "job_id": work.job.job_id})


def same_request(row: JobRow, lane: str, seq: int, kind: str, digest: str) -> str:
    """Return the id of the request that has a number; another body under that number is the client's error."""
    where = f"request number {seq} of {lane}"
    if row.digest != digest or row.kind != kind:
        raise InvalidInputError(
            f"seq_id: {where} was used before with a different body ({row.kind}); each request needs its own number",
            field="seq_id",
        )
    if row.state == "refused":
        reason = msgspec.json.decode(row.context).get("reason", "")
        raise InvalidInputError(f"seq_id: {where} was refused before: {reason}", field="seq_id")
    return row.request_id


def _same(row: JobRow, draft: Draft) -> str:
    return same_request(row, draft.lane, draft.seq, draft.kind, draft.digest)


def _promise(row: JobRow, sampling_client: tuple[str, int] | None) -> Promise:
    return Promise(
        request_id=row.request_id,
        kind=row.kind,
        lane=row.lane,
        session_id=row.session_id,
        org_id=row.org_id,
        user_id=row.user_id,
        created_at=row.created_at,
        sampling_client=sampling_client,
    )
