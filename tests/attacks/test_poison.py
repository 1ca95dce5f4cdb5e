"""Requests that kill the engine fail, and everybody else gets the same results as without them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.backends import ONE, arithmetic_spec
from support.durable import Training
from support.in_process import BASE, Client, datum, forward_backward, run, sample, serving, until

from tinsmith.engine.backend.local import ProcessBackend
from tinsmith.engine.backend.supervisor import Supervisor, SupervisorOptions
from tinsmith.server.runs import replay

POISON = 499
TOKENS = (1, 2, 3, 4, 5, 6)
LONG = 3000
"""Tokens of a sample that is being computed while others come and go."""
QUICK = SupervisorOptions(backoff_s=0.01, max_backoff_s=0.05, retry_failed_s=0.0)


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "RETRY_S", (0.0, 0.0, 0.001))


def engine(**options: Any) -> Any:
    """An engine that a request with the token POISON kills."""
    card = msgspec.structs.replace(ONE, name=BASE)
    return ProcessBackend([arithmetic_spec(card, die_on=f"{POISON},", **options)], QUICK)


def supervisor(backend: ProcessBackend) -> Supervisor:
    return backend._supervisors[BASE]


def poison(seq: int, sampler: str) -> dict[str, Any]:
    return sample(sampler, seq, prompt={"chunks": [{"type": "encoded_text", "tokens": [1, POISON, 3]}]})


async def train(client: Client) -> tuple[list[Any], str]:
    training = Training(client, await client.model(await client.session()))
    for token in TOKENS:
        await training.step(token)
    return training.results, await training.end()


async def long_sample(client: Client) -> Any:
    sampler = await client.sampler(await client.session())
    return await client.post("asample", sample(sampler, 1, sampling_params={"max_tokens": LONG, "stop": [], "seed": 5}))


async def undisturbed(folder: Path) -> tuple[Any, Any]:
    async with serving(folder) as server:
        ann = await server.client()
        return await train(ann), (await ann.outcome(await long_sample(ann)))["sequences"]


@pytest.mark.parametrize("signal_name", ["SIGSEGV", "SIGABRT"])
def test_another_tenants_work_is_never_condemned(tmp_path: Path, signal_name: str) -> None:
    async def scenario() -> None:
        expected = await undisturbed(tmp_path / "b")
        backend = engine(die_by=signal_name)
        async with serving(tmp_path / "a", backend=backend, poll_s=1.0) as server:
            ann, eve = await server.client(), await server.client("eve", "eves")
            models = [await eve.model(await eve.session()) for _ in range(3)]
            drawn = await long_sample(ann)
            await until(lambda: backend.position(drawn.json["request_id"]).reason == "running")
            training = asyncio.create_task(train(ann))
            bad = [
                await eve.post("forward_backward", forward_backward(model, 1, datum(5, POISON, 2))) for model in models
            ]
            for promise in bad:
                failed = await eve.outcome(promise)
                assert failed["category"] == "server"
                assert "it killed the engine, also while nothing else was running" in failed["error"]
            assert (await training, (await ann.outcome(drawn))["sequences"]) == expected
            after = await eve.post("forward_backward", forward_backward(models[0], 2, datum(5, 9, 2)))
            assert "error" not in await eve.outcome(after), "its own run goes on, too"

    run(scenario())


def test_a_snapshot_that_kills_the_engine_is_given_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        expected = await undisturbed(tmp_path / "b")
        backend = engine(die_in="snapshot-")
        async with serving(tmp_path / "a", backend=backend, max_replay_s=1.0, poll_s=1.0) as server:
            ann = await server.client()
            model = await ann.model(await ann.session())
            run = server.services.runs.known(model)
            assert run is not None
            training = Training(ann, model)
            for token in TOKENS:
                run._snapshots.cost._since.seconds += 10.0  # one is due behind each step
                run._snapshots.cost.not_before_s = 0.0
                await training.step(token)
            assert (training.results, await training.end()) == expected[0]
            assert "not tried again: it killed the engine, also while nothing else was running" in caplog.text
            assert supervisor(backend).epoch == 3

    run(scenario())


def test_one_sample_among_many_is_found_and_the_others_are_drawn(tmp_path: Path) -> None:
    async def scenario() -> None:
        backend = engine()
        async with serving(tmp_path / "a", backend=backend, poll_s=1.0) as server:
            eve = await server.client("eve", "eves")
            sampler = await eve.sampler(await eve.session())
            messages = [sample(sampler, seq) for seq in range(1, 101)]
            messages[60] = poison(61, sampler)
            promises = [await eve.post("asample", message) for message in messages]
            results = [await eve.outcome(promise) for promise in promises]
            assert [number for number, result in enumerate(results) if "error" in result] == [60]
            assert supervisor(backend).epoch < 14, "halves, not one after another"

    run(scenario())


def test_a_tenant_that_keeps_killing_goes_apart_from_others(tmp_path: Path) -> None:
    async def scenario() -> None:
        expected = await undisturbed(tmp_path / "b")
        backend = engine()
        async with serving(tmp_path / "a", backend=backend, poll_s=1.0) as server:
            ann, eve = await server.client(), await server.client("eve", "eves")
            sampler = await eve.sampler(await eve.session())
            drawn = await long_sample(ann)
            training = asyncio.create_task(train(ann))
            for seq in (1, 2, 3):
                assert "error" in await eve.outcome(await eve.post("asample", poison(seq, sampler)))
            apart = await eve.post("asample", sample(sampler, 4))
            held = "requests of this organisation killed the engine repeatedly"
            await until(lambda: held in backend.position(apart.json["request_id"]).reason)
            assert (await training, (await ann.outcome(drawn))["sequences"]) == expected
            assert "error" not in await eve.outcome(apart)

    run(scenario())


def test_a_killer_that_is_cancelled_each_time_condemns_nobody_else(tmp_path: Path) -> None:
    """It is never proven, for it is never tried again; its tenant goes apart all the same."""

    async def scenario() -> None:
        expected = await undisturbed(tmp_path / "b")
        backend = engine()
        async with serving(tmp_path / "a", backend=backend, poll_s=1.0) as server:
            ann, eve = await server.client(), await server.client("eve", "eves")
            sampler = await eve.sampler(await eve.session())
            drawn = await long_sample(ann)
            training = asyncio.create_task(train(ann))
            for seq in (1, 2, 3):
                epoch = supervisor(backend).epoch
                bad = await eve.post("asample", poison(seq, sampler))
                await until(lambda before=epoch: supervisor(backend).epoch > before)  # type: ignore[misc]
                await eve.post("cancel_future", {"request_id": bad.json["request_id"]})
            assert (await training, (await ann.outcome(drawn))["sequences"]) == expected
            suspects, now = supervisor(backend)._queue.suspects, asyncio.get_running_loop().time()
            assert [suspects.is_quarantined(tenant, now) for tenant in suspects._strikes] == [True]

    run(scenario())
