"""zstd bodies, with a limit on their unpacked size: a few bytes can unpack to gigabytes."""

from __future__ import annotations

import zstandard

from tinsmith.errors import LimitExceededError, WireError

LEVEL = 1
"""Takes half the time of level 3 and gives the same size on token data (bench/wire.py)."""
MAX_WINDOW_BYTES = 8 * 1024 * 1024
"""The largest window to allocate; RFC 8878 asks decoders to support this much, and clients need no more."""
_SLICE_BYTES = 256
"""The input fed at a time if a frame does not state its size: one slice unpacks to at most 8 MiB."""


def compress(body: bytes | memoryview) -> bytes:
    """Return one frame that states its content size."""
    return zstandard.ZstdCompressor(level=LEVEL, write_content_size=True).compress(body)


def decompress(body: bytes, max_bytes: int) -> bytes:
    """Return the content of exactly one frame; refuse more than `max_bytes`."""
    if body[:4] != zstandard.FRAME_HEADER:
        raise WireError("body: not valid zstd: it does not start with a frame", field="body")
    decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
    try:
        announced = zstandard.get_frame_parameters(body).content_size
        if announced in (zstandard.CONTENTSIZE_UNKNOWN, 0):  # a frame of 0 bytes cannot be decoded in one call
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
        raise WireError("body: the zstd frame is incomplete", field="body")
    if frame.unused_data or position < len(body):
        raise WireError("body: there is more data after the zstd frame", field="body")
    return b"".join(parts)


def _too_large(max_bytes: int) -> LimitExceededError:
    return LimitExceededError(f"body: unpacks to more than the allowed {max_bytes} bytes", field="body")
