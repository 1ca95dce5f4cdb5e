"""Joining metrics of pieces into those of a whole, by the suffix of their names: sum, mean, min, max.

The rules are those by which clients join the chunks of a call (`wire/combining.py`), so that the cut does not matter: a
mean is weighted by datums.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor


class MetricTotals:
    """Metrics of the pieces seen so far. Numbers stay on their device until `result`."""

    def __init__(self) -> None:
        self._values: dict[str, Tensor] = {}
        self._datums = 0

    def add(self, metrics: Mapping[str, Tensor], datums: int = 1) -> None:
        """Join in one piece, which has `datums` datums (only means ask for that)."""
        self._datums += datums
        for name, value in metrics.items():
            suffix = name.rpartition(":")[2]
            if suffix not in _JOINS:
                raise ValueError(f"metric {name!r}: the name must end in :{', :'.join(_JOINS)}")
            value = value.detach() * datums if suffix == "mean" else value.detach()
            self._values[name] = _JOINS[suffix](self._values[name], value) if name in self._values else value

    def result(self) -> dict[str, float]:
        """The metrics of all pieces together."""
        return {
            name: float(value) / (max(self._datums, 1) if name.endswith(":mean") else 1)
            for name, value in self._values.items()
        }


_JOINS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "mean": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
}
