"""Requests made from the server's own description, and spoiled in every way: none may bring it to a 5xx.

Each route of /openapi.json gets requests that fit its schema (with ids of things that exist, so that they get far), the
same with parts replaced, dropped, added or driven to extremes, and bytes that are no request at all. Every refusal must
be JSON with `detail` and `code`, or what other services' clients read instead.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.fuzz import DIALECT_IDS
from support.fuzz_world import settle, small_card
from support.in_process import Answer, Client, Recorder, Server, datum, forward_backward, serving

from tinsmith.server.http.openapi import openapi
from tinsmith.wire.codecs import zstd
from tinsmith.wire.codecs.json_codec import decode
from tinsmith.wire.codecs.proto_training import encode_request
from tinsmith.wire.messages.training import ForwardBackwardRequest
from tinsmith.wire.routes.own import MSGPACK_TYPE
from tinsmith.wire.routes.served import SERVED_BY_NAME, SERVED_ROUTES

DOCUMENT = msgspec.json.decode(openapi())
OPERATIONS = {
    operation["operationId"]: (method.upper(), path, operation)
    for path, methods in DOCUMENT["paths"].items()
    for method, operation in methods.items()
}
ENDING = ("delete_checkpoint", "unload_model", "finish_session", "delete_api_key")
"""Routes that take away what others need; they come last."""
TARGETS = {
    **{name: target for name, target in OPERATIONS.items() if name not in ENDING},
    **{name: OPERATIONS[name] for name in ENDING},
}
EXAMPLES = int(os.environ.get("TINSMITH_FUZZ_EXAMPLES", "30"))
"""For each route; more of them can be asked for."""

TEXT = st.one_of(
    st.text(max_size=20),
    st.sampled_from(
        [
            "",
            "\0",
            "../../secret",
            "tinker://a/weights/b",
            "tinker://",
            "a" * 5000,
            "\ud800",
            "😀",
            "NaN",
            "null",
            "'--",
        ]
    ),
)
NUMBERS = st.sampled_from(
    [0, 1, -1, 2, 2**31, 2**63 - 1, 2**63, -(2**63) - 1, 2**64, 10**400, 0.5, -0.0, 1e-320, 1e308, float("nan")]
) | st.integers(-3, 40)
JUNK: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


class World:
    """A server with something of everything in it."""

    def __init__(self, server: Server, client: Client) -> None:
        self.server = server
        self.client = client
        self.ids: dict[str, list[Any]] = {}
        self.seen: dict[str, set[int]] = {}
        """The statuses that each route gave."""

    def knowing(self, ids: dict[str, list[Any]]) -> World:
        """The same world, with other values for some names."""
        known = World(self.server, self.client)
        known.ids = self.ids | ids
        return known

    async def fill(self) -> None:
        self.ids = {
            **await settle(self.client),
            "op": ["placeholder", "output"],
            "tokens": [1, 2, 31],
            "max_tokens": [0, 4],
            "stop": [[], "a", [3]],
            "temperature": [0.0, 1.0],
            "top_k": [-1, 5],
            "top_p": [1.0],
            "topk_sample_logprobs": [0, 3],
            "prompt_logprobs_last_n": [1],
        }
        self.ids["retrieved_request_ids"] = self.ids["request_id"]


def schema_values(schema: Any, world: World, name: str = "") -> st.SearchStrategy[Any]:
    """Values that fit a schema; where a name is known, mostly ones that exist."""
    made = _schema_values(schema, world, name)
    known = _known(schema, world, name)
    return st.one_of(st.sampled_from(known), st.sampled_from(known), made) if known else made


def _known(schema: Any, world: World, name: str) -> list[Any]:
    """Values for a name that exist; lists for arrays only."""
    known = world.ids.get(name, [])
    kind = (_resolved(schema) if "$ref" in schema else schema).get("type")
    return known if kind is None else [value for value in known if isinstance(value, list) == (kind == "array")]


def _schema_values(schema: Any, world: World, name: str) -> st.SearchStrategy[Any]:
    if "$ref" in schema:
        return st.deferred(lambda: _schema_values(_resolved(schema), world, name))
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return st.one_of([_schema_values(option, world, name) for option in schema[key]])
    if "const" in schema:
        return st.just(schema["const"])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    kind = schema.get("type")
    if kind == "object":
        return _objects(schema, world)
    if kind == "array":
        return st.lists(
            schema_values(schema.get("items", {}), world, name), min_size=schema.get("minItems", 0), max_size=4
        )
    if kind == "integer":
        low, high = schema.get("minimum", -3), min(schema.get("maximum", 31), 31)
        return st.integers(low, max(low, high))
    if kind == "number":
        return st.floats(0, 1)
    if kind == "boolean":
        return st.booleans()
    if kind == "null":
        return st.none()
    return TEXT if kind == "string" else JUNK


def _objects(schema: Any, world: World) -> st.SearchStrategy[Any]:
    required = set(schema.get("required", ()))
    fields = {key: schema_values(value, world, key) for key, value in schema.get("properties", {}).items()}
    if set(fields) == {"model_input", "loss_fn_inputs"}:
        return st.sampled_from([datum(1, 2, 3), datum(5, 6), datum(1, advantages=None, weights=None)])
    if not fields:
        values = schema.get("additionalProperties")
        inner = schema_values(values, world) if isinstance(values, dict) else JUNK
        return st.dictionaries(st.text(max_size=5), inner, max_size=3)
    optional = {key: value for key, value in fields.items() if key not in required}
    return st.fixed_dictionaries({key: fields[key] for key in fields if key in required}, optional=optional)


def bare(schema: Any, world: World) -> st.SearchStrategy[Any]:
    """An object with what it must have, of values that exist where such are known: the likeliest to be accepted."""
    fields = {}
    for name in schema.get("required", ()):
        known = _known(schema["properties"][name], world, name)
        fields[name] = st.sampled_from(known) if known else schema_values(schema["properties"][name], world, name)
    return st.fixed_dictionaries(fields)


def _resolved(schema: Any) -> Any:
    return DOCUMENT["components"]["schemas"][schema["$ref"].rpartition("/")[2]]


def spoiled(value: Any, data: st.DataObject) -> Any:
    """The value with one place in it made wrong."""
    if isinstance(value, dict) and value and data.draw(st.integers(0, 3)):
        key = data.draw(st.sampled_from(sorted(value)))
        how = data.draw(st.sampled_from(["drop", "add", "into", "into"]))
        if how == "drop":
            return {name: item for name, item in value.items() if name != key}
        if how == "add":
            return {**value, data.draw(TEXT): data.draw(JUNK)}
        return {**value, key: spoiled(value[key], data)}
    if isinstance(value, list) and value and data.draw(st.booleans()):
        index = data.draw(st.integers(0, len(value) - 1))
        return [*value[:index], spoiled(value[index], data), *value[index + 1 :]]
    return data.draw(JUNK)


def deep(data: st.DataObject) -> bytes:
    depth = data.draw(st.sampled_from([50, 2000, 200_000]))
    opening, closing = data.draw(st.sampled_from([(b"[", b"]"), (b'{"model_id":', b"}"), (b'{"x":', b"}")]))
    return opening * depth + b"1" + (closing * depth if data.draw(st.booleans()) else b"")


def bodies(operation: Any, world: World, data: st.DataObject) -> bytes:
    how = data.draw(st.sampled_from(["fits", "bare", "spoiled", "spoiled", "spoiled", "bytes", "deep", "protobuf"]))
    if how == "bytes":
        return data.draw(
            st.binary(max_size=60) | st.sampled_from([b"null", b"[]", b'"x"', b"NaN", b"{", b'{"a":1e999}'])
        )
    if how == "deep":
        return deep(data)
    if how == "protobuf":
        return protobuf(world, data)
    content = operation.get("requestBody", {}).get("content", {})
    if MSGPACK_TYPE in content:
        many = [bodies(OPERATIONS["asample"][2], world, data) for _ in range(data.draw(st.integers(0, 3)))]
        return msgspec.msgpack.encode(many if how == "fits" else spoiled(many, data))
    schema = content.get("application/json", {}).get("schema", {})
    if how == "bare" and "$ref" in schema:
        return json.dumps(data.draw(bare(_resolved(schema), world))).encode()
    value = data.draw(schema_values(schema, world))
    return json.dumps(value if how == "fits" else spoiled(value, data)).encode()


def protobuf(world: World, data: st.DataObject) -> bytes:
    message = forward_backward(world.ids["model_id"][0], data.draw(st.integers(1, 9)))
    body = bytearray(encode_request(decode(msgspec.json.encode(message), ForwardBackwardRequest)))
    for _ in range(data.draw(st.integers(0, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    return bytes(body[: data.draw(st.integers(0, len(body)))] if data.draw(st.booleans()) else body)


def urls(path: str, operation: Any, world: World, data: st.DataObject) -> str:
    queries = []
    for parameter in operation["parameters"]:
        name = parameter["name"]
        fitting = schema_values(parameter.get("schema", {"type": "string"}), world, name)
        value = data.draw(st.one_of(fitting, fitting, TEXT))
        text = quote(_as_text(value), safe="/" if name in ("checkpoint_id", "name") else "")
        if parameter["in"] == "path":
            path = path.replace(f"{{{name}}}", text or "x")
        elif data.draw(st.integers(0, 9)) if parameter.get("required") else data.draw(st.booleans()):
            queries.append(f"{name}={text}")
    if data.draw(st.integers(0, 4)) == 0:
        queries.append(quote(data.draw(st.text(max_size=10)), safe="=&;+%"))
    return path + ("?" + "&".join(queries) if queries else "")


def _as_text(value: Any) -> str:
    return str(value).encode(errors="replace").decode()


PLAIN = {"content-type": "application/json"}
ODD_HEADERS = st.fixed_dictionaries(
    {"content-type": st.sampled_from(["application/json", "application/x-protobuf", "text/plain", "", "\xff"])},
    optional={
        "accept": st.sampled_from(["application/x-protobuf", "*/*", "\xff", ""]),
        "content-encoding": st.sampled_from(["identity", "zstd", "gzip", "zstd, zstd", "\xb2"]),
        "content-length": st.sampled_from(["\xb2", "-1", "1e5", "7"]),
        "x-stainless-package-version": st.sampled_from(["0.3.0", "9" * 5000 + ".1", "x"]),
        "x-forwarded-host": st.sampled_from(["\xff", "a b", ""]),
        "x-tinker-weights-access-token": st.sampled_from(["tml-", "eyJ", "\xff"]),
        "range": st.sampled_from(["bytes=0-1", "bytes=x", "\xff"]),
    },
)
HEADERS = st.one_of(st.just(PLAIN), st.just(PLAIN), ODD_HEADERS)


def requests(name: str, world: World, data: st.DataObject) -> tuple[str, str, bytes, dict[str, str]]:
    method, path, operation = TARGETS[name]
    world = world.knowing(DIALECT_IDS[SERVED_BY_NAME[name].dialect] if name in SERVED_BY_NAME else {})
    headers = data.draw(HEADERS)
    has_body = "requestBody" in operation or data.draw(st.integers(0, 9)) == 0
    body = bodies(operation, world, data) if has_body else b""
    if headers.get("content-encoding") == "zstd" and data.draw(st.booleans()):
        body = zstd.compress(body)
    return method, urls(path, operation, world, data), body, headers


def check(answer: Answer, shown: Any) -> None:
    assert answer.status < 500, (shown, answer)
    is_promise = answer.status == 408 and b'"try_again"' in answer.body
    if answer.status >= 400 and not is_promise:
        assert answer.headers["content-type"] == "application/json", (shown, answer)
        assert isinstance(answer.error["detail"], str), (shown, answer)
        assert isinstance(answer.error["code"], str), (shown, answer)


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[asyncio.Runner, World]]:
    """A server that stays for all routes, on one loop."""
    with asyncio.Runner() as runner:
        settings_ = {"poll_s": 0.001, "max_sessions": 10**6, "max_models": 10**6, "max_body_bytes": 2**21}
        directory = tmp_path_factory.mktemp("fuzz")
        context = serving(directory, backend=Recorder((small_card(directory),)), **settings_)
        server = runner.run(context.__aenter__())
        world = World(server, runner.run(server.client(scopes=("all", "admin"))))
        runner.run(world.fill())
        yield runner, world
        runner.run(context.__aexit__(None, None, None))


@pytest.mark.parametrize("name", list(TARGETS))
def test_no_request_breaks_the_server(name: str, fuzzed: tuple[asyncio.Runner, World]) -> None:
    runner, world = fuzzed

    @settings(
        max_examples=EXAMPLES,
        derandomize="TINSMITH_FUZZ_EXAMPLES" not in os.environ,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def fuzz(data: st.DataObject) -> None:
        method, path, body, headers = requests(name, world, data)
        key = world.client.key
        if name == "delete_api_key":
            key = runner.run(world.server.client("other")).key
        answer = runner.run(world.server.request(method, path, body, {"x-api-key": key, **headers}))
        world.seen.setdefault(name, set()).add(answer.status)
        check(answer, (method, path, body[:500], headers))

    fuzz()


def test_the_server_still_works_after_all_of_it(fuzzed: tuple[asyncio.Runner, World]) -> None:
    runner, world = fuzzed

    async def scenario() -> None:
        await world.server.sweep()
        await World(world.server, world.client).fill()

    runner.run(scenario())


def test_the_requests_get_far(fuzzed: tuple[asyncio.Runner, World]) -> None:
    """A fuzz that is refused at the door would prove nothing: most routes were also made to do their work."""
    seen = fuzzed[1].seen
    if set(seen) == set(TARGETS):
        done = {name for name, statuses in seen.items() if min(statuses) < 400}
        assert len(done) >= 0.8 * len(TARGETS), " ".join(sorted(set(TARGETS) - done))
        assert "delete_run" in done
        refused = {name for name, statuses in seen.items() if max(statuses) >= 400}
        assert len(refused) >= 0.8 * len(TARGETS), sorted(set(TARGETS) - refused)


def test_every_route_of_the_description_is_tried() -> None:
    assert set(OPERATIONS) <= set(TARGETS)
    assert set(OPERATIONS) == {route.name for route in SERVED_ROUTES}
