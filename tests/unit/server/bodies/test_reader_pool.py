"""Reader processes: whose turn it is, and what happens when one dies."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tinsmith.errors import LimitExceededError
from tinsmith.server.bodies import reader_pool
from tinsmith.server.bodies.questions import HeadQuestion, HeadReading, VocabularyQuestion
from tinsmith.server.bodies.reader_pool import INLINE_BYTES, TURN_BODIES, Asked, BodyReaderError, ReaderPool, next_turn


def test_a_reader_survives_what_it_did_not_expect(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async def scenario() -> None:
        pool = ReaderPool(1)
        try:
            with pytest.raises(BodyReaderError, match="FileNotFoundError"):
                await pool.ask("acme", VocabularyQuestion(directory=str(tmp_path / "missing")), b"")
            process = pool._all[0]._process
            large = b'{"model": "small", "rest": "%s"}' % (b"a" * 40_000)
            assert await pool.ask("acme", HeadQuestion(), large) == HeadReading(model="small")
            assert pool._all[0]._process is process
        finally:
            await pool.close()

    asyncio.run(scenario())
    assert "FileNotFoundError" in capfd.readouterr().err


def large(name: str) -> bytes:
    return b'{"rest": "%s", "model": "%s"}' % (b"a" * INLINE_BYTES, name.encode())


def with_pool(scenario: Callable[[ReaderPool], Awaitable[None]], readers: int = 1) -> None:
    async def run() -> None:
        pool = ReaderPool(readers)
        try:
            await asyncio.wait_for(scenario(pool), 60)
        finally:
            await pool.close()

    asyncio.run(run())


async def asked_of(pool: ReaderPool, tenant: str, name: str) -> str:
    reading = await pool.ask(tenant, HeadQuestion(), large(name))
    assert isinstance(reading, HeadReading)
    return reading.model


def test_a_body_larger_than_the_pipe_arrives_whole() -> None:
    async def scenario(pool: ReaderPool) -> None:
        body = b'{"rest": "%s", "model": "m"}' % (b"a" * 5 * reader_pool.PIPE_BYTES)
        assert await pool.ask("acme", HeadQuestion(), body) == HeadReading(model="m")

    with_pool(scenario)


def test_everybody_gets_the_answer_to_his_own_question() -> None:
    async def scenario(pool: ReaderPool) -> None:
        names = [f"m{number}" for number in range(30)]
        got = await asyncio.gather(*(asked_of(pool, f"org{number % 4}", name) for number, name in enumerate(names)))
        assert got == names

    with_pool(scenario, readers=2)


def test_organisations_take_turns() -> None:
    async def scenario(pool: ReaderPool) -> None:
        order: list[str] = []

        async def ask(tenant: str) -> None:
            await asked_of(pool, tenant, tenant)
            order.append(tenant)

        await asyncio.gather(*(ask("many") for _ in range(6)), ask("one"))
        assert order.index("one") <= 2  # after the turn under way, and the one that was waiting before it

    with_pool(scenario)


def test_a_process_that_was_killed_is_replaced() -> None:
    async def scenario(pool: ReaderPool) -> None:
        assert await asked_of(pool, "acme", "first") == "first"
        process = pool._all[0]._process
        assert process is not None
        process.kill()
        process.wait()
        assert await asyncio.gather(*(asked_of(pool, "acme", name) for name in "abc")) == ["a", "b", "c"]

    with_pool(scenario)


def test_only_the_body_that_kills_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a turn are sent together; those after the one that kills are answered all the same."""

    async def scenario(pool: ReaderPool) -> None:
        questions = [reader_pool._questions.encode(HeadQuestion()) for _ in range(3)]
        asked = [
            Asked(question, body, asyncio.get_running_loop().create_future())
            for question, body in zip(questions, (b'{"model": "a"}', b"kill", b'{"model": "b"}'), strict=True)
        ]
        await pool._all[0].serve(asked)
        first, second, third = [one.answer.result() for one in asked]
        assert (first, third) == (HeadReading(model="a"), HeadReading(model="b"))
        assert second == reader_pool._TOO_MUCH

    program = (
        "import os, tinsmith.server.bodies.reader_process as p; real = p.read; "
        "p.read = lambda question, body: os._exit(9) if body == b'kill' else real(question, body); p.main()"
    )
    start = reader_pool.subprocess.Popen
    monkeypatch.setattr(
        reader_pool.subprocess, "Popen", lambda command, **options: start([command[0], "-c", program], **options)
    )
    with_pool(scenario)


def test_a_body_that_takes_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(pool: ReaderPool) -> None:
        with pytest.raises(LimitExceededError, match="takes too much time"):
            await asked_of(pool, "acme", "m")

    monkeypatch.setattr(reader_pool, "READ_S", 0.0)
    with_pool(scenario)


def test_a_client_that_leaves_stops_nobody() -> None:
    async def scenario(pool: ReaderPool) -> None:
        tasks = [asyncio.ensure_future(asked_of(pool, "acme", name)) for name in "abc"]
        await asyncio.sleep(0)
        for task in tasks[:2]:
            task.cancel()
        assert await tasks[2] == "c"

    with_pool(scenario)


def test_a_turn_has_several_small_bodies_or_one_large_one() -> None:
    async def scenario() -> None:
        def bodies(*sizes: int) -> deque[Asked]:
            loop = asyncio.get_running_loop()
            return deque(Asked(b"", b"x" * size, loop.create_future()) for size in sizes)

        def turns(*sizes: int) -> list[list[int]]:
            waiting, found = bodies(*sizes), []
            while waiting:
                found.append([asked.size_bytes for asked in next_turn(waiting)])
            return found

        half = INLINE_BYTES // 2
        assert turns(half, half, 1) == [[half, half], [1]]
        assert turns(10 * INLINE_BYTES, 1) == [[10 * INLINE_BYTES], [1]]
        assert turns(1, 10 * INLINE_BYTES) == [[1], [10 * INLINE_BYTES]]
        assert turns(*[1] * (TURN_BODIES + 1)) == [[1] * TURN_BODIES, [1]]
        waiting = bodies(1, 2, 3)
        waiting[1].answer.cancel()
        assert [asked.size_bytes for asked in next_turn(waiting)] == [1, 3]

    asyncio.run(scenario())
