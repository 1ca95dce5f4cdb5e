"""Split the data of one forward_backward call into requests, and join their results into one.

Datums are taken in order; a chunk is closed when the next datum would exceed the byte limit, or at the datum limit. A
datum above the byte limit is sent alone. Results are joined metric by metric: a metric's name ends in its reduction
(`loss:sum`). tests/contract/test_logic_contract.py compares both with the official client.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tinsmith.errors import InvalidInputError
from tinsmith.wire.messages.service import ClientConfigResponse
from tinsmith.wire.messages.training import ForwardBackwardOutput
from tinsmith.wire.values.chunks import EncodedTextChunk
from tinsmith.wire.values.inputs import Datum

logger = logging.getLogger(__name__)

T = TypeVar("T")

JSON_BYTES_PER_NUMBER = 10
"""The estimate of official clients that send JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkLimits:
    """The most that goes into one request."""

    max_datums: int = 1024
    max_bytes: int = 5_000_000

    @classmethod
    def of(cls, config: ClientConfigResponse) -> ChunkLimits:
        return cls(max_datums=config.fwdbwd_max_chunk_len, max_bytes=config.fwdbwd_max_chunk_bytes_count)


def binary_bytes(datum: Datum) -> int:
    """Return a datum's estimated size in protobuf: 4 bytes per token, media and tensors at their size."""
    return datum.estimated_bytes


def json_bytes(datum: Datum) -> int:
    """Return a datum's estimated size in JSON: 10 bytes per number, media at their size."""
    size = 0
    for chunk in datum.model_input.chunks:
        is_text = isinstance(chunk, EncodedTextChunk)
        size += chunk.length * JSON_BYTES_PER_NUMBER if is_text else chunk.estimated_bytes
    return size + sum(int(tensor.array.size) * JSON_BYTES_PER_NUMBER for tensor in datum.loss_fn_inputs.values())


def split(data: Sequence[T], limits: ChunkLimits, size_of: Callable[[T], int]) -> list[list[T]]:
    """Return the chunks, in order."""
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


def combine(results: Sequence[ForwardBackwardOutput]) -> ForwardBackwardOutput:
    """Return one result for all chunks, in their order."""
    if not results:
        raise InvalidInputError("no results to combine")
    outputs = [output for result in results for output in result.loss_fn_outputs]
    return ForwardBackwardOutput(results[0].loss_fn_output_type, outputs, combine_metrics(results))


def combine_metrics(results: Sequence[ForwardBackwardOutput]) -> dict[str, float]:
    """Join the metrics that every chunk has, each by its own reduction; a mean weighs chunks by their datums."""
    weights = [len(result.loss_fn_outputs) for result in results]
    combined: dict[str, float] = {}
    for name in results[0].metrics:
        if not all(name in result.metrics for result in results):
            continue
        values = [result.metrics[name] for result in results]
        reduction = name.rpartition(":")[2] if ":" in name else ""
        if reduction == "unique":
            combined |= {name if i == 0 else f"{name}_{i}": value for i, value in enumerate(values)}
        elif reduction in _REDUCTIONS and not (reduction.startswith("hash") and not all(map(math.isfinite, values))):
            combined[name] = _REDUCTIONS[reduction](values, weights)
        elif len(values) == 1:
            combined[name] = values[0]
        else:
            logger.warning(
                "metric %r is left out of the result: its name does not say how to join the values of chunks",
                name,
            )
    return combined


def _mean(values: Sequence[float], weights: Sequence[int]) -> float:
    total = sum(weights)
    if total == 0:
        return sum(values) / len(values)
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / total


def _slack(values: Sequence[float], weights: Sequence[int]) -> float:
    return max(values) - _mean(values, weights)


_REDUCTIONS: dict[str, Callable[[Sequence[float], Sequence[int]], float]] = {
    "sum": lambda values, weights: sum(values),
    "mean": _mean,
    "min": lambda values, weights: min(values),
    "max": lambda values, weights: max(values),
    "slack": _slack,
    "hash2": lambda values, weights: sum(int(value) for value in values) % 2**64,
    "hash_unordered": lambda values, weights: sum(int(value) for value in values) % 2**64,
}
