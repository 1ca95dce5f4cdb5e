"""The rules for sample requests: each refusal names its field, and server and engine agree on every request."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinsmith.engine.models.config import ModelConfig
from tinsmith.engine.protocol import ModelCard
from tinsmith.engine.sampling.plan import plan_sample
from tinsmith.errors import InvalidInputError
from tinsmith.server.bodies.questions import SampleQuestion
from tinsmith.server.bodies.read import read_sample
from tinsmith.wire.codecs import json_codec
from tinsmith.wire.message import NOT_GIVEN
from tinsmith.wire.messages.sampling import OutputFormat, SampleRequest, SamplingParams
from tinsmith.wire.rules.sample_rules import MAX_TOPK, check_options, check_sample
from tinsmith.wire.values.chunks import ImageAssetPointerChunk
from tinsmith.wire.values.inputs import ModelInput
from tinsmith.wire.values.tensors import TensorData

CARD = ModelCard(name="small", vocab_size=100, max_context_length=16)


def request(tokens: list[int] | None = None, params: dict[str, Any] | None = None, **fields: Any) -> SampleRequest:
    prompt = ModelInput.from_ints([1, 2, 3] if tokens is None else tokens)
    return SampleRequest(
        **{"prompt": prompt, "sampling_params": SamplingParams(**{"max_tokens": 4, **(params or {})}), **fields}
    )


def check(made: SampleRequest, card: ModelCard = CARD) -> int:
    return check_sample(made, vocab_size=card.vocab_size, max_context_length=card.max_context_length)


def refused(made: SampleRequest, field: str, says: str) -> None:
    with pytest.raises(InvalidInputError, match=says) as caught:
        check(made)
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: ")


def test_what_is_fine() -> None:
    assert check(request()) == 3
    assert check(request([0, 99], {"max_tokens": 14, "temperature": 0.0})) == 2
    assert check(request(params={"max_tokens": 0, "top_k": 1, "top_p": 1e-9})) == 3
    assert check(request([1] * 15, {"max_tokens": None})) == 15
    assert check(request(params={"stop": []}, num_samples=8)) == 3
    assert check(request(params={"stop": [0, 99], "seed": -(2**63)})) == 3
    targets = TensorData(data=[-1, 99, 0, 5], dtype="int64", shape=[2, 2])
    made = request(target_prompt_logprobs=targets, prompt_logprobs=True, prompt_logprobs_last_n=2)
    assert check(made) == 3


@pytest.mark.parametrize(
    ("tokens", "field", "says"),
    [
        ([], "prompt", "is empty"),
        ([1, 100], "prompt.chunks[0].tokens[1]", r"100 is not a token of this model \(allowed: 0 to 99\)"),
        ([1] * 16, "prompt", "16 tokens leave no room for a sample; this model's maximum context length is 16"),
    ],
)
def test_prompts(tokens: list[int], field: str, says: str) -> None:
    refused(request(tokens), field, says)


def test_a_prompt_that_is_no_text() -> None:
    image = ImageAssetPointerChunk(format="png", location="x", expected_tokens=3)
    refused(request(prompt=ModelInput(chunks=[image])), "prompt.chunks[0]", "type image_asset")


@pytest.mark.parametrize(
    ("params", "field", "says"),
    [
        ({"max_tokens": 14}, "max_tokens", "14 is more than the 13 tokens that fit after a prompt of 3"),
        ({"temperature": -0.1}, "temperature", "-0.1 is not allowed; it must be 0"),
        ({"top_p": 0.0}, "top_p", "0.0 is not allowed; it must be above 0 and at most 1"),
        ({"top_p": 1.1}, "top_p", "1.1"),
        ({"top_k": 0}, "top_k", "0 is not allowed; it must be -1"),
        ({"top_k": -2}, "top_k", "-2 is not allowed"),
        ({"stop": ["a", ""]}, "stop[1]", "is an empty string"),
        ({"stop": ""}, "stop[0]", "is an empty string"),
        ({"stop": [1, 100]}, "stop[1]", "100 is not a token of this model"),
        ({"stop": [-1]}, "stop[0]", "-1 is not a token"),
        ({"stop": ["x" * 999] * 5}, "stop", "the strings take 4995 bytes together; 4096 are allowed"),
        ({"min_p": 1.5}, "min_p", "1.5 is not allowed; it must be 0 to 1"),
        ({"min_p": -0.1}, "min_p", "-0.1 is not allowed"),
        ({"frequency_penalty": 2.5}, "frequency_penalty", "2.5 is not allowed; it must be -2 to 2"),
        ({"presence_penalty": -2.5}, "presence_penalty", "-2.5 is not allowed; it must be -2 to 2"),
        ({"repetition_penalty": 0.0}, "repetition_penalty", "0.0 is not allowed; it must be above 0 and at most 10"),
        ({"repetition_penalty": 10.5}, "repetition_penalty", "10.5 is not allowed"),
        ({"logit_bias": {1: 0.0, 2: -101.0}}, "logit_bias[2]", "-101.0 is not allowed; it must be -100 to 100"),
        ({"logit_bias": {1: 0.0, 100: 1.0}}, "logit_bias", r"100 is not a token of this model \(allowed: 0 to 99\)"),
        ({"logit_bias": {-1: 0.0}}, "logit_bias", "-1 is not a token"),
        ({"stop_token_ids": [1, 100]}, "stop_token_ids[1]", "100 is not a token of this model"),
        (
            {"output_format": OutputFormat(type="json_object", schema="{}")},
            "output_format.schema",
            "must be empty for type json_object; use type json_schema",
        ),
        ({"output_format": OutputFormat(type="regex")}, "output_format.schema", "is empty; type regex needs one"),
        (
            {"output_format": OutputFormat(type="lark", schema="\u00fc" * 40_000)},
            "output_format.schema",
            "has 80000 bytes; at most 65536 are allowed",
        ),
    ],
)
def test_parameters(params: dict[str, Any], field: str, says: str) -> None:
    refused(request(params=params), f"sampling_params.{field}", says)


@pytest.mark.parametrize(
    ("fields", "field", "says"),
    [
        ({"topk_prompt_logprobs": 101}, "topk_prompt_logprobs", "101 is more than the 100 that are allowed"),
        ({"topk_sample_logprobs": 101}, "topk_sample_logprobs", "101 is more than the 100 that are allowed"),
        ({"prompt_alt_tokens_k": 2000}, "prompt_alt_tokens_k", "2000 is more than the 1000 that are allowed"),
        ({"prompt_logprobs_last_n": 1}, "prompt_logprobs_last_n", "prompt_logprobs is not"),
        ({"prompt_logprobs_last_n": 1, "topk_prompt_logprobs": 2}, "prompt_logprobs_last_n", "prompt_logprobs is not"),
        (
            {"prompt_logprobs_last_n": 3, "prompt_logprobs": True},
            "prompt_logprobs_last_n",
            "3 is not allowed; a prompt of 3 tokens has 2 logprobs",
        ),
    ],
)
def test_extras(fields: dict[str, Any], field: str, says: str) -> None:
    refused(request(**fields), field, says)


@pytest.mark.parametrize(
    ("targets", "says"),
    [
        (TensorData(data=[1, 2], dtype="int64"), r"has shape \[2\]; a prompt of 3 tokens needs \[2, K\]"),
        (TensorData(data=[1, 2, 3], dtype="int64", shape=[3, 1]), r"has shape \[3, 1\]"),
        (TensorData(data=[1.0, 2.0], dtype="float32", shape=[2, 1]), "has dtype float32"),
        (TensorData(data=[1, 100], dtype="int64", shape=[2, 1]), "holds 100, which is not a token"),
        (TensorData(data=[1, -2], dtype="int64", shape=[2, 1]), "holds -2, which is not a token"),
    ],
)
def test_targets(targets: TensorData, says: str) -> None:
    refused(request(target_prompt_logprobs=targets), "target_prompt_logprobs", says)


def test_tables_that_are_too_large() -> None:
    huge = ModelCard(name="huge", vocab_size=10**6, max_context_length=10**6)
    made = request([1] * 20_000, {"max_tokens": 1}, topk_prompt_logprobs=1000)
    with pytest.raises(InvalidInputError, match="1000 for each of 20000 tokens is too many; 4194304 in all") as caught:
        check(made, huge)
    assert caught.value.field == "topk_prompt_logprobs"
    with pytest.raises(InvalidInputError, match="topk_sample_logprobs: 1000 for each of 999997000 tokens"):
        check(request(params={"max_tokens": None}, num_samples=1000, topk_sample_logprobs=1000), huge)
    wide = TensorData(data=[], dtype="int64", shape=[2, 2**40], sparse_crow_indices=[0, 0, 0], sparse_col_indices=[])
    with pytest.raises(InvalidInputError, match="has more than the 4194304 cells"):
        check(request(target_prompt_logprobs=wide), huge)


def test_options_are_checked_without_a_model() -> None:
    """The client knows no vocabulary and no context, and leaves these, and images, to the server."""
    check_options(request([10**6] * 100, {"max_tokens": 10**6, "stop": [10**6]}, topk_prompt_logprobs=10**5))
    image = ImageAssetPointerChunk(format="png", location="x", expected_tokens=3)
    check_options(request(prompt=ModelInput(chunks=[image]), prompt_logprobs=True, prompt_logprobs_last_n=9))
    with pytest.raises(InvalidInputError, match=r"top_p: 2\.0 is not allowed"):
        check_options(request(params={"top_p": 2.0}))
    with pytest.raises(InvalidInputError, match=r"has shape \[1, 1\]"):
        check_options(request(target_prompt_logprobs=TensorData(data=[1], dtype="int64", shape=[1, 1])))


VOCABULARY, CONTEXT = 20, 8
MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=VOCABULARY,
    hidden_size=8,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    intermediate_size=8,
    max_context_length=CONTEXT,
    eos_token_ids=(0,),
)
SERVED = ModelCard(name="small", vocab_size=VOCABULARY, max_context_length=CONTEXT)

near = st.integers(-2, VOCABULARY + 2)
tables = st.sampled_from([0, 0, 0, 1, VOCABULARY, VOCABULARY + 1, MAX_TOPK + 1])
stops = st.one_of(
    st.just(NOT_GIVEN),
    st.none(),
    st.lists(near, max_size=3),
    st.lists(st.text(max_size=3), max_size=3),
    st.sampled_from(["", "end", "x" * 1000]),
)
targets = st.one_of(
    st.just(NOT_GIVEN),
    st.tuples(st.integers(0, CONTEXT), st.integers(0, 3), near).map(
        lambda made: TensorData(data=[made[2]] * (made[0] * made[1]), dtype="int64", shape=list(made[:2]))
    ),
    st.integers(0, CONTEXT).map(lambda size: TensorData(data=[1.0] * size, dtype="float32", shape=[size, 1])),
)
params = st.fixed_dictionaries(
    {
        "max_tokens": st.one_of(st.just(NOT_GIVEN), st.none(), st.integers(0, CONTEXT + 1)),
        "stop": stops,
        "temperature": st.sampled_from([0.0, 1.0, 2.5, -1.0]),
        "top_p": st.sampled_from([1.0, 0.5, 0.0, 1.5]),
        "top_k": st.integers(-2, 2),
    }
)
extras = st.fixed_dictionaries(
    {},
    optional={
        "num_samples": st.integers(1, 4),
        "prompt_logprobs": st.booleans(),
        "prompt_logprobs_last_n": st.integers(1, CONTEXT),
        "topk_prompt_logprobs": tables,
        "topk_sample_logprobs": tables,
        "prompt_alt_tokens_k": tables,
        "target_prompt_logprobs": targets,
    },
)


@settings(max_examples=1000, deadline=None)
@given(st.lists(st.integers(0, VOCABULARY), max_size=CONTEXT + 1), params, extras)
def test_server_and_engine_accept_the_same_requests(
    tokens: list[int], params: dict[str, Any], extras: dict[str, Any]
) -> None:
    """Both read the same bytes: the server before it journals a request, the engine before it plans the samples."""
    try:
        body = json_codec.encode(request(tokens, params, **extras))
    except InvalidInputError:
        return  # no client can send it
    question = SampleQuestion(cards=(SERVED,), max_samples=100)
    fault = read_sample(question, body).faults.get(SERVED.name)
    refusal = None
    try:
        plan = plan_sample(json_codec.decode(body, SampleRequest), MODEL, CONTEXT)
    except InvalidInputError as error:
        refusal = error.message
    assert refusal == (fault.text if fault is not None else None)
    if refusal is None:
        assert 0 <= plan.max_new <= CONTEXT - len(tokens)
        check_options(json_codec.decode(body, SampleRequest))
