"""Any mix of concurrent writes has the same effect as the same writes to a dict, one after another."""

from __future__ import annotations

import asyncio
from typing import TypeAlias

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import store_rows as make
from support.stores import AnyStore, MakeStore, run

from tinsmith.errors import ConstraintError
from tinsmith.server.jobs.pruning import delete_requests
from tinsmith.store.base import Statement, statement
from tinsmith.store.rows import JobRow

Step: TypeAlias = tuple[str, int, bytes]
"""What to do, the job's number, its payload."""
Jobs: TypeAlias = dict[int, tuple[str, bytes]]
"""State and payload by number."""

LANE = "model"
STEPS = st.tuples(
    st.sampled_from(["insert_job", "insert_job_if_absent", "set_job_state", "prune_journal"]),
    st.integers(0, 5),
    st.binary(max_size=3),
)
CALLERS = st.lists(STEPS, min_size=1, max_size=3)
ROUNDS = st.lists(st.lists(CALLERS, min_size=1, max_size=6), max_size=4)


def as_statement(step: Step) -> Statement:
    name, seq, payload = step
    if name == "prune_journal":
        return statement(name, lane=LANE, seq=seq)
    if name == "set_job_state":
        return statement(name, request_id=f"{LANE}:{seq}", state="done")
    return statement(name, make.job(LANE, seq, job=payload))


def expected(jobs: Jobs, caller: list[Step]) -> tuple[Jobs, int | type[ConstraintError]]:
    """What one caller's steps leave and give."""
    after, touched = dict(jobs), 0
    for name, seq, payload in caller:
        if name == "insert_job" and seq in after:
            return jobs, ConstraintError
        if name.startswith("insert") and seq not in after:
            after[seq], touched = ("queued", payload), touched + 1
        elif name == "set_job_state" and after.get(seq, ("",))[0] == "queued":
            after[seq], touched = ("done", after[seq][1]), touched + 1
        elif name == "prune_journal":
            cut = [number for number, (state, job) in after.items() if number <= seq and state == "done" and job]
            after |= dict.fromkeys(cut, ("done", b""))
            touched += len(cut)
    return after, touched


async def follow(store: AnyStore, rounds: list[list[list[Step]]]) -> None:
    jobs: Jobs = {}
    for callers in rounds:
        writes = [store.write(*map(as_statement, caller)) for caller in callers]
        outcomes = await asyncio.gather(*writes, return_exceptions=True)
        for caller, outcome in zip(callers, outcomes, strict=True):
            jobs, result = expected(jobs, caller)
            assert (type(outcome) if isinstance(outcome, Exception) else outcome) == result
        found = await store.read(JobRow, "jobs_of_lane_after", lane=LANE, seq=-1, limit=100)
        assert {row.seq: (row.state, row.job) for row in found} == jobs
        assert [row.seq for row in found] == sorted(jobs)


def test_concurrent_writes_are_as_if_one_after_another(make_store: MakeStore) -> None:
    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(rounds=ROUNDS)
    def check(rounds: list[list[list[Step]]]) -> None:
        async def scenario(store: AnyStore) -> None:
            await delete_requests(store, "stored_of_session", session_id="session-1")
            await follow(store, rounds)

        run(make_store, scenario)

    check()
