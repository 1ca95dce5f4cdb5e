"""Clients of bench/server.py, each in a process of its own; prints one JSON line.

usage: server_load.py sdk URL KEY OUTSTANDING COUNT      samples by our client
       server_load.py raw URL KEY CONNECTIONS COUNT      submit and fetch samples, by bare HTTP
       server_load.py echo URL - CONNECTIONS COUNT       the same request to an echo server, by bare HTTP
       server_load.py payload URL KEY BYTES COUNT        forward_backward of this size, one after another
       server_load.py polls URL KEY CONNECTIONS SECONDS  long polls that get no answer
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import statistics
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

MODEL = "tinsmith/arithmetic"
PROMPT = list(range(128))
SAMPLE = {
    "num_samples": 1,
    "prompt": {"chunks": [{"type": "encoded_text", "tokens": PROMPT}]},
    "sampling_params": {"max_tokens": 16, "seed": 1, "temperature": 1.0, "top_k": -1, "top_p": 1.0},
    "prompt_logprobs": False,
    "topk_prompt_logprobs": 0,
    "type": "sample",
}


class Connection:
    """One HTTP/1.1 connection that is kept open; answers have a content-length."""

    def __init__(self, url: str, key: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname, parts.port
        self._head = f"host: {parts.netloc}\r\nx-api-key: {key}\r\n"
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(
        self, path: str, body: bytes, content_type: str = "application/json", accept: str = "application/json"
    ) -> tuple[int, bytes]:
        reader, writer = self._streams or await self._open()
        writer.write(
            f"POST {path} HTTP/1.1\r\n{self._head}content-type: {content_type}\r\naccept: {accept}\r\n"
            f"content-length: {len(body)}\r\n\r\n".encode()
            + body
        )
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
        return int(head[9:12]), await reader.readexactly(length)

    async def call(self, path: str, message: Any) -> Any:
        status, body = await self.post(f"/api/v1/{path}", json.dumps(message).encode())
        assert status == 200, (path, status, body)
        return json.loads(body)

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        self._streams = await asyncio.open_connection(self._host, self._port)
        return self._streams


class PlainConnection(Connection):
    """The same on a bare socket: asyncio's streams copy a large body several times before it leaves."""

    _socket: socket.socket | None = None

    async def post(
        self, path: str, body: bytes, content_type: str = "application/json", accept: str = "application/json"
    ) -> tuple[int, bytes]:
        loop = asyncio.get_running_loop()
        if self._socket is None:
            self._socket = socket.create_connection((self._host, self._port))
            self._socket.setblocking(False)
        head = (
            f"POST {path} HTTP/1.1\r\n{self._head}content-type: {content_type}\r\naccept: {accept}\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        await loop.sock_sendall(self._socket, head.encode())
        await loop.sock_sendall(self._socket, body)
        answer = b""
        while b"\r\n\r\n" not in answer:
            answer += await loop.sock_recv(self._socket, 65536)
        top, _, rest = answer.partition(b"\r\n\r\n")
        length = int(top.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        while len(rest) < length:
            rest += await loop.sock_recv(self._socket, 65536)
        return int(answer[9:12]), rest


async def run_workers(workers: list[Callable[[], Awaitable[None]]], count: int) -> dict[str, Any]:
    """All workers until `count` is used up; latencies of each piece of work."""
    left = iter(range(count))
    times_s: list[float] = []

    async def work(act: Callable[[], Awaitable[None]]) -> None:
        for _ in left:
            began = time.perf_counter()
            await act()
            times_s.append(time.perf_counter() - began)

    wall, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(work(act) for act in workers))
    return {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu, **told(times_s)}


def told(times_s: list[float]) -> dict[str, Any]:
    cuts = statistics.quantiles(times_s, n=100)
    return {"count": len(times_s), "p50_ms": cuts[49] * 1e3, "p99_ms": cuts[98] * 1e3}


async def sdk(url: str, key: str, outstanding: int, count: int) -> dict[str, Any]:
    import tinsmith

    os.environ["TINKER_TELEMETRY"] = "0"
    client = tinsmith.ServiceClient(base_url=url, api_key=key)
    sampler = await client.create_sampling_client_async(base_model=MODEL)
    prompt, params = tinsmith.ModelInput.from_ints(PROMPT), tinsmith.SamplingParams(max_tokens=16, seed=1)

    async def one() -> None:
        await sampler.sample_async(prompt, 1, params)

    await run_workers([one] * 50, 200)
    return await run_workers([one] * outstanding, count)


async def new_sampler(url: str, key: str) -> str:
    connection = Connection(url, key)
    session = await connection.call("create_session", {"sdk_version": "0.36.0", "tags": []})
    asked = {"session_id": session["session_id"], "sampling_session_seq_id": 0, "base_model": MODEL}
    sampler = await connection.call("create_sampling_session", asked)
    return str(sampler["sampling_session_id"])


async def raw(url: str, key: str, connections: int, count: int) -> dict[str, Any]:
    sampler_id = await new_sampler(url, key)
    numbers = iter(range(10**9))
    template = json.dumps({**SAMPLE, "sampling_session_id": sampler_id, "seq_id": "NUMBER"}).encode()

    def worker() -> Callable[[], Awaitable[None]]:
        connection = Connection(url, key)

        async def one() -> None:
            body = template.replace(b'"NUMBER"', b"%d" % next(numbers))
            status, answer = await connection.post("/api/v1/asample", body)
            assert status == 200, answer
            asked = json.dumps({"request_id": json.loads(answer)["request_id"]}).encode()
            status, answer = await connection.post("/api/v1/retrieve_future", asked, accept="application/x-protobuf")
            assert status == 200, answer

        return one

    return await run_workers([worker() for _ in range(connections)], count)


async def echo(url: str, key: str, connections: int, count: int) -> dict[str, Any]:
    body = json.dumps({**SAMPLE, "sampling_session_id": "x", "seq_id": 1}).encode()

    def worker() -> Callable[[], Awaitable[None]]:
        connection = Connection(url, key)

        async def one() -> None:
            status, answer = await connection.post("/echo", body)
            assert status == 200, answer

        return one

    return await run_workers([worker() for _ in range(connections)], count)


async def new_model(url: str, key: str) -> str:
    connection = Connection(url, key)
    session = (await connection.call("create_session", {"sdk_version": "0.36.0", "tags": []}))["session_id"]
    asked = {"session_id": session, "model_seq_id": 0, "base_model": MODEL, "lora_config": {"rank": 4, "seed": 1}}
    promise = await connection.call("create_model", asked)
    return str((await connection.call("retrieve_future", {"request_id": promise["request_id"]}))["model_id"])


async def payload(url: str, key: str, size_bytes: int, count: int) -> dict[str, Any]:
    import numpy as np

    from tinsmith import Datum, ModelInput
    from tinsmith.wire.codecs.proto_training import encode_request
    from tinsmith.wire.messages.training import ForwardBackwardInput, ForwardBackwardRequest

    model_id = await new_model(url, key)
    length = 4000
    tokens = np.arange(length) % 500
    inputs = {"target_tokens": tokens.astype(np.int64), "weights": np.ones(length, np.float32)}
    datum = Datum(ModelInput.from_ints(tokens.tolist()), inputs)
    data = [datum] * max(size_bytes // (16 * length), 1)
    connection, large, times_s, sent = Connection(url, key), PlainConnection(url, key), [], 0
    for seq_id in range(1, count + 1):
        message = ForwardBackwardRequest(
            forward_backward_input=ForwardBackwardInput(data=data, loss_fn="cross_entropy"),
            model_id=model_id,
            seq_id=seq_id,
        )
        body = bytes(encode_request(message))
        began = time.perf_counter()
        status, answer = await large.post("/api/v1/forward_backward", body, "application/x-protobuf")
        times_s.append(time.perf_counter() - began)
        assert status == 200, answer
        sent = len(body)
        request_id = json.loads(answer)["request_id"]
        await connection.post(
            "/api/v1/retrieve_future", json.dumps({"request_id": request_id}).encode(), accept="application/x-protobuf"
        )
    return {"body_bytes": sent, **told(times_s)}


async def polls(url: str, key: str, connections: int, seconds: int) -> dict[str, Any]:
    """A request whose predecessor never comes is waited for by many."""
    model_id = await new_model(url, key)
    step = {"model_id": model_id, "seq_id": 1000, "adam_params": {"learning_rate": 0.1}}
    promise = await Connection(url, key).call("optim_step", step)
    body = json.dumps({"request_id": promise["request_id"]}).encode()
    waiting = [
        asyncio.create_task(Connection(url, key).post("/api/v1/retrieve_future", body)) for _ in range(connections)
    ]
    await asyncio.sleep(3)
    print("open", flush=True)
    await asyncio.sleep(seconds)
    pending = sum(not task.done() for task in waiting)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    return {"pending": pending}


def main() -> None:
    task, url, key, first, second = sys.argv[1:]
    run = {"sdk": sdk, "raw": raw, "echo": echo, "payload": payload, "polls": polls}[task]
    urllib.request.urlopen(f"{url}/healthz", timeout=30).close()
    print(json.dumps(asyncio.run(run(url, key, int(first), int(second)))))


if __name__ == "__main__":
    main()
