"""Datums read in one pass equal those read field by field, and so do the errors of damaged ones."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from tinsmith.errors import TinkerError
from tinsmith.types import Datum, EncodedTextChunk, ModelInput
from tinsmith.wire.codecs import proto_training

plain = proto_training._plain_datum


def made(draw: random.Random) -> bytes:
    """The body of a datum, most often one that is read in one go."""
    tokens = [draw.randrange(600) for _ in range(draw.choice([1, 2, 5, 40]))]
    inputs: dict[str, Any] = {"target_tokens": np.array(tokens), "weights": np.ones(len(tokens), np.float32)}
    if draw.random() < 0.3:
        inputs["advantages"] = np.ones(len(tokens), np.float32)
    if draw.random() < 0.2:
        inputs["other"] = np.ones((2, 3), np.float32)
    if draw.random() < 0.2:
        inputs["of another length"] = np.arange(3)
    cut = draw.choice([0, 0, 1])
    chunks = [EncodedTextChunk(tokens=part) for part in (tokens[:cut], tokens[cut:]) if part]
    return proto_training._datum_message(Datum(ModelInput(chunks=chunks), inputs)).encode()


def damaged(body: bytes, draw: random.Random) -> bytes:
    """Some bytes changed, lost or added, half of them among the first, which say what follows."""
    bent = bytearray(body)
    for _ in range(draw.choice([0, 1, 1, 2, 4])):
        at = min(draw.randrange(14) if draw.random() < 0.5 else draw.randrange(len(bent)), len(bent) - 1)
        kind = draw.randrange(4)
        if kind < 2:
            bent[at] = draw.choice([0, 1, 2, 8, 10, 18, 26, 127, 128, 255, draw.randrange(256)])
        elif kind == 2 and len(bent) > 20:
            del bent[at : at + draw.choice([1, 2, 4, 8])]
        else:
            bent[at:at] = draw.randbytes(draw.choice([1, 4]))
    return bytes(bent)


def outcome(body: bytes) -> Any:
    try:
        return proto_training._read_datum(memoryview(body), "data[0]")
    except TinkerError as error:
        return type(error), str(error), getattr(error, "field", None)


@pytest.mark.parametrize("seed", range(3))
def test_both_ways_of_reading_agree(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(seed)
    bodies = [damaged(made(draw), draw) for _ in range(400)]
    in_one_go = [outcome(body) for body in bodies]
    assert sum(plain(memoryview(body)) is not None for body in bodies) > 50
    assert sum(isinstance(found, tuple) for found in in_one_go) > 50
    monkeypatch.setattr(proto_training, "_plain_datum", lambda data: None)
    assert in_one_go == [outcome(body) for body in bodies]


def test_ids_that_no_vocabulary_has_are_not_read_in_one_go() -> None:
    body = made(random.Random(5))
    datum = plain(memoryview(body))
    assert datum is not None
    first = np.array([datum.loss_fn_inputs["target_tokens"].array[0]]).tobytes()
    for number in (-1, 2**31):
        wrong = body.replace(first, np.array([number]).tobytes(), 1)
        assert plain(memoryview(wrong)) is None
        assert f"{number} is not a token id" in str(outcome(wrong))
