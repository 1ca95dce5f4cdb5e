"""Our server without a socket: the real application on a store in memory and a backend of arithmetic, with a clock that
tests turn. `Client` speaks for one key holder."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import msgspec
from starlette.applications import Starlette

from tinsmith.config import ServerConfig
from tinsmith.engine.protocol import AnyJob
from tinsmith.errors import StoreError
from tinsmith.server.app import make_app, make_services, running
from tinsmith.server.auth.keys import create_key
from tinsmith.server.ops.sweeper import Sweeper
from tinsmith.server.services import Services
from tinsmith.store.base import Row, Statement, Store, Value
from tinsmith.store.memory import MemoryStore
from tinsmith.testing.backend import ARITHMETIC, MemoryBackend

BASE = ARITHMETIC.name
API = "/api/v1/"


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 30))


async def settled(turns: int = 50) -> None:
    """Let everything run that can run at once."""
    for _ in range(turns):
        await asyncio.sleep(0)


async def until(condition: Callable[[], object]) -> None:
    """Let others run until something has happened; `run` bounds the wait."""
    while not condition():
        await asyncio.sleep(0.001)


class Clock:
    """Seconds that pass when told to."""

    def __init__(self, now: float = 1_800_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class BreakableStore(MemoryStore):
    """A store that a test can take away (`is_down`), or hold at a statement (`gates`)."""

    is_down = False

    def __init__(self) -> None:
        super().__init__()
        self.gates: dict[str, asyncio.Event] = {}
        self.reached: set[str] = set()
        """Gates that somebody came to."""

    async def write(self, *statements: Statement) -> int:
        for made in statements:
            if made.name in self.gates:
                self.reached.add(made.name)
                await self.gates[made.name].wait()
        if self.is_down:
            raise StoreError("the database is away")
        return await super().write(*statements)

    async def read(self, row_type: Any, name: str, /, **parameters: Value) -> list[Any]:
        if name in self.gates:
            self.reached.add(name)
            await self.gates[name].wait()
        if self.is_down:
            raise StoreError("the database is away")
        return await super().read(row_type, name, **parameters)


def with_store(scenario: Callable[[BreakableStore], Coroutine[Any, Any, None]]) -> None:
    """Run a scenario on an empty store."""

    async def whole() -> None:
        store = BreakableStore()
        await store.open()
        try:
            await scenario(store)
        finally:
            await store.close()

    run(whole())


class Recorder(MemoryBackend):
    """Remembers what was submitted, in order."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.submitted: list[AnyJob] = []

    def submit(self, job: AnyJob, on_tokens: Any = None) -> Any:
        self.submitted.append(job)
        return super().submit(job, on_tokens)

    def kinds(self) -> list[str]:
        return [str(job.__struct_config__.tag) for job in self.submitted]


class Gate:
    """Holds jobs of some kinds until it opens."""

    def __init__(self, *kinds: str) -> None:
        self.kinds = kinds
        self.opened = asyncio.Event()

    async def __call__(self, job: AnyJob) -> None:
        if str(job.__struct_config__.tag) in self.kinds:
            await self.opened.wait()


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return msgspec.json.decode(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """What an error says, under our own names, whichever dialect it is in."""
        said = self.json
        if "error" not in said:
            return {name: said[name] for name in said}
        codes = {
            "invalid_api_key": "not_authenticated",
            "model_not_found": "unknown_resource",
            "authentication_error": "not_authenticated",
            "permission_error": "not_allowed",
            "not_found_error": "unknown_resource",
        }
        code = said["error"]["code" if "code" in said["error"] else "type"]
        return {"detail": said["error"]["message"], "code": codes.get(code, code)}

    @property
    def detail(self) -> str:
        text: str = self.error["detail"]
        return text


@dataclass
class Server:
    """A running application and its parts."""

    services: Services
    app: Starlette
    backend: Recorder
    store: Store
    clock: Clock
    sweeper: Sweeper

    async def client(self, user: str = "ann", org: str = "acme", **options: Any) -> Client:
        made = await create_key(self.store, name=user, now=self.clock(), org=org, user=user, **options)
        return Client(self, made.key, made.row.key_id)

    async def rows(self, row_type: type[Row], query: str, **parameters: Any) -> list[Any]:
        return await self.store.read(row_type, query, **parameters)

    async def sweep(self) -> None:
        await self.sweeper.round()

    async def request(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        pieces: list[bytes] | None = None,
    ) -> Answer:
        """One exchange. The path may carry a query; it is percent-decoded as a server does."""
        url = urlsplit(path)
        given = {"host": "server.test", **{name.lower(): value for name, value in (headers or {}).items()}}
        if pieces is None:
            given.setdefault("content-length", str(len(body)))
        parts = [body] if pieces is None else pieces
        sent: list[dict[str, Any]] = []
        received = iter([*({"body": part, "more_body": i < len(parts) - 1} for i, part in enumerate(parts))])

        async def receive() -> dict[str, Any]:
            message = next(received, None)
            if message is None:
                await asyncio.Event().wait()
            return {"type": "http.request", **(message or {})}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": unquote(url.path),
            "raw_path": url.path.encode(),
            "query_string": url.query.encode(),
            "root_path": "",
            "headers": [(name.encode("latin-1"), value.encode("latin-1")) for name, value in given.items()],
            "server": ("server.test", 80),
            "client": ("127.0.0.1", 1),
        }
        await self.app(scope, receive, send)
        start = sent[0]
        found = {name.decode("latin-1"): value.decode("latin-1") for name, value in start["headers"]}
        return Answer(start["status"], found, b"".join(message.get("body", b"") for message in sent[1:]))


class Client:
    """The holder of one key."""

    def __init__(self, server: Server, key: str, key_id: int = 0) -> None:
        self.server = server
        self.key = key
        self.key_id = key_id

    async def call(self, method: str, path: str, message: Any = None, **headers: str) -> Answer:
        """A call with JSON; paths without a leading slash are under /api/v1/."""
        whole = path if path.startswith("/") else API + path
        body = b"" if message is None else message if isinstance(message, bytes) else msgspec.json.encode(message)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.server.request(
            method, whole, body, {"x-api-key": self.key, "content-type": "application/json", **named}
        )

    async def post(self, path: str, message: Any = None, **headers: str) -> Answer:
        return await self.call("POST", path, {} if message is None else message, **headers)

    async def get(self, path: str, **query: Any) -> Answer:
        tail = "?" + "&".join(f"{name}={quote(str(value))}" for name, value in query.items()) if query else ""
        return await self.call("GET", path + tail)

    async def session(self, **fields: Any) -> str:
        answer = await self.post("create_session", {"tags": [], "sdk_version": "0.36.0", **fields})
        assert answer.status == 200, answer.body
        session_id: str = answer.json["session_id"]
        return session_id

    async def model(self, session_id: str, number: int = 0, **fields: Any) -> str:
        """A new model that is ready."""
        answer = await self.post("create_model", create_model(session_id, number, **fields))
        assert answer.status == 200, answer.body
        await self.result(answer)
        model_id: str = answer.json["model_id"]
        return model_id

    async def sampler(self, session_id: str, number: int = 0, **source: Any) -> str:
        message = {"session_id": session_id, "sampling_session_seq_id": number, **(source or {"base_model": BASE})}
        answer = await self.post("create_sampling_session", message)
        assert answer.status == 200, answer.body
        sampler_id: str = answer.json["sampling_session_id"]
        return sampler_id

    async def save(self, model_id: str, seq: int, name: str, kind: str = "save_weights", **fields: Any) -> str:
        answer = await self.post(kind, {"model_id": model_id, "seq_id": seq, "path": name, **fields})
        path: str = (await self.result(answer)).json["path"]
        return path

    async def poll(self, promise: Answer | str, **headers: str) -> Answer:
        request_id = promise if isinstance(promise, str) else promise.json["request_id"]
        return await self.post("retrieve_future", {"request_id": request_id}, **headers)

    async def outcome(self, promise: Answer) -> dict[str, Any]:
        """What an accepted request came to, be it an error."""
        assert promise.status == 200, promise.body
        answer = await self.poll(promise)
        while answer.status == 408:
            answer = await self.poll(promise)
        found: dict[str, Any] = answer.json
        return found

    async def result(self, promise: Answer | str) -> Answer:
        """The result of a promise that must succeed."""
        if isinstance(promise, Answer):
            assert promise.status == 200, promise.body
        answer = await self.poll(promise)
        while answer.status == 408:
            answer = await self.poll(promise)
        assert answer.status == 200, answer.body
        assert "error" not in answer.json, answer.body
        return answer


async def begun(server: Server) -> tuple[Client, str, str]:
    """A client with a session and a model in it."""
    ann = await server.client()
    session = await ann.session()
    return ann, session, await ann.model(session)


def create_model(session_id: str, number: int = 0, **fields: Any) -> dict[str, Any]:
    return {
        "session_id": session_id,
        "model_seq_id": number,
        "base_model": BASE,
        "lora_config": {"rank": 4, "seed": 7},
        **fields,
    }


def datum(*tokens: int, **inputs: Any) -> dict[str, Any]:
    targets = [*tokens[1:], tokens[0]]
    known = {
        "target_tokens": {"data": targets, "dtype": "int64"},
        "weights": {"data": [1.0] * len(tokens), "dtype": "float32"},
    }
    given = {name: value for name, value in {**known, **inputs}.items() if value is not None}
    return {"model_input": {"chunks": [{"type": "encoded_text", "tokens": list(tokens)}]}, "loss_fn_inputs": given}


def forward_backward(model_id: str, seq: int | None, *data: Any, **fields: Any) -> dict[str, Any]:
    work = {"data": list(data) or [datum(5, 9, 2)], "loss_fn": "cross_entropy", **fields}
    message: dict[str, Any] = {"model_id": model_id, "forward_backward_input": work}
    return message if seq is None else {**message, "seq_id": seq}


def optim_step(model_id: str, seq: int | None, **params: Any) -> dict[str, Any]:
    message: dict[str, Any] = {"model_id": model_id, "adam_params": {"learning_rate": 0.1, **params}}
    return message if seq is None else {**message, "seq_id": seq}


def sample(sampler_id: str | None, seq: int | None = None, **fields: Any) -> dict[str, Any]:
    message: dict[str, Any] = {
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
        "sampling_params": {"max_tokens": 4, "stop": []},
        **fields,
    }
    if sampler_id is not None:
        message["sampling_session_id"] = sampler_id
    return message if seq is None else {**message, "seq_id": seq}


@asynccontextmanager
async def serving(
    directory: Path,
    *,
    backend: Recorder | None = None,
    store: Store | None = None,
    clock: Clock | None = None,
    **settings: Any,
) -> AsyncIterator[Server]:
    """A server until the end of the block; a store that is given stays open behind it, as after a crash."""
    made = store if store is not None else BreakableStore()
    if store is None:
        await made.open()
    used_clock = clock or Clock()
    used = backend or Recorder()
    config = ServerConfig(**{"data_dir": directory / "data", "min_free_bytes": 1, "drain_s": 0.001, **settings})
    services = make_services(config, made, used, clock=used_clock, ticks=used_clock)
    try:
        async with running(services):
            yield Server(services, make_app(services), used, made, used_clock, Sweeper(services))
    finally:
        if store is None:
            await made.close()
