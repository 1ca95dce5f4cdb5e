"""The jobs of one base model: order, window, suspects, positions."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from support.jobs import Jobs, datum

from tinsmith.engine.backend import suspects as suspects_module
from tinsmith.engine.backend.job_queue import PATIENCE_S, WINDOW, Entry, JobQueue
from tinsmith.engine.backend.suspects import ALONE_S, STRIKE_S, STRIKES, Cause, Suspects
from tinsmith.engine.protocol import AnyJob


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


class Clock:
    """Seconds that pass when told to."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def queue(clock: Clock) -> JobQueue:
    return JobQueue(clock)


def add(queue: JobQueue, loop: asyncio.AbstractEventLoop, *jobs: AnyJob) -> list[str]:
    for job in jobs:
        queue.add(Entry(job, loop.create_future(), None))
    return [job.job_id for job in jobs]


def sent(queue: JobQueue) -> list[str]:
    return [entry.job.job_id for entry in queue.take_sendable()]


def test_a_model_has_a_window_and_samples_have_none(queue: JobQueue, loop: asyncio.AbstractEventLoop) -> None:
    jobs = Jobs("base")
    ids = add(queue, loop, jobs.create(), *jobs.steps(2))
    samples = add(queue, loop, *(jobs.sample([1]) for _ in range(5)))
    assert sent(queue) == ids[:WINDOW] + samples
    assert sent(queue) == []
    queue.end(ids[0])
    assert sent(queue) == [ids[WINDOW]]


def test_positions(queue: JobQueue, loop: asyncio.AbstractEventLoop) -> None:
    jobs = Jobs("base")
    ids = add(queue, loop, jobs.create(), *jobs.steps(1))
    samples = add(queue, loop, *(jobs.sample([1]) for _ in range(4)))
    sent(queue)

    def ahead(job_ids: list[str]) -> list[int]:
        return [queue.ahead(entry) for job_id in job_ids if (entry := queue.get(job_id)) is not None]

    assert ahead(ids) == [0, 1, 2]
    assert ahead(samples) == [0, 1, 2, 3]
    queue.begin([ids[0], *samples[:2]])
    assert ahead(samples) == [0, 0, 0, 1]
    assert queue.running() == (1, 2)
    queue.end(samples[0])
    queue.end(samples[2])
    assert ahead(samples) == [0, 0]
    queue.end(ids[0])
    assert ahead(ids) == [0, 1]


def begun(queue: JobQueue) -> list[str]:
    """What is sent now, and begins at once."""
    ids = sent(queue)
    queue.begin(ids)
    return ids


def condemned(queue: JobQueue, cause: Cause | None = "crash") -> list[str]:
    """The engine dies; those that are condemned by it."""
    return [entry.job.job_id for entry, is_condemned in queue.lose(cause) if is_condemned]


def test_after_a_crash_suspects_are_tried_apart_until_the_culprit_is_alone(
    queue: JobQueue, loop: asyncio.AbstractEventLoop
) -> None:
    ann, bob = Jobs("base", "ann", tenant="ann"), Jobs("base", "bob", tenant="bob")
    mine, theirs = [ann.sample([1]) for _ in range(3)], bob.create()
    add(queue, loop, *mine, theirs)
    begun(queue)
    assert condemned(queue) == []
    other = Jobs("base", "cat", tenant="cat").sample([2])
    add(queue, loop, *mine, theirs, other)
    assert begun(queue) == [job.job_id for job in mine], "suspects of one tenant, and nothing beside them"
    assert begun(queue) == []
    for job in mine:
        queue.end(job.job_id)
    assert begun(queue) == [theirs.job_id], "nobody else is at the engine, so the next suspect need not wait"
    assert condemned(queue) == [theirs.job_id]
    assert queue.suspects.is_condemned(theirs)
    add(queue, loop, other)
    assert begun(queue) == [other.job_id]


def test_a_job_is_never_condemned_for_a_death_with_others_beside_it(
    queue: JobQueue, loop: asyncio.AbstractEventLoop
) -> None:
    """However often: the two are sent together by a trial that was lifted."""
    first, second = Jobs("base", tenant="ann").sample([1]), Jobs("base", tenant="bob").sample([2])
    for _ in range(20):
        add(queue, loop, first, second)
        for entry in list(queue._entries.values()):
            queue._sent(entry)
            queue.begin([entry.job.job_id])
        assert condemned(queue) == []


@pytest.mark.parametrize("position", [0, 63, 100, 199])
def test_one_among_many_is_found_in_few_deaths_and_nobody_else_is_condemned(
    queue: JobQueue, loop: asyncio.AbstractEventLoop, position: int
) -> None:
    jobs = Jobs("base")
    waiting = {job.job_id: job for job in (jobs.sample([1]) for _ in range(200))}
    culprit = list(waiting)[position]
    found: list[str] = []
    deaths = 0
    while waiting and not found:
        add(queue, loop, *waiting.values())
        while (ids := begun(queue)) and culprit not in ids:
            for job_id in ids:
                queue.end(job_id)
                del waiting[job_id]
        found = condemned(queue)
        deaths += 1
    assert found == [culprit]
    assert deaths <= 11
    for job_id in found:
        del waiting[job_id]
    add(queue, loop, *waiting.values())
    while ids := begun(queue):
        for job_id in ids:
            queue.end(job_id)
    assert len(queue) == 0
    assert len(queue.suspects) == 1, "the condemned one is remembered"


@pytest.mark.parametrize(("cause", "tries"), [("crash", 2), ("memory", 3), ("killed", 10)])
def test_what_a_death_alone_proves_depends_on_its_cause(
    queue: JobQueue, loop: asyncio.AbstractEventLoop, cause: Cause, tries: int
) -> None:
    job = Jobs("base").sample([1])
    for number in range(1, tries + 1):
        add(queue, loop, job)
        assert begun(queue) == [job.job_id]
        assert condemned(queue, cause) == ([job.job_id] if number == tries else [])


def test_a_kill_from_outside_makes_nobody_wait(queue: JobQueue, loop: asyncio.AbstractEventLoop) -> None:
    jobs = [Jobs("base", tenant=name).sample([1]) for name in "abc"]
    for _ in range(3):
        ids = add(queue, loop, *jobs)
        assert begun(queue) == ids
        assert condemned(queue, "killed") == []
    assert not any(queue.suspects.strikes(name, 0.0) for name in "abc")


def test_a_suspect_waits_until_the_engine_is_empty_and_others_are_held_meanwhile(
    queue: JobQueue, loop: asyncio.AbstractEventLoop, clock: Clock
) -> None:
    jobs = Jobs("base", tenant="ann")
    suspect, others = jobs.sample([1]), [Jobs("base", tenant="bob").sample([2]) for _ in range(3)]
    add(queue, loop, suspect)
    begun(queue)
    condemned(queue)
    add(queue, loop, others[0])
    assert begun(queue) == [others[0].job_id]
    add(queue, loop, suspect, others[1])
    assert begun(queue) == []
    [first, second] = [queue.get(job.job_id) for job in (suspect, others[1])]
    assert first is not None
    assert second is not None
    assert queue.why_held(first) == "waits to run alone, because the engine died while this request was running"
    assert queue.why_held(second) == "waits while a request during which the engine died runs alone"
    clock.now += 1.0
    queue.end(others[0].job_id)
    assert begun(queue) == [suspect.job_id]
    clock.now += 1.0
    queue.end(suspect.job_id)
    assert begun(queue) == [others[1].job_id]


def test_samples_that_take_too_long_make_room(queue: JobQueue, loop: asyncio.AbstractEventLoop, clock: Clock) -> None:
    suspect, long = Jobs("base", tenant="ann").sample([1]), Jobs("base", tenant="bob").sample([2])
    add(queue, loop, suspect)
    begun(queue)
    condemned(queue)
    add(queue, loop, long)
    begun(queue)
    add(queue, loop, suspect)
    assert (begun(queue), queue.take_back()) == ([], [])
    assert queue.look_again_at() == clock.now + PATIENCE_S
    clock.now += PATIENCE_S
    assert [entry.job.job_id for entry in queue.take_back()] == [long.job_id]
    assert begun(queue) == [], "the engine has not said yet that it dropped it"
    add(queue, loop, long)
    queue.begin([long.job_id])  # said before it heard of the cancellation
    entry = queue.get(long.job_id)
    assert entry is not None
    assert entry.stage == "waiting"
    queue.gone(long.job_id)
    assert begun(queue) == [suspect.job_id]


def test_operations_are_waited_for_but_nobody_is_held_for_ever(
    queue: JobQueue, loop: asyncio.AbstractEventLoop, clock: Clock
) -> None:
    suspect, long = Jobs("base", tenant="ann").sample([1]), Jobs("base", "long", tenant="bob").create()
    add(queue, loop, suspect)
    begun(queue)
    condemned(queue)
    add(queue, loop, long)
    begun(queue)
    other = Jobs("base", tenant="cat").sample([2])
    add(queue, loop, suspect, other)
    for patience_s in (PATIENCE_S, 2 * PATIENCE_S, 4 * PATIENCE_S):
        assert begun(queue) == []
        clock.now += patience_s
        assert queue.take_back() == []
        assert begun(queue) == [other.job_id], "others have the engine again"
        queue.end(other.job_id)
        clock.now += patience_s
        other = Jobs("base", tenant="cat").sample([2])
        add(queue, loop, other)
    assert begun(queue) == []
    queue.end(long.job_id)
    assert begun(queue) == [suspect.job_id]


def test_nobody_is_held_for_a_tenant_whose_own_operation_is_computed(
    queue: JobQueue, loop: asyncio.AbstractEventLoop, clock: Clock
) -> None:
    suspect, long = Jobs("base", tenant="eve").sample([1]), Jobs("base", "long", tenant="eve").create()
    add(queue, loop, suspect)
    begun(queue)
    condemned(queue)
    add(queue, loop, long)
    begun(queue)
    other = Jobs("base", tenant="ann").sample([2])
    add(queue, loop, suspect, other)
    assert begun(queue) == [other.job_id]
    assert queue.look_again_at() is None
    queue.end(other.job_id)
    assert begun(queue) == []
    queue.end(long.job_id)
    assert begun(queue) == [suspect.job_id]


def test_one_who_lives_long_enough_goes_on_beside_others(
    queue: JobQueue, loop: asyncio.AbstractEventLoop, clock: Clock
) -> None:
    suspect, other = Jobs("base", tenant="ann").create(), Jobs("base", tenant="bob").sample([2])
    add(queue, loop, suspect)
    begun(queue)
    condemned(queue)
    add(queue, loop, suspect, other)
    assert begun(queue) == [suspect.job_id]
    assert queue.look_again_at() == clock.now + ALONE_S
    clock.now += ALONE_S
    assert begun(queue) == [other.job_id]
    assert condemned(queue) == [], "it was not alone"
    add(queue, loop, suspect)
    begun(queue)
    assert queue.look_again_at() == clock.now + 2 * ALONE_S


def test_others_have_the_engine_between_two_trials(
    queue: JobQueue, loop: asyncio.AbstractEventLoop, clock: Clock
) -> None:
    suspects = [Jobs("base", name, tenant=name).create() for name in ("ann", "bob")]
    add(queue, loop, *suspects)
    begun(queue)
    condemned(queue)
    others = [Jobs("base", tenant="cat").sample([number]) for number in (1, 2, 3)]
    add(queue, loop, *suspects, others[0])
    assert begun(queue) == [suspects[0].job_id]
    clock.now += 3.0
    queue.end(suspects[0].job_id)
    assert begun(queue) == [others[0].job_id]
    clock.now += 2.9
    add(queue, loop, others[1])
    assert begun(queue) == [others[1].job_id]
    queue.end(others[0].job_id)
    clock.now += 0.1
    add(queue, loop, others[2])
    assert begun(queue) == []
    queue.end(others[1].job_id)
    assert begun(queue) == [suspects[1].job_id]


def test_when_an_engine_comes_back_others_go_first(
    queue: JobQueue, loop: asyncio.AbstractEventLoop, clock: Clock
) -> None:
    """A tenant whose jobs kill one engine after another costs others the restarts, and no more."""
    suspect = Jobs("base", tenant="eve").sample([1])
    add(queue, loop, suspect)
    begun(queue)
    condemned(queue)
    clock.now += 7.0
    others = [Jobs("base", tenant="ann").sample([number]) for number in (1, 2)]
    add(queue, loop, suspect, others[0])
    assert begun(queue) == [others[0].job_id]
    clock.now += 6.9
    queue.end(others[0].job_id)
    add(queue, loop, others[1])
    assert begun(queue) == [others[1].job_id]
    clock.now += 0.1
    assert queue.look_again_at() == clock.now
    assert begun(queue) == []
    queue.end(others[1].job_id)
    assert begun(queue) == [suspect.job_id]


def test_a_sample_that_is_being_dropped_is_beside_others(
    queue: JobQueue, loop: asyncio.AbstractEventLoop, clock: Clock
) -> None:
    """A killer that is cancelled at once: whoever is computed then is not alone, and it counts against its tenant."""
    victim = Jobs("base", tenant="ann").create()
    for number in range(1, STRIKES + 1):
        killer = Jobs("base", tenant="eve").sample([1])
        add(queue, loop, killer)
        begun(queue)
        queue.drop(killer.job_id)
        add(queue, loop, victim)
        for entry in list(queue._entries.values()):
            queue._sent(entry)
        queue.begin([victim.job_id])
        assert condemned(queue) == []
        assert queue.suspects.strikes("eve", clock.now) == number
    assert queue.suspects.strikes("ann", clock.now) == 1
    add(queue, loop, victim)
    assert begun(queue) == [victim.job_id]
    queue.end(victim.job_id)
    assert not queue.suspects.is_quarantined("ann", clock.now)
    assert queue.suspects.is_quarantined("eve", clock.now)


def quarantine(queue: JobQueue, loop: asyncio.AbstractEventLoop, clock: Clock, tenant: str) -> None:
    for _ in range(STRIKES):
        bad = Jobs("base", tenant=tenant).sample([1])
        for _ in range(2):
            add(queue, loop, bad)
            clock.now += 10.0
            begun(queue)
            found = condemned(queue)
        assert found == [bad.job_id]


def test_all_jobs_of_a_tenant_that_keeps_killing_go_apart_and_wait_longer_each_time(
    queue: JobQueue, loop: asyncio.AbstractEventLoop, clock: Clock
) -> None:
    quarantine(queue, loop, clock, "eve")
    new, other = Jobs("base", tenant="eve"), Jobs("base", tenant="ann").sample([1])
    jobs = [new.create(), new.sample([1]), new.sample([2])]
    add(queue, loop, *jobs, other)
    assert begun(queue) == [other.job_id]
    queue.end(other.job_id)
    [entry] = [queue.get(jobs[0].job_id)]
    assert entry is not None
    assert "requests of this organisation killed the engine repeatedly" in (queue.why_held(entry) or "")
    assert begun(queue) == []
    assert queue.look_again_at() == clock.now + 2.0
    clock.now += 2.0
    assert sorted(begun(queue)) == sorted(job.job_id for job in jobs)
    assert condemned(queue) == []
    assert queue.suspects.not_before("eve", clock.now) == clock.now + 4.0
    clock.now += STRIKE_S
    add(queue, loop, other)
    assert begun(queue) == [other.job_id]
    assert not queue.suspects.is_quarantined("eve", clock.now)


def test_what_a_quarantine_held_goes_when_it_ends(
    queue: JobQueue, loop: asyncio.AbstractEventLoop, clock: Clock
) -> None:
    suspects = []
    for _ in range(STRIKES):
        suspects.append(Jobs("base", tenant="ann").sample([1]))
        add(queue, loop, suspects[-1])
        begun(queue)
        condemned(queue)
    held = Jobs("base", tenant="ann").create()
    add(queue, loop, *suspects)
    clock.now += 100.0
    for _ in suspects:
        [job_id] = begun(queue)
        if job_id == suspects[0].job_id:
            add(queue, loop, held)
        queue.end(job_id)
    assert queue.suspects.is_quiet
    assert begun(queue) == [held.job_id]


def test_the_memory_of_suspects_is_shared_fairly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suspects_module, "MAX_REMEMBERED", 10)
    suspects = Suspects()
    mine = [Jobs("base", tenant="ann").sample([1]) for _ in range(3)]
    suspects.died(mine, [], "crash", 0.0)
    for _ in range(30):
        suspects.died([Jobs("base", tenant="eve").sample([1]) for _ in range(5)], [], "crash", 0.0)
    assert len(suspects) == 10
    assert all(suspects.is_suspect(job) for job in mine)


def test_a_suspect_operation_holds_up_its_own_model(queue: JobQueue, loop: asyncio.AbstractEventLoop) -> None:
    first, second = Jobs("base", "first"), Jobs("base", "second")
    suspects = [first.create(), second.create()]
    add(queue, loop, *suspects)
    begun(queue)
    condemned(queue)
    later = second.forward(datum([1, 2]))
    third = Jobs("base", "third").create()
    add(queue, loop, *suspects, later, third)
    assert begun(queue) == [suspects[0].job_id]
    queue.end(suspects[0].job_id)
    assert begun(queue) == [suspects[1].job_id]
    queue.end(suspects[1].job_id)
    assert sorted(begun(queue)) == sorted([third.job_id, later.job_id])


def test_what_had_not_begun_is_not_blamed(queue: JobQueue, loop: asyncio.AbstractEventLoop) -> None:
    jobs = Jobs("base")
    work = [jobs.create(), *jobs.steps(1)]
    add(queue, loop, *work)
    for _ in range(3):
        sent(queue)
        assert condemned(queue) == []
        assert queue.suspects.is_quiet
        add(queue, loop, *work)
