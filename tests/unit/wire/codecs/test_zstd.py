"""zstd bodies: the bytes come back, and never more of them than allowed."""

from __future__ import annotations

import struct

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from support.memory import MIB, memory_below

from tinsmith.errors import LimitExceededError, WireError
from tinsmith.wire.codecs import zstd


@given(st.binary(max_size=1000))
@settings(deadline=None, max_examples=50)
def test_zstd_gives_the_bytes_back(body: bytes) -> None:
    assert zstd.decompress(zstd.compress(body), len(body)) == body
    streamed = zstandard.ZstdCompressor(write_content_size=False).compress(body)
    assert zstd.decompress(streamed, len(body)) == body


@pytest.mark.parametrize("write_size", [True, False])
def test_zstd_holds_its_limit_exactly(write_size: bool) -> None:
    body = zstandard.ZstdCompressor(write_content_size=write_size).compress(bytes(1000))
    assert zstd.decompress(body, 1000) == bytes(1000)
    with pytest.raises(LimitExceededError, match="999"):
        zstd.decompress(body, 999)


def frame(*blocks: tuple[int, int], content_size: int | None = None, window: int = 0x38, last: bool = True) -> bytes:
    """A frame of run-length blocks (byte, count), which may state any content size."""
    descriptor = 0x00 if content_size is None else 0xC0
    size = b"" if content_size is None else struct.pack("<Q", content_size)
    body = b"".join(struct.pack("<I", byte << 24 | count << 3 | 1 << 1) for byte, count in blocks)
    if last:
        body = body[:-4] + struct.pack("<I", struct.unpack("<I", body[-4:])[0] | 1)
    return b"\x28\xb5\x2f\xfd" + bytes([descriptor, window]) + size + body


BLOCK = 128 * 1024
GIGABYTE = ((0, BLOCK),) * (1 << 13)


def test_hand_made_frames_are_right() -> None:
    assert zstd.decompress(frame((7, 5), (8, 2)), 100) == b"\x07" * 5 + b"\x08" * 2
    assert zstd.decompress(frame((7, 5), content_size=5), 100) == b"\x07" * 5


@pytest.mark.parametrize("limit", [0, 1, MIB, 16 * MIB])
def test_a_bomb_without_content_size_stops_at_the_limit(limit: int) -> None:
    bomb = frame(*GIGABYTE)
    assert len(bomb) < 40_000
    with memory_below(limit + 20 * MIB), pytest.raises(LimitExceededError, match=f"allowed {limit} bytes") as caught:
        zstd.decompress(bomb, limit)
    assert caught.value.field == "body"


@pytest.mark.parametrize("content_size", [0, 1, 10, MIB, 2**30 - 1, 2**40, 2**63, 2**64 - 2, 2**64 - 1])
def test_a_bomb_with_a_lying_content_size_is_refused(content_size: int) -> None:
    with memory_below(20 * MIB), pytest.raises(WireError, match="body"):
        zstd.decompress(frame(*GIGABYTE, content_size=content_size), MIB)


@pytest.mark.parametrize("content_size", [4, 6, MIB])
def test_a_content_size_that_is_not_true_is_refused(content_size: int) -> None:
    with pytest.raises(WireError, match="body"):
        zstd.decompress(frame((7, 5), content_size=content_size), MIB)


@pytest.mark.parametrize("write_size", [True, False])
@pytest.mark.parametrize("content", [b"", b"some content " * 50])
def test_a_frame_is_refused_if_cut_off_or_followed_by_anything(write_size: bool, content: bytes) -> None:
    body = zstandard.ZstdCompressor(write_content_size=write_size, write_checksum=True).compress(content)
    assert zstd.decompress(body, MIB) == content
    for length in range(len(body)):
        with pytest.raises(WireError, match="body"):
            zstd.decompress(body[:length], MIB)
    for rest in (b"\x00", b"junk", body, bytes(1000)):
        with pytest.raises(WireError, match="body"):
            zstd.decompress(body + rest, MIB)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x28\xb5\x2f\xfd",
        b"\x50\x2a\x4d\x18\x00\x00\x00\x00",
        b"\x50\x2a\x4d\x18\x05\x00\x00\x00hello",
        b"\x50\x2a\x4d\x18\x00\x00\x00\x00" + frame((7, 5)),
        frame((7, 5), window=0xA8),
        frame((7, 5), last=False),
        frame((7, 5))[:-1],
        bytes(64),
    ],
    ids=["empty", "magic", "skippable", "skippable text", "skippable first", "window", "no last", "cut", "zeros"],
)
def test_what_is_no_single_frame_is_refused(body: bytes) -> None:
    with memory_below(20 * MIB), pytest.raises(WireError, match="body"):
        zstd.decompress(body, MIB)
