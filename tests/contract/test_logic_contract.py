"""Pure rules compared with the official client's own code: chunking, combining metrics, paths."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.official import NEWEST, Official, RefusedError
from support.official_values import datums

from tinsmith import InvalidInputError, types
from tinsmith.wire.rules.split_join import ChunkLimits, binary_bytes, combine_metrics, split

THOROUGH = settings(
    max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None
)
NEWEST_LINE = tuple(int(part) for part in NEWEST.split(".")[:2])


@THOROUGH
@given(st.lists(datums(NEWEST_LINE, binary=True), min_size=1, max_size=8), st.integers(1, 4), st.integers(0, 200))
def test_data_is_split_alike(newest: Official, data: list[Any], max_datums: int, max_bytes: int) -> None:
    theirs = newest.ask("chunk", data=data, max_datums=max_datums, max_bytes=max_bytes)
    ours = split(
        [types.Datum.from_builtins(datum) for datum in data],
        ChunkLimits(max_datums=max_datums, max_bytes=max_bytes),
        binary_bytes,
    )
    assert [len(chunk) for chunk in ours] == theirs


_METRICS = st.dictionaries(
    st.builds(
        "{}:{}".format,
        st.sampled_from(["a", "b", "loss"]),
        st.sampled_from(["sum", "mean", "min", "max", "slack", "unique"]),
    ),
    st.floats(-1e6, 1e6),
    max_size=6,
)


@THOROUGH
@given(st.lists(st.tuples(st.integers(1, 5), _METRICS), min_size=1, max_size=4))
def test_metrics_are_reduced_alike(newest: Official, parts: list[tuple[int, dict[str, float]]]) -> None:
    theirs = newest.ask("combine", parts=[{"count": count, "metrics": metrics} for count, metrics in parts])
    ours = combine_metrics([types.ForwardBackwardOutput("T", [{}] * count, metrics) for count, metrics in parts])
    assert ours.keys() == theirs.keys()
    assert ours == pytest.approx(theirs, rel=1e-12, abs=1e-6)


@THOROUGH
@given(st.lists(st.integers(0, 2**53).map(float), min_size=1, max_size=5))
def test_hashes_are_added_alike(newest: Official, values: list[float]) -> None:
    theirs = newest.ask("combine", parts=[{"count": 1, "metrics": {"h:hash2": value}} for value in values])
    ours = combine_metrics([types.ForwardBackwardOutput("T", [{}], {"h:hash2": value}) for value in values])
    assert ours == theirs


@pytest.mark.parametrize(
    "path",
    [
        "tinker://run/weights/a",
        "tinker://s:train:0/sampler_weights/0001",
        "tinker://r/external_weights/x",
        "tinker://r/weights/a/b",
        "tinker://r/weights",
        "tinker://r/other/a",
        "http://r/weights/a",
        "",
    ],
)
def test_paths_are_parsed_alike(newest: Official, path: str) -> None:
    try:
        theirs = newest.ask("parse_path", path=path)
    except RefusedError:
        with pytest.raises(InvalidInputError):
            types.ParsedCheckpointTinkerPath.from_tinker_path(path)
        return
    assert types.ParsedCheckpointTinkerPath.from_tinker_path(path).model_dump() == theirs
