"""Ending a session with as much in it as there may be holds nobody up, and what it may hold is bounded."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from attacks.test_loop_lag import MAX_S
from support import store_rows as make
from support.in_process import (
    BASE,
    Gate,
    Recorder,
    begun,
    forward_backward,
    run,
    sample,
    serving,
    settled,
)
from support.loop_lag import watched_loop

from tinsmith.server.auth import access
from tinsmith.store.base import statement

SAMPLERS = 2000


@pytest.mark.parametrize(("samples", "passes"), [(2000, 0), (0, 5000)])
def test_the_end_of_a_busy_session_does_not_hold_the_loop(tmp_path: Path, samples: int, passes: int) -> None:
    """Each sampler was once looked for among all waiting samples: a second for 4,000 of both."""

    async def scenario() -> None:
        backend = Recorder(hold=Gate("forward_backward", "sample"))
        async with serving(tmp_path, backend=backend, poll_s=0.01) as server:
            ann, session, model = await begun(server)
            sampler = await ann.sampler(session)
            owner = {"session_id": session, "org_id": "acme", "user_id": "acme.ann"}
            rows = [make.sampler(f"{session}:sample:{n}", **owner) for n in range(1, SAMPLERS)]
            await server.store.write(*(statement("insert_sampler", row) for row in rows))
            for number in range(1, samples + 1):
                assert (await ann.post("asample", sample(sampler, number))).status == 200
            for number in range(1, passes + 1):
                assert (await ann.post("forward_backward", forward_backward(model, number))).status == 200
            await settled()
            with watched_loop() as lag:
                assert len((await ann.get(f"sessions/{session}")).json["sampler_ids"]) == SAMPLERS
                end = {"reason": {"type": "success"}}
                assert (await ann.post(f"sessions/{session}/finish", end)).status == 200
                await server.services.jobs.drain()
                assert lag.seconds < MAX_S, lag.where
            assert server.services.broker.count() == 0

    asyncio.run(asyncio.wait_for(scenario(), 120))


def test_samplers_of_a_session_are_bounded(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, max_samplers=3) as server:
            ann = await server.client()
            session = await ann.session()
            made = [await ann.sampler(session, number) for number in range(3)]
            asked = {"session_id": session, "sampling_session_seq_id": 3, "base_model": BASE}
            refused = await ann.post("create_sampling_session", asked)
            assert (refused.status, refused.json["field"]) == (400, "session_id")
            assert "has created 3 sampling sessions (limit 3)" in refused.detail
            assert await ann.sampler(session, 1) == made[1], "asked for again, it is the same"
            await ann.sampler(await ann.session())

    run(scenario())


def test_samplers_take_disk_space_of_their_organisation(tmp_path: Path) -> None:
    """Each has directories of its own, although it shares the files of a checkpoint."""

    async def scenario() -> None:
        async with serving(tmp_path, disk_cap_per_org_bytes=200_000) as server:
            ann, eve = await server.client(), await server.client("eve", org="other")
            session = await eve.session()
            path = await eve.save(await eve.model(session), 1, "w", "save_weights_for_sampler")
            asked = {"session_id": session, "model_path": path}
            for number in range(100):
                answer = await eve.post("create_sampling_session", {**asked, "sampling_session_seq_id": number})
                if answer.status != 200:
                    break
            assert 5 < number < 30
            assert (answer.status, answer.json["field"]) == (400, "model_path")
            assert "disk_cap_per_org_bytes" in answer.detail
            counted = server.services.disk.used("other")
            await server.services.disk.measure(is_due=True)
            assert server.services.disk.used("other") == pytest.approx(counted, abs=20_000)
            await ann.sampler(await ann.session())

    run(scenario())


def test_samplers_in_memory_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store has them all; those of others are read again."""
    monkeypatch.setattr(access, "MAX_SAMPLERS", 4)

    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann, eve = await server.client(), await server.client("eve", org="other")
            hers = await ann.sampler(await ann.session())
            await ann.result(await ann.post("asample", sample(hers, 1)))
            session = await eve.session()
            for number in range(10):
                theirs = await eve.sampler(session, number)
                await eve.result(await eve.post("asample", sample(theirs, 1)))
                assert len(server.services.access.samplers) <= 4
            await ann.result(await ann.post("asample", sample(hers, 2)))

    run(scenario())
