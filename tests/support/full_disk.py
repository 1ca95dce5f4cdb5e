"""A server on a disk that fills up: run as a program on a small file system of its own, prints what it answered.

python -m support.full_disk DIRECTORY
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from support.in_process import begun, serving
from tinsmith.errors import StorageFullError
from tinsmith.store.base import statement
from tinsmith.store.sqlite import SqliteStore


def fill(directory: Path) -> None:
    """Leave no block free."""
    with contextlib.suppress(OSError):
        descriptor = os.open(directory / "filler", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            while True:
                os.write(descriptor, bytes(4096))
        finally:
            os.close(descriptor)


async def insert_until_full(store: SqliteStore) -> None:
    """Use up what the log has left, too."""
    try:
        while True:
            row: dict[str, Any] = {"at": 1.0, "org_id": "x", "session_id": "s", "body": "x" * 8000}
            await store.write(statement("insert_telemetry", **row))
    except StorageFullError:
        return


async def main(directory: Path) -> dict[str, int]:
    store = SqliteStore(directory / "tinsmith.sqlite")
    await store.open()
    answers: dict[str, int] = {}
    async with serving(directory, store=store) as server:
        ann, session, model = await begun(server)
        for number in range(1, 7):
            await ann.save(model, number, f"w{number}")
        other = await ann.session()
        ended = await ann.model(session, 1)
        await ann.save(ended, 1, "w1")
        await ann.result(await ann.post("unload_model", {"model_id": ended}))
        await ann.get(f"sessions/{session}/trace_export")
        fill(directory)
        await insert_until_full(store)
        runs = f"training_runs/{model}/checkpoints/weights"
        fill(directory)
        answers["trace"] = (await ann.get(f"sessions/{session}/trace_export")).status
        answers["archive"] = (await ann.get(f"{runs}/w1/archive")).status
        for round_ in range(3):
            fill(directory)
            await insert_until_full(store)
            answers[f"publish {round_}"] = (await ann.call("POST", f"{runs}/w6/publish", {})).status
            answers[f"unpublish {round_}"] = (await ann.call("DELETE", f"{runs}/w6/publish")).status
            answers[f"ttl {round_}"] = (await ann.call("PUT", f"{runs}/w6/ttl", {"ttl_seconds": 5})).status
            fill(directory)
            answers[f"delete {round_}"] = (await ann.call("DELETE", f"{runs}/w{round_ + 1}")).status
        fill(directory)
        await insert_until_full(store)
        answers["delete run"] = (await ann.call("DELETE", f"/tinsmith/v1/training_runs/{ended}")).status
        fill(directory)
        answers["finish"] = (await ann.post(f"sessions/{other}/finish", {"reason": {"type": "success"}})).status
        left = [item["checkpoint_id"] for item in (await ann.get("checkpoints")).json["checkpoints"]]
        answers["left"] = len(left)
    await store.close()
    return answers


if __name__ == "__main__":
    print(json.dumps(asyncio.run(asyncio.wait_for(main(Path(sys.argv[1])), 60))))
