"""A few bytes do not become many: neither in memory while they are decoded, nor in what is stored."""

from __future__ import annotations

import asyncio
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.in_process import Client, forward_backward, sample, serving
from support.openai_server import backend, complete

from tinsmith.config import ServerConfig
from tinsmith.server.bodies.read import MAX_CONTAINERS
from tinsmith.wire.codecs import zstd
from tinsmith.wire.routes.door import SMALL
from tinsmith.wire.routes.served import SERVED_ROUTES
from tinsmith.wire.routes.table import ROUTES, Route

MB = 1024 * 1024
PEAK_BYTES = 4 * MB
"""What a request to a route of small bodies may take, whatever is in it."""
SMALL_ROUTES = [route for route in ROUTES if route.request is not None and route.door.body is SMALL]


async def packed(client: Client, path: str, body: bytes, **headers: str) -> Any:
    return await client.call("POST", path, zstd.compress(body), content_encoding="zstd", **headers)


def path_of(route: Route) -> str:
    return route.path.replace("{session_id}", "a").replace("{training_run_id}", "a").replace("{checkpoint_id}", "a/b")


@pytest.mark.parametrize("route", SMALL_ROUTES, ids=lambda route: route.name)
def test_a_small_route_takes_little_memory_whatever_comes(tmp_path: Path, route: Route) -> None:
    """3 KB of zstd once took 920 MB and two seconds."""

    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann = await server.client(scopes=("all", "admin"))
            assert route.request is not None
            name = next((field.encode_name for field in reversed(msgspec.structs.fields(route.request))), "x").encode()
            for value in (b"[],", b"{},", b'{"":0},', b'"a",', b"1e9,", b"null,"):
                for size in (30_000, 4 * MB):
                    many = value * (size // len(value))
                    body = zstd.compress(b'{"user_metadata":{"a":[%s1]},"%s":[%s1]}' % (many, name, many))
                    tracemalloc.start()
                    answer = await ann.call(route.method, path_of(route), body, content_encoding="zstd")
                    peak = tracemalloc.get_traced_memory()[1]
                    tracemalloc.stop()
                    assert 400 <= answer.status < 500 or size == 30_000
                    assert peak < PEAK_BYTES, (value, size, peak)

    asyncio.run(asyncio.wait_for(scenario(), 120))


def test_what_is_kept_of_a_session_is_bounded(tmp_path: Path) -> None:
    """2 KB of zstd in a name once kept 60 MB for each session."""

    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann = await server.client()
            for fields in (
                {"display_name": "x" * 60_000},
                {"display_name": "x" * 1025},
                {"tags": ["x"] * 257},
                {"tags": ["x" * 257]},
                {"sdk_version": "x" * 257},
                {"project_id": "x" * 513},
                {"user_metadata": {"a": "x" * 60_000}},
                {"user_metadata": {"a": [[]] * 10_000}},
            ):
                answer = await ann.post("create_session", fields)
                assert answer.status in (400, 413, 422), fields
                assert next(iter(fields)) in answer.detail
            await ann.session(display_name="x" * 1024, tags=["x" * 256] * 100, user_metadata={"a": "x" * 30_000})
            kept = list(server.services.access.sessions.values())
            assert [len(msgspec.json.encode(row)) < 64 * 1024 for row in kept] == [True]

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_large_body_of_brackets_is_refused_before_anything_is_made_of_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann = await server.client()
            session = await ann.session()
            model, sampler = await ann.model(session), await ann.sampler(session)
            brackets = b"[" + b"[]," * MAX_CONTAINERS + b"[]]"
            for path, message, field in (
                ("forward_backward", forward_backward(model, 1), b'"data":'),
                ("asample", sample(sampler, 1), b'"chunks":'),
            ):
                head, _, tail = msgspec.json.encode(message).partition(field)
                body = head + field + brackets + b"," + b'"x":' + tail
                tracemalloc.start()
                answer = await packed(ann, path, body)
                peak = tracemalloc.get_traced_memory()[1]
                tracemalloc.stop()
                assert answer.status == 413, answer.body
                assert "lists and objects" in answer.detail
                assert peak < 4 * len(body)

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_body_that_takes_too_much_to_read_costs_its_sender_only(tmp_path: Path) -> None:
    """The process that reads it is replaced; the next body is read as if nothing had been."""

    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann, eve = await server.client(), await server.client("eve", org="evil")
            message = forward_backward(await ann.model(await ann.session()), 1)
            message["forward_backward_input"]["x"] = "y" * 100_000
            first = await ann.post("forward_backward", message)
            await ann.result(first)
            for reader in server.services.readers._all:
                if reader._process is not None:
                    reader._process.kill()
            theirs = forward_backward(await eve.model(await eve.session()), 1)
            theirs["forward_backward_input"]["x"] = "y" * 100_000
            await eve.result(await eve.post("forward_backward", theirs))

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_settings_of_sizes_hold_for_every_route() -> None:
    config = ServerConfig()
    for route in SERVED_ROUTES:
        assert (route.door.body.max_unpacked_bytes or config.max_unpacked_bytes) <= 32 * MB


def test_a_number_of_samples_asks_for_no_memory(tmp_path: Path) -> None:
    """A stream makes a log for each sample; two thousand million of them were made before anybody checked."""

    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann = await server.client()
            sampler = await ann.sampler(await ann.session())
            for number in (1025, 10**6, 2**31, 2**63 - 1):
                for path in ("asample", "/tinsmith/v1/sample_stream"):
                    tracemalloc.start()
                    answer = await ann.post(path, sample(sampler, None, num_samples=number))
                    peak = tracemalloc.get_traced_memory()[1]
                    tracemalloc.stop()
                    assert answer.status in (400, 422), (path, number, answer.body)
                    assert "num_samples" in answer.detail
                    assert peak < MB

    asyncio.run(asyncio.wait_for(scenario(), 60))


@pytest.mark.parametrize("is_stream", [False, True])
def test_an_echoed_prompt_is_not_multiplied_without_limit(tmp_path: Path, is_stream: bool) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, backend=backend(tmp_path / "tokenizer")) as server:
            ann = await server.client()
            asked = {"n": 1024, "max_tokens": 0, "echo": True, "stream": is_stream}
            answer = await complete(ann, prompt=[97] * 1025, **asked)
            assert answer.status == 400
            assert "echo: 1024 choices that each repeat their prompt (1025 tokens)" in answer.detail
            answer = await complete(ann, prompt=[97] * 1024, **asked)
            assert answer.status == 200
            assert answer.body.count(b"a" * 1024) == 1024

    asyncio.run(asyncio.wait_for(scenario(), 60))
