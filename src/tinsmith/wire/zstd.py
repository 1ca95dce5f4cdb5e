"""zstd bodies, with a bound on what a few bytes can unfold to."""

from __future__ import annotations

import zstandard

from tinsmith.errors import LimitExceededError, WireError

LEVEL = 1
"""Half the time of level 3 for the same bytes on token data (bench/wire.py)."""
MAX_WINDOW_BYTES = 8 * 1024 * 1024
"""What a decoder may have to remember; RFC 8878 asks decoders to support this much, and clients need no more."""
_SLICE_BYTES = 256
"""Input fed at a time when a frame does not state its size: one slice unfolds to 8 MiB at the very most."""


def compress(body: bytes | memoryview) -> bytes:
    """One frame that states its content size."""
    return zstandard.ZstdCompressor(level=LEVEL, write_content_size=True).compress(body)


def decompress(body: bytes, max_bytes: int) -> bytes:
    """The content of exactly one frame, if it is at most `max_bytes` large."""
    if body[:4] != zstandard.FRAME_HEADER:
        raise WireError("body: not valid zstd: it does not begin with a frame", field="body")
    decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
    try:
        announced = zstandard.get_frame_parameters(body).content_size
        if announced in (zstandard.CONTENTSIZE_UNKNOWN, 0):  # a frame of 0 bytes is not decoded in one go
            return _decompress_slices(decompressor, body, max_bytes)
        if announced > max_bytes:
            raise _too_large(max_bytes)
        return decompressor.decompress(body, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise WireError(f"body: not valid zstd: {error}", field="body") from None


def _decompress_slices(decompressor: zstandard.ZstdDecompressor, body: bytes, max_bytes: int) -> bytes:
    frame = decompressor.decompressobj()
    parts, total, position = [], 0, 0
    while position < len(body) and not frame.eof:
        parts.append(frame.decompress(body[position : position + _SLICE_BYTES]))
        position += _SLICE_BYTES
        total += len(parts[-1])
        if total > max_bytes:
            raise _too_large(max_bytes)
    if not frame.eof:
        raise WireError("body: the zstd frame is cut off", field="body")
    if frame.unused_data or position < len(body):
        raise WireError("body: more follows after the zstd frame", field="body")
    return b"".join(parts)


def _too_large(max_bytes: int) -> LimitExceededError:
    return LimitExceededError(f"body: unpacks to more than the allowed {max_bytes} bytes", field="body")
