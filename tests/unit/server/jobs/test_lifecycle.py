"""The life of a request: idempotence by number, refusals, and results that survive a store that is unreachable."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from support.in_process import BreakableStore, Clock, run, settled

from tinsmith.engine.protocol import Done, JobCancelledError, JobFailedError, OptimStep, Usage
from tinsmith.errors import InvalidInputError, StorageFullError, StoreError
from tinsmith.server.jobs import lifecycle as jobs_module
from tinsmith.server.jobs.job import Completed, Draft, Work
from tinsmith.server.jobs.lifecycle import Jobs
from tinsmith.server.jobs.pending_results import Broker, Outcome
from tinsmith.store.base import Statement, statement
from tinsmith.store.rows import JobRow, OrgRow, ResultRow, UsageRow


class Bench:
    """A `Jobs` with its parts; `queued` is what was handed on."""

    def __init__(self, store: BreakableStore) -> None:
        self.store = store
        self.broker = Broker()
        self.queued: list[Work] = []
        self.ended: list[Work] = []
        self.finish: Any = None
        self.jobs = Jobs(
            store,
            self.broker,
            {"optim_step": self._finisher, "sample": self._finisher},
            clock=Clock(100.0),
            on_end=lambda work, _: self.ended.append(work),
        )

    async def _finisher(self, work: Work, done: Done) -> Completed:
        if self.finish is not None:
            return await self.finish(work, done)
        return Completed(Outcome(done.body, "json"))

    async def accept(self, draft: Draft) -> str:
        return await self.jobs.accept(draft, self.queued.append)

    async def row(self, request_id: str) -> JobRow:
        return (await self.store.read(JobRow, "job", request_id=request_id))[0]


def draft(seq: int = 1, digest: str = "d", **fields: Any) -> Draft:
    def make_job(request_id: str) -> OptimStep:
        return OptimStep(job_id=request_id, tenant="o", base_model="b", model_id="m", body=b"x")

    known = {"kind": "optim_step", "lane": "m", "session_id": "s", "org_id": "o", "user_id": "u"}
    return Draft(**{**known, "seq": seq, "digest": digest, "make_job": make_job, **fields})


def bench(scenario: Any) -> None:
    async def whole() -> None:
        store = BreakableStore()
        await store.open()
        try:
            await scenario(Bench(store))
        finally:
            store.is_down = False
            await store.close()

    run(whole())


def test_a_request_is_in_the_journal_before_it_is_queued_and_has_a_promise() -> None:
    async def scenario(made: Bench) -> None:
        request_id = await made.accept(draft(context={"a": 1}))
        [work] = made.queued
        row = await made.row(request_id)
        assert (row.lane, row.seq, row.kind, row.state, row.created_at) == ("m", 1, "optim_step", "queued", 100.0)
        assert Work.from_row(row).job == work.job
        assert Work.from_row(row).context == work.context == {"a": 1}
        assert made.broker.pending(request_id) is not None
        assert made.jobs.queued_by_org == {"o": 1}
        assert made.jobs.is_accepting("m", 1) is False

    bench(scenario)


def test_the_same_number_again_gives_the_same_id_and_runs_once() -> None:
    async def scenario(made: Bench) -> None:
        first = await made.accept(draft())
        assert await made.accept(draft()) == first
        assert len(made.queued) == 1
        assert made.jobs.queued_by_org == {"o": 1}
        known = await made.jobs.known("m", 1)
        assert known is not None
        assert known.request_id == first
        assert await made.jobs.known("m", 2) is None

    bench(scenario)


def test_duplicates_in_flight_share_one_journalling() -> None:
    async def scenario(made: Bench) -> None:
        tasks = [asyncio.create_task(made.accept(draft())) for _ in range(5)]
        await asyncio.sleep(0)
        assert made.jobs.is_accepting("m", 1)
        known = await made.jobs.known("m", 1)
        ids = await asyncio.gather(*tasks)
        assert len(set(ids)) == 1
        assert known is not None
        assert known.request_id == ids[0]
        assert len(made.queued) == 1

    bench(scenario)


@pytest.mark.parametrize("in_flight", [True, False])
@pytest.mark.parametrize("other", [{"digest": "other"}, {"kind": "save_weights"}])
def test_the_same_number_with_another_body_is_refused(in_flight: bool, other: dict[str, Any]) -> None:
    async def scenario(made: Bench) -> None:
        first = asyncio.create_task(made.accept(draft()))
        await asyncio.sleep(0)
        if not in_flight:
            await first
        with pytest.raises(InvalidInputError, match="request number 1 of m was used before with a different body"):
            await made.accept(replace(draft(), **other))
        await first
        assert len(made.queued) == 1

    bench(scenario)


def test_a_refused_number_stays_refused_with_its_reason() -> None:
    async def scenario(made: Bench) -> None:
        await made.jobs.refuse(draft(), "data: is empty")
        with pytest.raises(InvalidInputError, match="request number 1 of m was refused before: data: is empty"):
            await made.accept(draft())
        assert made.queued == []
        assert made.jobs.queued_by_org == {}
        accepted = await made.accept(draft(2))
        await made.jobs.refuse(draft(2, "other"), "too late")
        assert (await made.row(accepted)).state == "queued"

    bench(scenario)


def test_a_request_that_cannot_be_journalled_leaves_nothing_behind() -> None:
    async def scenario(made: Bench) -> None:
        made.store.is_down = True
        tasks = [asyncio.create_task(made.accept(draft())) for _ in range(2)]
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(error) for error in found] == [StoreError, StoreError]
        assert made.queued == []
        assert made.broker.count() == 0
        assert not made.jobs.is_accepting("m", 1)
        made.store.is_down = False
        await made.accept(draft())
        assert len(made.queued) == 1

    bench(scenario)


def test_what_is_written_with_a_request_is_written_with_it_or_not_at_all() -> None:
    async def scenario(made: Bench) -> None:
        org = statement("insert_org", OrgRow(org_id="new", name="new", created_at=0.0))
        await made.accept(draft(statements=(org,)))
        assert len(await made.store.read(OrgRow, "org", org_id="new")) == 1
        other = statement("insert_org", OrgRow(org_id="other", name="other", created_at=0.0))
        await made.accept(draft(statements=(other,)))
        assert await made.store.read(OrgRow, "org", org_id="other") == []

    bench(scenario)


def test_a_result_is_kept_and_told() -> None:
    async def scenario(made: Bench) -> None:
        request_id = await made.accept(draft())
        promise = made.broker.pending(request_id)
        assert promise is not None
        made.queued[0].started_at = 99.0
        made.jobs.finish(made.queued[0], Done(body=b'{"a":1}', usage=Usage(training=7), device_s=0.25))
        outcome = await made.broker.wait(promise, 3600)
        assert outcome == Outcome(b'{"a":1}', "json")
        [kept] = await made.store.read(ResultRow, "result", request_id=request_id)
        assert (kept.body, kept.encoding, kept.started_at, kept.finished_at) == (b'{"a":1}', "json", 99.0, 100.0)
        assert (await made.row(request_id)).state == "done"
        await made.jobs.drain()
        assert made.jobs.queued_by_org == {"o": 0}
        assert made.ended == made.queued
        [usage] = await made.store.read(UsageRow, "usage_by_run", org_id="o", since_hour=0, until_hour=10)
        assert (usage.training, usage.device_us, usage.jobs) == (7, 250_000, 1)
        assert (usage.base_model, usage.run_id, usage.hour) == ("b", "m", 0)

    bench(scenario)


def test_a_result_is_kept_before_it_is_told() -> None:
    """Neither an operation's result nor those of samples that ended together."""

    async def scenario(made: Bench) -> None:
        gate = made.store.gates["insert_result"] = asyncio.Event()
        ids = [await made.accept(draft())]
        made.jobs.finish(made.queued.pop(), Done(body=b'{"a":1}'))
        ids += await three_samples(made)
        await settled()
        assert "insert_result" in made.store.reached
        assert [made.broker.pending(request_id) is not None for request_id in ids] == [True] * 4
        assert [made.broker.recent(request_id) for request_id in ids] == [None] * 4
        assert (made.ended, made.jobs.queued_by_org) == ([], {"o": 4})
        gate.set()
        await made.jobs.drain()
        assert [made.broker.pending(request_id) for request_id in ids] == [None] * 4

    bench(scenario)


async def three_samples(made: Bench) -> list[str]:
    """Three that are queued, and end at the same time: two well, one not."""
    lane = {"kind": "sample", "lane": "l", "context": {"project_id": "p"}}
    ids = [await made.accept(draft(seq, **lane)) for seq in (1, 2, 3)]
    for work, result in zip(
        made.queued,
        (
            Done(body=b"1", usage=Usage(prefill=5, sampled=2)),
            JobFailedError("no", "user"),
            Done(body=b"3", usage=Usage(prefill=7)),
        ),
        strict=True,
    ):
        made.jobs.finish(work, result)
    return ids


async def check_three(made: Bench, ids: list[str]) -> None:
    kept = [(await made.store.read(ResultRow, "result", request_id=request_id))[0] for request_id in ids]
    assert [row.body for row in kept] == [b"1", b'{"error":"no","category":"user"}', b"3"]
    assert [(await made.row(request_id)).state for request_id in ids] == ["done", "failed", "done"]
    assert [made.broker.recent(request_id) is not None for request_id in ids] == [True] * 3
    assert made.ended == made.queued
    assert made.jobs.queued_by_org == {"o": 0}
    usage = await made.store.read(UsageRow, "usage_of_org", org_id="o", since_hour=0, until_hour=10)
    assert [(row.prefill, row.sampled, row.jobs, row.project_id) for row in usage] == [(12, 2, 2, "p")]


def test_samples_that_end_together_are_kept_by_one_write() -> None:
    async def scenario(made: Bench) -> None:
        ids = await three_samples(made)
        before = made.store.commits
        await made.jobs.drain()
        assert made.store.commits == before + 1
        await check_three(made, ids)

    bench(scenario)


def test_where_they_cannot_be_kept_together_each_is_kept_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(made: Bench) -> None:
        write = made.store.write

        async def not_so_much(*statements: Statement) -> int:
            if sum(one.name == "insert_result" for one in statements) > 1:
                raise StorageFullError("no room for all of them")
            return await write(*statements)

        monkeypatch.setattr(made.store, "write", not_so_much)
        ids = await three_samples(made)
        await made.jobs.drain()
        await check_three(made, ids)

    bench(scenario)


def test_what_was_kept_by_a_write_that_seemed_to_fail_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(made: Bench) -> None:
        write = made.store.write

        async def kept_but(*statements: Statement) -> int:
            count = await write(*statements)
            if sum(one.name == "insert_result" for one in statements) > 1:
                raise StoreError("the connection was lost behind the commit")
            return count

        monkeypatch.setattr(made.store, "write", kept_but)
        ids = await three_samples(made)
        await made.jobs.drain()
        await check_three(made, ids)

    bench(scenario)


def test_samples_beyond_one_write_go_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs_module, "MAX_TOGETHER", 2)

    async def scenario(made: Bench) -> None:
        ids = await three_samples(made)
        await made.jobs.drain()
        await check_three(made, ids)

    bench(scenario)


@pytest.mark.parametrize(
    ("result", "state", "said"),
    [
        (JobFailedError("no such token", "user"), "failed", {"error": "no such token", "category": "user"}),
        (JobCancelledError("x"), "cancelled", {"error": "cancelled", "category": "user"}),
        (
            ZeroDivisionError("oh"),
            "failed",
            {"error": "internal error while handling this request: ZeroDivisionError: oh", "category": "server"},
        ),
    ],
)
def test_how_failures_are_told(result: Exception, state: str, said: dict[str, str]) -> None:
    async def scenario(made: Bench) -> None:
        request_id = await made.accept(draft())
        made.jobs.finish(made.queued[0], result)
        await made.jobs.drain()
        recent = made.broker.recent(request_id)
        assert recent is not None
        assert recent[1].is_error
        assert msgspec.json.decode(recent[1].body) == said
        assert (await made.row(request_id)).state == state

    bench(scenario)


def test_a_finisher_that_fails_is_a_failure_of_the_request() -> None:
    async def scenario(made: Bench) -> None:
        async def broken(work: Work, done: Done) -> Completed:
            raise OSError("disk gone")

        made.finish = broken
        request_id = await made.accept(draft())
        made.jobs.finish(made.queued[0], Done())
        await made.jobs.drain()
        recent = made.broker.recent(request_id)
        assert recent is not None
        assert b"OSError: disk gone" in recent[1].body

    bench(scenario)


def test_results_wait_for_a_store_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs_module, "STORE_RETRY_S", (0.0,))

    async def scenario(made: Bench) -> None:
        ids = [await made.accept(draft(seq)) for seq in (1, 2)]
        made.store.is_down = True
        for work in made.queued:
            made.jobs.finish(work, Done(body=b"{}"))
        await settled()
        assert made.broker.count() == 2
        assert made.broker.recent(ids[0]) is None
        made.store.is_down = False
        await made.jobs.drain()
        for request_id in ids:
            assert made.broker.recent(request_id) is not None
            assert len(await made.store.read(ResultRow, "result", request_id=request_id)) == 1

    bench(scenario)


def test_one_can_wait_for_the_results_of_a_lane() -> None:
    async def scenario(made: Bench) -> None:
        mine = await made.accept(draft())
        other = await made.accept(draft(lane="other"))
        made.store.is_down = True
        made.jobs.finish(made.queued[1], Done())
        await made.jobs.kept("m")
        made.store.is_down = False
        made.jobs.finish(made.queued[0], Done())
        await made.jobs.kept("m")
        assert (await made.row(mine)).state == "done"
        await made.jobs.kept("other")
        assert (await made.row(other)).state == "done"

    bench(scenario)


def test_a_result_that_is_known_at_once() -> None:
    async def scenario(made: Bench) -> None:
        wanted = draft(make_job=None, kind="create_custom_loss")
        first = await made.jobs.settle_at_once(wanted, {"loss_id": "x"})
        assert await made.jobs.settle_at_once(wanted, {"loss_id": "x"}) == first
        recent = made.broker.recent(first)
        assert recent is not None
        assert recent[1].body == b'{"loss_id":"x"}'
        with pytest.raises(InvalidInputError, match="was used before"):
            await made.jobs.settle_at_once(replace(wanted, digest="other"), {})
        assert made.jobs.queued_by_org == {}

    bench(scenario)


def test_a_caller_that_is_cut_off_does_not_leave_others_waiting() -> None:
    async def scenario(made: Bench) -> None:
        first = asyncio.create_task(made.accept(draft()))
        await asyncio.sleep(0)
        second = asyncio.create_task(made.accept(draft()))
        await asyncio.sleep(0)
        first.cancel()
        found: Any = await asyncio.gather(first, second, return_exceptions=True)
        assert isinstance(found[0], asyncio.CancelledError)
        assert isinstance(found[1], StoreError)  # which its client takes as: send it again
        assert not made.jobs.is_accepting("m", 1)

    bench(scenario)
