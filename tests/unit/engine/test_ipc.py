"""Frames between API and engine process: each is decoded as it was sent, whatever pieces it arrives in."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinsmith.engine import ipc
from tinsmith.engine.protocol import CreateModel as Create
from tinsmith.engine.protocol import Done, LoraSpec, ModelCard, Sample, TokenEvent, Usage
from tinsmith.errors import WireError

COMMON = {"job_id": "j", "tenant": "t", "base_model": "b"}
TO_ENGINE: list[ipc.ToEngine] = [
    ipc.Submit(Create(**COMMON, model_id="m", lora=LoraSpec(rank=4, seed=-3)), False),
    ipc.Submit(Sample(**COMMON, body=b"\x00\xff", seed=2**63 - 1, directory="/d", adapter_key="k"), True),
    ipc.Cancel("j"),
    ipc.Stop(),
]
FROM_ENGINE: list[ipc.FromEngine] = [
    ipc.Ready(ModelCard(name="b", vocab_size=9, max_context_length=8)),
    ipc.StartFailed("no memory"),
    ipc.Began(["j", "k"]),
    ipc.StreamedTokens("j", TokenEvent(sample=1, tokens=(3, 4), logprobs=(-0.5, -1.0), stop_reason="stop")),
    ipc.Finished("j", Done(body=bytes(100_000), encoding="protobuf", usage=Usage(training=3), device_s=0.25)),
    ipc.Failed("j", "why", "user"),
    ipc.Cancelled("j"),
]


@given(st.lists(st.integers(1, 70_000), max_size=30))
def test_frames_survive_any_cut(sizes: list[int]) -> None:
    stream = b"".join(part for frame in FROM_ENGINE for part in ipc.encode(frame))
    cutter, got, position = ipc.FrameCutter(), [], 0
    for size in [*sizes, len(stream)]:
        for content in cutter.feed(stream[position : position + size]):
            got.append(ipc.decode_from_engine(content))
        position += size
    assert got == FROM_ENGINE


@pytest.mark.parametrize("frame", TO_ENGINE, ids=lambda frame: type(frame).__name__)
def test_jobs_come_back_as_they_were(frame: ipc.ToEngine) -> None:
    assert ipc.decode_to_engine(ipc.encode(frame)[1]) == frame


def test_noise_is_noticed() -> None:
    with pytest.raises(WireError, match="out of sync"):
        list(ipc.FrameCutter().feed(struct.pack("<I", 2**32 - 1)))
