"""Joining the results of a call's chunks into one.

A metric's name ends in its reduction (`loss:sum`). tests/contract/test_logic_contract.py compares the rules with the
official client's.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

from tinsmith.errors import InvalidInputError
from tinsmith.wire.training import ForwardBackwardOutput

logger = logging.getLogger(__name__)


def combine(results: Sequence[ForwardBackwardOutput]) -> ForwardBackwardOutput:
    """One result for all chunks, in chunk order."""
    if not results:
        raise InvalidInputError("no results to combine")
    outputs = [output for result in results for output in result.loss_fn_outputs]
    return ForwardBackwardOutput(results[0].loss_fn_output_type, outputs, combine_metrics(results))


def combine_metrics(results: Sequence[ForwardBackwardOutput]) -> dict[str, float]:
    """The metrics that every chunk has, each reduced by its own rule, chunks weighted by their number of outputs."""
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
            logger.warning("metric %r cannot be joined from chunks; it is left out", name)
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
