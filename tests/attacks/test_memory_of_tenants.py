"""One tenant cannot push another's data out of memory: completion logs, results, tokens, telemetry."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.in_process import Client, Clock, Gate, Recorder, run, sample, serving, settled, until

from tinsmith.server.auth import authenticator
from tinsmith.server.jobs import pending_results
from tinsmith.server.jobs.pending_results import Broker, Outcome, Promise
from tinsmith.server.ops import activity


async def sampling(client: Client) -> str:
    return await client.sampler(await client.session())


def poll(sampler: str, clone: int = 0, **fields: Any) -> dict[str, Any]:
    return {"target": {"sampling_session_id": sampler, "cloned_sampler_id": clone}, **fields}


def test_polls_of_one_tenant_do_not_evict_the_completion_log_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More polls than logs are kept, while another tenant's batch poll waits: it learns of its sample at once."""
    monkeypatch.setattr(pending_results, "MAX_COMPLETION_LOGS", 20)

    async def scenario() -> None:
        backend = Recorder(hold=(gate := Gate("sample")))
        async with serving(tmp_path, backend=backend, poll_s=20.0) as server:
            ann, eve = await server.client(), await server.client("eve", org="evil")
            hers, theirs = await sampling(ann), await sampling(eve)
            promised = await ann.post("asample", sample(hers, 1))
            cursor = (await ann.post("retrieve_futures", poll(hers, timeout=0.001))).json["cursor"]
            waiting = asyncio.create_task(ann.post("retrieve_futures", poll(hers, prev_cursor=cursor)))
            await settled()
            for clone in range(60):
                assert (await eve.post("retrieve_futures", poll(theirs, clone, timeout=0.0001))).status == 200
            gate.opened.set()
            told = (await asyncio.wait_for(waiting, 10)).json["completions"]
            assert [one["request_id"] for one in told] == [promised.json["request_id"]]

    run(scenario())


def test_a_log_that_is_dropped_lets_its_poll_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant's own polls can push out its logs; a client that waits on one asks again, and misses nothing."""
    monkeypatch.setattr(pending_results, "MAX_COMPLETION_LOGS", 5)

    async def scenario() -> None:
        backend = Recorder(hold=(gate := Gate("sample")))
        async with serving(tmp_path, backend=backend, poll_s=20.0) as server:
            ann = await server.client()
            sampler = await sampling(ann)
            promised = await ann.post("asample", sample(sampler, 1))
            first = (await ann.post("retrieve_futures", poll(sampler, timeout=0.001))).json
            waiting = asyncio.create_task(ann.post("retrieve_futures", poll(sampler, prev_cursor=first["cursor"])))
            await settled()
            for clone in range(1, 10):
                await ann.post("retrieve_futures", poll(sampler, clone, timeout=0.0001))
            again = (await asyncio.wait_for(waiting, 10)).json
            gate.opened.set()
            await until(lambda: not server.services.broker.count())
            told = (await ann.post("retrieve_futures", poll(sampler, prev_cursor=again["cursor"]))).json["completions"]
            assert [one["request_id"] for one in told] == [promised.json["request_id"]]

    run(scenario())


def test_large_results_of_one_tenant_do_not_push_out_anothers() -> None:
    async def scenario() -> None:
        broker = Broker(kept_bytes=100_000)

        def end(request_id: str, org: str, size: int) -> None:
            made = Promise(
                request_id=request_id, kind="sample", lane="l", session_id="s", org_id=org, user_id="u", created_at=0.0
            )
            broker.open(made)
            broker.settle(request_id, Outcome(bytes(size), "protobuf"))

        end("hers", "acme", 1000)
        for number in range(500):
            end(f"theirs{number}", "evil", 2000)
        assert broker.recent("hers") is not None
        assert broker.recent("theirs0") is None
        assert broker.recent("theirs499") is not None

    run(scenario())


def test_results_are_not_held_for_ever() -> None:
    async def scenario() -> None:
        clock = Clock()
        broker = Broker(clock)
        for number in range(3):
            made = Promise(
                request_id=f"{number}", kind="x", lane="l", session_id="s", org_id="o", user_id="u", created_at=0.0
            )
            broker.open(made)
            broker.settle(f"{number}", Outcome(b"{}", "json"))
            clock.advance(pending_results.KEPT_S / 2)
        broker.forget_old()
        assert [broker.recent(f"{number}") is not None for number in range(3)] == [False, True, True]

    run(scenario())


def test_tokens_of_one_key_do_not_push_out_anothers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authenticator, "MAX_TOKENS", 8)

    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann, eve = await server.client(), await server.client("eve", org="evil")
            known = server.services.authenticator._tokens

            async def token(client: Client) -> str:
                server.clock.advance(1)  # a token is the same within a second
                text: str = (await client.post("auth/token")).json["jwt"]
                assert (await Client(server, text).get("get_server_capabilities")).status == 200
                return text

            hers = await token(ann)
            for _ in range(40):
                await token(eve)
            for garbage in ("tml-x", "eyJhbGciOiJIUzI1NiJ9.e30.x", "x", "eyJ" * 1000):
                for number in range(20):
                    answer = await Client(server, f"{garbage}{number}").get("get_server_capabilities")
                    assert answer.status == 401
            assert hers in known
            assert len(known) == 1 + 8

    run(scenario())


def test_telemetry_of_one_tenant_does_not_push_out_anothers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activity, "MAX_UNWRITTEN", 10)

    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann, eve = await server.client(), await server.client("eve", org="evil")
            batch = {"events": [], "platform": "x", "sdk_version": "x", "session_id": "s"}
            await ann.post("telemetry", batch)
            for _ in range(50):
                await eve.post("telemetry", batch)
            kept = [row.org_id for row in server.services.activity.telemetry]
            assert len(kept) == 11
            assert len(set(kept)) == 2

    run(scenario())
