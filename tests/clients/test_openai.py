"""The openai package against a server: its answers are those of the same samples through the Tinker protocol."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.clients import Program, Served

from tinsmith import ModelInput, SamplingClient, SamplingParams, ServiceClient

PROMPT = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def said(place: Path, server: Served, tuned: str) -> dict[str, Any]:
    """What the program printed."""
    answers: dict[str, Any] = Program("openai", place, server).script("openai_program.py", server.model, tuned)
    return answers


@pytest.fixture
def sampler(service: ServiceClient, tuned: str) -> SamplingClient:
    return service.create_sampling_client(model_path=tuned)


def encoded(sampler: SamplingClient, text: str) -> list[int]:
    tokens: list[int] = sampler.get_tokenizer().encode(text, add_special_tokens=False)
    return tokens


def test_completions_are_the_samples_of_the_same_seed(said: dict[str, Any], sampler: SamplingClient) -> None:
    answer = said["completions"]
    params = SamplingParams(max_tokens=8, temperature=1.0, seed=7)
    prompt = encoded(sampler, "the")
    (sequence,) = sampler.sample(ModelInput.from_ints(prompt), 1, params).result().sequences
    assert answer["logprobs"]["token_logprobs"] == list(sequence.logprobs or [])
    assert [len(alternatives) for alternatives in answer["logprobs"]["top_logprobs"]] == [2] * len(sequence.tokens)
    assert answer["text"] == sampler.get_tokenizer().decode(sequence.tokens, skip_special_tokens=True)
    assert answer["streamed"] == answer["text"]
    usage = {"prompt_tokens": len(prompt), "completion_tokens": len(sequence.tokens)}
    assert answer["usage"].items() >= usage.items()
    assert answer["streamed_usage"].items() >= usage.items()
    assert answer["several"] == [0, 1, 2, 3]


def test_a_text_can_be_scored(said: dict[str, Any], sampler: SamplingClient) -> None:
    scored = said["completions"]["scored"]
    logprobs = sampler.compute_logprobs(ModelInput.from_ints(encoded(sampler, "the end"))).result()
    assert scored["text"] == "the end"
    assert scored["logprobs"]["token_logprobs"] == logprobs
    assert scored["logprobs"]["tokens"] == ["the", " ", "e", "n", "d"]
    assert scored["logprobs"]["text_offset"] == [0, 3, 4, 5, 6]


def test_chat(said: dict[str, Any], sampler: SamplingClient, tuned: str) -> None:
    answer = said["chat"]
    assert (answer["role"], answer["content"], answer["finish"]) == ("assistant", "Hello there", "stop")
    assert answer["streamed"] == "Hello there"
    assert answer["base"] != "Hello there", "a checkpoint was asked for, and the base model is another"
    assert answer["model"] == tuned
    assert answer["stopped"] == ["Hel", "stop"]
    prompt = encoded(sampler, PROMPT)
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    assert answer["streamed_usage"]["total_tokens"] == answer["usage"]["total_tokens"]
    tokens = encoded(sampler, "Hello there")
    logprobs = sampler.compute_logprobs(ModelInput.from_ints([*prompt, *tokens])).result()[len(prompt) :]
    listed = answer["logprobs"][: len(tokens)]
    assert [token["logprob"] for token in listed] == pytest.approx(logprobs, abs=1e-5)
    assert b"".join(bytes(token["bytes"]) for token in listed) == b"Hello there"
    assert all(len(token["top_logprobs"]) == 2 for token in listed)


def test_tools(said: dict[str, Any]) -> None:
    answer = said["tools"]
    assert answer["finish"] == "tool_calls"
    assert answer["call"] == ["add", {"a": 2, "b": 3}]
    assert not answer["content"]
    assert answer["answer"] == "It is 5"
    assert answer["streamed"][0] == "tool_calls"


def test_masks_make_a_model_that_knows_nothing_write_what_was_asked_for(said: dict[str, Any]) -> None:
    answer = said["forced"]
    assert answer["call"] == ["add", ["a", "b"]]
    assert answer["finish"] == "stop"
    assert set(answer["parsed"]) == {"city", "size"}


def test_several_at_once(said: dict[str, Any]) -> None:
    assert said["together"] == ["Hello there", "See you", "Hello there", "left"]


def test_it_lists_the_models(said: dict[str, Any], server: Served, tuned: str) -> None:
    assert {server.model, tuned} <= set(said["models"])


@pytest.mark.parametrize(
    ("attempt", "kind", "status", "says"),
    [
        ("gone", "NotFoundError", 404, "does not exist"),
        ("unknown", "NotFoundError", 404, "gpt-9"),
        ("parameter", "BadRequestError", 400, "best_of"),
        ("temperature", "BadRequestError", 400, "temperature"),
        ("key", "AuthenticationError", 401, "key"),
        ("embeddings", "BadRequestError", 400, "embeddings"),
        ("long", "BadRequestError", 400, "1000 tokens"),
    ],
)
def test_refusals_are_its_own_errors(said: dict[str, Any], attempt: str, kind: str, status: int, says: str) -> None:
    raised = said["refused"][attempt]
    assert raised[:2] == [kind, status]
    assert says in raised[-1]


def test_a_prompt_that_does_not_fit_has_the_code_that_programs_know(said: dict[str, Any]) -> None:
    assert said["refused"]["long"][2] == "context_length_exceeded"
