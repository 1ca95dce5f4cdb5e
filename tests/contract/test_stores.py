"""What every store does: transactions, values, order, groups, closing."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from support import store_rows as make
from support.stores import AnyStore, MakeStore, run

from tinsmith.errors import ConstraintError, InvalidInputError, StoreError
from tinsmith.store.base import Row, Value, statement
from tinsmith.store.queries import load_queries
from tinsmith.store.rows import CountRow, JobRow, OrgRow, SamplerRow, UsageRow

INTEGERS = {
    "checkpoints",
    "clones",
    "datums",
    "device_us",
    "hour",
    "jobs",
    "keep",
    "key_id",
    "limit",
    "offset",
    "after",
    "first",
    "last",
    "prefill",
    "prefill_cached",
    "pruned",
    "public",
    "requests_per_minute",
    "sampled",
    "seq",
    "since_hour",
    "size_bytes",
    "snapshot_seq",
    "generation",
    "step",
    "storage",
    "stride",
    "tokens_per_day",
    "training",
    "until_hour",
}
TIMES = {"at", "before", "seconds", "since", "until"}


class AnyRow(Row, frozen=True, kw_only=True):
    """A row of which nothing is asked."""


def example(statement_name: str, parameter: str) -> Value:
    """A value of the right type."""
    if parameter in INTEGERS:
        return 3
    if parameter in TIMES or parameter.endswith("_at"):
        return 2.5
    is_blob = parameter in ("job", "request") or (parameter == "body" and statement_name == "insert_result")
    return b"\x00\xff" if is_blob else "text"


@pytest.mark.parametrize("name", ["read", "write"])
def test_every_statement_runs_on_every_engine(make_store: MakeStore, name: str) -> None:
    async def scenario(store: AnyStore) -> None:
        for query in load_queries("?").values():
            values = {parameter: example(query.name, parameter) for parameter in query.names}
            is_read = query.sql.startswith("SELECT")
            if is_read and name == "read":
                await store.read(AnyRow, query.name, **values)
            elif not is_read and "RETURNING" in query.sql:
                await store.write_returning(AnyRow, query.name, **values)
            elif not is_read:
                await store.write(statement(query.name, **values))

    run(make_store, scenario)


def test_a_write_gives_the_number_of_rows_it_touched(make_store: MakeStore) -> None:
    async def scenario(store: AnyStore) -> list[int]:
        return [
            await store.write(),
            await store.write(statement("insert_org", make.org())),
            await store.write(statement("insert_org", make.org())),
            await store.write(statement("insert_user", make.user("a")), statement("insert_user", make.user("b"))),
            await store.write(statement("delete_key", key_id=1)),
        ]

    assert run(make_store, scenario) == [0, 1, 0, 2, 0]


def test_returning_gives_rows(make_store: MakeStore) -> None:
    async def scenario(store: AnyStore) -> None:
        await store.write(statement("insert_sampler", make.sampler()))
        clones = [
            rows[0].clones
            for rows in await asyncio.gather(
                *(store.write_returning(SamplerRow, "add_sampler_clone", sampler_id="sampler-1") for _ in range(5))
            )
        ]
        assert clones == [1, 2, 3, 4, 5]
        assert await store.write_returning(SamplerRow, "add_sampler_clone", sampler_id="other") == []

    run(make_store, scenario)


def test_a_violated_constraint_undoes_the_whole_write(make_store: MakeStore) -> None:
    async def scenario(store: AnyStore) -> None:
        await store.write(statement("insert_job", make.job(seq=1)))
        with pytest.raises(ConstraintError, match=r"(?i)unique"):
            await store.write(
                statement("insert_org", make.org("lost")),
                statement("insert_job", make.job(seq=1, request_id="other")),
                statement("insert_org", make.org("lost too")),
            )
        assert await store.read(OrgRow, "orgs") == []
        (kept,) = await store.read(JobRow, "job_by_number", lane="model-1", seq=1)
        assert kept == make.job(seq=1)

    run(make_store, scenario)


def test_one_callers_violation_fails_that_caller_only(make_store: MakeStore) -> None:
    """All of them are queued at once, so they share transactions."""

    async def scenario(store: AnyStore) -> None:
        await store.write(statement("insert_job", make.job(seq=0)))
        writes = [
            store.write(
                statement("insert_org", make.org(f"org-{index}", created_at=float(index))),
                statement("insert_job", make.job(seq=0 if index % 3 == 0 else index, request_id=f"r-{index}")),
            )
            for index in range(1, 31)
        ]
        outcomes = await asyncio.gather(*writes, return_exceptions=True)
        good = [index for index in range(1, 31) if index % 3]
        assert [index for index, outcome in enumerate(outcomes, 1) if outcome == 2] == good
        assert sum(isinstance(outcome, ConstraintError) for outcome in outcomes) == 10
        assert [row.org_id for row in await store.read(OrgRow, "orgs")] == [f"org-{index}" for index in good]

    run(make_store, scenario)


def test_violations_do_no_lasting_harm(make_store: MakeStore) -> None:
    """Often enough for a driver to begin to prepare a statement behind one that fails, at an odd and an even count."""

    async def scenario(store: AnyStore) -> None:
        await store.write(statement("insert_job", make.job(seq=0)))
        await store.write(statement("insert_job_if_absent", make.job(seq=0)))
        for index in range(1, 15):
            bad, *good = await asyncio.gather(
                store.write(statement("insert_job", make.job(seq=0)), statement("insert_org", make.org("lost"))),
                store.write(statement("insert_job_if_absent", make.job(seq=index))),
                store.write(statement("set_job_state", request_id=f"model-1:{index}", state="done")),
                return_exceptions=True,
            )
            assert isinstance(bad, ConstraintError)
            assert good == [1, 1]

    run(make_store, scenario)


def test_many_writers_share_commits_and_keep_their_order(make_store: MakeStore) -> None:
    async def scenario(store: AnyStore) -> None:
        before = store.commits
        rows = [make.job(seq=1000 - index) for index in range(1000)]
        finished: list[int] = []
        writes = [asyncio.ensure_future(store.write(statement("insert_job", row))) for row in rows]
        for row, write in zip(rows, writes, strict=True):
            write.add_done_callback(lambda _, seq=row.seq: finished.append(seq))
        await asyncio.gather(*writes)
        await asyncio.sleep(0)
        assert store.commits - before <= 20
        assert finished == [row.seq for row in rows]

    run(make_store, scenario)


def test_later_writes_win(make_store: MakeStore) -> None:
    async def scenario(store: AnyStore) -> None:
        await store.write(statement("put_checkpoint", make.checkpoint()))
        path = make.checkpoint().path
        await asyncio.gather(
            *(
                store.write(statement("set_checkpoint_expires_at", path=path, expires_at=float(index)))
                for index in range(200)
            )
        )
        (found,) = await store.read(type(make.checkpoint()), "checkpoint", path=path)
        assert found.expires_at == 199.0

    run(make_store, scenario)


def test_a_read_sees_every_finished_write(make_store: MakeStore) -> None:
    async def scenario(store: AnyStore) -> None:
        async def write_then_read(seq: int) -> list[JobRow]:
            await store.write(statement("insert_job", make.job(seq=seq)))
            return await store.read(JobRow, "job_by_number", lane="model-1", seq=seq)

        found = await asyncio.gather(*(write_then_read(seq) for seq in range(100)))
        assert [rows[0].seq for rows in found] == list(range(100))

    run(make_store, scenario)


@pytest.mark.parametrize(
    "fields",
    [
        {"name": "", "created_at": -1e300},
        {"name": "π ≤ 4 \U0001f600 'quoted' \"twice\" %s :name \\ \n\t", "created_at": float("inf")},
        {"name": "null", "created_at": 1783036800.123456},
        {"name": "12", "created_at": 3},
    ],
)
def test_text_and_times_come_back_as_they_were(make_store: MakeStore, fields: dict[str, Any]) -> None:
    async def scenario(store: AnyStore) -> None:
        await store.write(statement("insert_org", make.org(**fields)))
        assert await store.read(OrgRow, "org", org_id="org-1") == [make.org(**fields)]

    run(make_store, scenario)


@pytest.mark.parametrize("amount", [0, -1, 2**31, 2**63 - 1, -(2**63)])
def test_integers_come_back_as_they_were(make_store: MakeStore, amount: int) -> None:
    async def scenario(store: AnyStore) -> None:
        await store.write(statement("add_usage", make.usage(storage=amount)))
        rows = await store.read(UsageRow, "usage_by_run", org_id="org-1", since_hour=0, until_hour=1000)
        assert [row.storage for row in rows] == [amount]

    run(make_store, scenario)


@pytest.mark.parametrize("payload", [b"", b"\x00", bytes(range(256)) * 16384], ids=["empty", "nul", "4 MB"])
def test_bytes_come_back_as_they_were(make_store: MakeStore, payload: bytes) -> None:
    async def scenario(store: AnyStore) -> None:
        await store.write(statement("insert_job", make.job(job=payload)))
        assert (await store.read(JobRow, "job", request_id="model-1:1"))[0].job == payload

    run(make_store, scenario)


def test_groups_are_bounded_in_bytes(make_store: MakeStore) -> None:
    async def scenario(store: AnyStore) -> None:
        before = store.commits
        payload = bytes(8 * 2**20)
        await asyncio.gather(*(store.write(statement("insert_job", make.job(seq=i, job=payload))) for i in range(12)))
        assert store.commits - before >= 3
        assert await store.read(CountRow, "count_jobs_queued") == [CountRow(count=12)]

    run(make_store, scenario)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "a\0b"}, "name: a string with a NUL character"),
        ({"name": "a\ud800"}, "name: character 1 is a lone surrogate"),
        ({"created_at": float("nan")}, "created_at: NaN cannot be stored"),
        ({"created_at": 2**63}, "created_at: 9223372036854775808 does not fit into 64 bits"),
    ],
)
def test_values_that_some_engine_would_change_are_refused(
    make_store: MakeStore, fields: dict[str, Any], message: str
) -> None:
    async def scenario(store: AnyStore) -> None:
        with pytest.raises(InvalidInputError, match=message):
            await store.write(statement("insert_org", make.org("good")), statement("insert_org", make.org(**fields)))
        assert await store.read(OrgRow, "orgs") == []

    run(make_store, scenario)


def test_mistakes_in_names_are_named(make_store: MakeStore) -> None:
    async def scenario(store: AnyStore) -> None:
        with pytest.raises(StoreError, match="has no statement 'inser_org'"):
            await store.write(statement("inser_org", make.org()))
        with pytest.raises(StoreError, match="statement org: parameter 'org_id' is missing; it needs org_id"):
            await store.read(OrgRow, "org", org="org-1")

    run(make_store, scenario)


def test_a_value_of_the_wrong_type_fails_its_caller_only(make_store: MakeStore) -> None:
    async def scenario(store: AnyStore) -> None:
        good, bad = await asyncio.gather(
            store.write(statement("insert_org", make.org())),
            store.write(statement("insert_user", make.user(created_at="yesterday"))),
            return_exceptions=True,
        )
        assert good == 1
        assert isinstance(bad, StoreError)

    run(make_store, scenario)


def test_rows_that_do_not_fit_their_type_are_an_error_of_the_reader(make_store: MakeStore) -> None:
    async def scenario(store: AnyStore) -> None:
        await store.write(statement("insert_org", make.org()))
        with pytest.raises(ValueError, match="missing required field `count`"):
            await store.read(CountRow, "orgs")
        await store.write(statement("insert_sampler", make.sampler()))
        with pytest.raises(ValueError, match="missing required field `count`"):
            await store.write_returning(CountRow, "add_sampler_clone", sampler_id="sampler-1")
        assert await store.read(OrgRow, "orgs") == [make.org()]

    run(make_store, scenario)


def test_a_cancelled_caller_does_not_undo_its_write(make_store: MakeStore) -> None:
    async def scenario(store: AnyStore) -> None:
        write = asyncio.ensure_future(store.write(statement("insert_org", make.org())))
        await asyncio.sleep(0)
        write.cancel()
        await store.write(statement("insert_org", make.org("later", created_at=9.0)))
        assert [row.org_id for row in await store.read(OrgRow, "orgs")] == ["org-1", "later"]

    run(make_store, scenario)


def test_closing_finishes_what_was_queued(make_lasting_store: MakeStore) -> None:
    async def write_and_leave(store: AnyStore) -> list[asyncio.Future[int]]:
        writes = [asyncio.ensure_future(store.write(statement("insert_job", make.job(seq=i)))) for i in range(500)]
        await asyncio.sleep(0)
        return writes

    writes = run(make_lasting_store, write_and_leave)
    assert [write.result() for write in writes] == [1] * 500

    async def count(store: AnyStore) -> int:
        return (await store.read(CountRow, "count_jobs_queued"))[0].count

    assert run(make_lasting_store, count) == 500


def test_a_store_that_is_not_open_says_so(make_store: MakeStore) -> None:
    async def scenario(store: AnyStore) -> None:
        with pytest.raises(StoreError, match="already open"):
            await store.open()
        await store.close()
        await store.close()
        for call in (store.write(statement("insert_org", make.org())), store.read(OrgRow, "orgs"), store.size_bytes()):
            with pytest.raises(StoreError, match="not open"):
                await call

    run(make_store, scenario)


def test_size_grows_with_what_is_kept(make_store: MakeStore) -> None:
    async def scenario(store: AnyStore) -> None:
        before = await store.size_bytes()
        await store.write(statement("insert_job", make.job(job=random.Random(1).randbytes(2 * 2**20))))
        freed = 64 * 1024  # pages that steps of the schema left free are used first
        assert await store.size_bytes() >= before + 2 * 2**20 - freed

    run(make_store, scenario)


def test_two_stores_share_a_database(make_lasting_store: MakeStore) -> None:
    async def scenario(store: AnyStore) -> None:
        other = make_lasting_store()
        await other.open()
        try:
            amounts = [one.write(statement("add_usage", make.usage())) for _ in range(50) for one in (store, other)]
            await asyncio.gather(*amounts)
            rows = await store.read(UsageRow, "usage_of_org", org_id="org-1", since_hour=0, until_hour=1000)
            assert [row.training for row in rows] == [700]
        finally:
            await other.close()

    run(make_lasting_store, scenario)
