"""The jobs of one base model: order, window, suspects, positions."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from support.jobs import Jobs, datum

from tinsmith.engine.base import AnyJob
from tinsmith.engine.queues import WINDOW, Entry, JobQueue


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture
def queue(loop: asyncio.AbstractEventLoop) -> JobQueue:
    return JobQueue()


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


def test_suspects_go_one_at_a_time_until_the_culprit_is_found(queue: JobQueue, loop: asyncio.AbstractEventLoop) -> None:
    jobs = Jobs("base")
    samples = [jobs.sample([1]) for _ in range(3)]
    ids = add(queue, loop, *samples)
    queue.begin(sent(queue))
    assert [is_condemned for _, is_condemned in queue.lose(blame=True)] == [False] * 3
    other = jobs.sample([2])
    add(queue, loop, *samples, other)
    assert sent(queue) == [ids[0], other.job_id]
    queue.begin([ids[0], other.job_id])
    condemned = {entry.job.job_id: is_condemned for entry, is_condemned in queue.lose(blame=True)}
    assert condemned == {ids[0]: True, ids[1]: False, ids[2]: False, other.job_id: False}
    assert queue.is_condemned(ids[0])
    add(queue, loop, *samples[1:], other)
    for job_id in [ids[1], ids[2], other.job_id]:
        assert sent(queue) == [job_id]
        queue.begin([job_id])
        queue.end(job_id)
    assert len(queue) == 0


def test_a_suspect_operation_holds_up_its_own_model_only(queue: JobQueue, loop: asyncio.AbstractEventLoop) -> None:
    first, second = Jobs("base", "first"), Jobs("base", "second")
    suspects = [first.create(), second.create()]
    add(queue, loop, *suspects)
    queue.begin(sent(queue))
    queue.lose(blame=True)
    later = second.forward(datum([1, 2]))
    third = Jobs("base", "third").create()
    add(queue, loop, *suspects, later, third)
    assert sent(queue) == [suspects[0].job_id, third.job_id]
    queue.end(suspects[0].job_id)
    assert sent(queue) == [suspects[1].job_id, later.job_id]


def test_what_had_not_begun_is_not_blamed(queue: JobQueue, loop: asyncio.AbstractEventLoop) -> None:
    jobs = Jobs("base")
    work = [jobs.create(), *jobs.steps(1)]
    add(queue, loop, *work)
    for _ in range(3):
        sent(queue)
        assert [is_condemned for _, is_condemned in queue.lose(blame=True)] == [False] * 3
        add(queue, loop, *work)
