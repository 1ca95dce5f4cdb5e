"""The arithmetic backend with gates that are files in the data directory, for tests of a server in another process.

While `hold` exists no job runs; while `hold_tokens` exists a stream stops after its second token.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from tinsmith.engine.protocol import AnyJob
from tinsmith.testing.backend import ARITHMETIC, MemoryBackend

LOOK_S = 0.01


def held_backend(config: Any) -> MemoryBackend:
    """For `tinsmith serve --backend support.held_backend:held_backend`."""

    async def hold(_: AnyJob) -> None:
        while (config.data_dir / "hold").exists():
            await asyncio.sleep(LOOK_S)

    async def pace(_: AnyJob, number: int) -> None:
        while number >= 2 and (config.data_dir / "hold_tokens").exists():
            await asyncio.sleep(LOOK_S)

    card = msgspec.structs.replace(ARITHMETIC, max_context_length=1_000_000)
    return MemoryBackend([card], hold=hold, pace=pace, log_path=config.data_dir / "executions.jsonl")
