"""A server that answers the core routes at once, with prepared bytes, so that a benchmark measures its client alone.

    python bench/stub_server.py --port 0 [--sample-tokens 16] [--fb-outputs 64x4096]

prints `listening on http://127.0.0.1:PORT`, then serves until it is ended. It keeps no state beyond counters: a request
id says by its first word what its result is. GET /stats reports requests, connections and the peak of open connections.
Not a test server: it checks nothing (tests/support/tinker_server.py does).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import re
import signal
from collections.abc import Callable
from typing import Any

import numpy as np

from tinsmith.wire.codecs import proto_outputs, proto_sampling
from tinsmith.wire.messages.sampling import SampledSequence, SampleResponse
from tinsmith.wire.messages.training import ForwardBackwardOutput
from tinsmith.wire.values.tensors import TensorData

JSON = b"application/json"
PROTOBUF = b"application/x-protobuf"
API = b"/api/v1/"
MODEL = "stub/model"
SESSION = "stub-session"
END_OF_HEAD = b"\r\n\r\n"
READ_BYTES = 1 << 20
"""One buffer for all connections: what is received is used up or copied before anything else is read."""

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_SAMPLES = re.compile(rb'"num_samples": ?(\d+)')
_SEQ_ID = re.compile(rb'"(?:seq_id|sampling_session_seq_id|model_seq_id)": ?(\d+)')
_REQUEST_ID = re.compile(rb'"request_id": ?"(\w+)')


def answer(body: bytes, content_type: bytes = JSON, status: bytes = b"200 OK") -> bytes:
    return b"HTTP/1.1 %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n%b" % (status, content_type, len(body), body)


def json_answer(value: Any) -> bytes:
    return answer(json.dumps(value).encode())


def sample_result(length: int, samples: int) -> bytes:
    tokens = np.arange(length, dtype=np.int32)
    sequence = SampledSequence("length", "", tokens, np.full(length, -0.5, np.float32))
    return answer(proto_sampling.encode_response(SampleResponse([sequence] * samples)), PROTOBUF)


def pass_result(datums: int, length: int) -> bytes:
    output = {"logprobs": TensorData.from_numpy(np.full(length, -1.0, np.float32))}
    result = ForwardBackwardOutput("TorchLossReturn", [output] * datums, {"loss:sum": float(datums * length)})
    return answer(proto_outputs.encode_output(result), PROTOBUF)


class Stub:
    """The answers, and what is counted."""

    def __init__(self, sample_tokens: int, datums: int, length: int) -> None:
        self.requests = self.connections = self.open = self.peak = 0
        self._numbers = itertools.count()
        self._sample_tokens = sample_tokens
        self._samples: dict[int, bytes] = {}
        self._submits: dict[bytes, bytes] = {
            name: json_answer({"request_id": kind})
            for name, kind in (
                (b"forward_backward", "pass"),
                (b"forward", "pass"),
                (b"optim_step", "step"),
                (b"save_weights", "save"),
                (b"load_weights", "load"),
            )
        }
        self._fixed: dict[bytes, bytes] = self._submits | {
            b"client/config": json_answer({}),
            b"client/dynamic_config": json_answer({}),
            b"create_session": json_answer({"session_id": SESSION, "type": "create_session"}),
            b"session_heartbeat": json_answer({"type": "session_heartbeat"}),
            b"telemetry": json_answer({"status": "accepted"}),
            b"healthz": json_answer({"status": "ok"}),
            b"get_server_capabilities": json_answer({"supported_models": [{"model_name": MODEL}]}),
            b"create_model": json_answer({"request_id": "model"}),
            b"get_info": json_answer(
                {"model_id": f"{SESSION}:train:0", "model_data": {"model_name": MODEL, "tokenizer_id": MODEL}}
            ),
        }
        self._results: dict[bytes, bytes] = {
            b"pass": pass_result(datums, length),
            b"step": json_answer({"metrics": {}}),
            b"model": json_answer({"model_id": f"{SESSION}:train:0", "type": "create_model"}),
            b"save": json_answer({"path": f"tinker://{SESSION}:train:0/weights/stub"}),
            b"load": json_answer({"path": f"tinker://{SESSION}:train:0/weights/stub"}),
            b"sampler": json_answer({"sampling_session_id": f"{SESSION}:sample:0"}),
            b"samplerpath": json_answer({"path": f"tinker://{SESSION}:train:0/sampler_weights/stub"}),
        }
        self._made: dict[bytes, Callable[[bytes], bytes]] = {
            b"asample": self._asample,
            b"retrieve_future": self._retrieve_future,
            b"create_sampling_session": self._create_sampling_session,
            b"save_weights_for_sampler": self._save_weights_for_sampler,
        }

    def answer(self, path: bytes, body: bytes) -> bytes:
        self.requests += 1
        name = path[len(API) :]
        fixed = self._fixed.get(name)
        if fixed is not None:
            return fixed
        made = self._made.get(name)
        if made is not None:
            return made(body)
        if path == b"/stats":
            return self._stats()
        if name.endswith(b"/finish"):
            return json_answer({})
        return answer(b'{"detail":"Not Found"}', status=b"404 Not Found")

    def known_answer(self, path: bytes) -> bytes:
        """The answer to a request whose body makes no difference; b"" where it does."""
        fixed = self._fixed.get(path[len(API) :], b"")
        self.requests += bool(fixed)
        return fixed

    def _asample(self, body: bytes) -> bytes:
        found = _SAMPLES.search(body)
        samples = int(found[1]) if found is not None else 1
        number = next(self._numbers)
        ids = b'","'.join(b"q%d_%d" % (number, i) for i in range(samples))
        return answer(b'{"request_id":"sample%d_%d","sample_sequence_ids":["%b"]}' % (samples, number, ids))

    def _retrieve_future(self, body: bytes) -> bytes:
        found = _REQUEST_ID.search(body)
        kind = found[1] if found is not None else b""
        result = self._results.get(kind)
        if result is None and kind.startswith(b"sample"):
            result = self._sample(int(kind[6:].partition(b"_")[0]))
        return result if result is not None else answer(b'{"detail":"unknown"}', status=b"404 Not Found")

    def _sample(self, samples: int) -> bytes:
        if samples not in self._samples:
            self._samples[samples] = sample_result(self._sample_tokens, samples)
        return self._samples[samples]

    def _create_sampling_session(self, body: bytes) -> bytes:
        found = _SEQ_ID.search(body)
        return json_answer({"sampling_session_id": f"{SESSION}:sample:{int(found[1]) if found else 0}"})

    def _save_weights_for_sampler(self, body: bytes) -> bytes:
        return json_answer({"request_id": "samplerpath" if b'"path"' in body else "sampler"})

    def _stats(self) -> bytes:
        counted = {"requests": self.requests, "connections": self.connections, "open": self.open, "peak": self.peak}
        return json_answer(counted)


class Connection(asyncio.BufferedProtocol):
    """HTTP/1.1 with keep-alive, pipelining and content-length; nothing else is needed."""

    def __init__(self, stub: Stub, shared: memoryview) -> None:
        self._stub = stub
        self._shared = shared
        self._rest = b""
        self._missing = 0
        self._late = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        stub = self._stub
        stub.connections += 1
        stub.open += 1
        stub.peak = max(stub.peak, stub.open)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stub.open -= 1

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._shared

    def buffer_updated(self, nbytes: int) -> None:
        if self._missing:
            nbytes = self._pass_over(nbytes)
            if self._missing:
                return
        received = self._shared[:nbytes].tobytes()
        data = self._rest + received if self._rest else received
        answers, self._late = ([self._late] if self._late else []), b""
        start, end = 0, data.find(END_OF_HEAD)
        while end >= 0:
            length = _LENGTH.search(data, start, end + 2)
            stop = end + 4 + (int(length[1]) if length is not None else 0)
            first = data.find(b" ", start) + 1
            path = data[first : data.find(b" ", first)]
            if len(data) < stop:
                self._late = self._stub.known_answer(path)
                if self._late:
                    self._missing, start = stop - len(data), len(data)
                break
            answers.append(self._stub.answer(path, data[end + 4 : stop]))
            start, end = stop, data.find(END_OF_HEAD, stop)
        self._rest = data[start:]
        if answers:
            assert self._transport is not None
            self._transport.write(answers[0] if len(answers) == 1 else b"".join(answers))

    def _pass_over(self, nbytes: int) -> int:
        """Drop what belongs to a large body whose answer is known without it; how much is left of what came."""
        left = max(nbytes - self._missing, 0)
        if left:
            self._shared[:left] = self._shared[self._missing : nbytes].tobytes()
        self._missing = max(self._missing - nbytes, 0)
        return left


async def serve(stub: Stub, port: int) -> None:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)
    shared = memoryview(bytearray(READ_BYTES))
    server = await loop.create_server(lambda: Connection(stub, shared), "127.0.0.1", port, backlog=4096)
    print(f"listening on http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await ended.wait()
    server.close()


def size(text: str) -> tuple[int, int]:
    datums, length = text.split("x")
    return int(datums), int(length)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--port", type=int, default=0, help="0: any free one")
    parser.add_argument("--sample-tokens", type=int, default=16, help="tokens of each sample")
    parser.add_argument("--fb-outputs", type=size, default=(4, 64), help="datums x tokens of each pass, as 64x4096")
    options = parser.parse_args()
    asyncio.run(serve(Stub(options.sample_tokens, *options.fb_outputs), options.port))


if __name__ == "__main__":
    main()
