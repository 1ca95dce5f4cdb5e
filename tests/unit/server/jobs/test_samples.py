"""Running samples, their numbers and budgets, and batch polls."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.in_process import (
    BASE,
    BreakableStore,
    Client,
    Recorder,
    Server,
    datum,
    forward_backward,
    optim_step,
    run,
    sample,
    serving,
    settled,
)

from tinsmith.server.jobs import samples as samples_module
from tinsmith.store.rows import JobRow, SamplerRow
from tinsmith.wire.routes.own import SAMPLES


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples_module, "RETRY_S", 0.0)


async def begun(server: Server, **options: Any) -> tuple[Client, str, str]:
    ann = await server.client(**options)
    session = await ann.session()
    return ann, session, await ann.sampler(session)


def closed() -> tuple[asyncio.Event, Recorder]:
    """A gate, and a backend whose samples wait before it."""
    opened = asyncio.Event()
    return opened, Recorder(hold=lambda job: opened.wait())


def test_samples_run_in_any_order_and_a_number_is_used_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann, _, sampler = await begun(server)
            fifth = await ann.post("asample", sample(sampler, 5))
            answer = await ann.result(fifth)
            assert fifth.json["sample_sequence_ids"] == [f"{fifth.json['request_id']}:0"]
            assert (await ann.post("asample", sample(sampler, 5))).json == fifth.json
            assert (await ann.result(fifth)).json == answer.json
            other = await ann.post("asample", sample(sampler, 5, num_samples=2))
            assert other.status == 400
            assert "was used before" in other.detail
            without = [await ann.post("asample", sample(sampler)) for _ in range(2)]
            assert without[0].json["request_id"] != without[1].json["request_id"]
            assert server.backend.kinds() == ["sample"] * 3

    run(scenario())


def test_duplicates_in_flight(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann, _, sampler = await begun(server)
            answers = await asyncio.gather(*(ann.post("asample", sample(sampler, 1)) for _ in range(8)))
            assert len({answer.json["request_id"] for answer in answers}) == 1
            await ann.result(answers[0])
            assert server.backend.kinds() == ["sample"]

    run(scenario())


def test_a_lost_sample_is_drawn_again_with_the_same_seed(tmp_path: Path) -> None:
    async def scenario() -> None:
        opened, backend = closed()
        async with serving(tmp_path, backend=backend) as server:
            ann, _, sampler = await begun(server)
            promise = await ann.post("asample", sample(sampler, 1))
            await settled()
            backend.lose()
            opened.set()
            await ann.result(promise)
            first, second = backend.submitted
            assert first == second

    run(scenario())


def test_a_cancelled_sample_is_not_drawn_again_after_a_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples_module, "RETRY_S", 3600.0)

    async def scenario() -> None:
        _, backend = closed()
        async with serving(tmp_path, backend=backend) as server:
            ann, _, sampler = await begun(server)
            promises = [await ann.post("asample", sample(sampler, seq)) for seq in (1, 2)]
            await settled()
            assert (await ann.post("cancel_future", {"request_id": promises[0].json["request_id"]})).status == 200
            backend.lose()
            await settled()
            assert (await ann.post("cancel_future", {"request_id": promises[1].json["request_id"]})).status == 200
            for promise in promises:
                assert (await ann.poll(promise)).json["error"] == "cancelled"
            assert backend.kinds() == ["sample", "sample"]

    run(scenario())


def test_the_end_of_a_session_cancels_its_samples(tmp_path: Path) -> None:
    async def scenario() -> None:
        _, backend = closed()
        async with serving(tmp_path, backend=backend) as server:
            ann, session, sampler = await begun(server)
            promise = await ann.post("asample", sample(sampler, 1))
            await settled()
            assert (await ann.post(f"sessions/{session}/finish", {"reason": {"type": "success"}})).status == 200
            assert (await ann.poll(promise)).json["error"] == "cancelled"
            assert (await ann.post("asample", sample(sampler, 2))).status == 410

    run(scenario())


def test_a_restart_draws_what_was_accepted(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = BreakableStore()
        await store.open()
        _, backend = closed()
        async with serving(tmp_path, store=store, backend=backend) as server:
            ann, _, sampler = await begun(server)
            promise = await ann.post("asample", sample(sampler, 1))
        async with serving(tmp_path, store=store) as server:
            again = Client(server, ann.key)
            assert (await again.post("asample", sample(sampler, 1))).json == promise.json
            await again.result(promise)
            assert server.backend.submitted[0] == backend.submitted[0]
        await store.close()

    run(scenario())


def test_a_budget_pays_once_for_a_request_that_is_sent_twice(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann, _, sampler = await begun(server, tokens_per_day=10)
            promise = await ann.post("asample", sample(sampler, 1))  # 3 of prompt, 4 sampled
            assert (await ann.get("/tinsmith/v1/quota")).json["tokens_left_today"] == 3
            assert (await ann.post("asample", sample(sampler, 1))).json == promise.json
            assert (await ann.get("/tinsmith/v1/quota")).json["tokens_left_today"] == 3
            over = await ann.post("asample", sample(sampler, 2))
            assert (over.status, over.json["code"], over.json["remaining"]) == (403, "over_budget", 3)
            assert 0 < over.json["retry_after_s"] <= 86_400
            assert " 3 left; this needs 7; the budget resets at " in over.detail
            await ann.result(promise)

    run(scenario())


def test_a_pass_over_the_budget_holds_up_nothing_behind_it_also_after_a_restart(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = BreakableStore()
        await store.open()
        async with serving(tmp_path, store=store) as server:
            ann, session, _ = await begun(server, tokens_per_day=3)
            model = await ann.model(session)
            over = await ann.post("forward_backward", forward_backward(model, 1, datum(1, 2, 3, 4)))
            assert (over.status, over.json["code"]) == (403, "over_budget")
            assert "this needs 4, more than a whole day's" in over.detail
            again = await ann.post("forward_backward", forward_backward(model, 1, datum(1, 2, 3, 4)))
            assert (again.status, "was refused before: the key's budget" in again.detail) == (400, True)
            await ann.result(await ann.post("forward_backward", forward_backward(model, 2, datum(1, 2, 3))))
            assert (await ann.post("forward_backward", forward_backward(model, 3, datum(1)))).status == 403
        async with serving(tmp_path, store=store) as server:
            await Client(server, ann.key).result(await Client(server, ann.key).post("optim_step", optim_step(model, 4)))
        await store.close()

    run(scenario())


def test_a_pass_that_is_sent_twice_at_once_is_paid_for_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann, session, _ = await begun(server, tokens_per_day=3)
            model = await ann.model(session)
            message = forward_backward(model, 1, datum(1, 2, 3))
            first, second = await asyncio.gather(*(ann.post("forward_backward", message) for _ in range(2)))
            assert (first.status, first.json) == (200, second.json)
            await ann.result(first)
            await ann.result(await ann.post("optim_step", optim_step(model, 2)))

    run(scenario())


def test_the_log_names_the_key_that_reached_its_cap(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann, session, sampler = await begun(server, tokens_per_day=6)
            model = await ann.model(session)
            await ann.post("asample", sample(sampler, 1))
            await ann.post(SAMPLES.path, msgspec.msgpack.encode([msgspec.json.encode(sample(sampler, 2))]))
            await ann.post("forward_backward", forward_backward(model, 1, datum(*range(7))))

    run(scenario())
    refused = [record for record in caplog.records if getattr(record, "event", "") == "refused"]
    assert [vars(record)["route"] for record in refused] == ["asample", "samples", "forward_backward"]
    for record in refused:
        assert (vars(record)["status"], vars(record)["code"], vars(record)["org_id"]) == (403, "over_budget", "acme")
        assert "6 tokens per day has 6 left; this needs 7" in record.getMessage()


def test_a_repeated_sample_is_known_also_while_the_queue_is_full(tmp_path: Path) -> None:
    async def scenario() -> None:
        _, backend = closed()
        async with serving(tmp_path, backend=backend, max_queued=1) as server:
            ann, _, sampler = await begun(server)
            promise = await ann.post("asample", sample(sampler, 1))
            assert (await ann.post("asample", sample(sampler, 2))).status == 429
            assert (await ann.post("asample", sample(sampler, 1))).json == promise.json

    run(scenario())


def test_budgets_count_what_was_used_before_a_restart(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = BreakableStore()
        await store.open()
        async with serving(tmp_path, store=store) as server:
            ann, session, sampler = await begun(server, tokens_per_day=10)
            await ann.result(await ann.post("asample", sample(sampler, 1)))
            model = await ann.model(session)
            assert (await ann.post("forward_backward", forward_backward(model, 1, datum(1, 2, 3, 4)))).status == 403
            await ann.result(await ann.post("forward_backward", forward_backward(model, 2, datum(1, 2, 3))))
        async with serving(tmp_path, store=store) as server:
            again = Client(server, ann.key)
            assert (await again.get("/tinsmith/v1/quota")).json["tokens_left_today"] == 0
            assert (await again.post("asample", sample(sampler, 2))).status == 403
        await store.close()

    run(scenario())


def batch(sampler: str, cursor: int = 0, clone: int = 0, **fields: Any) -> dict[str, Any]:
    target = {"type": "sampling_session", "sampling_session_id": sampler, "cloned_sampler_id": clone}
    return {"target": target, "prev_cursor": cursor, **fields}


def test_one_poll_hears_of_all_samples(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann, _, sampler = await begun(server)
            start = (await ann.post("retrieve_futures", batch(sampler, timeout=0.001))).json
            assert start["completions"] == []
            polling = asyncio.create_task(ann.post("retrieve_futures", batch(sampler, start["cursor"])))
            await settled()
            first = await ann.post("asample", sample(sampler, 1))
            heard = (await polling).json
            assert [(done["state"], done["request_id"]) for done in heard["completions"]] == [
                ("finished", first.json["request_id"])
            ]
            clone = (await ann.post("join_sampling_session", {"sampling_session_id": sampler})).json["client_counter"]
            assert clone == 1
            await ann.result(await ann.post("asample", sample(sampler, 10**9 + 1)))
            mine = await ann.post("retrieve_futures", batch(sampler, heard["cursor"], timeout=0.001))
            assert mine.json["completions"] == []
            of_clone = (await ann.post("retrieve_futures", batch(sampler, 0, clone))).json
            assert len(of_clone["completions"]) == 1

    run(scenario())


def test_a_batch_poll_after_a_restart_hears_of_what_finished_before(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = BreakableStore()
        await store.open()
        async with serving(tmp_path, store=store) as server:
            ann, _, sampler = await begun(server)
            start = (await ann.post("retrieve_futures", batch(sampler, timeout=0.001))).json["cursor"]
            done = await ann.post("asample", sample(sampler, 1))
            await ann.result(done)
            clock = server.clock
        clock.advance(1)
        async with serving(tmp_path, store=store, clock=clock) as server:
            again = Client(server, ann.key)
            heard = (await again.post("retrieve_futures", batch(sampler, start))).json
            assert [item["request_id"] for item in heard["completions"]] == [done.json["request_id"]]
            known = batch(sampler, start, retrieved_request_ids=[done.json["request_id"]], timeout=0.001)
            assert (await again.post("retrieve_futures", known)).json["completions"] == []
        await store.close()

    run(scenario())


def test_a_sampling_session_is_made_once_per_number(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann, session, sampler = await begun(server)
            assert await ann.sampler(session) == sampler
            model = await ann.model(session)
            path = await ann.save(model, 1, "one", "save_weights_for_sampler")
            taken = await ann.post(
                "create_sampling_session",
                {"session_id": session, "sampling_session_seq_id": 0, "model_path": path},
            )
            assert taken.status == 400
            assert "sampling_session_seq_id: 0 was used" in taken.detail
            saved = await ann.sampler(session, 1, model_path=path)
            assert (await ann.call("DELETE", f"training_runs/{model}/checkpoints/sampler_weights/one")).status == 200
            assert await ann.sampler(session, 1, model_path=path) == saved  # it stays when the checkpoint goes
            await ann.result(await ann.post("asample", sample(saved, 1)))
            [row] = await server.rows(SamplerRow, "sampler", sampler_id=saved)
            assert (row.base_model, row.model_path) == (BASE, path)

    run(scenario())


def test_weights_are_not_saved_under_the_number_of_another_sampler(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann, session, _ = await begun(server)
            model = await ann.model(session)
            message = {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 0}
            taken = await ann.post("save_weights_for_sampler", message)
            assert taken.status == 400
            assert "sampling_session_seq_id: 0 was used" in taken.detail
            message = {"model_id": model, "seq_id": 2, "sampling_session_seq_id": 1}
            made = (await ann.result(await ann.post("save_weights_for_sampler", message))).json
            assert made["sampling_session_id"] == f"{session}:sample:1"
            await ann.result(await ann.post("asample", sample(made["sampling_session_id"], 0)))

    run(scenario())


def test_a_stream_of_tokens_ends_with_the_reasons(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann, _, sampler = await begun(server)
            answer = await ann.post("/tinsmith/v1/sample_stream", sample(sampler, 1))
            assert answer.headers["content-type"].startswith("text/event-stream")
            events = [part.split("\n")[0] for part in answer.body.decode().split("\n\n") if part]
            assert events == ["event: token"] * (len(events) - 1) + ["event: done"]
            assert len(events) > 1
            refused = await ann.post("/tinsmith/v1/sample_stream", sample(sampler, 2, num_samples=10**6))
            assert (refused.status, refused.json["field"]) == (400, "num_samples")
            [row] = await server.rows(JobRow, "jobs_of_lane_after", lane=sampler, seq=0, limit=9)
            assert row.seq == 1

    run(scenario())
