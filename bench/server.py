"""The server with the arithmetic backend: round trips, held polls, large requests, beside a FastAPI server that echoes.

`python bench/server.py [--folder DIR]`. The data lies under --folder (default: here, since /tmp may be
memory). FastAPI gets a virtual environment of its own, under --folder. Wall times need a quiet machine; CPU times are
what to trust. Run by `make bench`.

`python bench/server.py --protocols` compares our HTTP protocol class with stock uvicorn: the same application behind
each, all servers up at once, rounds in turn, and the median of the CPU time per request.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LOAD = ROOT / "bench" / "server_load.py"
BACKEND = "tinsmith.testing.backend:memory_backend"
ECHO = """
from typing import Any
from fastapi import FastAPI
from pydantic import BaseModel

class Chunk(BaseModel):
    type: str
    tokens: list[int]

class Prompt(BaseModel):
    chunks: list[Chunk]

class Params(BaseModel):
    max_tokens: int | None = None
    seed: int | None = None
    temperature: float = 1
    top_k: int = -1
    top_p: float = 1

class Sample(BaseModel):
    num_samples: int
    prompt: Prompt
    sampling_params: Params
    sampling_session_id: str
    seq_id: int
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    type: str = "sample"

app = FastAPI()

@app.get("/healthz")
async def healthz() -> dict[str, str]:
    return {"status": "ok"}

@app.post("/echo")
async def echo(sample: Sample) -> Sample:
    return sample
"""

PROTOCOLS = {"ours": "protocol_for", "stock uvicorn": "lambda config: HttpToolsProtocol"}
"""What `process.protocol_for` is replaced with."""
WITH_PROTOCOL = """
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from tinsmith.server import process
from tinsmith.server.http.uvicorn_protocol import protocol_for

process.protocol_for = %s
from tinsmith.cli.main import main
main()
"""


class Process:
    """A server under measurement."""

    def __init__(self, command: list[str], environment: dict[str, str], until: str, cwd: Path) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in `close`
        self._process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=self._log, text=True, cwd=cwd
        )
        self.lines: list[str] = []
        assert self._process.stdout is not None
        while not self.lines or until not in self.lines[-1]:
            line = self._process.stdout.readline()
            if not line:
                self._log.seek(0)
                raise SystemExit(f"{command[:4]} ended:\n{self._log.read()[-2000:]}")
            self.lines.append(line.strip())

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(30)
        self._log.close()


@contextlib.contextmanager
def our_server(folder: Path, protocol: str | None = None) -> Iterator[tuple[Process, str, str]]:
    started = ["-m", "tinsmith"] if protocol is None else ["-c", WITH_PROTOCOL % PROTOCOLS[protocol]]
    with tempfile.TemporaryDirectory(dir=folder, prefix=".bench-server-") as data:
        command = [sys.executable, *started, "serve", "--port", "0", "--data-dir", data, "--backend", BACKEND]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        server = Process(command, environment, "TINKER_API_KEY=", ROOT)
        try:
            yield server, server.lines[1].partition("=")[2], Path(data, "local.key").read_text().strip()
        finally:
            server.close()


@contextlib.contextmanager
def echo_server(folder: Path) -> Iterator[tuple[Process, str]]:
    place = folder / ".bench-fastapi"
    if not (place / "bin" / "uvicorn").exists():
        venv.create(place, with_pip=True)
        wanted = ["fastapi", "uvicorn", "uvloop", "httptools"]
        subprocess.run([place / "bin" / "python", "-m", "pip", "install", "-qqq", *wanted], check=True)
    (place / "echo_server.py").write_text(ECHO)
    port = 18_431
    starter = f"""
import asyncio, uvicorn
from echo_server import app
server = uvicorn.Server(uvicorn.Config(app, port={port}, log_level="warning", access_log=False))
async def main():
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    print("listening", flush=True)
    await task
import uvloop
uvloop.run(main())
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    server = Process([str(place / "bin" / "python"), "-c", starter], environment, "listening", place)
    try:
        yield server, f"http://127.0.0.1:{port}"
    finally:
        server.close()


def load(task: str, url: str, key: str, *numbers: int) -> dict[str, Any]:
    command = [sys.executable, "-W", "ignore", str(LOAD), task, url, key, *map(str, numbers)]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(ROOT / "src")}, capture_output=True, text=True, timeout=600
    )
    if done.returncode:
        raise SystemExit(f"{task} ended with {done.returncode}: {done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def measured(server: Process, task: str, url: str, key: str, *numbers: int) -> dict[str, Any]:
    before = server.cpu_s()
    result = load(task, url, key, *numbers)
    result["server_cpu_s"] = server.cpu_s() - before
    return result


def show(title: str, result: dict[str, Any], per: int = 1) -> None:
    rate = result["count"] * per / result["wall_s"]
    cpu = result["server_cpu_s"] / result["count"] / per * 1e6
    print(
        f"{title:<44} {rate:8.0f}/s   server {cpu:6.0f} us CPU each   "
        f"p50 {result['p50_ms']:7.1f} ms   p99 {result['p99_ms']:7.1f} ms",
        flush=True,
    )


def measure_polls(server: Process, url: str, key: str, count: int, seconds: int) -> None:
    command = [sys.executable, str(LOAD), "polls", url, key, str(count), str(seconds)]
    client = subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": str(ROOT / "src")}, stdout=subprocess.PIPE, text=True
    )
    assert client.stdout is not None
    assert client.stdout.readline() == "open\n"
    before, began = server.cpu_s(), time.perf_counter()
    time.sleep(seconds - 1)
    share = (server.cpu_s() - before) / (time.perf_counter() - began)
    pending = json.loads(client.communicate(timeout=120)[0].splitlines()[-1])["pending"]
    print(f"{pending} long polls held: {share:.1%} of a core   (target: 2,000 below 5 %)", flush=True)


def compare_protocols(folder: Path, count: int, rounds: int) -> None:
    """CPU time per request of the server behind each protocol class, rounds in turn, the median of each."""
    with contextlib.ExitStack() as stack:
        servers = {name: stack.enter_context(our_server(folder, name)) for name in PROTOCOLS}
        for task, numbers, per in (("raw", (100, count), 2), ("sdk", (100, count), 1), ("payload", (4_000_000, 40), 1)):
            found: dict[str, list[tuple[float, float]]] = {name: [] for name in servers}
            for round_ in range(rounds + 1):  # the first one warms up
                for name, (server, url, key) in servers.items():
                    result = measured(server, task, url, key, *numbers)
                    if round_:
                        cpu_us = result["server_cpu_s"] / result["count"] / per * 1e6
                        found[name].append((cpu_us, result["p50_ms"]))
            stock = statistics.median(cpu_us for cpu_us, _ in found["stock uvicorn"])
            for name, figures in found.items():
                cpu_us = sorted(cpu_us for cpu_us, _ in figures)
                middle, p50_ms = statistics.median(cpu_us), statistics.median(p50_ms for _, p50_ms in figures)
                print(
                    f"{task:<8} {name:<14} {middle:6.0f} us CPU each (from {cpu_us[0]:.0f} to {cpu_us[-1]:.0f}), "
                    f"{1 - middle / stock:+.1%} saved against stock uvicorn   p50 {p50_ms:.1f} ms",
                    flush=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=ROOT)
    parser.add_argument("--count", type=int, default=6000, help="samples per measurement")
    parser.add_argument("--only", nargs="*", default=["sdk", "raw", "echo", "payload", "polls"])
    parser.add_argument("--protocols", action="store_true", help="compare our HTTP protocol class with stock uvicorn")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of --protocols")
    options = parser.parse_args()
    if options.protocols:
        compare_protocols(options.folder, options.count, options.rounds)
        return
    with our_server(options.folder) as (server, url, key):
        if "sdk" in options.only:
            for outstanding in (100, 1000):
                result = measured(server, "sdk", url, key, outstanding, options.count)
                show(f"round trips by our SDK, {outstanding} outstanding", result)
        if "raw" in options.only:
            result = measured(server, "raw", url, key, 100, options.count)
            show("round trips by bare HTTP, 100 connections", result)
            show("  the same, counted as requests", result, per=2)
        if "payload" in options.only:
            result = measured(server, "payload", url, key, 4_000_000, 40)
            size = result["body_bytes"] / 1e6
            print(
                f"forward_backward of {size:.1f} MB acknowledged: p50 {result['p50_ms']:.1f} ms, "
                f"p99 {result['p99_ms']:.1f} ms   (target: 25 ms)",
                flush=True,
            )
        if "polls" in options.only:
            measure_polls(server, url, key, 2000, 10)
    if "echo" in options.only:
        with echo_server(options.folder) as (echo, url):
            load("echo", url, "-", 10, 200)
            show("FastAPI + pydantic echo, 100 connections", measured(echo, "echo", url, "-", 100, options.count))


if __name__ == "__main__":
    main()
