"""Generated requests over all routes of both tables, by the hundred thousand: `python -m support.fuzz`.

A request is made from its route's types with ids of things that exist, and then mostly spoiled: a value anywhere in it
is replaced by junk, dropped or added, bytes are changed or cut off, or what belongs to another tenant is named. All
choices come from a seed. The server is the real application on SQLite with the arithmetic backend; sessions end and
others begin, so that memory can be compared.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import os
import random
import re
import sys
import tempfile
import time
import types
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints
from urllib.parse import quote

import msgspec

from support.anthropic_server import ANTHROPIC_FITTING
from support.fuzz_world import Ids, settle, small_card
from support.in_process import Answer, Client, Recorder, Server, datum, forward_backward, sample, serving
from support.openai_server import FITTING
from tinsmith.engine.protocol import AnyJob
from tinsmith.store.sqlite import SqliteStore
from tinsmith.testing.backend import MemoryBackend
from tinsmith.wire.codecs import zstd
from tinsmith.wire.codecs.json_codec import decode
from tinsmith.wire.codecs.proto_training import encode_request
from tinsmith.wire.messages.training import ForwardBackwardRequest
from tinsmith.wire.routes.served import SERVED_ROUTES
from tinsmith.wire.routes.table import Dialect, Route

TENANTS = 3
OPTIONAL = 0.25
"""How often a field that may be left out is there."""
WORKERS = 24
RENEW_EVERY = 4000
"""Requests after which every tenant begins a new session, and the old ones end."""
LONG = 500_000
"""Requests after which every bounded cache of the server is full, so that memory in use must have stopped growing."""
MAX_GROWTH = 0.15
RARE = {
    "delete_api_key": 0.02,
    "finish_session": 0.05,
    "create_session": 0.1,
    "unload_model": 0.05,
    "delete_checkpoint": 0.1,
    "delete_run": 0.1,
    "import_weights": 0.1,
    "metrics": 0.1,
    "export_session_trace": 0.3,
}
"""Routes that delete what others need, are slow, or leave much behind: how often they come where others come once."""

DIALECT_IDS: dict[Dialect, dict[str, list[Any]]] = {
    "tinker": {},
    "openai": FITTING,
    "anthropic": ANTHROPIC_FITTING,
}
"""What makes a request of other services' clients valid."""
NOT_YET = ("readyz",)
"""Routes that say with a 503 that something has not begun yet: the engine."""

TEXTS = ("", "\0", "../../secret", "tinker://a/weights/b", "a" * 600, "😀", "NaN", "null", "'--", "%00", "x" * 3000)
NUMBERS = (0, 1, -1, 2, 31, 2**31, 2**63 - 1, 2**63, -(2**63) - 1, 2**64, 0.5, -0.0, 1e-320, 1e308)
NESTED: tuple[Any, ...] = ([], {}, [[]], {"": {}}, [None] * 40, {"a": [1, "b"]}, [[[[[[[[[[1]]]]]]]]]], {"type": "x"})
JUNK: tuple[Any, ...] = (*TEXTS, *NUMBERS, *NESTED, None, True, "\x1b[2J")
RAW = (b"NaN", b"Infinity", b"1e999", b"9" * 5000, b"[" * 3000, b'"\\ud800"', b'"\xff"', b"{", b"", b"tru")
"""JSON that is none."""

GRAPH = {
    "format": 1,
    "nodes": [
        {"op": "placeholder", "name": "logprobs", "target": "logprobs", "args": [], "kwargs": {}},
        {"op": "output", "name": "output", "target": "output", "args": [{"ref": "logprobs"}], "kwargs": {}},
    ],
}


class Forgetful(Recorder):
    """Does not remember what was submitted."""

    def submit(self, job: AnyJob, on_tokens: Any = None) -> Any:
        return MemoryBackend.submit(self, job, on_tokens)


@dataclass
class Tenant:
    """A key holder, and what they have now."""

    client: Client
    ids: Ids = field(default_factory=dict)
    seq: int = 0

    async def begin(self) -> None:
        """A session with something of everything in it; the one before falls silent."""
        self.ids = {
            **await settle(self.client),
            "loss_fn": ["cross_entropy"],
            "data": [[datum(1, 2, 3)], [datum(5, 6), datum(7)]],
            "timeout": [0.001],
            "rank": [4],
            "graph": [GRAPH],
            "inputs": [[{"name": "logprobs", "rank": 1}]],
            "lora_config": [{"rank": 4}],
            "optimizer_config": [{"type": "adamw"}],
        }
        self.ids["retrieved_request_ids"] = [self.ids["request_id"]]
        self.seq = 4


def example(annotation: Any, name: str, ids: Ids, draw: random.Random) -> Any:
    """A value that fits a type, of things that exist where their name is known."""
    if name in ids and draw.random() < 0.9:
        return draw.choice(ids[name])
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return example(arguments[0], name, ids, draw)
    if origin is Literal:
        return draw.choice(arguments)
    if origin in (Union, types.UnionType):
        return example(draw.choice([one for one in arguments if one is not type(None)]), name, ids, draw)
    if origin is list:
        return [example(arguments[0], name, ids, draw) for _ in range(draw.randrange(3))]
    if origin is dict:
        return {f"k{index}": example(arguments[1], name, ids, draw) for index in range(draw.randrange(3))}
    if annotation in (int, float):
        return draw.randrange(8)
    if annotation is bool:
        return draw.random() < 0.5
    if annotation is datetime:
        return "2027-01-15T00:00:00Z"
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        return fitting(annotation, ids, draw)
    return "text" if annotation is str else {}


@cache
def specs(cls: Any) -> list[tuple[str, Any, bool]]:
    """The fields of a message: name, type, and whether it must be there."""
    hints = get_type_hints(cls, include_extras=True)
    return [(spec.encode_name, hints[spec.name], spec.required) for spec in msgspec.structs.fields(cls)]


def fitting(cls: Any, ids: Ids, draw: random.Random) -> dict[str, Any]:
    """An object that fits a message's type: what is required, and half of the rest."""
    made = {
        name: example(annotation, name, ids, draw)
        for name, annotation, is_required in specs(cls)
        if is_required or draw.random() < OPTIONAL
    }
    config = cls.__struct_config__
    return {config.tag_field: config.tag, **made} if config.tag_field is not None else made


def spoiled(value: Any, draw: random.Random) -> Any:
    """The value with one place in it made wrong."""
    if isinstance(value, dict) and value and draw.random() < 0.85:
        key = draw.choice(list(value))
        how = draw.randrange(5)
        if how == 0:
            return {name: item for name, item in value.items() if name != key}
        if how == 1:
            return {**value, draw.choice(TEXTS): draw.choice(JUNK)}
        return {**value, key: spoiled(value[key], draw)}
    if isinstance(value, list) and value and draw.random() < 0.6:
        index = draw.randrange(len(value))
        return [*value[:index], spoiled(value[index], draw), *value[index + 1 :]]
    return draw.choice(JUNK)


def damaged(body: bytes, draw: random.Random) -> bytes:
    """The bytes with some changed, cut off or doubled."""
    if not body:
        return draw.randbytes(draw.randrange(30))
    at = draw.randrange(len(body))
    how = draw.randrange(5)
    if how == 0:
        return body[:at]
    if how == 1:
        return body[:at] + draw.choice(RAW) + body[at:]
    if how == 2:
        return body[:at] + draw.randbytes(4) + body[at + 4 :]
    if how == 3:
        return body + body[at:]
    colon = body.find(b":", at)
    return body[: colon + 1] + draw.choice(RAW) + body[colon + 2 :]


@dataclass
class Request:
    route: Route
    method: str
    path: str
    body: bytes
    headers: dict[str, str]


class Maker:
    """Requests from a seed."""

    def __init__(self, tenants: list[Tenant]) -> None:
        self._tenants = tenants
        self._routes = list(SERVED_ROUTES)
        self._weights = [RARE.get(route.name, 1.0) for route in self._routes]
        self._bodies: dict[tuple[str, int], list[Any]] = {}

    def renewed(self) -> None:
        """The tenants have new things: what was made of the old ones is forgotten."""
        self._bodies.clear()

    def request(self, tenant: Tenant, draw: random.Random) -> Request:
        route = draw.choices(self._routes, self._weights)[0]
        whose = tenant if draw.random() < 0.95 else draw.choice(self._tenants)
        path = self._path(route, whose, draw)
        headers = {"x-api-key": tenant.client.key, "content-type": "application/json"}
        body = b""
        if route.method in ("POST", "PUT") or draw.random() < 0.02:
            body = self._body(route, whose, draw, headers)
        if draw.random() < 0.03:
            headers.update(odd_headers(draw))
        if headers.get("content-encoding") == "zstd" and draw.random() < 0.7:
            body = zstd.compress(body)
        return Request(route, route.method, path, body, headers)

    def _path(self, route: Route, whose: Tenant, draw: random.Random) -> str:
        path = route.path
        for name in route.parameters:
            value = draw.choice(whose.ids.get(name, ["x"])) if draw.random() < 0.9 else draw.choice(TEXTS)
            path = path.replace(
                f"{{{name}}}", quote(str(value) or "x", safe="/" if name in ("checkpoint_id", "name") else "")
            )
        if route.query is None or draw.random() < 0.1:
            return path
        query = fitting(route.query, whose.ids, draw)
        if draw.random() < 0.4:
            spoilt = spoiled(query, draw)
            query = spoilt if isinstance(spoilt, dict) else query
        pairs = (f"{quote(str(name))}={quote(str(value)[:2000])}" for name, value in query.items())
        return f"{path}?{'&'.join(pairs)}"

    def _body(self, route: Route, whose: Tenant, draw: random.Random, headers: dict[str, str]) -> bytes:
        how = draw.random()
        if "protobuf" in route.body_encodings and how < 0.4:
            headers["content-type"] = "application/x-protobuf"
            return self._protobuf(whose, draw)
        if route.body_encodings[0] in ("msgpack", "bytes"):
            headers["content-type"] = f"application/{route.body_encodings[0]}"
            return self._packed(route, whose, draw)
        value = self._value(route, whose, draw)
        if how < 0.55:
            value = spoiled(value, draw)
        if how < 0.1:
            value = spoiled(value, draw)
        body = msgspec.json.encode(value)
        if 0.55 <= how < 0.75:
            return damaged(body, draw)
        if how > 0.9995:
            return body[:-1] + b',"pad":"%s"}' % (b"x" * 40_000) if body.endswith(b"}") else body
        return body

    def _value(self, route: Route, whose: Tenant, draw: random.Random) -> Any:
        """A message that fits; some are made for each world, and used again."""
        if route.request is None:
            return {}
        made = self._bodies.setdefault((route.name, id(whose)), [])
        if len(made) < 12:
            made.append(fitting(route.request, whose.ids | DIALECT_IDS[route.dialect], draw))
        value = dict(draw.choice(made))
        if "seq_id" in value or route.name in ("forward_backward", "optim_step"):
            if draw.random() < 0.5:
                whose.seq += 1
            value["seq_id"] = whose.seq
        return value

    def _protobuf(self, whose: Tenant, draw: random.Random) -> bytes:
        message = forward_backward(whose.ids["model_id"][0], draw.randrange(1, 40))
        body = encode_request(decode(msgspec.json.encode(message), ForwardBackwardRequest))
        return damaged(body, draw) if draw.random() < 0.7 else body

    def _packed(self, route: Route, whose: Tenant, draw: random.Random) -> bytes:
        ids = whose.ids
        if route.name == "samples":
            one = msgspec.json.encode(sample(ids["sampling_session_id"][0], draw.randrange(10**6)))
            packed: Any = [one if draw.random() < 0.7 else damaged(one, draw) for _ in range(draw.randrange(4))]
        elif route.name == "import_weights":
            packed = draw.choice(ids["import message"])
        else:
            return draw.randbytes(draw.randrange(200))
        if draw.random() < 0.4:
            packed = spoiled(packed, draw)
        with suppress(OverflowError):
            body = msgspec.msgpack.encode(packed)
            return damaged(body, draw) if draw.random() < 0.2 else body
        return b""


def odd_headers(draw: random.Random) -> dict[str, str]:
    return draw.choice(
        [
            {"content-type": ""},
            {"content-type": "text/plain"},
            {"accept": "application/x-protobuf"},
            {"content-encoding": "zstd"},
            {"content-encoding": "gzip"},
            {"content-length": "-1"},
            {"x-stainless-package-version": "9" * 5000 + ".1"},
            {"x-stainless-package-version": "0.3.0"},
            {"x-forwarded-host": "a b"},
            {"x-tinker-weights-access-token": "eyJ"},
            {"range": "bytes=x"},
            {"x-api-key": "tml-nobody"},
            {"x-api-key": ""},
            {"idempotency-key": "x" * 300},
        ]
    )


M_ARENA_MAX = -8
_MALL_INFO = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


@dataclass
class Report:
    """What came of it."""

    statuses: dict[str, Counter[int]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    memory: list[tuple[int, int, int]] = field(default_factory=list)
    """Requests so far, and the process' resident bytes and the bytes in use then."""
    seconds: float = 0.0
    restarts: int = 0

    def count(self) -> int:
        return sum(sum(counter.values()) for counter in self.statuses.values())

    def note(self, index: int, request: Request, answer: Answer) -> None:
        self.statuses.setdefault(request.route.name, Counter())[answer.status] += 1
        is_told = (
            answer.status < 400 or answer.status == 408 or b'"code"' in answer.body or b'"type":"error"' in answer.body
        )
        is_not_yet = answer.status == 503 and request.route.name in NOT_YET
        if (answer.status >= 500 and not is_not_yet) or not is_told:
            shown = f"{request.method} {request.path[:200]} {request.body[:300]!r}"
            self.faults.append(f"request {index}: {shown} -> {answer.status} {answer.body[:300]!r}")

    def table(self) -> str:
        lines = ["| Route | Requests | 2xx, 3xx | 4xx | 5xx |", "|---|---|---|---|---|"]
        total: Counter[int] = Counter()
        for name, counter in sorted(self.statuses.items()):
            classes = Counter({status // 100: 0 for status in counter})
            for status, count in counter.items():
                classes[2 if status // 100 == 3 else status // 100] += count
            total += classes
            lines.append(f"| `{name}` | {sum(counter.values()):,} | {classes[2]:,} | {classes[4]:,} | {classes[5]:,} |")
        lines.append(f"| all | {self.count():,} | {total[2]:,} | {total[4]:,} | {total[5]:,} |")
        return "\n".join(lines)


class _MallInfo(ctypes.Structure):
    """What glibc's mallinfo2 answers."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in _MALL_INFO)


def used_bytes() -> int:
    """What is in use inside the process: Python's small objects, and all that malloc has given out (large objects,
    SQLite's pages). Unlike resident memory it does not count free places between things that are in use."""
    try:
        ask = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        return 0
    ask.restype = _MallInfo
    given = ask()
    return int(given.uordblks + given.hblkhd) + _small_bytes()


def _small_bytes() -> int:
    """Bytes in the small objects of Python, which says so on stderr only."""
    with tempfile.TemporaryFile() as told:
        stderr = os.dup(2)
        os.dup2(told.fileno(), 2)
        try:
            sys._debugmallocstats()
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
        told.seek(0)
        found = re.search(rb"# bytes in allocated blocks\s*=\s*([\d,]+)", told.read())
    return int(found[1].replace(b",", b"")) if found else 0


def resident_bytes() -> int:
    """What the process holds, when all that is free has been given back."""
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    except FileNotFoundError:
        return 0


async def fuzz(directory: Path, bodies: int, seed: int, say: Callable[[str], None] = lambda _: None) -> Report:
    """Send so many requests; returns what was answered."""
    report, began, card, told = Report(), time.monotonic(), small_card(directory), 0
    store = SqliteStore(directory / "fuzz.db")
    await store.open()
    settings = {"poll_s": 0.001, "result_grace_s": 1.0, "max_sessions": 10**6, "max_models": 10**6}
    async with serving(directory, backend=Forgetful((card,)), store=store, **settings) as server:
        tenants = [Tenant(await server.client(f"u{n}", org=f"o{n}", scopes=("all", "admin"))) for n in range(TENANTS)]
        maker = Maker(tenants)
        for first in range(0, bodies, RENEW_EVERY):
            server.clock.advance(1000)
            for _ in range(4):
                await server.sweep()
            for tenant in tenants:
                await tenant.begin()
            maker.renewed()
            last = min(bodies, first + RENEW_EVERY)
            numbers = iter(range(first, last))
            await asyncio.gather(*(_work(server, maker, tenants, numbers, seed, report) for _ in range(WORKERS)))
            report.memory.append((last, resident_bytes(), used_bytes()))
            for fault in report.faults[told:]:
                say(fault)
            told = len(report.faults)
            if first // RENEW_EVERY % 25 == 0:
                resident, used = (size / 2**20 for size in report.memory[-1][1:])
                say(f"{last:,} requests, {resident:.0f} MB, {used:.1f} MB in use, {len(report.faults)} faults")
        report.restarts = server.backend.epoch_of(card.name) - 1
    await store.close()
    report.seconds = time.monotonic() - began
    return report


async def _work(server: Server, maker: Maker, tenants: list[Tenant], numbers: Any, seed: int, report: Report) -> None:
    for index in numbers:
        draw = random.Random(seed * 1_000_003 + index)
        tenant = draw.choice(tenants)
        request = maker.request(tenant, draw)
        if request.route.name == "delete_api_key":
            request.headers["x-api-key"] = (await server.client("gone", org="gone")).key
        answer = await server.request(request.method, request.path, request.body, request.headers)
        report.note(index, request, answer)


def main() -> int:
    parser = argparse.ArgumentParser(description="Send generated requests to a server in this process")
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 2)  # as the server does, see `keep_memory`
    place = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=place) as directory:
        report = asyncio.run(
            fuzz(Path(directory), options.requests, options.seed, lambda line: print(line, flush=True))
        )
    print(report.table())
    (_, warm, before), (_, last, after) = report.memory[len(report.memory) // 5], report.memory[-1]
    print(
        f"\nseed {options.seed}, {report.count() / report.seconds:,.0f} requests a second, {report.restarts} restarts"
    )
    print(f"memory of the process: {warm / 2**20:.0f} MB after a fifth, {last / 2**20:.0f} MB at the end")
    print(f"of that in use: {before / 2**20:.1f} MB after a fifth, {after / 2**20:.1f} MB at the end")
    print(f"{len(report.faults)} faults", file=sys.stderr)
    grown = after / before - 1 if before and report.count() >= LONG else 0.0
    if grown > MAX_GROWTH:
        print(f"memory in use grew by {grown:.0%} after the first fifth ({MAX_GROWTH:.0%} allowed)", file=sys.stderr)
    return 1 if report.faults or report.restarts or grown > MAX_GROWTH else 0


if __name__ == "__main__":
    raise SystemExit(main())
