"""Our own endpoints for many samples in one request: submitting them, and getting their results."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.in_process import Answer, Client, Recorder, run, sample, serving

from tinsmith.server.routes import futures
from tinsmith.store.rows import JobRow
from tinsmith.wire.routes.own import MAX_SAMPLES_AT_ONCE, SAMPLE_RESULTS, SAMPLES, SampleResults, SubmitAnswer


async def submit(client: Client, *bodies: Any) -> list[SubmitAnswer]:
    packed = [body if isinstance(body, bytes) else msgspec.json.encode(body) for body in bodies]
    answer = await client.post(SAMPLES.path, msgspec.msgpack.encode(packed))
    assert answer.status == 200, answer.body
    return msgspec.msgpack.decode(answer.body, type=list[SubmitAnswer])


async def results(client: Client, sampler: str, cursor: int = 0, **fields: Any) -> SampleResults:
    target = {"sampling_session_id": sampler, "cloned_sampler_id": 0}
    answer = await client.post(SAMPLE_RESULTS.path, {"target": target, "prev_cursor": cursor, "timeout": 1.0, **fields})
    assert answer.status == 200, answer.body
    return msgspec.msgpack.decode(answer.body, type=SampleResults)


def test_each_body_has_the_answer_that_it_would_have_alone(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann, bob = await server.client(), await server.client("bob", org="others")
            sampler = await ann.sampler(await ann.session())
            foreign = await bob.sampler(await bob.session())
            bodies = [
                sample(sampler, 1),
                sample(foreign, 1),
                sample(sampler, 2, num_samples=0),
                b"{",
                sample(sampler, 3),
            ]
            answers = await submit(ann, *bodies)
            assert [answer.status for answer in answers] == [200, 404, 422, 422, 200]
            assert b"num_samples" in answers[2].body
            first = msgspec.json.decode(answers[0].body)
            assert first["sample_sequence_ids"] == [f"{first['request_id']}:0"]
            assert (await ann.post("asample", sample(sampler, 1))).json == first
            rows = await server.rows(JobRow, "jobs_of_lane_after", lane=sampler, seq=0, limit=9)
            assert [row.seq for row in rows] == [1, 3]

    run(scenario())


def test_the_same_number_twice_in_one_request_runs_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann = await server.client()
            sampler = await ann.sampler(await ann.session())
            one, same, other = await submit(ann, *[sample(sampler, 1)] * 2, sample(sampler, 1, num_samples=2))
            assert one == same
            assert other.status == 400
            await results(ann, sampler)
            assert server.backend.kinds() == ["sample"]

    run(scenario())


def test_every_sample_counts_towards_the_rate(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann = await server.client()
            sampler = await ann.sampler(await ann.session())
            slow = await server.client(requests_per_minute=3)
            answers = await submit(slow, *[sample(sampler, number) for number in range(5)])
            assert [answer.status for answer in answers] == [200, 200, 200, 429, 429]
            assert float(answers[-1].headers["retry-after"]) > 0

    run(scenario())


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"\xc1", "not a MessagePack array"),
        (msgspec.msgpack.encode([1]), "not a MessagePack array"),
        (msgspec.msgpack.encode([b"{}"] * (MAX_SAMPLES_AT_ONCE + 1)), "at most 256"),
    ],
)
def test_what_is_no_array_of_bodies_is_refused_as_a_whole(tmp_path: Path, body: bytes, says: str) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            answer: Answer = await (await server.client()).post(SAMPLES.path, body)
            assert 400 <= answer.status < 500
            assert says in answer.detail

    run(scenario())


def test_results_come_along_and_the_cursor_goes_on(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann = await server.client()
            sampler = await ann.sampler(await ann.session())
            promises = [msgspec.json.decode(a.body) for a in await submit(ann, sample(sampler, 1), sample(sampler, 2))]
            found: dict[str, Any] = {}
            cursor = 0
            while len(found) < 2:
                told = await results(ann, sampler, cursor)
                assert told.cursor > cursor
                cursor = told.cursor
                found |= {done.request_id: done for done in told.results}
            for promise in promises:
                done = found[promise["request_id"]]
                alone = await ann.post("retrieve_future", promise, accept=done.content_type)
                assert (done.body, done.content_type) == (alone.body, alone.headers["content-type"])
            assert (await results(ann, sampler, cursor, timeout=0.001)).results == []

    run(scenario())


def test_a_failure_comes_as_its_json(tmp_path: Path) -> None:
    async def scenario() -> None:
        opened = asyncio.Event()
        async with serving(tmp_path, backend=Recorder(hold=lambda job: opened.wait())) as server:
            ann = await server.client()
            sampler = await ann.sampler(await ann.session())
            [answer] = await submit(ann, sample(sampler, 1))
            await ann.post("cancel_future", msgspec.json.decode(answer.body))
            [done] = (await results(ann, sampler)).results
            assert done.content_type == "application/json"
            assert msgspec.json.decode(done.body or b"") == {"error": "cancelled", "category": "user"}

    run(scenario())


def test_large_results_are_named_and_many_are_told_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, metadata_above_bytes=64) as server:
            ann = await server.client()
            sampler = await ann.sampler(await ann.session())
            promise = await ann.post("asample", sample(sampler, 1, num_samples=8))
            await ann.result(promise)
            [done] = (await results(ann, sampler)).results
            assert (done.request_id, done.body) == (promise.json["request_id"], None)
        async with serving(tmp_path / "parts") as server:
            monkeypatch.setattr(futures, "MAX_RESULTS_BYTES", 0)
            ann = await server.client()
            sampler = await ann.sampler(await ann.session())
            for number in (1, 2, 3):
                await ann.result(await ann.post("asample", sample(sampler, number)))
            seen, cursor = [], 0
            for _ in range(3):
                told = await results(ann, sampler, cursor)
                cursor = told.cursor
                seen += [done.request_id for done in told.results]
            assert len(seen) == len(set(seen)) == 3

    run(scenario())
