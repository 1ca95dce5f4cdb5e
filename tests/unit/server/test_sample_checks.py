"""What is wrong with a sample request: each refusal names its field."""

from __future__ import annotations

from typing import Any

import pytest

from tinsmith.engine.base import ModelCard
from tinsmith.errors import InvalidInputError
from tinsmith.server.sample_checks import MAX_STOP_CHARS, MAX_STOPS, check_sample
from tinsmith.wire.chunks import ImageAssetPointerChunk
from tinsmith.wire.inputs import ModelInput
from tinsmith.wire.sampling import SampleRequest, SamplingParams
from tinsmith.wire.tensors import TensorData

CARD = ModelCard(name="small", vocab_size=100, max_context_length=16)


def request(tokens: list[int] | None = None, params: dict[str, Any] | None = None, **fields: Any) -> SampleRequest:
    prompt = ModelInput.from_ints([1, 2, 3] if tokens is None else tokens)
    return SampleRequest(
        **{"prompt": prompt, "sampling_params": SamplingParams(**{"max_tokens": 4, **(params or {})}), **fields}
    )


def refused(made: SampleRequest, field: str, says: str) -> None:
    with pytest.raises(InvalidInputError, match=says) as caught:
        check_sample(made, CARD, max_samples=8)
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: ")


def test_what_is_fine() -> None:
    assert check_sample(request(), CARD, max_samples=8) == 3
    assert check_sample(request([0, 99], {"max_tokens": 14, "temperature": 0.0}), CARD, max_samples=8) == 2
    assert check_sample(request(params={"max_tokens": 0, "top_k": 1, "top_p": 1e-9}), CARD, max_samples=8) == 3
    assert check_sample(request([1] * 15, {"max_tokens": None}), CARD, max_samples=8) == 15
    assert check_sample(request(params={"stop": []}, num_samples=8), CARD, max_samples=8) == 3
    assert check_sample(request(params={"stop": [0, 99], "seed": -(2**63)}), CARD, max_samples=8) == 3
    targets = TensorData(data=[-1, 99, 0, 5], dtype="int64", shape=[2, 2])
    assert check_sample(request(target_prompt_logprobs=targets, prompt_logprobs_last_n=2), CARD, max_samples=8) == 3


@pytest.mark.parametrize(
    ("tokens", "field", "says"),
    [
        ([], "prompt", "is empty"),
        ([1, 100], "prompt.chunks[0].tokens[1]", r"100 is not a token of small \(0 to 99\)"),
        ([1] * 16, "prompt", "16 tokens leave no room in small's context of 16"),
    ],
)
def test_prompts(tokens: list[int], field: str, says: str) -> None:
    refused(request(tokens), field, says)


def test_a_prompt_that_is_no_text() -> None:
    image = ImageAssetPointerChunk(format="png", location="x", expected_tokens=3)
    refused(request(prompt=ModelInput(chunks=[image])), "prompt.chunks[0]", "small reads text only, not image_asset")


@pytest.mark.parametrize(
    ("params", "field", "says"),
    [
        ({"max_tokens": 14}, "max_tokens", r"14 is more than the 13 that fit behind a prompt of 3 tokens"),
        ({"temperature": -0.1}, "temperature", "-0.1 is not 0"),
        ({"top_p": 0.0}, "top_p", r"0.0 is not in \(0, 1\]"),
        ({"top_p": 1.1}, "top_p", "1.1"),
        ({"top_k": 0}, "top_k", "0 is not -1"),
        ({"top_k": -2}, "top_k", "-2 is not -1"),
        ({"seed": 2**63}, "seed", "more than 64 bits"),
        ({"stop": ["x"] * (MAX_STOPS + 1)}, "stop", f"{MAX_STOPS + 1} are more than {MAX_STOPS}"),
        ({"stop": ["a", ""]}, "stop[1]", "a text of 0 characters"),
        ({"stop": ""}, "stop[0]", "a text of 0 characters"),
        ({"stop": "x" * (MAX_STOP_CHARS + 1)}, "stop[0]", "1 to 1000 are allowed"),
        ({"stop": [1, 100]}, "stop[1]", "100 is not a token of small"),
        ({"stop": [-1]}, "stop[0]", "-1 is not a token"),
    ],
)
def test_parameters(params: dict[str, Any], field: str, says: str) -> None:
    refused(request(params=params), f"sampling_params.{field}", says)


@pytest.mark.parametrize(
    ("fields", "field", "says"),
    [
        ({"num_samples": 9}, "num_samples", "9 is more than 8"),
        ({"topk_prompt_logprobs": 101}, "topk_prompt_logprobs", "101 is more than 100"),
        ({"topk_sample_logprobs": 101}, "topk_sample_logprobs", "101 is more than 100"),
        ({"prompt_alt_tokens_k": 2000}, "prompt_alt_tokens_k", "2000 is more than 100"),
        ({"prompt_logprobs_last_n": 3}, "prompt_logprobs_last_n", "3 is not between 1 and 2"),
    ],
)
def test_extras(fields: dict[str, Any], field: str, says: str) -> None:
    refused(request(**fields), field, says)


@pytest.mark.parametrize(
    ("targets", "says"),
    [
        (TensorData(data=[1, 2], dtype="int64"), r"has shape \[2\]; \[2, K\] is needed"),
        (TensorData(data=[1, 2, 3], dtype="int64", shape=[3, 1]), r"has shape \[3, 1\]"),
        (TensorData(data=[1.0, 2.0], dtype="float32", shape=[2, 1]), "has dtype float32"),
        (TensorData(data=[1, 100], dtype="int64", shape=[2, 1]), "not -1 or a token of small"),
        (TensorData(data=[1, -2], dtype="int64", shape=[2, 1]), "not -1 or a token of small"),
    ],
)
def test_targets(targets: TensorData, says: str) -> None:
    refused(request(target_prompt_logprobs=targets), "target_prompt_logprobs", says)


def test_tables_that_are_too_large() -> None:
    huge = ModelCard(name="huge", vocab_size=10**6, max_context_length=10**6)
    made = request([1] * 20_000, {"max_tokens": 1}, topk_prompt_logprobs=1000)
    with pytest.raises(InvalidInputError, match="1000 for each of 20000 positions is too much") as caught:
        check_sample(made, huge, max_samples=8)
    assert caught.value.field == "topk_prompt_logprobs"
