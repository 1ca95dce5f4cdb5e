"""Which checkpoints the sweeper deletes, by retention and by the disk cap, and which it never deletes."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
from support.in_process import Client, Server, run, serving

from tinsmith.server.checkpoints.retention import check_disk_cap
from tinsmith.store.rows import AuditRow, CheckpointRow


async def saved(server: Server, ann: Client, count: int, *, first: int = 1, apart_s: float = 10.0) -> tuple[str, int]:
    """A new model with so many training checkpoints, one after another; gives the model and its next number."""
    model = await ann.model(await ann.session())
    for number in range(first, first + count):
        await ann.save(model, number, f"c{number}")
        server.clock.advance(apart_s)
    return model, first + count


async def names(server: Server, model: str) -> list[str]:
    rows = await server.rows(CheckpointRow, "checkpoints_of_model", model_id=model)
    missing = [row.path for row in rows if not Path(row.directory).is_dir()]
    assert missing == [], "a row without files"
    return [row.name for row in rows]


async def set_ttl(ann: Client, model: str, name: str, ttl_seconds: int | None) -> None:
    path = f"training_runs/{model}/checkpoints/weights/{name}/ttl"
    assert (await ann.call("PUT", path, {"ttl_seconds": ttl_seconds})).status == 200


def test_nothing_goes_by_itself(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, session_timeout_s=1e9) as server:
            model, _ = await saved(server, await server.client(), 4)
            server.clock.advance(1e8)
            await server.sweep()
            assert await names(server, model) == ["c1", "c2", "c3", "c4"]

    run(scenario())


def test_the_newest_of_each_run_are_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, max_run_checkpoints=2) as server:
            ann = await server.client()
            model, _ = await saved(server, ann, 4)
            other, _ = await saved(server, ann, 1)
            [first, *_] = await server.rows(CheckpointRow, "checkpoints_of_model", model_id=model)
            with caplog.at_level(logging.INFO, "tinsmith.server.checkpoints.retention"):
                await server.sweep()
            assert await names(server, model) == ["c3", "c4"]
            assert await names(server, other) == ["c1"]
            assert not Path(first.directory).exists()
            assert [record.message for record in caplog.records] == [
                f"checkpoint tinker://{model}/weights/{name} ({first.size_bytes} bytes) deleted: "
                "its run has 2 newer ones (the server's retention settings)"
                for name in ("c1", "c2")
            ]
            entries = await server.rows(AuditRow, "audit_of_org", org_id=first.org_id, since=0.0, until=1e12, limit=9)
            assert [row.tinker_path for row in entries if row.event == "checkpoint_deleted"] == [
                f"tinker://{model}/weights/c2",
                f"tinker://{model}/weights/c1",
            ]

    run(scenario())


def test_old_ones_go_but_never_the_newest_of_a_run(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, checkpoint_retention_s=25) as server:
            model, _ = await saved(server, await server.client(), 4)
            await server.sweep()
            assert await names(server, model) == ["c3", "c4"]
            server.clock.advance(1000)
            await server.sweep()
            assert await names(server, model) == ["c4"]

    run(scenario())


def test_what_somebody_wants_kept_stays(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, max_run_checkpoints=1, checkpoint_retention_s=1, session_timeout_s=1e9) as server:
            ann = await server.client()
            model, number = await saved(server, ann, 4)
            await ann.save(model, number, "drawn", "save_weights_for_sampler")
            await ann.save(model, number + 1, "out", "save_weights_external")
            await ann.save(model, number + 2, "brief", ttl_seconds=500)  # the newest, but it will go by itself
            assert (await ann.post(f"training_runs/{model}/checkpoints/weights/c2/publish")).status == 200
            await set_ttl(ann, model, "c1", 1000)
            server.clock.advance(100)
            await server.sweep()
            assert sorted(await names(server, model)) == ["brief", "c1", "c2", "c4", "drawn", "out"]
            server.clock.advance(450)
            await server.sweep()
            assert sorted(await names(server, model)) == ["c1", "c2", "c4", "drawn", "out"]
            server.clock.advance(1000)
            await server.sweep()
            assert sorted(await names(server, model)) == ["c2", "c4", "drawn", "out"]

    run(scenario())


def test_a_checkpoint_that_changes_during_the_round_is_left_alone(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, max_run_checkpoints=1) as server:
            ann = await server.client()
            model, number = await saved(server, ann, 3)
            read = server.store.read

            async def then_save_again(row_type: Any, name: str, /, **parameters: Any) -> list[Any]:
                rows = await read(row_type, name, **parameters)
                if name == "checkpoints_beyond":
                    await ann.save(model, number, "c1", overwrite=True)
                    await set_ttl(ann, model, "c2", 1000)
                return rows

            server.store.read = then_save_again  # type: ignore[method-assign]
            await server.sweep()
            server.store.read = read  # type: ignore[method-assign]
            assert sorted(await names(server, model)) == ["c1", "c2", "c3"]

    run(scenario())


async def size_of_one(server: Server, model: str) -> int:
    [row, *_] = await server.rows(CheckpointRow, "checkpoints_of_model", model_id=model)
    size: int = row.size_bytes
    return size


def with_cap(server: Server, cap: int, action: str) -> None:
    """Sizes are known only when something was saved."""
    object.__setattr__(server.services.config, "disk_cap_bytes", cap)
    object.__setattr__(server.services.config, "disk_cap_action", action)


def test_over_the_cap_nothing_is_deleted_unless_the_server_may(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann = await server.client()
            model, number = await saved(server, ann, 4)
            with_cap(server, 2 * await size_of_one(server, model), "refuse")
            await server.sweep()
            await server.sweep()
            assert await names(server, model) == ["c1", "c2", "c3", "c4"]
            assert len([record for record in caplog.records if "refusing saves" in record.message]) == 1
            refused = await ann.post("save_weights", {"model_id": model, "seq_id": number, "path": "more"})
            assert (refused.status, "and this server allows" in refused.detail) == (400, True)

    run(scenario())


def test_over_the_cap_the_oldest_of_all_runs_go_first(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann = await server.client()
            old, _ = await saved(server, ann, 3)
            new, number = await saved(server, ann, 3)
            with_cap(server, 4 * await size_of_one(server, new), "delete")
            await server.sweep()
            assert (await names(server, old), await names(server, new)) == (["c3"], ["c2", "c3"])
            await ann.save(new, number, "c4")
            assert (await names(server, old), await names(server, new)) == (["c3"], ["c2", "c3", "c4"])
            await ann.save(new, number + 1, "c5")  # makes room for itself, without waiting for the sweeper
            assert (await names(server, old), await names(server, new)) == (["c3"], ["c3", "c4", "c5"])

    run(scenario())


def test_what_goes_anyway_may_be_enough_for_the_cap(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, max_run_checkpoints=3) as server:
            ann = await server.client()
            model, _ = await saved(server, ann, 4)
            await set_ttl(ann, model, "c2", 5)
            server.clock.advance(6)
            with_cap(server, 3 * await size_of_one(server, model) + 1, "delete")
            await server.sweep()
            assert await names(server, model) == ["c1", "c3", "c4"]

    run(scenario())


def test_when_nothing_may_go_the_cap_still_refuses(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann = await server.client()
            model, number = await saved(server, ann, 1)
            with_cap(server, 1, "delete")
            await server.sweep()
            assert await names(server, model) == ["c1"]
            refused = await ann.post("save_weights", {"model_id": model, "seq_id": number, "path": "more"})
            assert refused.status == 400

    run(scenario())


def test_those_who_make_room_at_once_delete_no_more_than_is_needed(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann = await server.client()
            model, _ = await saved(server, ann, 6)
            with_cap(server, 5 * await size_of_one(server, model), "delete")
            await asyncio.gather(*(check_disk_cap(server.services) for _ in range(5)), server.sweep())
            assert await names(server, model) == ["c3", "c4", "c5", "c6"]

    run(scenario())
