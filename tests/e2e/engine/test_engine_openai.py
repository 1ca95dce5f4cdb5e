"""The endpoints for OpenAI and Anthropic clients on a real engine: formats are enforced, stops of all kinds work
together, and tokens and logprobs are those of the Tinker API."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from support.tiny_server import tiny_server

from tinsmith import ModelInput, SamplingParams, ServiceClient
from tinsmith.text.tokenizer import load_tokenizer

TOOLS = "{%- if tools %}{{ tools | tojson }}<tool_call>{%- endif %}"
TEMPLATE = TOOLS + "{%- for message in messages %}{{ message.content }}{%- endfor %}"


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    place = tmp_path_factory.mktemp("openai")
    (place / "tools.jinja").write_text(TEMPLATE)
    with tiny_server(place, 512, "--chat-template", f"caller={place / 'tools.jinja'}", "--alias", "caller=tiny") as env:
        yield {**env, "TOKENIZER": str(place / "model")}


def post(env: dict[str, str], path: str, **fields: Any) -> Any:
    body = json.dumps({"model": "tiny", **fields}).encode()
    headers = {"authorization": f"Bearer {env['TINKER_API_KEY']}", "content-type": "application/json"}
    request = urllib.request.Request(f"{env['TINKER_BASE_URL']}/v1/{path}", body, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


def test_tokens_and_logprobs_are_those_of_the_tinker_api(env: dict[str, str]) -> None:
    tokens = load_tokenizer(env["TOKENIZER"]).encode("the band")
    with ServiceClient(base_url=env["TINKER_BASE_URL"], api_key=env["TINKER_API_KEY"]) as service:
        sampler = service.create_sampling_client(base_model="tiny")
        params = SamplingParams(max_tokens=20, seed=11, temperature=0.8)
        native = sampler.sample(ModelInput.from_ints(tokens), 2, params).result(60)
        scores = sampler.compute_logprobs(ModelInput.from_ints(tokens)).result(60)
    asked = {"prompt": "the band", "n": 2, "logprobs": 3}
    answer = post(env, "completions", **asked, max_tokens=20, seed=11, temperature=0.8)
    for choice, sequence in zip(answer["choices"], native.sequences, strict=True):
        assert choice["logprobs"]["token_logprobs"] == sequence.logprobs
        assert choice["finish_reason"] == sequence.stop_reason
    assert answer["usage"]["prompt_tokens"] == len(tokens)
    echoed = post(env, "completions", prompt="the band", max_tokens=0, echo=True, logprobs=1)["choices"][0]
    assert echoed["logprobs"]["token_logprobs"] == scores
    assert echoed["text"] == "the band"


def test_the_cached_part_of_a_prompt_is_told(env: dict[str, str]) -> None:
    usages = [post(env, "completions", prompt="and the band " * 20, max_tokens=2)["usage"] for _ in range(2)]
    first, second = (usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert 0 <= first < second < usages[1]["prompt_tokens"]


def test_strings_and_special_tokens_stop_together(env: dict[str, str]) -> None:
    special = load_tokenizer(env["TOKENIZER"]).special_texts()[0]
    plain = post(env, "completions", prompt="the", max_tokens=60, seed=1, stop=["\x00never"])
    text = plain["choices"][0]["text"]
    found = re.search(r"[!-~]{2,}", text[1:])
    assert found is not None
    stop = found[0]
    cut = post(env, "completions", prompt="the", max_tokens=60, seed=1, stop=[stop, special])
    assert cut["choices"][0]["text"] == text[: text.index(stop)]
    assert cut["choices"][0]["finish_reason"] == "stop"


def test_an_answer_follows_its_schema(env: dict[str, str]) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 22]}},
        "required": ["ok", "n"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    }
    for seed in range(3):
        answer = post(
            env,
            "chat/completions",
            messages=[{"role": "user", "content": "x"}],
            seed=seed,
            response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": schema}},
        )
        found = json.loads(answer["choices"][0]["message"]["content"])
        assert set(found) == {"ok", "n"}
        assert found["n"] in (1, 22)


def test_a_tool_that_must_be_called_is_called(env: dict[str, str]) -> None:
    parameters = {
        "type": "object",
        "properties": {"at": {"enum": ["left", "right"]}},
        "required": ["at"],
        "additionalProperties": False,
    }
    tools = [{"type": "function", "function": {"name": name, "parameters": parameters}} for name in ("look", "go")]
    for choice in ("required", {"type": "function", "function": {"name": "go"}}):
        answer = post(
            env,
            "chat/completions",
            model="caller",
            messages=[{"role": "user", "content": "x"}],
            tools=tools,
            tool_choice=choice,
        )
        (call,) = answer["choices"][0]["message"]["tool_calls"]
        assert call["function"]["name"] in (("look", "go") if choice == "required" else ("go",))
        assert json.loads(call["function"]["arguments"])["at"] in ("left", "right")
        assert answer["choices"][0]["finish_reason"] == "tool_calls"


def test_a_template_that_the_operator_chose_is_the_aliases_alone(env: dict[str, str]) -> None:
    turns = [{"role": "user", "content": "the"}]
    size = len(load_tokenizer(env["TOKENIZER"]).encode("the", add_special_tokens=False))
    assert post(env, "chat/completions", model="caller", messages=turns, max_tokens=1)["usage"]["prompt_tokens"] == size
    own = post(env, "chat/completions", messages=turns, max_tokens=1)["usage"]["prompt_tokens"]
    assert own > size


def test_messages_have_the_tokens_of_the_tinker_api(env: dict[str, str]) -> None:
    tokenizer = load_tokenizer(env["TOKENIZER"])
    tokens = tokenizer.encode("the band", add_special_tokens=False)
    with ServiceClient(base_url=env["TINKER_BASE_URL"], api_key=env["TINKER_API_KEY"]) as service:
        sampler = service.create_sampling_client(base_model="tiny")
        params = SamplingParams(max_tokens=20, temperature=0)
        native = sampler.sample(ModelInput.from_ints(tokens), 1, params).result(60).sequences[0]
    turns = [{"role": "user", "content": "the band"}]
    answer = post(env, "messages", model="caller", messages=turns, max_tokens=20, temperature=0)
    text = "".join(block["text"] for block in answer["content"])
    assert text == tokenizer.decode(native.tokens, skip_special_tokens=True)
    assert answer["usage"]["output_tokens"] == len(native.tokens)
    assert answer["stop_reason"] == {"length": "max_tokens", "stop": "end_turn"}[native.stop_reason]


def test_a_message_that_must_call_a_tool_does(env: dict[str, str]) -> None:
    schema = {
        "type": "object",
        "properties": {"at": {"enum": [1, 2]}},
        "required": ["at"],
        "additionalProperties": False,
    }
    tools = [{"name": name, "input_schema": schema, "strict": True} for name in ("look", "go")]
    turns = [{"role": "user", "content": "x"}]
    choice = {"type": "tool", "name": "go"}
    answer = post(env, "messages", model="caller", messages=turns, tools=tools, tool_choice=choice, max_tokens=99)
    (block,) = answer["content"]
    assert (block["type"], block["name"], answer["stop_reason"]) == ("tool_use", "go", "tool_use")
    assert block["input"]["at"] in (1, 2)


def test_tokens_from_the_prefix_cache_are_counted_apart(env: dict[str, str]) -> None:
    asked = {"model": "caller", "messages": [{"role": "user", "content": "one two three " * 20}]}
    size = post(env, "messages/count_tokens", **asked)["input_tokens"]
    first, second = (post(env, "messages", **asked, max_tokens=2)["usage"] for _ in range(2))
    assert first["input_tokens"] == size
    assert second["cache_read_input_tokens"] > 0
    assert second["input_tokens"] + second["cache_read_input_tokens"] == size
