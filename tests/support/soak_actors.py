"""What tenants do to a server in the soak: raw requests, each actor one habit, many of them bad.

An actor is a function of a `Door` that does its thing once; it may raise what a connection raises.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from support.in_process import datum, forward_backward, optim_step, sample
from support.server_process import ROOT, environment

MODEL = "tiny"
PROGRAM = ROOT / "tests" / "support" / "soak_program.py"
TIMEOUT_S = 180.0
TTL_S = 4
FILES = ("adapter_model.safetensors", "adapter_config.json", "manifest.json", "optimizer.safetensors")


class Reply(NamedTuple):
    status: int
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class RefusedError(Exception):
    """An answer that the actor cannot go on from."""


@dataclass
class Door:
    """One tenant's way in."""

    url: str
    key: str
    random: random.Random
    data_dir: Path
    statuses: Counter[int] = field(default_factory=Counter)
    current: str = ""
    """The session that is kept alive while something is waited for."""

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=TIMEOUT_S)

    def send(self, path: str, message: Any = None, method: str = "POST") -> Reply:
        """One request over a connection of its own; paths without a leading slash are under /api/v1/."""
        connection = self.connect()
        try:
            body = message if isinstance(message, bytes) or message is None else json.dumps(message).encode()
            kind = "application/msgpack" if isinstance(message, bytes) else "application/json"
            headers = {"x-api-key": self.key, "content-type": kind}
            connection.request(method, path if path.startswith("/") else f"/api/v1/{path}", body, headers)
            response = connection.getresponse()
            self.statuses[response.status] += 1
            return Reply(response.status, response.read())
        finally:
            connection.close()

    def good(self, path: str, message: Any = None, method: str = "POST") -> Any:
        reply = self.send(path, message, method)
        if reply.status != 200:
            raise RefusedError(f"{path}: {reply.status} {reply.body[:200]!r}")
        return reply.json

    def raw(self, path: str, body: bytes, claimed: int) -> socket.socket:
        """A connection on which a request was begun."""
        address = urlsplit(self.url)
        made = socket.create_connection((address.hostname or "", address.port or 80), timeout=TIMEOUT_S)
        head = (
            f"POST /api/v1/{path} HTTP/1.1\r\nhost: localhost\r\nx-api-key: {self.key}\r\n"
            f"content-type: application/json\r\ncontent-length: {claimed}\r\n\r\n"
        )
        made.sendall(head.encode() + body)
        return made

    def session(self) -> str:
        made = self.good("create_session", {"tags": ["soak"], "sdk_version": "0.36.0"})
        self.current = str(made["session_id"])
        return self.current

    def result(self, promise: Any) -> Any:
        """What a promise gave."""
        answer = self.outcome(promise)
        if answer.get("error"):
            raise RefusedError(str(answer["error"])[:200])
        return answer

    def outcome(self, promise: Any) -> Any:
        """What became of a promise, a failure too."""
        end = time.monotonic() + TIMEOUT_S
        while (reply := self.send("retrieve_future", {"request_id": promise["request_id"]})).status == 408:
            if time.monotonic() > end:
                raise RefusedError("a promise did not resolve")
            self.send("session_heartbeat", {"session_id": self.current})
        if reply.status != 200:
            raise RefusedError(f"retrieve_future: {reply.status}")
        return reply.json

    def model(self, session: str, rank: int = 4) -> str:
        lora = {"rank": rank, "seed": self.random.randrange(1000)}
        message = {"session_id": session, "model_seq_id": 0, "base_model": MODEL, "lora_config": lora}
        promise = self.good("create_model", message)
        self.result(promise)
        return str(promise["model_id"])


def trainer(door: Door) -> None:
    """Train, save, load, sample what was saved, and finish properly."""
    session = door.session()
    model = door.model(session)
    tokens = [door.random.randrange(4, 250) for _ in range(12)]
    for step in range(3):
        door.good("forward_backward", forward_backward(model, 3 * step + 1, datum(*tokens)))
        door.result(door.good("optim_step", optim_step(model, 3 * step + 2, learning_rate=0.01)))
        save = {"model_id": model, "seq_id": 3 * step + 3, "path": f"s{step}", "ttl_seconds": TTL_S}
        path = door.result(door.good("save_weights", save))["path"]
    door.result(door.good("load_weights", {"model_id": model, "seq_id": 10, "path": path, "optimizer": True}))
    frozen = {"model_id": model, "seq_id": 11, "path": "frozen", "ttl_seconds": TTL_S}
    path = door.result(door.good("save_weights_for_sampler", frozen))["path"]
    asked = {"session_id": session, "sampling_session_seq_id": 0, "model_path": path}
    sampler = door.good("create_sampling_session", asked)["sampling_session_id"]
    door.result(door.good("asample", sample(sampler, 1, num_samples=4)))
    door.send(f"sessions/{session}/finish", {"reason": {"type": "success"}})


def deserter(door: Door) -> None:
    """Ask for much, and never come back: the session falls silent."""
    session = door.session()
    sampler = door.good(
        "create_sampling_session", {"session_id": session, "sampling_session_seq_id": 0, "base_model": MODEL}
    )["sampling_session_id"]
    for number in range(8):
        door.good("asample", sample(sampler, number + 1, sampling_params={"max_tokens": 48, "stop": []}))


def canceller(door: Door) -> None:
    """Ask, and cancel: some before, some while they run."""
    session = door.session()
    asked = {"session_id": session, "sampling_session_seq_id": 0, "base_model": MODEL}
    sampler = door.good("create_sampling_session", asked)["sampling_session_id"]
    long = {"max_tokens": 200, "stop": []}
    promises = [door.good("asample", sample(sampler, n + 1, sampling_params=long, num_samples=4)) for n in range(5)]
    for promise in promises[:4]:
        door.send("cancel_future", {"request_id": promise["request_id"]})
    for promise in promises:
        door.outcome(promise)
    door.send(f"sessions/{session}/finish", {"reason": {"type": "interrupted"}})


def staller(door: Door) -> None:
    """Begin bodies and do not go on; hang up after a while."""
    made = [door.raw("create_session", b'{"tags": [', 1000), door.raw("telemetry", b"", 100_000)]
    time.sleep(door.random.uniform(0.2, 2.0))
    for connection in made:
        connection.close()


def slow_reader(door: Door) -> None:
    """Ask for an answer and read a little of it, slowly."""
    body = json.dumps({"limit": 100}).encode()
    made = door.raw("sessions/search", body, len(body))
    for _ in range(5):
        made.settimeout(1.0)
        with contextlib.suppress(TimeoutError):
            made.recv(1)
        time.sleep(0.1)
    made.close()


def reconnector(door: Door) -> None:
    """Hang up without waiting for the answer, again and again, then ask for the same by its number."""
    session = door.session()
    asked = {"session_id": session, "sampling_session_seq_id": 0, "base_model": MODEL}
    sampler = door.good("create_sampling_session", asked)["sampling_session_id"]
    message = sample(sampler, 1, sampling_params={"max_tokens": 24, "stop": [], "seed": 3})
    body = json.dumps(message).encode()
    for _ in range(3):
        door.raw("asample", body, len(body)).close()
    promise = door.good("asample", message)
    polling = json.dumps({"request_id": promise["request_id"]}).encode()
    door.raw("retrieve_future", polling, len(polling)).close()
    door.result(promise)
    door.send(f"sessions/{session}/finish", {"reason": {"type": "success"}})


def importer(door: Door) -> None:
    """Bring a checkpoint along, in one body and in parts; some uploads are left half done."""
    files = own_checkpoint(door)
    facts = {"name": "brought", "base_model": MODEL, "rank": 4, "alpha": 32.0}
    body = msgspec.msgpack.encode({**facts, "files": files})
    path = door.good("/tinsmith/v1/import_weights", body)["path"]
    session = door.session()
    load = {"session_id": session, "model_seq_id": 0, "path": path, "optimizer": True}
    door.result(door.good("load_weights", load))
    door.send(f"sessions/{session}/finish", {"reason": {"type": "success"}})
    run_id, _, tail = path.removeprefix("tinker://").partition("/")
    door.good(f"training_runs/{run_id}/checkpoints/{tail}", None, "DELETE")
    upload = door.random.choice(("abandoned-upload-1", "abandoned-upload-2"))
    door.send(f"/tinsmith/v1/import_parts?upload={upload}&file=manifest.json&offset=0", b"half")


def own_checkpoint(door: Door) -> dict[str, bytes]:
    """The files of a checkpoint that the server wrote for this tenant."""
    session = door.session()
    model = door.model(session)
    save = {"model_id": model, "seq_id": 1, "path": secrets.token_hex(4), "ttl_seconds": TTL_S}
    door.result(door.good("save_weights", save))
    place = next((door.data_dir / "checkpoints" / model.replace(":", "_") / "weights").iterdir())
    files = {name: (place / name).read_bytes() for name in FILES}
    door.send(f"sessions/{session}/finish", {"reason": {"type": "success"}})
    return files


def liar(door: Door) -> None:
    """Send what is refused: damaged imports, unknown models, strange paths."""
    facts = {"name": "x", "base_model": MODEL, "rank": 4, "alpha": 32.0}
    files = {"manifest.json": b'{"files":{"/dev/zero":"00"}}', "adapter_config.json": b"{}", FILES[0]: b"x" * 5000}
    door.send("/tinsmith/v1/import_weights", msgspec.msgpack.encode({**facts, "files": files}))
    door.send("create_session", {"tags": "x" * 1000})
    door.send("load_weights", {"session_id": "nobody", "model_seq_id": 0, "path": "tinker://no/weights/no"})
    door.send("telemetry", {"session_id": "nobody", "events": [{"x": "\\" * 2000}]})


def program(door: Door) -> None:
    """A program with our client; half of them are killed in the middle."""
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", PROGRAM, str(door.random.randrange(1000))],
        env=environment(TINKER_BASE_URL=door.url, TINKER_API_KEY=door.key) | {"PYTHONPATH": str(ROOT / "src")},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        process.wait(door.random.uniform(1.5, 6.0) if door.random.random() < 0.5 else TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()


Actor = Callable[[Door], None]
ACTORS: tuple[Actor, ...] = (
    trainer,
    deserter,
    canceller,
    staller,
    slow_reader,
    reconnector,
    importer,
    liar,
    program,
)
