"""Every write of a short run fails once, before or after its commit: nothing is lost, nothing is done twice."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.durable import OFTEN, Training, begun, model_row, snapshot_settled
from support.in_process import Answer, BreakableStore, Client, run, serving

from tinsmith.errors import StorageFullError, StoreError
from tinsmith.server.jobs import lifecycle as jobs_module
from tinsmith.server.runs import replay
from tinsmith.store.base import Statement
from tinsmith.store.rows import StepRow, UsageRow

TOKENS = (1, 2, 3)


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "RETRY_S", (0.0, 0.0, 0.001))
    monkeypatch.setattr(jobs_module, "STORE_RETRY_S", (0.0, 0.001))


class FailingStore(BreakableStore):
    """Fails one write, by its number since `arm`: with nothing written, or although it was."""

    def __init__(self, fails_at: int | None, is_written: bool) -> None:
        super().__init__()
        self.names: list[str] = []
        self._fails_at = fails_at
        self._is_written = is_written
        self._is_armed = False

    def arm(self) -> None:
        self._is_armed = True
        self.names.clear()

    async def write(self, *statements: Statement) -> int:
        self.names.append(statements[0].name)
        if not self._is_armed or len(self.names) - 1 != self._fails_at:
            return await super().write(*statements)
        if self._is_written:
            await super().write(*statements)
            raise StoreError("the connection broke behind the commit")
        raise StorageFullError("no room for the database")


class Persistent(Client):
    """Sends a request again while the server cannot take it, as clients do."""

    async def post(self, path: str, message: Any = None, **headers: str) -> Answer:
        answer = await super().post(path, message, **headers)
        while answer.status == 503:
            await asyncio.sleep(0)
            answer = await super().post(path, message, **headers)
        return answer


async def trained(folder: Path, store: FailingStore) -> tuple[list[Any], str, list[Any], list[Any]]:
    """A run with snapshots, two losses of the engine, and a restart of the server: what came of it, and was counted."""
    await store.open()
    async with serving(folder, store=store, **OFTEN) as server:
        ann, _, model = await begun(server)
        store.arm()
        training = Training(Persistent(server, ann.key), model)
        await training.step(TOKENS[0])
        await snapshot_settled(server, model)
        server.backend.lose()
        await training.step(TOKENS[1])
    async with serving(folder, store=store, **OFTEN) as server:
        training.client = Persistent(server, ann.key)
        await training.step(TOKENS[2])
        server.backend.lose()
        digest = await training.end()
        await snapshot_settled(server, model)
        assert (await model_row(server, model)).fault is None
    steps = await store.read(StepRow, "steps_after", model_id=model, after=-1, limit=99)
    usage = await store.read(UsageRow, "usage_by_run", org_id="acme", since_hour=0, until_hour=10**6)
    await store.close()
    curve = [(row.step, row.seq, row.metrics) for row in steps]
    assert len(curve) == len(TOKENS)
    return training.results, digest, curve, [(row.training, row.checkpoints, row.device_us, row.jobs) for row in usage]


def test_every_write_may_fail_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = FailingStore(None, False)
        expected = await trained(tmp_path / "whole", store)
        assert {"insert_job", "insert_result", "set_model_snapshot", "delete_payload"} <= set(store.names)
        for number in range(len(store.names)):
            for is_written in (False, True):
                failing = FailingStore(number, is_written)
                got = await trained(tmp_path / f"{number}-{is_written}", failing)
                assert got == expected, f"write {number} ({failing.names[number]}), written: {is_written}"

    run(scenario())
