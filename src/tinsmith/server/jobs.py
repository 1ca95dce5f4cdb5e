"""The life of a request in the server: journalled before it is answered, run, its result kept before it is told.

Owns: idempotence by number, the promise, the result and what is written with it. How jobs reach the backend is in
`runs` (training, in order) and `samples`.
Does not know: HTTP, what a request asks for; `finishers` say what a finished job means.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any

import msgspec

from tinsmith.engine.base import Done, JobCancelledError, JobFailedError, encode_job
from tinsmith.errors import ConstraintError, InvalidInputError, StoreError
from tinsmith.server.promises import Broker, Outcome, Promise
from tinsmith.server.usage import usage_statements
from tinsmith.server.work import Draft, Finished, Finisher, Work, digest_of, error_outcome
from tinsmith.store.base import Statement, Store, statement
from tinsmith.store.rows import JobRow, ResultRow

logger = logging.getLogger(__name__)

STORE_RETRY_S = (0.2, 0.5, 1.0, 2.0, 5.0)
"""Pauses while a result cannot be written; the last one repeats. The result is in memory meanwhile."""

MAX_TOGETHER = 256
"""Results of samples in one write."""

Enqueue = Callable[[Work], None]
Ended = list[tuple[Work, Done | BaseException]]


def new_request_id() -> str:
    return secrets.token_hex(16)


class Jobs:
    """Accepts requests and brings their results home."""

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
    ) -> None:
        """`explain` says what a failed job's client is told, where that is more than the error itself."""
        self._store = store
        self._broker = broker
        self._finishers = finishers
        self._clock = clock
        self._new_id = new_id
        self._on_end = on_end
        self._explain = explain
        self._accepting: dict[tuple[str, int], asyncio.Future[JobRow]] = {}
        self._tasks: dict[asyncio.Task[None], str] = {}
        """Results on their way to the store, each with its lane."""
        self.queued_by_org: dict[str, int] = {}
        """How many requests of each organisation have no result yet."""
        self._store_is_down = False
        self._samples: Ended | None = None
        """Samples that have ended, and whose results the next task will keep."""

    async def accept(self, draft: Draft, enqueue: Enqueue) -> str:
        """Journal a request and queue it; returns its id. The same number again gives the same id."""
        number = (draft.lane, draft.seq)
        accepting = self._accepting.get(number)
        if accepting is not None:
            return _same(await asyncio.shield(accepting), draft)
        promised: asyncio.Future[JobRow] = asyncio.get_running_loop().create_future()
        self._accepting[number] = promised
        try:
            row = await self._journal(draft, enqueue)
        except BaseException as error:
            promised.set_exception(error if isinstance(error, Exception) else StoreError("the request was cut off"))
            promised.exception()  # marks it as looked at: often nobody else waits for it
            raise
        else:
            promised.set_result(row)
        finally:
            del self._accepting[number]
        return _same(row, draft)

    async def known(self, lane: str, seq: int) -> JobRow | None:
        """The request that has this number already, or is being journalled under it."""
        accepting = self._accepting.get((lane, seq))
        if accepting is not None:
            return await asyncio.shield(accepting)
        rows = await self._store.read(JobRow, "job_by_number", lane=lane, seq=seq)
        return rows[0] if rows else None

    def is_accepting(self, lane: str, seq: int) -> bool:
        return (lane, seq) in self._accepting

    async def settle_at_once(self, draft: Draft, result: Any) -> str:
        """Journal a request whose result is known already."""
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
        """Close a number: nothing will run under it, and those behind it need not wait."""
        await self._store.write(self._refusal(draft, reason))

    def refuse_later(self, draft: Draft, reason: str) -> None:
        """The same as soon as the store can write."""
        self._keep(draft.lane, self._write_for_sure(self._refusal(draft, reason)))

    def _refusal(self, draft: Draft, reason: str) -> Statement:
        row = self._row(replace(draft, context={"reason": reason}), self._new_id(), "refused")
        return statement("insert_job_if_absent", row)

    def reopen(self, work: Work) -> None:
        """A request from before a restart has a promise again."""
        self._count(work.row.org_id, 1)
        self._broker.open(_promise(work.row, work.feed))

    def finish(self, work: Work, result: Done | BaseException) -> None:
        """A job has ended: keep its result, then tell those who wait."""
        if work.row.kind != "sample":
            self._keep(work.row.lane, self._finish([(work, result)]))
            return
        if self._samples is None or len(self._samples) == MAX_TOGETHER:
            self._samples = []
            self._keep("", self._finish(self._samples))
        self._samples.append((work, result))

    async def drain(self) -> None:
        """Wait until all results that are on their way are kept."""
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def kept(self, lane: str) -> None:
        """Wait until the journal holds every result of this lane that is on its way."""
        while tasks := [task for task, of in self._tasks.items() if of == lane]:
            await asyncio.gather(*tasks, return_exceptions=True)

    async def kept_so_far(self, lane: str) -> None:
        """The same for those that are on their way now; others may follow."""
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
        work = Work(row=row, job=job, context=dict(draft.context), log=draft.log)
        self.reopen(work)
        enqueue(work)
        return row

    def _take_up(self, row: JobRow, draft: Draft, enqueue: Enqueue) -> None:
        """Queue a request that was journalled by a write which seemed to fail, now that its client sent it again."""
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
            raise StoreError(f"request {draft.seq} of {draft.lane} was neither written nor found")
        return rows[0]

    async def _finish(self, ended: Ended) -> None:
        """Keep and tell results. Samples end in crowds, and one write keeps all that ended at the same time."""
        if ended is self._samples:
            self._samples = None
        meanings = [(work, result, *await self._meaning(work, result)) for work, result in ended]
        done = [(work, result) for work, result, _, state in meanings if state == "done" and isinstance(result, Done)]
        statements = [self._kept(work, result, finished.outcome) for work, result, finished, _ in meanings]
        statements += usage_statements(done, self._clock())
        for work, _, finished, state in meanings:
            statements += work.beside if state == "done" else ()
            statements.append(statement("set_job_state", request_id=work.row.request_id, state=state))
            statements += finished.statements
        if len(ended) == 1:
            await self._write_for_sure(*statements)
        else:
            try:
                await self._store.write(*statements)
            except StoreError:  # one may find the room that all together do not
                await asyncio.gather(*(self._finish([one]) for one in ended))
                return
        for work, _, finished, state in meanings:
            self._tell(work, finished, state)

    def _kept(self, work: Work, result: Done | BaseException, outcome: Outcome) -> Statement:
        row = ResultRow(
            request_id=work.row.request_id,
            body=outcome.body,
            encoding=outcome.encoding,
            digest=digest_of(result.body) if isinstance(result, Done) else digest_of(outcome.body),
            started_at=work.started_at or work.row.created_at,
            finished_at=self._clock(),
        )
        return statement("insert_result", row)

    def _tell(self, work: Work, finished: Finished, state: str) -> None:
        self._count(work.row.org_id, -1)
        self._broker.settle(work.row.request_id, finished.outcome)
        if finished.after is not None:
            finished.after()
        if self._on_end is not None:
            self._on_end(work, state)

    async def _meaning(self, work: Work, result: Done | BaseException) -> tuple[Finished, str]:
        if isinstance(result, Done):
            try:
                return await self._finishers[work.row.kind](work, result), "done"
            except Exception as error:
                logger.exception("a finished job cannot be told", extra={"event": "finish", "job_id": work.job.job_id})
                result = error
        if isinstance(result, JobCancelledError):
            return Finished(error_outcome(work.cancel_reason, "user")), "cancelled"
        if isinstance(result, JobFailedError):
            text = str(result) if self._explain is None else await self._explain(work, result)
            return Finished(error_outcome(text, result.category)), "failed"
        logger.error("job %s (%s) failed: %r", work.job.job_id, work.row.kind, result)
        text = f"the server failed on this request: {type(result).__name__}: {result}"
        return Finished(error_outcome(text, "server")), "failed"

    async def _write_for_sure(self, *statements: Statement) -> None:
        """Write a result however long it takes: it was computed and must not be lost while the disk is full."""
        for attempt in range(10**9):
            try:
                await self._store.write(*statements)
            except StoreError as error:
                if not self._store_is_down:
                    logger.error("the journal cannot be written, trying again until it can: %s", error)
                self._store_is_down = True
                await asyncio.sleep(STORE_RETRY_S[min(attempt, len(STORE_RETRY_S) - 1)])
            else:
                if self._store_is_down:
                    logger.info("the journal can be written again")
                self._store_is_down = False
                return

    def _count(self, org_id: str, change: int) -> None:
        self.queued_by_org[org_id] = self.queued_by_org.get(org_id, 0) + change


def same_request(row: JobRow, lane: str, seq: int, kind: str, digest: str) -> str:
    """The id of the request that has a number; another body under it is an error of the client."""
    where = f"request number {seq} of {lane}"
    if row.digest != digest or row.kind != kind:
        raise InvalidInputError(
            f"{where} was used before, for another {row.kind}; every request needs a number of its own", field="seq_id"
        )
    if row.state == "refused":
        reason = msgspec.json.decode(row.context).get("reason", "")
        raise InvalidInputError(f"{where} was refused before: {reason}", field="seq_id")
    return row.request_id


def _same(row: JobRow, draft: Draft) -> str:
    return same_request(row, draft.lane, draft.seq, draft.kind, draft.digest)


def _promise(row: JobRow, feed: tuple[str, int] | None) -> Promise:
    return Promise(
        request_id=row.request_id,
        kind=row.kind,
        lane=row.lane,
        org_id=row.org_id,
        user_id=row.user_id,
        created_at=row.created_at,
        feed=feed,
    )
