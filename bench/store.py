"""Durable writes per second and their latency, by number of concurrent writers; small reads; a 4 MB payload.

`python bench/store.py [DSN]`: SQLite in a temporary folder under --folder (default: here, since /tmp may be memory),
and PostgreSQL when a DSN is given. fsync of the disk is shown beside the numbers, since it bounds what one writer gets.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from pathlib import Path

from tinsmith.store.base import Store, statement
from tinsmith.store.open import open_store
from tinsmith.store.rows import JobHeadRow, JobRow

WRITERS = (1, 64, 1000)
SECONDS = 3.0
PAYLOAD = os.urandom(2000)


def job(lane: str, seq: int, payload: bytes = PAYLOAD) -> JobRow:
    return JobRow(
        request_id=f"{lane}:{seq}",
        lane=lane,
        seq=seq,
        kind="sample",
        session_id="session",
        org_id="org",
        user_id="user",
        digest="0" * 64,
        job=payload,
        created_at=time.time(),
    )


def percentiles(times_s: list[float]) -> str:
    cuts = statistics.quantiles(times_s, n=100)
    return f"p50 {cuts[49] * 1e3:8.2f} ms   p99 {cuts[98] * 1e3:8.2f} ms"


async def measure_writers(store: Store, writers: int, lane: str = "") -> None:
    times_s: list[float] = []
    commits = store.commits  # type: ignore[attr-defined]
    end = time.perf_counter() + SECONDS

    async def write(lane: str) -> None:
        seq = 0
        while (start := time.perf_counter()) < end:
            await store.write(statement("insert_job", job(lane, seq)))
            times_s.append(time.perf_counter() - start)
            seq += 1

    start = time.perf_counter()
    await asyncio.gather(*(write(f"{lane}{writers}-{index}") for index in range(writers)))
    wall_s = time.perf_counter() - start
    commits = store.commits - commits  # type: ignore[attr-defined]
    print(
        f"  {writers:5} writers  {len(times_s) / wall_s:9,.0f} writes/s   {percentiles(times_s)}   "
        f"{len(times_s) / commits:6.1f} per commit"
    )


async def measure_reads(store: Store, readers: int) -> None:
    times_s: list[float] = []

    async def read() -> None:
        for _ in range(2000 // readers):
            start = time.perf_counter()
            await store.read(JobHeadRow, "job_head_by_number", lane="1-0", seq=0)
            times_s.append(time.perf_counter() - start)

    start = time.perf_counter()
    await asyncio.gather(*(read() for _ in range(readers)))
    wall_s = time.perf_counter() - start
    print(f"  {readers:5} readers  {len(times_s) / wall_s:9,.0f} reads/s    {percentiles(times_s)}")


async def measure_large(store: Store) -> None:
    payload, times_s = os.urandom(4 * 2**20), []
    for seq in range(30):
        start = time.perf_counter()
        await store.write(statement("insert_job", job("large", seq, payload)))
        times_s.append(time.perf_counter() - start)
    print(f"      4 MB payload, one writer              {percentiles(times_s)}")


async def measure_busy_loop(store: Store) -> None:
    """64 writers while the loop's thread computes for most of the time, as a server under load does."""
    end = time.perf_counter() + SECONDS

    async def compute() -> None:
        while time.perf_counter() < end:
            until = time.perf_counter() + 0.001
            while time.perf_counter() < until:
                pass
            await asyncio.sleep(0)

    computing = asyncio.ensure_future(compute())
    print("  while the loop computes:")
    await measure_writers(store, 64, "busy-")
    await computing


async def measure(title: str, url: str) -> None:
    store = open_store(url)
    await store.open()
    print(title)
    for writers in WRITERS:
        await measure_writers(store, writers)
    await measure_busy_loop(store)
    for readers in (1, 64):
        await measure_reads(store, readers)
    await measure_large(store)
    await store.close()


def fsync_ms(folder: Path) -> float:
    times_s = []
    with (folder / "fsync").open("wb") as file:
        for _ in range(200):
            file.write(bytes(4096))
            file.flush()
            start = time.perf_counter()
            os.fsync(file.fileno())
            times_s.append(time.perf_counter() - start)
    return statistics.median(times_s) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dsn", nargs="?", help="a PostgreSQL database to write to")
    parser.add_argument("--folder", type=Path, default=Path(), help="where to make the SQLite file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        print(f"{os.cpu_count()} cores; fsync of 4 KB takes {fsync_ms(Path(folder)):.2f} ms here")
        asyncio.run(measure("SQLite", f"{folder}/tinsmith.db"))
    asyncio.run(measure("in memory", "memory:"))
    if arguments.dsn:
        asyncio.run(measure("PostgreSQL", arguments.dsn))


if __name__ == "__main__":
    main()
