"""What the OpenAI-compatible stream costs the server beside our own stream of the same samples.

`python bench/openai.py`. One server with the arithmetic backend, the same prompts and seeds by both routes, in turns.
Server CPU counts the API process and its body readers. The time to the first token is a client's wall time, and needs a
quiet machine.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.server_process import ServerProcess  # noqa: E402

from tinsmith.testing.backend import ARITHMETIC  # noqa: E402

PROMPT = list(range(1, 65))
TOKENS = 200
ROUNDS = 8
STREAMS = (1, 32, 256)
Stream = Callable[[aiohttp.ClientSession, int], Awaitable[tuple[int, float]]]


def cpu_s(process_id: int) -> float:
    """The CPU time of a process and its children so far."""
    total = 0
    for child in [process_id, *_children(process_id)]:
        fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


def _children(process_id: int) -> list[int]:
    tasks = Path(f"/proc/{process_id}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def streams(server: ServerProcess, sampler: str) -> dict[str, Stream]:
    """Each returns the tokens of one sample, and the seconds until the first of them."""

    async def read(session: aiohttp.ClientSession, path: str, body: Any, is_token: Callable[[bytes], int]) -> Any:
        began, first, count = time.perf_counter(), 0.0, 0
        async with session.post(server.url + path, json=body) as answer:
            assert answer.status == 200, await answer.text()
            async for line in answer.content:
                found = is_token(line)
                if found and not count:
                    first = time.perf_counter() - began
                count += found
        return count, first

    async def native(session: aiohttp.ClientSession, seed: int) -> tuple[int, float]:
        params = {"max_tokens": TOKENS, "seed": seed}
        prompt = {"chunks": [{"type": "encoded_text", "tokens": PROMPT}]}
        body = {"sampling_session_id": sampler, "prompt": prompt, "sampling_params": params}
        return await read(session, "/tinsmith/v1/sample_stream", body, lambda line: line.count(b'"tokens":[') > 0)  # type: ignore[no-any-return]

    async def openai(session: aiohttp.ClientSession, seed: int) -> tuple[int, float]:
        body = {"model": ARITHMETIC.name, "prompt": PROMPT, "max_tokens": TOKENS, "seed": seed, "stream": True}
        return await read(session, "/v1/completions", body, lambda line: line.count(b'"text":"') > 0)  # type: ignore[no-any-return]

    return {"sample_stream": native, "/v1/completions": openai}


async def sampler_of(server: ServerProcess, session: aiohttp.ClientSession) -> str:
    async def post(path: str, body: Any) -> Any:
        async with session.post(f"{server.url}/api/v1/{path}", json=body) as answer:
            return json.loads(await answer.read())

    made = await post("create_session", {"tags": [], "sdk_version": "0.36.0"})
    asked = {"session_id": made["session_id"], "sampling_session_seq_id": 0, "base_model": ARITHMETIC.name}
    return str((await post("create_sampling_session", asked))["sampling_session_id"])


async def compare(server: ServerProcess) -> None:
    headers = {"x-api-key": server.key}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(headers=headers, connector=connector) as session:
        routes = streams(server, await sampler_of(server, session))
        for stream in routes.values():
            began = time.perf_counter()
            await stream(session, 0)
            print(f"first request of its kind: {time.perf_counter() - began:.3f} s")
        for count in STREAMS:
            costs: dict[str, list[float]] = {name: [] for name in routes}
            waits: dict[str, list[float]] = {name: [] for name in routes}
            for number in range(ROUNDS):
                turns = list(routes.items())
                for name, stream in (
                    turns if number % 2 else reversed(turns)
                ):  # one's last writes are in the other's turn
                    before = cpu_s(server.process_id)
                    together = max(1, 64 // count)
                    drawn = 0
                    for turn in range(together):
                        seeds = range(1 + 1000 * number + turn * count, 1 + 1000 * number + (turn + 1) * count)
                        found = await asyncio.gather(*(stream(session, seed) for seed in seeds))
                        drawn += TOKENS * len(found)
                        waits[name] += [first for _, first in found]
                    costs[name].append((cpu_s(server.process_id) - before) / drawn)
            for name in routes:
                cost, wait = statistics.median(costs[name]) * 1e6, statistics.median(waits[name]) * 1e3
                print(f"{count:4} streams  {name:16} {cost:6.1f} us CPU per token, first token after {wait:7.1f} ms")


def main() -> None:
    with (
        tempfile.TemporaryDirectory() as place,
        ServerProcess(Path(place) / "data", backend="support.openai_server:served") as server,
    ):
        asyncio.run(compare(server))


if __name__ == "__main__":
    main()
