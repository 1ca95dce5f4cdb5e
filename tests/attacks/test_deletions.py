"""Deleting much takes nobody's turn to write, and deleting something twice gives nobody room that is not there."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support import store_rows as make
from support.in_process import BreakableStore, Client, Server, begun, run, serving, settled, until

from tinsmith.server.checkpoints.disk_budget import OwnedRow
from tinsmith.server.jobs.pruning import PIECE_BYTES, PIECE_ROWS
from tinsmith.store.base import Statement, statement
from tinsmith.store.rows import CheckpointRow, CustomLossRow, JobRow, SessionRow

ROW_BYTES = PIECE_BYTES // 8
ROWS = 40
WHOLE_BYTES = ROWS * ROW_BYTES
OVERHEAD_BYTES = 4096
"""Of the other columns of a piece."""


class Watched(BreakableStore):
    """Notes how many bytes each write frees, and can stop after some writes."""

    def __init__(self) -> None:
        super().__init__()
        self.freed: list[int] = []
        self.left: int | None = None

    async def write(self, *statements: Statement) -> int:
        if self.left == 0:
            raise asyncio.CancelledError
        self.left = None if self.left is None else self.left - 1
        before = await self._stored()
        count = await super().write(*statements)
        self.freed.append(before - await self._stored())
        return count

    async def _stored(self) -> int:
        return sum(row.size_bytes for row in await self.read(OwnedRow, "bytes_by_org"))


async def fill(server: Server, session: str, model: str) -> None:
    """A large payload or result in each of many requests of a run, and large losses."""
    owner = {"session_id": session, "org_id": "acme", "user_id": "acme.ann"}
    for number in range(100, 100 + ROWS):
        sizes = {"job": bytes(ROW_BYTES)} if number % 2 else {"job": b""}
        job = make.job(model, number, **owner, **sizes, state="done")
        result = make.result(job.request_id, body=b"" if number % 2 else bytes(ROW_BYTES))
        await server.store.write(statement("insert_job", job), statement("insert_result", result))


async def with_losses(server: Server, session: str) -> None:
    for number in range(ROWS):
        loss = make.custom_loss(f"loss-{number}", session_id=session, org_id="acme", request=bytes(ROW_BYTES))
        await server.store.write(statement("insert_custom_loss", loss))


async def watched(tmp_path: Path, scenario: Any) -> None:
    store = Watched()
    await store.open()
    async with serving(tmp_path, store=store) as server:
        await scenario(server, store, *await begun(server))
    await store.close()


def check_freed(store: Watched, whole: int) -> None:
    assert sum(store.freed) >= whole
    assert max(store.freed) <= PIECE_BYTES + OVERHEAD_BYTES, "other writes wait for no more than this"


def test_a_run_is_deleted_in_pieces(tmp_path: Path) -> None:
    async def scenario(server: Server, store: Watched, ann: Client, session: str, model: str) -> None:
        await fill(server, session, model)
        await ann.result(await ann.post("unload_model", {"model_id": model}))
        store.freed.clear()
        assert (await ann.call("DELETE", f"/tinsmith/v1/training_runs/{model}")).status == 200
        check_freed(store, WHOLE_BYTES)
        assert await server.rows(JobRow, "jobs_of_lane_after", lane=model, seq=-1, limit=9) == []

    run(watched(tmp_path, scenario))


def test_a_session_is_pruned_in_pieces(tmp_path: Path) -> None:
    async def scenario(server: Server, store: Watched, ann: Client, session: str, model: str) -> None:
        await fill(server, session, model)
        await with_losses(server, session)
        await ann.post(f"sessions/{session}/finish", {"reason": {"type": "success"}})
        server.clock.advance(10**5)
        store.freed.clear()
        await server.sweep()
        check_freed(store, 2 * WHOLE_BYTES)

    run(watched(tmp_path, scenario))


def test_what_a_snapshot_replaces_is_deleted_in_pieces(tmp_path: Path) -> None:
    async def scenario(server: Server, store: Watched, ann: Client, session: str, model: str) -> None:
        await fill(server, session, model)
        taken = server.services.runs.known(model)
        assert taken is not None
        store.freed.clear()
        await taken._snapshots._prune(100 + ROWS)
        check_freed(store, WHOLE_BYTES // 2)
        left = await server.rows(JobRow, "jobs_of_lane_after", lane=model, seq=99, limit=ROWS)
        assert [row.job for row in left] == [b""] * ROWS

    run(watched(tmp_path, scenario))


def test_many_small_requests_are_deleted_in_pieces_too(tmp_path: Path) -> None:
    async def scenario(server: Server, store: Watched, ann: Client, session: str, model: str) -> None:
        owner = {"session_id": session, "org_id": "acme", "user_id": "acme.ann"}
        jobs = [make.job(model, number, **owner, state="done") for number in range(100, 100 + 3 * PIECE_ROWS)]
        await store.write(*(statement("insert_job", job) for job in jobs))
        await ann.result(await ann.post("unload_model", {"model_id": model}))
        store.freed.clear()
        assert (await ann.call("DELETE", f"/tinsmith/v1/training_runs/{model}")).status == 200
        assert len([size for size in store.freed if size]) >= 3

    run(watched(tmp_path, scenario))


@pytest.mark.parametrize("writes", [1, 2, 5])
def test_pruning_that_was_cut_short_goes_on_after_a_restart(tmp_path: Path, writes: int) -> None:
    """And meanwhile the session's client does not come back to half of it."""

    async def scenario() -> None:
        store = Watched()
        await store.open()
        async with serving(tmp_path, store=store) as server:
            ann, session, model = await begun(server)
            await fill(server, session, model)
            await with_losses(server, session)
            server.clock.advance(10**4)
            await server.sweep()
            clock = server.clock
            clock.advance(10**4)
            await server.sweeper.flush()
            store.left = writes
            with pytest.raises(asyncio.CancelledError):
                await server.sweeper._prune()
            store.left = None
        async with serving(tmp_path, store=store, clock=clock) as server:
            [row] = await server.rows(SessionRow, "session", session_id=session)
            assert row.pruned
            back = await Client(server, ann.key).post("session_heartbeat", {"session_id": session})
            assert back.status == 410
            assert await server.rows(JobRow, "jobs_of_lane_after", lane=model, seq=-1, limit=9)
            await server.sweep()
            assert await server.rows(JobRow, "jobs_of_lane_after", lane=model, seq=-1, limit=9) == []
            assert await server.rows(CustomLossRow, "custom_loss", loss_id="loss-39") == []
        await store.close()

    run(scenario())


def test_a_checkpoint_that_is_deleted_many_times_at_once_frees_its_space_once(tmp_path: Path) -> None:
    """Otherwise an organisation at its cap would delete one checkpoint ten times, and get room for nine."""

    async def scenario() -> None:
        store = BreakableStore()
        await store.open()
        async with serving(tmp_path, store=store) as server:
            ann, _, model = await begun(server)
            for number in range(1, 5):
                await ann.save(model, number, f"w{number}")
            await server.services.disk.measure(is_due=True)
            [row] = await server.rows(CheckpointRow, "checkpoint", path=f"tinker://{model}/weights/w1")
            before = server.services.disk.used("acme")
            store.gates["delete_checkpoint"] = asyncio.Event()
            where = f"training_runs/{model}/checkpoints/weights/w1"
            deletes = [asyncio.create_task(ann.call("DELETE", where)) for _ in range(4)]
            await until(lambda: "delete_checkpoint" in store.reached)
            await settled()
            store.gates.pop("delete_checkpoint").set()
            assert [(await one).status for one in deletes] == [200] * 4
            assert before - server.services.disk.used("acme") == row.size_bytes
            assert not Path(row.directory).exists()
        await store.close()

    run(scenario())


def test_a_checkpoint_that_was_saved_again_meanwhile_is_not_orphaned(tmp_path: Path) -> None:
    """Files without a row would count for nobody."""

    async def scenario() -> None:
        store = BreakableStore()
        await store.open()
        async with serving(tmp_path, store=store) as server:
            ann, _, model = await begun(server)
            path = await ann.save(model, 1, "w")
            store.gates["delete_checkpoint"] = asyncio.Event()
            delete = asyncio.create_task(ann.call("DELETE", f"training_runs/{model}/checkpoints/weights/w"))
            await until(lambda: "delete_checkpoint" in store.reached)
            assert await ann.save(model, 2, "w", overwrite=True) == path
            store.gates.pop("delete_checkpoint").set()
            assert (await delete).status == 200
            [row] = await server.rows(CheckpointRow, "checkpoint", path=path)
            kept = (tmp_path / "data" / "checkpoints").rglob("manifest.json")
            assert [file.parent for file in kept] == [Path(row.directory)]
        await store.close()

    run(scenario())


def test_a_run_that_is_deleted_twice_at_once_is_deleted_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = BreakableStore()
        await store.open()
        async with serving(tmp_path, store=store) as server:
            ann, _, model = await begun(server)
            await ann.save(model, 1, "w")
            await ann.result(await ann.post("unload_model", {"model_id": model}))
            await server.services.disk.measure(is_due=True)
            before = server.services.disk.used("acme")
            [row] = await server.rows(CheckpointRow, "checkpoint", path=f"tinker://{model}/weights/w")
            store.gates["delete_checkpoint"] = asyncio.Event()
            deletes = [asyncio.create_task(ann.call("DELETE", f"/tinsmith/v1/training_runs/{model}")) for _ in range(3)]
            await until(lambda: "delete_checkpoint" in store.reached)
            await settled()
            store.gates.pop("delete_checkpoint").set()
            assert {(await one).status for one in deletes} <= {200, 404}
            assert before - server.services.disk.used("acme") == row.size_bytes
        await store.close()

    run(scenario())
