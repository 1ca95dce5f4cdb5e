"""The arguments of a loss graph as JSON."""

from __future__ import annotations

import collections
import math
from typing import Any

import msgspec
import pytest
import torch
import torch.fx
from hypothesis import given, settings
from hypothesis import strategies as st

from tinsmith.client.losses.loss_graph import decode_argument, encode_argument
from tinsmith.errors import InvalidInputError

ENCODED: list[tuple[Any, Any]] = [
    (None, None),
    (True, True),
    (3, 3),
    (0.5, 0.5),
    ("text", "text"),
    ([1, [2.0]], [1, [2.0]]),
    ((1, (None,)), {"tuple": [1, {"tuple": [None]}]}),
    ({"a": (1,)}, {"dict": {"a": {"tuple": [1]}}}),
    (slice(1, None, -2), {"slice": [1, None, -2]}),
    (..., {"ellipsis": True}),
    (math.inf, {"float": "inf"}),
    (-math.inf, {"float": "-inf"}),
    (torch.bfloat16, {"dtype": "bfloat16"}),
    (torch.device("cuda", 1), {"device": "cuda:1"}),
    (torch.strided, {"layout": "strided"}),
    (torch.channels_last, {"memory_format": "channels_last"}),
]


@pytest.mark.parametrize(
    ("value", "encoded"), ENCODED, ids=lambda value: getattr(value, "__name__", type(value).__name__)
)
def test_arguments_have_their_own_spelling(value: Any, encoded: Any) -> None:
    assert encode_argument(value) == encoded
    decoded = decode_argument(msgspec.json.decode(msgspec.json.encode(encoded)), {})
    assert decoded == value
    assert type(decoded) is type(value)


def test_nan_and_references_have_theirs() -> None:
    graph = torch.fx.Graph()
    node = graph.placeholder("x")
    assert encode_argument((node, math.nan)) == {"tuple": [{"ref": "x"}, {"float": "nan"}]}
    decoded = decode_argument({"tuple": [{"ref": "x"}, {"float": "nan"}]}, {"x": 7})
    assert decoded[0] == 7
    assert math.isnan(decoded[1])


_SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4)
_INDICES = st.none() | st.integers(-5, 5)
ARGUMENTS = st.recursive(
    _SCALARS | st.just(...) | st.builds(slice, _INDICES, _INDICES, _INDICES) | st.just(torch.float16),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(ARGUMENTS)
@settings(deadline=None, max_examples=200)
def test_every_argument_comes_back(value: Any) -> None:
    assert decode_argument(encode_argument(value), {}) == value


@pytest.mark.parametrize(
    "value",
    [1j, b"x", {1, 2}, {1: 2}, range(3), object(), collections.deque()],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_other_arguments_are_refused(value: Any) -> None:
    with pytest.raises(InvalidInputError, match=f"torch.exp gets a {type(value).__name__}, which cannot be sent"):
        encode_argument(value, "torch.exp")


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"ref": "x", "tuple": []},
        {"ref": "unknown"},
        {"ref": ["x"]},
        {"tuple": 3},
        {"dict": []},
        {"slice": [1, 2]},
        {"ellipsis": False},
        {"float": "1.0"},
        {"dtype": "nn"},
        {"dtype": "load"},
        {"layout": "float32"},
        {"device": "no such device"},
        {"memory_format": 3},
        {"eval": "1"},
        [{"other": 1}],
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_what_no_encoder_writes_is_refused(value: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"^argument: "):
        decode_argument(value, {"x": 1})
