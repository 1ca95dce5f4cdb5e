"""Bodies that are mislabelled, too large, or decompression bombs."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import msgspec
import zstandard
from support.in_process import (
    forward_backward,
    run,
)
from support.refusals import GOOD, bench

from tinsmith.wire.codecs import zstd


def test_bodies_that_are_not_what_they_say(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(tmp_path, max_body_bytes=4096, max_unpacked_bytes=65536) as made:
            ann = made.client
            good = msgspec.json.encode(forward_backward(made.model, 1, GOOD))
            cases: list[tuple[bytes, dict[str, str], int, tuple[str, ...]]] = [
                (b"", {}, 404, ("training run ''",)),
                (b"{", {}, 422, ("forward_backward",)),
                (b"[]", {}, 422, ("forward_backward",)),
                (b"\xff\xfe", {}, 422, ("forward_backward",)),
                (b'{"a":' + b"[" * 4000, {}, 422, ("nested too deeply",)),
                (good, {"content_encoding": "gzip"}, 415, ("content-encoding 'gzip'", "send zstd")),
                (good, {"content_encoding": "zstd"}, 422, ("not valid zstd",)),
                (zstd.compress(good)[:-3], {"content_encoding": "zstd"}, 422, ("zstd",)),
                (b" " * 5000, {}, 413, ("body: larger than the allowed 4096 bytes",)),
                (
                    zstd.compress(b" " * 10**6),
                    {"content_encoding": "zstd"},
                    413,
                    ("unpacks to more than the allowed 65536 bytes",),
                ),
            ]
            for body, headers, status, says in cases:
                await made.check(await ann.post("forward_backward", body, **headers), status, says)
            answer = await ann.post("optim_step", b"\x0a\x00", content_type="application/x-protobuf")
            await made.check(answer, 415, ("accepts JSON, not protobuf",))

    run(scenario())


def test_a_bomb_costs_no_memory(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(tmp_path, max_unpacked_bytes=2**20) as made:
            whole = zstandard.ZstdCompressor(level=19).compress(bytes(2**28))
            stream = zstandard.ZstdCompressor(level=19, write_content_size=False).compressobj()
            silent = stream.compress(bytes(2**28)) + stream.flush()  # one that does not say how large it gets
            for bomb in (whole, silent):
                assert len(bomb) < 2**20
                tracemalloc.start()
                answer = await made.client.post("forward_backward", bomb, content_encoding="zstd")
                _, peak = tracemalloc.get_traced_memory()
                tracemalloc.stop()
                assert peak < 2**25
                await made.check(answer, 413, ("unpacks to more than the allowed 1048576 bytes",))

    run(scenario())
