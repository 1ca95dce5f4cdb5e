"""Temporary conditions: a full disk, a locked or unreachable database, a clock that jumps, an engine that dies."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import sqlite3
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.backends import ONE, arithmetic_spec
from support.durable import OFTEN, Training, begun, model_row, snapshot_settled
from support.in_process import (
    BASE,
    BreakableStore,
    Client,
    Clock,
    create_model,
    datum,
    forward_backward,
    run,
    sample,
    serving,
)

from tinsmith.engine.backend.local import ProcessBackend
from tinsmith.engine.backend.supervisor import SupervisorOptions
from tinsmith.errors import StorageFullError, TinkerError
from tinsmith.server.checkpoints.manifest import is_intact
from tinsmith.server.jobs import lifecycle as jobs_module
from tinsmith.server.process import sole_user
from tinsmith.server.runs import replay
from tinsmith.store.base import Statement, statement
from tinsmith.store.rows import CheckpointRow, ModelRow
from tinsmith.store.sqlite import SqliteStore
from tinsmith.testing import files as test_files

TOKENS = (1, 2, 3, 4)


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "RETRY_S", (0.0, 0.0, 0.001))
    monkeypatch.setattr(jobs_module, "STORE_RETRY_S", (0.0, 0.001))


async def plain(folder: Path) -> tuple[list[Any], str]:
    """The run of these tests when nothing happens."""
    async with serving(folder) as server:
        ann, _, model = await begun(server)
        training = Training(ann, model)
        for token in TOKENS:
            await training.step(token)
        return training.results, await training.end()


class FullStore(BreakableStore):
    """Has no room for payloads while it is told so; `is_full` for anything at all."""

    is_full = False

    async def write(self, *statements: Statement) -> int:
        if self.is_full:
            raise StorageFullError("no room for the database")
        return await super().write(*statements)


def test_a_full_disk_refuses_new_work_and_keeps_what_was_computed(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = FullStore()
        await store.open()
        async with serving(tmp_path / "a", store=store) as server:
            ann, _, model = await begun(server)
            training = Training(ann, model)
            await training.step(TOKENS[0])
            promises = await training.ask(TOKENS[1])
            store.is_full = True  # the results of what was accepted have no room either
            refused = await ann.post("forward_backward", forward_backward(model, 5))
            assert (refused.status, refused.json["code"]) == (503, "storage_full")
            assert "no room" in refused.detail
            store.is_full = False
            training.results += [(await ann.result(promise)).json for promise in promises]
            for token in TOKENS[2:]:
                await training.step(token)
            assert (training.results, await training.end()) == await plain(tmp_path / "b")
        await store.close()

    run(scenario())


@pytest.mark.parametrize("code", [errno.EROFS, errno.ENOSPC, errno.EIO], ids=["read-only", "full", "broken"])
def test_files_that_cannot_be_written_fail_the_save_with_the_reason_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    async def scenario() -> None:
        expected = await plain(tmp_path / "b")
        async with serving(tmp_path / "a", **OFTEN) as server:
            ann, _, model = await begun(server)
            training = Training(ann, model)
            await training.step(TOKENS[0])
            await snapshot_settled(server, model)

            def fails(*_: Any) -> None:
                raise OSError(code, os.strerror(code))

            with monkeypatch.context() as broken:
                broken.setattr(test_files.os, "rename", fails)
                training.seq += 1
                message = {"model_id": model, "seq_id": training.seq, "path": "lost"}
                failed = (await ann.poll(await ann.post("save_weights", message))).json
                assert os.strerror(code) in failed["error"]
                for token in TOKENS[1:3]:  # their snapshots fail, too
                    await training.step(token)
                await snapshot_settled(server, model)
            assert (await model_row(server, model)).snapshot_seq == 2
            server.backend.lose()
            await training.step(TOKENS[3])
            await training.end("lost")  # the name is free
            assert (training.results, await training.end()) == expected
            checkpoints = await server.rows(CheckpointRow, "checkpoints_of_model", model_id=model)
            assert sorted(row.name for row in checkpoints) == ["end", "lost"]

    run(scenario())


def test_a_locked_database_delays(tmp_path: Path) -> None:
    async def scenario() -> None:
        path = tmp_path / "tinsmith.sqlite"
        store = SqliteStore(path, busy_timeout_s=0.02)
        await store.open()
        async with serving(tmp_path / "a", store=store) as server:
            ann, _, model = await begun(server)
            training = Training(ann, model)
            await training.step(TOKENS[0])
            other = sqlite3.connect(path, isolation_level=None)
            promises = await training.ask(TOKENS[1])
            other.execute("BEGIN IMMEDIATE")
            refused = await ann.post("forward_backward", forward_backward(model, 5))
            assert (refused.status, refused.json["code"]) == (503, "store_unavailable")
            assert "has locked the database" in refused.detail
            other.execute("ROLLBACK")
            other.close()
            training.results += [(await ann.result(promise)).json for promise in promises]
            for token in TOKENS[2:]:
                await training.step(token)
            assert (training.results, await training.end()) == await plain(tmp_path / "b")
        await store.close()

    run(scenario())


def test_a_database_that_is_away_delays_also_a_restore(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = BreakableStore()
        await store.open()
        async with serving(tmp_path / "a", store=store, **OFTEN) as server:
            ann, _, model = await begun(server)
            training = Training(ann, model)
            for token in TOKENS[:2]:
                await training.step(token)
            promises = await training.ask(TOKENS[2])
            store.is_down = True
            server.backend.lose()
            for _ in range(200):
                await asyncio.sleep(0)
            assert (await ann.post("forward_backward", forward_backward(model, 7))).status == 503
            store.is_down = False
            training.results += [(await ann.result(promise)).json for promise in promises]
            await training.step(TOKENS[3])
            assert (training.results, await training.end()) == await plain(tmp_path / "b")
        await store.close()

    run(scenario())


@pytest.mark.parametrize("jump_s", [30 * 86_400.0, -30 * 86_400.0], ids=["forward", "back"])
def test_a_clock_that_jumps_changes_no_result(tmp_path: Path, jump_s: float) -> None:
    async def scenario() -> None:
        async with serving(tmp_path / "a", **OFTEN) as server:
            ann, session, model = await begun(server)
            training = Training(ann, model)
            sampler = await ann.sampler(session)
            for token in TOKENS[:2]:
                await training.step(token)
            promises = await training.ask(TOKENS[2])
            drawn = await ann.post("asample", sample(sampler, 1, sampling_params={"max_tokens": 4, "seed": 5}))
            server.clock.advance(jump_s)
            for promise in promises:
                training.results.append((await ann.result(promise)).json)
            await ann.result(drawn)
            await server.sweep()  # forward: the session seems to have been silent for a month
            await server.sweep()
            await training.step(TOKENS[3])
            assert (training.results, await training.end()) == await plain(tmp_path / "b")

    run(scenario())


def test_a_clock_that_was_set_back_at_a_restart_hides_no_sample(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = BreakableStore()
        await store.open()
        async with serving(tmp_path, store=store) as server:
            ann, session, _ = await begun(server)
            sampler = await ann.sampler(session)
            first = await ann.post("asample", sample(sampler, 1))
            poll: dict[str, Any] = {"target": {"type": "sampling_session", "sampling_session_id": sampler}}
            seen = (await ann.post("retrieve_futures", {**poll, "prev_cursor": 0})).json
            assert [row["request_id"] for row in seen["completions"]] == [first.json["request_id"]]
            held = await ann.post("asample", sample(sampler, 2))
            await ann.result(held)  # done, and not heard of by a batch poll
        async with serving(tmp_path, store=store, clock=Clock(server.clock() - 3600)) as server:
            again = Client(server, ann.key)
            cursor = {"prev_cursor": seen["cursor"], "retrieved_request_ids": [first.json["request_id"]]}
            answer = (await again.post("retrieve_futures", {**poll, **cursor})).json
            assert [row["request_id"] for row in answer["completions"]] == [held.json["request_id"]]
            third = await again.post("asample", sample(sampler, 3))
            cursor["prev_cursor"] = answer["cursor"]
            answer = (await again.post("retrieve_futures", {**poll, **cursor})).json
            assert third.json["request_id"] in [row["request_id"] for row in answer["completions"]]
        await store.close()

    run(scenario())


POISON = 499


def process_backend(**options: Any) -> Any:
    card = msgspec.structs.replace(ONE, name=BASE)
    return ProcessBackend([arithmetic_spec(card, **options)], SupervisorOptions(backoff_s=0.01, retry_failed_s=0.0))


def test_a_poison_job_is_failed_and_everyone_goes_on(tmp_path: Path) -> None:
    async def scenario() -> None:
        expected = await plain(tmp_path / "b")
        async with serving(tmp_path / "a", backend=process_backend(die_on=f"{POISON},"), poll_s=1.0) as server:
            ann, _, model = await begun(server)
            bob = await server.client("bob", "bobs")
            other = await bob.model(await bob.session())
            mine, theirs = Training(ann, model), Training(bob, other)
            for training in (mine, theirs):
                for token in TOKENS[:2]:
                    await training.step(token)
            mine.seq += 1
            poison = await ann.post("forward_backward", forward_backward(model, mine.seq, datum(5, POISON, 2)))
            failed = await ann.outcome(poison)
            assert failed["category"] == "server"
            assert "it killed the engine, also while nothing else was running" in failed["error"]
            for training in (mine, theirs):
                for token in TOKENS[2:]:
                    await training.step(token)
                assert (training.results, await training.end()) == expected

    run(scenario())


def test_a_model_that_was_changed_by_half_is_made_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        expected = await plain(tmp_path / "b")
        backend = process_backend(doubt_on="learning_rate", doubt_log=str(tmp_path / "doubts"))
        async with serving(tmp_path / "a", backend=backend) as server:
            ann, _, model = await begun(server)
            training = Training(ann, model)
            for token in TOKENS:
                await training.step(token)
            assert (training.results, await training.end()) == expected
            assert backend.epoch_of(BASE) == 2
            assert "exited with code 5" in backend._supervisors[BASE]._last_death

    run(scenario())


def test_an_engine_that_cannot_start_leaves_the_server_up(tmp_path: Path) -> None:
    async def scenario() -> None:
        backend = process_backend(start_log=str(tmp_path / "starts"), refuse=1)
        async with serving(tmp_path / "a", backend=backend) as server:
            ann = await server.client()
            session = await ann.session()
            failed = await ann.outcome(await ann.post("create_model", create_model(session)))
            assert "start 1 was told to fail" in failed["error"]
            ready = await ann.get("/readyz")
            assert (ready.status, ready.json["status"]) == (503, "failed")
            assert "start 1 was told to fail" in ready.json["reason"]
            assert (await ann.get("/healthz")).status == 200
            await ann.model(session, 1)
            assert (await ann.get("/readyz")).status == 200

    run(scenario())


def test_a_damaged_checkpoint_is_refused_by_name_and_another_offered(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann, session, model = await begun(server)
            training = Training(ann, model)
            paths = []
            for token, name in zip(TOKENS, ("first", "second", "third"), strict=False):
                await training.step(token)
                await training.end(name)
                paths.append(f"tinker://{model}/weights/{name}")
            await _damage(server, paths[2])
            load = {"model_id": model, "path": paths[2], "optimizer": True}
            training.seq += 1
            failed = await ann.outcome(await ann.post("load_weights", {**load, "seq_id": training.seq}))
            assert f"{paths[2]} is damaged and was not loaded" in failed["error"]
            assert f"The newest intact checkpoint of that run is {paths[1]}" in failed["error"]
            made = await ann.post("load_weights", {"path": paths[2], "session_id": session, "model_seq_id": 7})
            assert f"checkpoint of that run is {paths[1]}" in (await ann.outcome(made))["error"]
            await _damage(server, paths[1])
            await _damage(server, paths[0])
            training.seq += 1
            failed = await ann.outcome(await ann.post("load_weights", {**load, "seq_id": training.seq}))
            assert "No other checkpoint of that run is intact" in failed["error"]
            await training.step(TOKENS[3])  # the run itself is as it was

    run(scenario())


async def _damage(server: Any, path: str) -> None:
    """Change one bit of the weights, in all places that share them."""
    [row] = await server.rows(CheckpointRow, "checkpoint", path=path)
    file = Path(row.directory) / "adapter_model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert not is_intact(lambda: None, Path(row.directory))


def test_files_of_any_backend_can_be_judged(tmp_path: Path) -> None:
    assert not is_intact(lambda: None, tmp_path)
    name = "adapter_config.json"
    (tmp_path / name).write_bytes(b"x")
    digest = "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"
    for record in (digest, {"bytes": 1, "sha256": digest}):
        (tmp_path / "manifest.json").write_bytes(msgspec.json.encode({"files": {name: record}}))
        assert is_intact(lambda: None, tmp_path)
    for wrong in ("0", None, {"bytes": 1}, 5):
        (tmp_path / "manifest.json").write_bytes(msgspec.json.encode({"files": {name: wrong}}))
        assert not is_intact(lambda: None, tmp_path)
    (tmp_path / "manifest.json").write_bytes(b"[]")
    assert not is_intact(lambda: None, tmp_path)


def test_what_a_crash_left_half_written_is_removed_at_the_next_start(tmp_path: Path) -> None:
    async def scenario() -> None:
        places = ["checkpoints/m/weights/.a.12.partial", "samplers/.s.12.partial", "snapshots/m/.4-ab.12.partial"]
        places += ["snapshots/m/4-ab"]
        for place in places:
            (tmp_path / "data" / place).mkdir(parents=True)
        (tmp_path / "data/checkpoints/m/weights/whole").mkdir()
        store = BreakableStore()
        await store.open()
        owner = {"session_id": "s", "org_id": "o", "user_id": "u", "base_model": "b", "lora": "{}", "optimizer": "{}"}
        row = ModelRow(model_id="m", created_at=1.0, used_at=1.0, state="parked", **owner)
        await store.write(statement("insert_model", row))
        async with serving(tmp_path, store=store):
            assert [place for place in places if (tmp_path / "data" / place).exists()] == []
            assert (tmp_path / "data/checkpoints/m/weights/whole").is_dir()
        await store.close()

    run(scenario())


def test_a_data_directory_has_one_server(tmp_path: Path) -> None:
    now = itertools.count()
    with sole_user(tmp_path):
        with (
            pytest.raises(TinkerError, match=f"in use by another server, process {os.getpid()};"),
            sole_user(tmp_path, clock=lambda: float(next(now)), sleep=lambda _: None),
        ):
            pass
        assert next(now) > 3  # it was waited for
    with sole_user(tmp_path):
        pass
