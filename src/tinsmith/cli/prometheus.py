"""Percentiles out of the histograms that our server shows to Prometheus.

Does not know: how they were fetched. A percentile is the upper edge of its bucket: so long or less.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

_BUCKET = re.compile(r"^(tinsmith_(?:request|job)_seconds)_bucket\{([^}]*)\} ([0-9.eE+]+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
ANSWERING = "answering"
"""The stage of a request between its last byte and the answer's."""


@dataclass(frozen=True, slots=True)
class Timing:
    """How long one stage of one kind of request takes; None: longer than the widest bucket."""

    stage: str
    name: str
    count: int
    p50_s: float | None
    p95_s: float | None

    def plain(self) -> dict[str, Any]:
        return asdict(self)


def timings(text: str) -> list[Timing]:
    """The stages in the text of /metrics, those of jobs first, each by its name."""
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for metric, labels, value in _BUCKET.findall(text):
        named = dict(_LABEL.findall(labels))
        is_job = metric == "tinsmith_job_seconds"
        stage = named["stage"] if is_job else ANSWERING
        name = named["kind" if is_job else "route"]
        found.setdefault((stage, name), []).append((float(named["le"].replace("+Inf", "inf")), float(value)))
    order = ("waiting", "running", ANSWERING)
    return [
        Timing(stage, name, int(max(count for _, count in buckets)), *percentiles(buckets, (0.5, 0.95)))
        for (stage, name), buckets in sorted(found.items(), key=lambda item: (order.index(item[0][0]), item[0][1]))
    ]


def percentiles(buckets: list[tuple[float, float]], shares: Iterable[float]) -> list[float | None]:
    """The edges below which these shares lie; `buckets` are edges with the counts up to them."""
    ordered = sorted(buckets)
    total = ordered[-1][1]
    edges = (next(edge for edge, count in ordered if count >= share * total) for share in shares)
    return [None if edge == float("inf") else edge for edge in edges]
