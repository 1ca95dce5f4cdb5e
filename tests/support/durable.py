"""A short training run on a server in this process, for tests of what survives: it can be cut off anywhere."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from support.in_process import Client, Server, datum, forward_backward, optim_step
from tinsmith.store.rows import CheckpointRow, JobRow, ModelRow

OFTEN: dict[str, Any] = {"max_replay_s": 1e-9}
"""Settings under which every step is followed by a snapshot, as soon as the last one counts."""


async def begun(server: Server) -> tuple[Client, str, str]:
    ann = await server.client()
    session = await ann.session()
    return ann, session, await ann.model(session)


class Training:
    """Numbered requests of one model: passes, steps, and a save at the end."""

    def __init__(self, client: Client, model: str, seq: int = 0) -> None:
        self.client = client
        self.model = model
        self.seq = seq
        self.results: list[Any] = []

    async def step(self, token: int) -> None:
        """A pass and then a step, and their results."""
        for ask in (self._pass, self._step):
            self.results.append((await self.client.result(await ask(token))).json)

    async def ask(self, token: int) -> list[Any]:
        """The same without waiting."""
        return [await self._pass(token), await self._step(token)]

    async def _pass(self, token: int) -> Any:
        self.seq += 1
        return await self.client.post(
            "forward_backward", forward_backward(self.model, self.seq, datum(5, 9, 2 + token))
        )

    async def _step(self, token: int) -> Any:
        self.seq += 1
        return await self.client.post("optim_step", optim_step(self.model, self.seq))

    async def end(self, name: str = "end") -> str:
        """Digest of the weights and the optimizer."""
        self.seq += 1
        path = await self.client.save(self.model, self.seq, name)
        [row] = await self.client.server.rows(CheckpointRow, "checkpoint", path=path)
        return str(row.digest)


async def model_row(server: Server, model: str) -> ModelRow:
    [row] = await server.rows(ModelRow, "model", model_id=model)
    found: ModelRow = row
    return found


async def payloads(server: Server, model: str) -> dict[int, int]:
    """How many bytes of each number the journal still has."""
    rows: list[JobRow] = await server.rows(JobRow, "jobs_of_lane_after", lane=model, seq=-1, limit=1000)
    return {row.seq: len(row.job) for row in rows}


async def snapshot_settled(server: Server, model: str) -> None:
    """Wait until no snapshot is under way, results included."""
    await server.services.jobs.drain()
    run = server.services.runs.known(model)
    assert run is not None
    await run._snapshots.settled()
    await asyncio.sleep(0)


def crash(server: Server) -> None:
    """kill -9 of the API process: nothing that is on its way is written any more."""
    for task in list(server.services.jobs._tasks):
        task.cancel()
    for run in server.services.runs.all():
        if run._snapshots._taking is not None:
            run._snapshots._taking.cancel()


def snapshot_directories(server: Server) -> list[Path]:
    return sorted((server.services.files.root / "snapshots").glob("*/*"))
