"""Failures that cannot be explained, finished or written: they end, and do not lose any other result."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from support.in_process import BreakableStore, Recorder, run, sample, serving

from tinsmith.engine.protocol import AnyJob, Done, JobFailedError, Sample
from tinsmith.errors import InvalidInputError, UnstorableError
from tinsmith.server.jobs import lifecycle as jobs_module
from tinsmith.server.jobs.job import Completed, Work, error_outcome
from tinsmith.store.base import Statement, statement

OTHERS = 60


class UnspeakableError(JobFailedError):
    """An error that cannot say what it is."""

    def __str__(self) -> str:
        raise RecursionError("too deep")


class Hostile(Recorder):
    """Fails what one organisation asks for, with errors that quote what it sent."""

    errors: tuple[Callable[[], Exception], ...] = (
        lambda: JobFailedError("a\0b"),
        lambda: JobFailedError("half of a pair: \ud800"),
        lambda: JobFailedError("x" * 10_000_000),
        lambda: UnspeakableError("never seen"),
        lambda: JobFailedError("user's \0", "user"),
        lambda: MemoryError(),
        lambda: RecursionError("deep"),
        lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "\ud800"),
    )
    count = 0

    def submit(self, job: AnyJob, on_tokens: Any = None) -> Any:
        if not isinstance(job, Sample) or job.tenant != "other":
            return super().submit(job, on_tokens)
        future: asyncio.Future[Done] = self._loop.create_future()
        error = self.errors[self.count % len(self.errors)]()
        self.count += 1
        self._loop.call_soon(self._loop.call_soon, future.set_exception, error)
        return future


Explain = Callable[[Work, JobFailedError], Awaitable[str]]


def raising(error: BaseException) -> Explain:
    async def explain(work: Work, failed: JobFailedError) -> str:
        if work.row.org_id == "other":
            raise error
        return str(failed)

    return explain


async def surrogates(work: Work, failed: JobFailedError) -> str:
    return "\udfff\0"


async def endless(work: Work, failed: JobFailedError) -> str:
    await asyncio.Event().wait()
    return ""


EXPLANATIONS: dict[str, Explain | None] = {
    "as it is": None,
    "recursion": raising(RecursionError("deep")),
    "unicode": raising(UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates")),
    "embedded null byte": raising(ValueError("embedded null byte")),
    "memory": raising(MemoryError()),
    "text that cannot be stored": surrogates,
    "without end": endless,
}


@pytest.mark.parametrize("explain", EXPLANATIONS.values(), ids=EXPLANATIONS)
def test_every_sample_resolves_beside_failures_that_cannot_be_explained(
    tmp_path: Path, explain: Explain | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, backend=Hostile()) as server:
            if explain is not None:
                server.services.jobs._explain = explain
            ann, eve = await server.client("ann"), await server.client("eve", org="other")
            good = await ann.sampler(await ann.session())
            bad = await eve.sampler(await eve.session())
            asked = []
            for number in range(OTHERS):
                asked.append(ann.post("asample", sample(good, number + 1)))
                asked.append(eve.post("asample", sample(bad, number + 1)))
            promises = await asyncio.gather(*asked)
            for promise in promises[::2]:
                await ann.result(promise)
            for promise in promises[1::2]:
                while (answer := await eve.poll(promise)).status == 408:
                    pass
                assert answer.json["error"]
                assert len(answer.body) < 20_000

    monkeypatch.setattr(jobs_module, "EXPLAIN_S", 0.05, raising=False)
    run(scenario())


class ChoosyStore(BreakableStore):
    """Does not take what one sample's result brings along."""

    async def write(self, *statements: Statement) -> int:
        if any(made.parameters.get("name") == "unstorable" for made in statements):
            raise UnstorableError("too big")
        return await super().write(*statements)


def unstorable() -> Statement:
    return statement("insert_org", org_id="x", name="unstorable", created_at=1.0)


def nul() -> Statement:
    return statement("insert_org", org_id="a\0b", name="x", created_at=1.0)


def unknown() -> Statement:
    return statement("no_such_statement", name="x")


@pytest.mark.parametrize("make", [unstorable, nul, unknown], ids=lambda make: make.__name__)
@pytest.mark.parametrize("has_after", [False, True], ids=["", "and-then-raises"])
def test_a_row_that_cannot_be_written_sinks_no_other(
    tmp_path: Path, make: Callable[[], Statement], has_after: bool
) -> None:
    async def scenario() -> None:
        store = ChoosyStore()
        await store.open()
        async with serving(tmp_path, store=store) as server:
            finishers: Any = server.services.jobs._finishers
            plain = finishers["sample"]

            def fail() -> None:
                raise InvalidInputError("what follows fails")

            async def finish(work: Work, done: Done) -> Completed:
                finished: Completed = await plain(work, done)
                if work.row.org_id == "other":
                    return Completed(finished.outcome, (make(),), fail if has_after else None)
                return finished

            finishers["sample"] = finish
            ann, eve = await server.client("ann"), await server.client("eve", org="other")
            good, bad = await ann.sampler(await ann.session()), await eve.sampler(await eve.session())
            asked = [
                client.post("asample", sample(sampler, number + 1))
                for number in range(OTHERS)
                for client, sampler in ((ann, good), (eve, bad))
            ]
            promises = await asyncio.gather(*asked)
            for promise in promises[::2]:
                await ann.result(promise)
            for promise in promises[1::2]:
                while (answer := await eve.poll(promise)).status == 408:
                    pass
                assert "could not be stored" in answer.json["error"]
        await store.close()

    run(scenario())


def test_an_error_is_text_that_every_client_can_read() -> None:
    assert error_outcome("a\0\ud800b", "user").body == '{"error":"a\ufffd?b","category":"user"}'.encode()
