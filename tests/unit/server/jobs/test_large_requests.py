"""Requests large enough to be hashed in a thread keep every promise that small ones keep."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
from support.in_process import begun, datum, forward_backward, optim_step, run, serving

from tinsmith.server.jobs.digests import LARGE_BYTES
from tinsmith.server.jobs.job import digest_of
from tinsmith.store.rows import JobRow

TOKENS = tuple(place % 500 for place in range(4000))


def large(model_id: str, seq: int | None, token: int = 1) -> dict[str, Any]:
    """A pass of more than is hashed on the loop."""
    message = forward_backward(model_id, seq, datum(token, *TOKENS[1:]), *[datum(*TOKENS)] * 15)
    assert len(msgspec.json.encode(message)) > LARGE_BYTES
    return message


def test_repetitions_and_other_bodies_under_one_number(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann, _, model = await begun(server)
            message = large(model, 1)
            answers = await asyncio.gather(*(ann.post("forward_backward", message) for _ in range(4)))
            assert {answer.status for answer in answers} == {200}
            assert len({answer.json["request_id"] for answer in answers}) == 1
            other = await ann.post("forward_backward", large(model, 1, token=2))
            assert (other.status, "was used before" in other.detail) == (400, True)
            await ann.result(answers[0])
            again = await ann.post("forward_backward", message)
            assert again.json["request_id"] == answers[0].json["request_id"]
            [row] = await server.rows(JobRow, "job_by_number", lane=model, seq=1)
            assert row.digest == digest_of(b"forward_backward", msgspec.json.encode(message))
            assert server.backend.kinds() == ["create_model", "forward_backward"]

    run(scenario())


def test_a_refused_one_leaves_no_job_and_closes_its_number(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann, _, model = await begun(server)
            bad = large(model, 1, token=10_000)
            refused = await asyncio.gather(*(ann.post("forward_backward", bad) for _ in range(2)))
            assert {answer.status for answer in refused} == {400}
            [row] = await server.rows(JobRow, "job_by_number", lane=model, seq=1)
            assert (row.state, row.job) == ("refused", b"")
            await ann.result(await ann.post("optim_step", optim_step(model, 2)))  # does not wait for number 1
            assert server.backend.kinds() == ["create_model", "optim_step"]

    run(scenario())


def test_without_numbers_they_run_in_the_order_in_which_they_came(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann, _, model = await begun(server)
            sent = [
                ann.post("forward_backward", large(model, None)),
                ann.post("optim_step", optim_step(model, None)),
                ann.post("forward_backward", large(model, None, token=3)),
            ]
            for promise in await asyncio.gather(*sent):
                await ann.result(promise)
            assert server.backend.kinds() == ["create_model", "forward_backward", "optim_step", "forward_backward"]

    run(scenario())
