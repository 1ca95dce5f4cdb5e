"""Splitting the data of one forward_backward into requests.

Datums are taken in order; a chunk closes when the next one would exceed the byte limit, or at the datum limit. A single
datum above the byte limit goes alone. (Compared with the official client in tests/contract/test_logic_contract.py.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tinsmith.errors import InvalidInputError
from tinsmith.wire.chunks import EncodedTextChunk
from tinsmith.wire.inputs import Datum
from tinsmith.wire.service import ClientConfigResponse

T = TypeVar("T")

JSON_BYTES_PER_NUMBER = 10
"""What JSON-speaking clients reckon for one number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkLimits:
    """How much goes into one request."""

    max_datums: int = 1024
    max_bytes: int = 5_000_000

    @classmethod
    def of(cls, config: ClientConfigResponse) -> ChunkLimits:
        return cls(max_datums=config.fwdbwd_max_chunk_len, max_bytes=config.fwdbwd_max_chunk_bytes_count)


def binary_bytes(datum: Datum) -> int:
    """A datum's estimated size in protobuf: 4 bytes a token, media and tensors as they are."""
    return datum.estimated_bytes


def json_bytes(datum: Datum) -> int:
    """A datum's estimated size in JSON: 10 bytes a number, media as they are."""
    size = 0
    for chunk in datum.model_input.chunks:
        is_text = isinstance(chunk, EncodedTextChunk)
        size += chunk.length * JSON_BYTES_PER_NUMBER if is_text else chunk.estimated_bytes
    return size + sum(int(tensor.array.size) * JSON_BYTES_PER_NUMBER for tensor in datum.loss_fn_inputs.values())


def split(data: Sequence[T], limits: ChunkLimits, size_of: Callable[[T], int]) -> list[list[T]]:
    """The chunks, in order; together they are the data."""
    if not data:
        raise InvalidInputError("No data provided: pass at least one datum", field="data")
    chunks: list[list[T]] = []
    filled = 0
    for datum in data:
        size = size_of(datum)
        if not chunks or len(chunks[-1]) >= limits.max_datums or filled + size > limits.max_bytes:
            chunks.append([])
            filled = 0
        chunks[-1].append(datum)
        filled += size
    return chunks
