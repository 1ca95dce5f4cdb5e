"""The Anthropic-compatible endpoints: blocks in, blocks out, streams that add up to the same message, and its errors.

What they share with OpenAI's (names of models, sessions, owners, usage) is tested there.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.anthropic_server import HELLO, answered, count, events, message
from support.in_process import BASE, Client, Recorder, Server, run, serving, until
from support.openai_server import TEMPLATE, Scripted, backend, card_with_tokenizer, chat, write_tokenizer

from tinsmith.engine.protocol import AnyJob, Done, JobFailedError, Sample
from tinsmith.testing.engine import token_events
from tinsmith.text.tokenizer import load_tokenizer
from tinsmith.wire.codecs.proto_sampling import decode_response, encode_response
from tinsmith.wire.messages.sampling import SampledSequence, SampleResponse

THINKS = TEMPLATE.replace("{%- endif %}", "{%- endif %}{%- if enable_thinking is false %}(no thinking){%- endif %}", 1)
TOOL = {"name": "look", "description": "Looks.", "input_schema": {"type": "object", "properties": {"at": {}}}}


def answers_with(server: Server, tokens: list[int], cached: int = 0) -> None:
    """Change what a scripted model answers."""
    drawn = np.array(tokens, np.int32)
    sequence = SampledSequence("stop", "", drawn, np.zeros(drawn.size, np.float32))
    response = SampleResponse([sequence], prompt_cache_hit_tokens=cached)
    assert isinstance(server.backend, Scripted)
    server.backend.done = Done(body=encode_response(response), encoding="protobuf")
    server.backend.events = token_events(response)


def sent(server: Server, tmp_path: Path) -> tuple[str, dict[str, Any]]:
    """The prompt of the last sample as text, and its parameters."""
    job = server.backend.submitted[-1]
    assert isinstance(job, Sample)
    body = json.loads(job.body)
    text: str = load_tokenizer(str(tmp_path / "t")).decode(body["prompt"]["chunks"][0]["tokens"])
    return text, body["sampling_params"]


def test_the_same_prompt_gives_the_same_tokens_as_the_tinker_route(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, backend=backend(tmp_path / "t")) as server:
            ann = await server.client()
            whole = answered(await message(ann, temperature=0, max_tokens=12))
            _, params = sent(server, tmp_path)
            job = server.backend.submitted[-1]
            assert isinstance(job, Sample)
            sampler = await ann.sampler(await ann.session(), 7, base_model=BASE)
            native = {**json.loads(job.body), "sampling_session_id": sampler, "sampling_params": params}
            promise = await ann.post("asample", native)
            answer = await ann.poll(promise, accept="application/x-protobuf")
            while answer.status == 408:
                answer = await ann.poll(promise, accept="application/x-protobuf")
            tokens = decode_response(answer.body).sequences[0].tokens
            text = load_tokenizer(str(tmp_path / "t")).decode(tokens, skip_special_tokens=True)
            assert whole["content"] == [{"type": "text", "text": text, "citations": None}]
            assert whole["usage"]["output_tokens"] == len(tokens)
            again = await chat(ann, temperature=0, max_tokens=12)
            assert again.json["choices"][0]["message"]["content"] == text
            assert again.json["usage"]["prompt_tokens"] == whole["usage"]["input_tokens"] > 0
            assert (await count(ann)).json == {"input_tokens": whole["usage"]["input_tokens"]}

    run(scenario())


ANSWERS: list[tuple[str, dict[str, Any], list[dict[str, Any]], tuple[str, str | None]]] = [
    ("Hi, é!", {}, [{"type": "text", "text": "Hi, é!", "citations": None}], ("end_turn", None)),
    (
        "one two END",
        {"stop_sequences": ["never", " two END"]},
        [{"type": "text", "text": "one", "citations": None}],
        ("stop_sequence", " two END"),
    ),
    (
        "one<|im_start|>",
        {"stop_sequences": ["<|im_start|>"]},
        [{"type": "text", "text": "one", "citations": None}],
        ("stop_sequence", "<|im_start|>"),
    ),
    (
        "<think>\nhm, why\n</think>\n\nBecause.",
        {},
        [
            {"type": "thinking", "thinking": "hm, why", "signature": ""},
            {"type": "text", "text": "Because.", "citations": None},
        ],
        ("end_turn", None),
    ),
    (
        'Wait. <tool_call>{"name": "look", "arguments": {"at": "é"}}</tool_call>',
        {"tools": [TOOL]},
        [
            {"type": "text", "text": "Wait.", "citations": None},
            {"type": "tool_use", "name": "look", "input": {"at": "é"}},
        ],
        ("tool_use", None),
    ),
    (
        '<tool_call>{"name": "look", "arguments": {}}</tool_call><tool_call>{"name": "look", "arguments": {"at": 1}}'
        "</tool_call>",
        {"tools": [TOOL]},
        [
            {"type": "tool_use", "name": "look", "input": {}},
            {"type": "tool_use", "name": "look", "input": {"at": 1}},
        ],
        ("tool_use", None),
    ),
    (
        '<tool_call>{"name": "look", "arguments": "there"}</tool_call>',
        {"tools": [TOOL]},
        [
            {"type": "text", "text": '\n{"name":"look","arguments":"there"}', "citations": None},
        ],
        ("end_turn", None),
    ),
    ("", {}, [], ("end_turn", None)),
]


def test_an_answer_is_blocks_and_says_why_it_ended(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, backend=Scripted(tmp_path / "t", "")) as server:
            ann = await server.client()
            tokenizer = load_tokenizer(str(tmp_path / "t"))
            for text, fields, content, (reason, stop) in ANSWERS:
                drawn = tokenizer.encode(text) + ([] if stop is not None else [257])
                answers_with(server, drawn)
                for is_stream in (False, True):
                    made = answered(await message(ann, stream=is_stream, **fields))
                    size = len(tokenizer.encode(sent(server, tmp_path)[0], add_special_tokens=False))
                    assert made == {
                        "type": "message",
                        "role": "assistant",
                        "model": BASE,
                        "content": content,
                        "stop_reason": reason,
                        "stop_sequence": stop,
                        "usage": {
                            "input_tokens": size,
                            "cache_creation_input_tokens": 0,
                            "cache_read_input_tokens": 0,
                            "output_tokens": len(drawn),
                        },
                    }

    run(scenario())


def test_a_stream_has_the_tokens_that_come_with_the_result_only(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, backend=Scripted(tmp_path / "t", "one two")) as server:
            ann = await server.client()
            assert isinstance(server.backend, Scripted)
            for kept in (3, 0):
                server.backend.events = list(server.backend.events)[:kept]
                assert answered(await message(ann, stream=True))["content"][0]["text"] == "one two"

    run(scenario())


def test_an_answer_that_is_too_long_says_so(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, backend=backend(tmp_path / "t")) as server:
            ann = await server.client()
            for is_stream in (False, True):
                made = answered(await message(ann, max_tokens=3, stream=is_stream))
                assert made["stop_reason"] == "max_tokens"
                assert made["usage"]["output_tokens"] == 3

    run(scenario())


def test_cached_tokens_are_told_apart_and_the_prompt_is_never_empty(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, backend=Scripted(tmp_path / "t", "x")) as server:
            ann = await server.client()
            size = (await count(ann)).json["input_tokens"]
            for cached, counted in ((5, 5), (size, size - 1)):
                answers_with(server, [97, 257], cached)
                for is_stream in (False, True):
                    usage = answered(await message(ann, stream=is_stream))["usage"]
                    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (size - counted, counted)

    run(scenario())


CONVERSATION = [
    {"role": "user", "content": [{"type": "text", "text": "look", "cache_control": {"type": "ephemeral"}}]},
    {"role": "user", "content": "there"},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "I must look", "signature": "x"},
            {"type": "text", "text": "Wait."},
            {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": "é"}},
            {"type": "tool_use", "id": "toolu_2", "name": "look", "input": {}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": "a tree"},
            {
                "type": "tool_result",
                "tool_use_id": "toolu_2",
                "content": [{"type": "text", "text": "not"}, {"type": "text", "text": "there"}],
                "is_error": True,
            },
            {"type": "text", "text": "And?"},
        ],
    },
]


def test_blocks_become_the_messages_of_the_models_own_template(tmp_path: Path) -> None:
    async def scenario() -> None:
        template = TEMPLATE.replace(
            "{{ message.content }}",
            "{{ message.name or '' }}{{ message.tool_call_id or '' }}({{ message.reasoning_content or '' }})"
            "{{ message.content }}",
        )
        async with serving(tmp_path, backend=Scripted(tmp_path / "t", "x", template=template)) as server:
            ann = await server.client()
            system = [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief"}]
            await message(ann, messages=CONVERSATION, system=system, tools=[TOOL], tool_choice={"type": "auto"})
            text, _ = sent(server, tmp_path)
            tools, rest = text.split("<|im_end|>", 1)
            function = {"name": "look", "parameters": TOOL["input_schema"], "description": "Looks."}
            assert json.dumps([{"type": "function", "function": function}]) in tools
            assert rest == (
                "<|im_start|>system\n()Be\nbrief<|im_end|>"
                "<|im_start|>user\n()look\nthere<|im_end|>"
                "<|im_start|>assistant\n(I must look)Wait."
                '<tool_call>{"name": "look", "arguments": {"at": "é"}}</tool_call>'
                '<tool_call>{"name": "look", "arguments": {}}</tool_call><|im_end|>'
                "<|im_start|>tool\nlooktoolu_1()a tree<|im_end|>"
                "<|im_start|>tool\nlooktoolu_2()Error: not\nthere<|im_end|>"
                "<|im_start|>user\n()And?<|im_end|>"
                "<|im_start|>assistant"
            )
            await message(ann, tools=[TOOL], tool_choice={"type": "none"})
            assert "Tools:" not in sent(server, tmp_path)[0]

    run(scenario())


def test_parameters_reach_the_sampler(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, backend=Scripted(tmp_path / "t", "x")) as server:
            ann = await server.client()
            harmless = {"metadata": {"user_id": "me"}, "service_tier": "auto", "cache_control": {"type": "ephemeral"}}
            fields = {"temperature": 0.25, "top_p": 0.5, "top_k": 7, "stop_sequences": ["a", "<|im_start|>"]}
            assert (await message(ann, **fields, **harmless, container=None)).status == 200
            params = sent(server, tmp_path)[1]
            assert {name: params[name] for name in ("max_tokens", "temperature", "top_p", "top_k", "stop")} == {
                "max_tokens": 64,
                "temperature": 0.25,
                "top_p": 0.5,
                "top_k": 7,
                "stop": ["a"],
            }
            assert params["stop_token_ids"] == [256, 257], "a special token, and the template's end of a turn"

    run(scenario())


def test_what_agents_send_besides_the_conversation_changes_no_answer(tmp_path: Path) -> None:
    """Claude Code asks for cached prompts and to keep all thoughts, by a path with a query, with beta headers."""

    async def scenario() -> None:
        async with serving(tmp_path, backend=Scripted(tmp_path / "t", "x")) as server:
            ann = await server.client()
            answered(await message(ann))
            text, plain = sent(server, tmp_path)
            mark = {"type": "ephemeral", "ttl": "1h"}
            said = [{"role": "user", "content": [{"type": "text", "text": "hello", "cache_control": mark}]}]
            body = {
                "model": BASE,
                "messages": said,
                "max_tokens": 64,
                "metadata": {"user_id": "{}"},
                "service_tier": "standard_only",
                "thinking": {"type": "adaptive"},
                "context_management": {"edits": [KEEP_ALL]},
            }
            beta = {"anthropic-beta": "context-management-2025-06-27,interleaved-thinking-2025-05-14"}
            answered(await ann.post("/v1/messages?beta=true", body, **beta))
            same_text, params = sent(server, tmp_path)
            assert same_text == text
            assert params | {"seed": 0} == plain | {"seed": 0}
            for nothing in (
                None,
                {},
                {"edits": []},
                edits(KEEP_ALL["type"], keep={"type": "all"})["context_management"],
            ):
                assert (await message(ann, context_management=nothing)).status == 200
            counted = await count(ann, context_management={"edits": [KEEP_ALL]})
            assert counted.json == (await count(ann)).json

    run(scenario())


def test_an_answer_continues_the_assistants_last_message(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, backend=Scripted(tmp_path / "t", " B)")) as server:
            ann = await server.client()
            begun = [*HELLO, {"role": "assistant", "content": [{"type": "text", "text": "It is ("}]}]
            made = answered(await message(ann, messages=begun))
            assert made["content"][0]["text"] == " B)"
            assert sent(server, tmp_path)[0].endswith("<|im_start|>assistantIt is (")
            for field, content in (
                ("messages[1].content", "It is ( "),
                ("messages[1].content[0]", [{"type": "tool_use", "id": "x", "name": "look", "input": {}}]),
            ):
                refused = await message(ann, messages=[*HELLO, {"role": "assistant", "content": content}])
                assert refused.status == 400
                assert refused.json["error"]["message"].startswith(f"{field}: ")

    run(scenario())


def test_a_call_can_be_forced(tmp_path: Path) -> None:
    async def scenario() -> None:
        text = '{"name": "look", "arguments": {"at": 3}}'
        async with serving(tmp_path, backend=Scripted(tmp_path / "t", text)) as server:
            ann = await server.client()
            for choice in ({"type": "any"}, {"type": "tool", "name": "look"}):
                for is_stream in (False, True):
                    tools = [{**TOOL, "strict": True}, {**TOOL, "name": "hear", "type": "custom"}]
                    made = answered(await message(ann, tools=tools, tool_choice=choice, stream=is_stream))
                    assert made["content"] == [{"type": "tool_use", "name": "look", "input": {"at": 3}}]
                    assert made["stop_reason"] == "tool_use"
                    schema = json.loads(sent(server, tmp_path)[1]["output_format"]["schema"])
                    assert len(schema.get("anyOf", [schema])) == (2 if choice["type"] == "any" else 1)
            one = {"type": "auto", "disable_parallel_tool_use": True}
            assert (await message(ann, tools=[TOOL], tool_choice=one)).status == 200
            assert sent(server, tmp_path)[1]["stop"] == ["</tool_call>"]
            schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
            wanted = {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
            assert (await message(ann, **wanted)).status == 200
            assert json.loads(sent(server, tmp_path)[1]["output_format"]["schema"]) == schema

    run(scenario())


@pytest.mark.parametrize(
    "template", [THINKS, TEMPLATE.replace("assistant\n{%- endif", "assistant\n<think>\n{%- endif")]
)
def test_thinking_is_turned_on_and_off_by_the_template(tmp_path: Path, template: str) -> None:
    async def scenario() -> None:
        can_stop = template is THINKS
        async with serving(tmp_path, backend=Scripted(tmp_path / "t", "a</think>b", template=template)) as server:
            ann = await server.client()
            on = {"thinking": {"type": "enabled", "budget_tokens": 32}}
            assert (await message(ann, **on)).status == 200
            assert (await message(ann, thinking={"type": "adaptive"})).status == 200
            assert "(no thinking)" not in sent(server, tmp_path)[0]
            off = await message(ann, thinking={"type": "disabled"})
            assert off.status == (200 if can_stop else 400), off.body
            if can_stop:
                assert "(no thinking)" in sent(server, tmp_path)[0]
            else:
                assert "always thinks" in off.json["error"]["message"]
                begun = [*HELLO, {"role": "assistant", "content": "x"}]
                assert (await message(ann, messages=begun)).status == 400
            for fields, field in (
                ({"thinking": {"type": "enabled", "budget_tokens": 64}}, "thinking.budget_tokens"),
                ({**on, "tools": [TOOL], "tool_choice": {"type": "any"}}, "thinking: cannot be enabled"),
                ({"thinking": {"type": "between_tools"}}, "thinking.type"),
            ):
                refused = await message(ann, **fields)
                assert refused.status == 400, refused.body
                assert refused.json["error"]["message"].startswith(field), refused.body

    run(scenario())


def test_a_model_that_cannot_think_is_not_asked_to(tmp_path: Path) -> None:
    async def scenario() -> None:
        directory = write_tokenizer(tmp_path / "t")
        for name in ("tokenizer.json", "tokenizer_config.json"):
            text = (directory / name).read_text().replace("<think>", "<thunk>").replace("</think>", "</thunk>")
            (directory / name).write_text(text)
        async with serving(tmp_path, backend=Recorder((card_with_tokenizer(directory),))) as server:
            ann = await server.client()
            refused = await message(ann, thinking={"type": "enabled", "budget_tokens": 32})
            assert (refused.status, refused.json["error"]["type"]) == (400, "invalid_request_error")
            assert refused.json["error"]["message"] == "thinking: this model does not think; leave it out"
            for harmless in ("disabled", "adaptive"):
                assert (await message(ann, thinking={"type": harmless})).status == 200

    run(scenario())


def user(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


KEEP_ALL = {"type": "clear_thinking_20251015", "keep": "all"}


def edits(kind: str, **fields: Any) -> dict[str, Any]:
    return {"context_management": {"edits": [{"type": kind, **fields}]}}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 10**6}, "max_tokens"),
    ({"temperature": 1.5}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"stop_sequences": [""]}, "stop_sequences[0]"),
    ({"stop_sequences": ["a"] * 100}, "stop_sequences"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    (user(), "messages[0].content"),
    (user({"type": "text"}), "messages[0].content[0].text"),
    (user({"type": "image", "source": {}}), "messages[0].content[0]"),
    (user({"type": "document", "source": {}}), "messages[0].content[0]"),
    (user({"type": "thinking", "thinking": "x"}), "messages[0].content[0]"),
    (user({"type": "tool_result", "tool_use_id": "x"}), "messages[0].content[0].tool_use_id"),
    ({"messages": [{"role": "user", "content": "a" * 10**6}]}, "messages"),
    (
        {"messages": [*HELLO, {"role": "assistant", "content": [{"type": "redacted_thinking"}]}, *HELLO]},
        "messages[1].content[0]",
    ),
    (
        {
            "messages": [
                *CONVERSATION[:3],
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "image"}]}],
                },
            ]
        },
        "messages[3].content[0].content[0]",
    ),
    ({"system": [{"type": "image"}]}, "system[0]"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
    ({"tools": [{"name": "look"}]}, "tools[0].input_schema"),
    ({"tools": [{**TOOL, "strict": True}]}, "tools[0].strict"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "hear"}}, "tool_choice"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"output_config": {"effort": "low"}}, "output_config.effort: this model has no levels of effort; leave it out"),
    (edits("clear_tool_uses_20250919"), "context_management.edits[0]"),
    (edits("clear_thinking_20251015"), "context_management.edits[0]"),
    (edits("clear_thinking_20251015", keep={"type": "thinking_turns", "value": 2}), "context_management.edits[0]"),
    (edits("compact_20260112", keep="all"), "context_management.edits[0]"),
    ({"context_management": {"edits": [KEEP_ALL, {"type": "x"}]}}, "context_management.edits[1]"),
    ({"context_management": {"edit": []}}, "context_management"),
    ({"context_management": []}, "context_management"),
    ({"mcp_servers": []}, "mcp_servers"),
    ({"container": "x"}, "container"),
    ({"frequency_penalty": 1}, "frequency_penalty"),
]


def test_what_cannot_be_honoured_is_refused_by_name(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, backend=backend(tmp_path / "t")) as server:
            ann = await server.client()
            for fields, name in REFUSED:
                answer = await message(ann, **fields)
                assert answer.status == 400, (fields, answer.body)
                error = answer.json
                assert (set(error), error["type"]) == ({"type", "error", "request_id"}, "error")
                assert set(error["error"]) == {"type", "message"}
                assert error["error"]["type"] == "invalid_request_error"
                assert error["error"]["message"].startswith(name), (fields, error)
            for body in (b"", b"{", b"[]", b'{"model": 3}', b"\xff"):
                for path in ("/v1/messages", "/anthropic/api/v1/messages/count_tokens"):
                    assert (await ann.post(path, body)).json["error"]["type"] == "invalid_request_error"
            assert server.backend.kinds() == []
            refused = await count(ann, max_tokens=3)
            assert refused.json["error"]["message"].startswith("max_tokens: ")

    run(scenario())


def test_tokens_are_counted_even_if_they_do_not_fit(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, backend=backend(tmp_path / "t")) as server:
            ann = await server.client()
            card = server.backend.cards()[0]
            long = [{"role": "user", "content": "." * card.max_context_length}]
            assert (await count(ann, messages=long)).json["input_tokens"] > card.max_context_length
            assert (await message(ann, messages=long)).status == 400
            small = (await count(ann)).json["input_tokens"]
            larger = await count(ann, system="Be brief", tools=[TOOL], thinking={"type": "adaptive"})
            assert larger.json["input_tokens"] > small
            assert server.backend.kinds() == []

    run(scenario())


def test_every_error_has_anthropics_form(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, backend=backend(tmp_path / "t")) as server:
            ann = await server.client()
            slow = await server.client("slow", requests_per_minute=1)
            await count(slow)
            version = {"anthropic-version": "2023-06-01"}
            answers = {
                (401, "authentication_error"): await message(Client(server, "tml-wrong")),
                (403, "permission_error"): await message(await server.client("reader", scopes=("read",))),
                (404, "not_found_error"): await message(ann, model="claude-opus-4-5"),
                (413, "request_too_large"): await ann.post("/v1/messages", b"x" * (17 * 2**20)),
                (429, "rate_limit_error"): await message(slow),
            }
            missing = [
                await server.request("POST", "/v1/messages/batches", headers=version),
                await server.request("POST", "/anthropic/api/v1/nothing"),
            ]
            answers |= {(404, "not_found_error"): missing[0]}
            for (status, kind), answer in answers.items():
                assert (answer.status, answer.json["error"]["type"]) == (status, kind), answer.body
            for answer in missing:
                assert answer.json["type"] == "error"
            assert "code" in (await server.request("POST", "/v1/messages/batches")).json["error"], "OpenAI's form"
            bearer = await server.request(
                "POST",
                "/anthropic/api/v1/messages",
                json.dumps({"model": BASE, "messages": HELLO, "max_tokens": 2}).encode(),
                {**version, "authorization": f"Bearer {ann.key}"},
            )
            assert bearer.status == 200

    run(scenario())


def test_a_failure_in_a_stream_is_an_event(tmp_path: Path) -> None:
    async def scenario() -> None:
        class Failing(Scripted):
            def submit(self, job: AnyJob, on_tokens: Any = None) -> Any:
                if not isinstance(job, Sample):
                    return super().submit(job, on_tokens)
                future: asyncio.Future[Done] = asyncio.get_running_loop().create_future()
                future.set_exception(JobFailedError("out of memory"))
                return future

        async with serving(tmp_path, backend=Failing(tmp_path / "t", "")) as server:
            ann = await server.client()
            found = events(await message(ann, stream=True))
            assert [event["type"] for event in found] == ["message_start", "error"]
            assert found[-1]["error"]["type"] == "api_error"
            whole = await message(ann)
            assert (whole.status, whole.json["error"]["type"]) == (500, "api_error")

    run(scenario())


def test_a_client_that_leaves_takes_its_sample_with_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        forever = asyncio.Event()

        async def held(job: Any) -> None:
            if isinstance(job, Sample):
                await forever.wait()

        async with serving(tmp_path, backend=backend(tmp_path / "t", hold=held)) as server:
            ann = await server.client()
            for is_stream in (False, True):
                asking = asyncio.create_task(message(ann, stream=is_stream))
                await until(lambda: server.services.broker.count())
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
                await until(lambda: not server.services.broker.count())
                assert server.services.samples.sessions() == set()

    run(scenario())
