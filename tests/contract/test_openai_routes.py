"""The OpenAI-compatible endpoints: the right model, the right numbers, the right errors, and nothing left behind.

Many servers get these wrong; the first tests are about their faults.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from support.doors import ask, send
from support.in_process import (
    BASE,
    Answer,
    BreakableStore,
    Client,
    begun,
    forward_backward,
    optim_step,
    run,
    serving,
    settled,
    until,
)
from support.openai_server import TEMPLATE, Scripted, backend, chat, chunks, complete, write_tokenizer

from tinsmith.engine.protocol import Sample
from tinsmith.server.dialects.caller_session import LEAVE_S, ROTATE_S
from tinsmith.store.rows import CountRow, SessionRow
from tinsmith.text.tokenizer import load_tokenizer
from tinsmith.wire.codecs.proto_sampling import decode_response
from tinsmith.wire.messages.sampling import SampledSequence

PROMPT = [97, 98, 99]
PARAMS: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 12, "seed": 5, "logprobs": 0}


async def natively(client: Client, seed: int = 5, **source: Any) -> SampledSequence:
    """The same sample by the Tinker route."""
    session = await client.session()
    sampler = await client.sampler(session, 7, **(source or {"base_model": BASE}))
    message = {
        "sampling_session_id": sampler,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": PROMPT}]},
        "sampling_params": {"max_tokens": 12, "seed": seed},
    }
    promise = await client.post("asample", message)
    answer = await client.poll(promise, accept="application/x-protobuf")
    while answer.status == 408:
        answer = await client.poll(promise, accept="application/x-protobuf")
    return decode_response(answer.body).sequences[0]


async def trained(client: Client, model: str, seq: int, name: str) -> str:
    """A sampler checkpoint after one more step."""
    await client.result(await client.post("forward_backward", forward_backward(model, seq)))
    await client.result(await client.post("optim_step", optim_step(model, seq + 1)))
    return await client.save(model, seq + 2, name, "save_weights_for_sampler")


def logprobs_of(answer: Answer) -> list[float]:
    assert answer.status == 200, answer.body
    found: list[float] = answer.json["choices"][0]["logprobs"]["token_logprobs"]
    return found


def test_tokens_and_logprobs_equal_those_of_the_tinker_route_to_the_last_bit(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, backend=backend(tmp_path / "t")) as server:
            ann = await server.client()
            native = await natively(ann)
            assert native.logprobs is not None
            whole = await complete(ann, **PARAMS)
            assert logprobs_of(whole) == native.logprobs
            assert whole.json["usage"]["completion_tokens"] == len(native.tokens)
            assert whole.json["choices"][0]["finish_reason"] == native.stop_reason
            streamed = [chunk["choices"][0] for chunk in chunks(await complete(ann, **PARAMS, stream=True))]
            assert [value for part in streamed for value in part["logprobs"]["token_logprobs"]] == native.logprobs
            assert "".join(part["text"] for part in streamed) == whole.json["choices"][0]["text"]
            tokenizer = load_tokenizer(str(tmp_path / "t"))
            assert tokenizer.decode(native.tokens, skip_special_tokens=True) == whole.json["choices"][0]["text"]

    run(scenario())


def test_a_checkpoint_is_answered_with_its_own_weights(tmp_path: Path) -> None:
    """Not with the base model's, nor with those of the run's first checkpoint, nor with older ones of its name."""

    async def scenario() -> None:
        async with serving(tmp_path, backend=backend(tmp_path / "t"), aliases={"tuned": "tinker://none"}) as server:
            ann, _, model = await begun(server)
            first = await trained(ann, model, 1, "first")
            second = await trained(ann, model, 4, "second")
            found = {}
            for name in (BASE, first, second, f"{BASE};{second}"):
                found[name] = logprobs_of(await complete(ann, **PARAMS, model=name))
                source = {"base_model": BASE} if name == BASE else {"model_path": name.rpartition(";")[2]}
                assert found[name] == (await natively(ann, **source)).logprobs, name
            assert found[second] == found[f"{BASE};{second}"]
            assert found[BASE] != found[first] != found[second]
            await send(ann, ask("delete_checkpoint", training_run_id=model, checkpoint_id="sampler_weights/first"))
            assert (await complete(ann, **PARAMS, model=first)).status == 404
            assert await trained(ann, model, 7, "first") == first
            assert logprobs_of(await complete(ann, **PARAMS, model=first)) != found[first]
            wrong = await complete(ann, **PARAMS, model=f"other;{second}")
            assert (wrong.status, wrong.json["error"]["param"]) == (400, "model")
            await send(ann, ask("delete_checkpoint", training_run_id=model, checkpoint_id="sampler_weights/second"))
            for name in (second, f"{BASE};{second}", "tinker://none", "nothing", "tuned"):
                gone = await complete(ann, **PARAMS, model=name)
                assert (gone.status, gone.json["error"]["code"]) == (404, "model_not_found"), name

    run(scenario())


def test_a_key_samples_its_own_checkpoints_and_published_ones(tmp_path: Path) -> None:
    async def scenario() -> None:
        settings: dict[str, Any] = {}
        async with serving(tmp_path, backend=backend(tmp_path / "t"), **settings) as server:
            ann, _, model = await begun(server)
            path = await trained(ann, model, 1, "mine")
            eve = await server.client("eve", org="other")
            colleague = await server.client("bob")
            place = {"training_run_id": model, "checkpoint_id": "sampler_weights/mine"}
            before = len(server.backend.submitted)
            for stranger in (eve, colleague):
                refused = await complete(stranger, **PARAMS, model=path)
                assert (refused.status, refused.json["error"]["code"]) == (404, "model_not_found")
                assert (await stranger.get(f"/v1/models/{path}")).status == 404
            assert len(server.backend.submitted) == before
            await send(ann, ask("publish_checkpoint", **place))
            assert (await complete(eve, **PARAMS, model=path)).status == 200
            await send(ann, ask("unpublish_checkpoint", **place))
            assert (await complete(eve, **PARAMS, model=path)).status == 404, "what was sampled before is no right"
            assert (await complete(ann, **PARAMS, model=path)).status == 200
            assert path not in (await eve.get("/v1/models")).body.decode()
            listed = {entry["id"]: entry for entry in (await ann.get("/v1/models")).json["data"]}
            assert set(listed) == {BASE, path}
            assert listed[path]["root"] == BASE
            one = await ann.get(f"/v1/models/{path}")
            assert (one.status, one.json["id"]) == (200, path)

    run(scenario())


def test_an_alias_stands_for_what_the_caller_may_sample(tmp_path: Path) -> None:
    async def scenario() -> None:
        tokenizer = tmp_path / "t"
        async with serving(tmp_path, backend=backend(tokenizer), aliases={"small": BASE}) as server:
            ann = await server.client()
            answer = await complete(ann, **PARAMS, model="small")
            assert answer.json["model"] == "small"
            assert logprobs_of(answer) == logprobs_of(await complete(ann, **PARAMS))
            listed = {entry["id"]: entry for entry in (await ann.get("/oai/api/v1/models")).json["data"]}
            assert set(listed) == {BASE, "small"}
            for name, root in ((BASE, None), ("small", BASE)):
                assert listed[name].get("root") == root
                assert (await ann.get(f"/v1/models/{name}")).json == listed[name]

    run(scenario())


def test_prompt_tokens_are_counted_and_a_prompt_may_be_text_or_tokens(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, backend=backend(tmp_path / "t")) as server:
            ann = await server.client()
            tokenizer = load_tokenizer(str(tmp_path / "t"))
            texts = ["abc", "hello there"]
            tokens = [tokenizer.encode(text) for text in texts]
            forms: list[Any] = [texts, tokens, texts[0], tokens[0]]
            answers = [await complete(ann, seed=3, prompt=form) for form in forms]
            for answer, form in zip(answers, forms, strict=True):
                is_batch = form in (texts, tokens)
                assert answer.json["usage"]["prompt_tokens"] == sum(map(len, tokens if is_batch else tokens[:1]))
            by_text, by_tokens, one_text, one_tokens = (
                [choice["text"] for choice in answer.json["choices"]] for answer in answers
            )
            assert by_text == by_tokens
            assert one_text == one_tokens == by_text[:1]
            prompt = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], add_generation_prompt=True)
            assert (await chat(ann, max_tokens=3)).json["usage"]["prompt_tokens"] == len(prompt)

    run(scenario())


def test_the_prompt_can_be_scored(tmp_path: Path) -> None:
    """As lm-eval does: echo, no or one new token, and the logprobs of the prompt's own."""

    async def scenario() -> None:
        async with serving(tmp_path, backend=backend(tmp_path / "t")) as server:
            ann = await server.client()
            for most in (0, 1):
                fields = {"echo": True, "logprobs": 1, "temperature": 0}
                answer = await complete(ann, prompt="hello there", max_tokens=most, **fields)
                choice = answer.json["choices"][0]
                scores = choice["logprobs"]
                size = answer.json["usage"]["prompt_tokens"]
                assert len(scores["tokens"]) == len(scores["token_logprobs"]) == size + most
                assert scores["token_logprobs"][0] is None
                assert scores["top_logprobs"][0] is None
                assert all(value < 0 for value in scores["token_logprobs"][1:])
                for token, value, top in zip(
                    scores["tokens"][1:], scores["token_logprobs"][1:], scores["top_logprobs"][1:], strict=True
                ):
                    assert top[token] == value
                    assert max(top.values()) >= value
                assert choice["text"].startswith("hello there")
                for token, offset in zip(scores["tokens"][:size], scores["text_offset"][:size], strict=True):
                    assert choice["text"][offset : offset + len(token)] == token
            native = (await complete(ann, prompt="hello there", max_tokens=0, echo=True, logprobs=1)).json
            assert native["usage"]["completion_tokens"] == 0
            assert native["choices"][0]["finish_reason"] == "length"

    run(scenario())


def test_chat_logprobs_are_there_when_they_are_asked_for(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, backend=backend(tmp_path / "t")) as server:
            ann = await server.client()
            asked = {"max_tokens": 6, "seed": 4, "logprobs": True}
            whole = (await chat(ann, **asked, top_logprobs=2)).json["choices"][0]
            entries = whole["logprobs"]["content"]
            assert len(entries) == 6
            assert (
                b"".join(bytes(entry["bytes"]) for entry in entries).decode(errors="replace")
                == (whole["message"]["content"])
            )
            assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
            streamed = [chunk["choices"][0] for chunk in chunks(await chat(ann, **asked, stream=True))]
            parts = [entry for part in streamed if part["logprobs"] for entry in part["logprobs"]["content"]]
            assert [entry["logprob"] for entry in parts] == [entry["logprob"] for entry in entries]
            assert streamed[0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
            assert "".join(part["delta"].get("content", "") for part in streamed) == whole["message"]["content"]
            assert [part["finish_reason"] for part in streamed] == [None] * (len(streamed) - 1) + ["length"]

    run(scenario())


def test_special_tokens_stop_a_sample_and_are_no_text(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, backend=backend(tmp_path / "t")) as server:
            ann = await server.client()
            for stop, token in (("<|im_end|>", 257), ("<|im_start|>", 256)):
                answer = await complete(ann, max_tokens=3000, seed=1, logprobs=0, stop=stop)
                choice = answer.json["choices"][0]
                assert choice["finish_reason"] == "stop"
                assert choice["logprobs"]["tokens"][-1] == stop
                assert stop not in choice["text"]
                job = server.backend.submitted[-1]
                assert isinstance(job, Sample)
                assert json.loads(job.body)["sampling_params"]["stop"] == [token]
            answer = await chat(ann, max_tokens=3000, seed=1, logprobs=True)
            last = answer.json["choices"][0]["logprobs"]["content"][-1]
            assert last["token"] == "<|im_end|>", "what the template writes after a turn ends it"

    run(scenario())


@pytest.mark.parametrize("is_stream", [False, True])
def test_stop_strings_are_cut_from_the_text(tmp_path: Path, is_stream: bool) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, backend=Scripted(tmp_path / "t", "one two END", end=None)) as server:
            ann = await server.client()
            answer = await complete(ann, stop=[" two END", "never"], stream=is_stream)
            parts = [chunk["choices"][0] for chunk in chunks(answer)] if is_stream else answer.json["choices"]
            assert "".join(part["text"] for part in parts) == "one"
            assert parts[-1]["finish_reason"] == "stop"

    run(scenario())


@pytest.mark.parametrize("is_stream", [False, True])
def test_thinking_is_apart_from_the_content(tmp_path: Path, is_stream: bool) -> None:
    async def scenario() -> None:
        text = "<think>\nhm, why\n</think>\n\nBecause."
        async with serving(tmp_path, backend=Scripted(tmp_path / "t", text)) as server:
            answer = await chat(await server.client(), stream=is_stream)
            messages = (
                [chunk["choices"][0]["delta"] for chunk in chunks(answer)]
                if is_stream
                else [answer.json["choices"][0]["message"]]
            )
            assert "".join(message.get("content") or "" for message in messages) == "Because."
            assert "".join(message.get("reasoning_content") or "" for message in messages) == "hm, why"

    run(scenario())


TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("is_stream", [False, True])
def test_tools_are_called_through_the_models_own_template(tmp_path: Path, is_stream: bool) -> None:
    async def scenario() -> None:
        text = 'Wait. <tool_call>\n{"name": "look", "arguments": {"at": "é"}}\n</tool_call>'
        async with serving(tmp_path, backend=Scripted(tmp_path / "t", text)) as server:
            ann = await server.client()
            answer = await chat(ann, stream=is_stream, tools=[TOOL])
            parts = [chunk["choices"][0] for chunk in chunks(answer)] if is_stream else answer.json["choices"]
            messages = [part["delta" if is_stream else "message"] for part in parts]
            (call,) = [call for message in messages for call in message.get("tool_calls", ())]
            assert call["function"]["name"] == "look"
            assert json.loads(call["function"]["arguments"]) == {"at": "é"}
            assert "".join(message.get("content") or "" for message in messages) == "Wait."
            assert parts[-1]["finish_reason"] == "tool_calls"
            job = server.backend.submitted[-1]
            assert isinstance(job, Sample)
            prompt = load_tokenizer(str(tmp_path / "t")).decode(json.loads(job.body)["prompt"]["chunks"][0]["tokens"])
            assert '"name": "look"' in prompt
            kept = await chat(ann, tools=[TOOL], tool_choice="none")
            assert "<tool_call>" in kept.json["choices"][0]["message"]["content"]
            turns = [
                {"role": "user", "content": [{"type": "text", "text": "look"}]},
                {"role": "assistant", "content": None, "tool_calls": [{**call, "index": 0}]},
                {"role": "tool", "tool_call_id": call["id"], "content": "seen"},
            ]
            assert (await chat(ann, messages=turns, tools=[TOOL])).status == 200

    run(scenario())


@pytest.mark.parametrize("is_stream", [False, True])
def test_an_answer_may_be_limited_to_one_call(tmp_path: Path, is_stream: bool) -> None:
    async def scenario() -> None:
        call = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
        async with serving(tmp_path, backend=Scripted(tmp_path / "t", call * 2)) as server:
            ann = await server.client()
            for limits, count in (({}, 2), ({"parallel_tool_calls": True}, 2), ({"parallel_tool_calls": False}, 1)):
                answer = await chat(ann, stream=is_stream, tools=[TOOL], **limits)
                parts = [chunk["choices"][0] for chunk in chunks(answer)] if is_stream else answer.json["choices"]
                messages = [part["delta" if is_stream else "message"] for part in parts]
                assert len([made for message in messages for made in message.get("tool_calls", ())]) == count
                assert parts[-1]["finish_reason"] == "tool_calls"
            job = server.backend.submitted[-1]
            assert isinstance(job, Sample)
            assert json.loads(job.body)["sampling_params"]["stop"] == ["</tool_call>"], "and the sample ends there"

    run(scenario())


def test_an_answer_with_a_form_is_not_a_thought(tmp_path: Path) -> None:
    """Although the template begins one: the first token is the form's already."""

    async def scenario() -> None:
        template = TEMPLATE.replace("assistant\n{%- endif", "assistant\n<think>\n{%- endif")
        text = '{"name": "look", "arguments": {}}'
        async with serving(tmp_path, backend=Scripted(tmp_path / "t", text, template=template)) as server:
            ann = await server.client()
            forced = (await chat(ann, tools=[TOOL], tool_choice="required")).json["choices"][0]["message"]
            assert forced["tool_calls"][0]["function"]["name"] == "look"
            formed = (await chat(ann, response_format={"type": "json_object"})).json["choices"][0]["message"]
            assert (formed["content"], formed.get("reasoning_content")) == (text, None)

    run(scenario())


def test_a_template_without_tools_takes_none(tmp_path: Path) -> None:
    async def scenario() -> None:
        template = "{% for message in messages %}{{ message.content }}{% endfor %}"
        async with serving(tmp_path, backend=Scripted(tmp_path / "t", "x", template=template)) as server:
            refused = await chat(await server.client(), tools=[TOOL])
            assert (refused.status, refused.json["error"]["param"]) == (400, "tools")

    run(scenario())


def test_a_model_without_template_takes_no_chats(tmp_path: Path) -> None:
    async def scenario() -> None:
        recorder = backend(tmp_path / "t")
        write_tokenizer(tmp_path / "t", None)
        async with serving(tmp_path, backend=recorder) as server:
            refused = await chat(await server.client())
            assert (refused.status, refused.json["error"]["param"]) == (400, "messages")
            assert "--chat-template" in refused.json["error"]["message"]

    run(scenario())


def test_requests_go_on_after_a_restart(tmp_path: Path) -> None:
    """A sample that was accepted before it is finished after it, though nobody waits; new requests work at once."""

    async def scenario() -> None:
        store, forever = BreakableStore(), asyncio.Event()
        await store.open()

        async def held(job: Any) -> None:
            if isinstance(job, Sample):
                await forever.wait()

        async with serving(tmp_path, backend=backend(tmp_path / "t", hold=held), store=store) as server:
            ann = await server.client()
            asking = asyncio.create_task(complete(ann))
            await until(lambda: server.services.broker.count())
            key = ann.key
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        async with serving(tmp_path, backend=backend(tmp_path / "t"), store=store) as server:
            again = Client(server, key)
            assert (await complete(again)).status == 200
            await until(lambda: not server.services.broker.count())
            assert len((await again.get("sessions")).json["sessions"]) == 2
            server.clock.advance(server.services.config.session_timeout_s + 1)
            await complete(again)
            await server.sweep()
            rows = await server.rows(SessionRow, "sessions_active")
            assert len(rows) == 1, "the session of the process before has expired"
        await store.close()

    run(scenario())


def test_the_operator_may_choose_the_template(tmp_path: Path) -> None:
    async def scenario() -> None:
        good, bad = tmp_path / "good.jinja", tmp_path / "bad.jinja"
        good.write_text("{% for message in messages %}[{{ message.content }}]{% endfor %}")
        bad.write_text("{{ raise_exception('two system messages') }}")
        settings = {"aliases": {"odd": BASE}, "chat_templates": {"": good, "odd": bad}}
        async with serving(tmp_path, backend=backend(tmp_path / "t"), **settings) as server:
            ann = await server.client()
            size = len(load_tokenizer(str(tmp_path / "t")).encode("[hello]"))
            assert (await chat(ann, max_tokens=1)).json["usage"]["prompt_tokens"] == size
            failed = await chat(ann, model="odd")
            assert failed.status == 400
            assert "two system messages" in failed.json["error"]["message"]

    run(scenario())


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("completions", {"best_of": 2}, "best_of"),
    ("completions", {"suffix": "x"}, "suffix"),
    ("completions", {"temprature": 1}, "temprature"),
    ("completions", {"temperature": "hot"}, "temperature"),
    ("completions", {"temperature": -1}, "temperature"),
    ("completions", {"top_p": 0}, "top_p"),
    ("completions", {"n": 0}, "n"),
    ("completions", {"n": 5000}, "n"),
    ("completions", {"n": 400, "prompt": ["a"] * 3}, "n"),
    ("completions", {"logprobs": 21}, "logprobs"),
    ("completions", {"logprobs": 20, "n": 1000, "max_tokens": 16}, "logprobs"),
    ("completions", {"logprobs": 0, "n": 1000, "max_tokens": 0, "echo": True, "prompt": [1] * 300}, "logprobs"),
    ("completions", {"max_tokens": 10**6}, "max_tokens"),
    ("completions", {"prompt": ""}, "prompt"),
    ("completions", {"prompt": []}, "prompt"),
    ("completions", {"prompt": [1, "a"]}, "prompt"),
    ("completions", {"prompt": [1, 10**6]}, "prompt[1]"),
    ("completions", {"prompt": ["a"] * 300}, "prompt"),
    ("completions", {"prompt": "a" * 10**6}, "prompt"),
    ("completions", {"logit_bias": {"x": 1}}, "logit_bias"),
    ("completions", {"stop": [""]}, "stop[0]"),
    ("completions", {"stop": ["a"] * 100}, "stop"),
    ("completions", {"logprobs": 10**5}, "logprobs"),
    ("completions", {"echo": True, "stream": True, "logprobs": 1}, "logprobs"),
    ("chat", {"messages": []}, "messages"),
    ("chat", {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ("chat", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
    ("chat", {"functions": []}, "functions"),
    ("chat", {"audio": {}}, "audio"),
    ("chat", {"modalities": ["audio"]}, "modalities"),
    ("chat", {"top_logprobs": 3}, "top_logprobs"),
    ("chat", {"logprobs": True, "top_logprobs": 100}, "top_logprobs"),
    ("chat", {"logprobs": True, "top_logprobs": 20, "n": 1000, "max_tokens": 16}, "logprobs"),
    ("chat", {"tools": ["x"]}, "tools[0]"),
    ("chat", {"tool_choice": "required"}, "tool_choice"),
    ("chat", {"max_tokens": 1, "max_completion_tokens": 1}, "max_completion_tokens"),
    ("chat", {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ("chat", {"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ("chat", {"response_format": {"type": "yaml"}}, "response_format.type"),
    ("chat", {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 3}}}}, "response_format"),
    (
        "chat",
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": ["a" * 50] * 8000}}}},
        "response_format.json_schema",
    ),
]


def test_what_cannot_be_honoured_is_refused_by_name(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, backend=backend(tmp_path / "t")) as server:
            ann = await server.client()
            for kind, fields, param in REFUSED:
                answer = await (complete if kind == "completions" else chat)(ann, **fields)
                assert answer.status == 400, (fields, answer.body)
                error = answer.json["error"]
                assert set(error) == {"message", "type", "param", "code"}
                assert (error["type"], error["param"]) == ("invalid_request_error", param), (fields, error)
                assert param in error["message"]
            assert (await ann.post("/v1/embeddings", {"model": BASE, "input": "x"})).status == 400
            harmless = {"user": "me", "metadata": {"a": "b"}, "store": True, "suffix": None, "best_of": None}
            assert (await complete(ann, **harmless)).status == 200
            for body in (b"", b"{", b"[]", b'{"model": 3}', b'{"model": NaN}', b"\xff"):
                answer = await ann.post("/v1/completions", body)
                assert answer.status == 400, (body, answer)
                assert answer.json["error"]["type"] == "invalid_request_error"
            assert server.backend.kinds() == ["sample"]

    run(scenario())


def test_errors_before_the_handler_have_openais_form_too(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, backend=backend(tmp_path / "t")) as server:
            nobody = Client(server, "tml-wrong")
            reader = await server.client("reader", scopes=("read",))
            slow = await server.client("slow", requests_per_minute=1)
            await slow.get("/v1/models")
            large = await (await server.client()).post("/v1/completions", b"x" * (17 * 2**20))
            answers = {
                401: await complete(nobody),
                403: await complete(reader),
                404: await server.request("GET", "/v1/nothing"),
                405: await server.request("PUT", "/v1/completions"),
                413: large,
                429: await complete(slow),
            }
            for status, answer in answers.items():
                assert answer.status == status, answer
                assert set(answer.json["error"]) == {"message", "type", "param", "code"}
            assert answers[401].json["error"]["code"] == "invalid_api_key"
            assert answers[429].json["error"]["type"] == "rate_limit_error"
            assert "retry-after" in answers[429].headers

    run(scenario())


def test_a_client_that_leaves_takes_its_samples_with_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        forever = asyncio.Event()

        async def held(job: Any) -> None:
            if isinstance(job, Sample):
                await forever.wait()

        async with serving(tmp_path, backend=backend(tmp_path / "t", hold=held)) as server:
            ann = await server.client()
            for fields in ({}, {"stream": True}, {"stream": True, "prompt": ["a", "b"], "n": 2}):
                asking = asyncio.create_task(complete(ann, **fields))
                await until(lambda: server.services.broker.count())
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
                await until(lambda: not server.services.broker.count())
                assert server.services.samples.sessions() == set()
            left = asyncio.Event()
            asking = asyncio.create_task(leaving(ann, left))
            await until(lambda: server.services.broker.count())
            left.set()
            await asking
            await until(lambda: not server.services.broker.count())

    run(scenario())


async def leaving(client: Client, left: asyncio.Event) -> None:
    """A request whose client closes the connection while it waits."""
    body = json.dumps({"model": BASE, "prompt": "a"}).encode()
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        if messages:
            return messages.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        pass

    headers = [(b"x-api-key", client.key.encode()), (b"content-length", str(len(body)).encode())]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": headers}
    await client.server.app(scope, receive, send)


def test_requests_share_a_session_that_is_renewed_and_cleaned_up(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, backend=backend(tmp_path / "t"), max_sessions=1) as server:
            ann = await server.client()
            await asyncio.gather(*(complete(ann) for _ in range(5)))
            (session,) = (await ann.get("sessions")).json["sessions"]
            await ann.session()  # the limit of one is for the caller's own
            await ann.post(f"sessions/{session}/finish", {"reason": {"type": "success"}})
            assert (await complete(ann)).status == 200, "a session that was ended is replaced"
            current = (await ann.get("sessions")).json["sessions"]
            server.clock.advance(ROTATE_S)
            assert (await complete(ann)).status == 200
            (newest,) = set((await ann.get("sessions")).json["sessions"]) - set(current)
            server.clock.advance(LEAVE_S + 1)
            await complete(ann)
            await server.sweep()
            rows = {row.session_id: row for row in await server.rows(SessionRow, "sessions_unpruned")}
            assert {key for key, row in rows.items() if row.status == "active"} == {newest}
            server.clock.advance(server.services.config.result_grace_s + 1)
            await complete(ann)
            await server.sweep()
            kept = await server.rows(SessionRow, "sessions_unpruned")
            assert len([row for row in kept if row.display_name is not None]) <= 2

    run(scenario())


def test_a_request_that_takes_long_keeps_its_session_alive(tmp_path: Path) -> None:
    async def scenario() -> None:
        go = asyncio.Event()

        async def held(job: Any) -> None:
            if isinstance(job, Sample):
                await go.wait()

        async with serving(tmp_path, backend=backend(tmp_path / "t", hold=held)) as server:
            ann = await server.client()
            asking = asyncio.create_task(complete(ann))
            await until(lambda: server.services.broker.count())
            for _ in range(5):
                server.clock.advance(server.services.config.session_timeout_s - 1)
                await server.sweep()
            await settled()
            go.set()
            assert (await asking).status == 200
            counted = await server.rows(CountRow, "count_jobs_queued")
            assert counted[0].count == 0

    run(scenario())


def test_usage_is_counted_like_any_samples(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, backend=backend(tmp_path / "t")) as server:
            ann = await server.client(tokens_per_day=100)
            answer = await complete(ann, prompt="hello", max_tokens=20)
            streamed = chunks(await complete(ann, max_tokens=20, stream=True, stream_options={"include_usage": True}))
            assert streamed[-1]["usage"]["completion_tokens"] > 0
            assert streamed[-1]["choices"] == []
            refused = await complete(ann, max_tokens=90)
            assert refused.status in (403, 429), refused.body
            assert answer.json["usage"]["total_tokens"] > answer.json["usage"]["completion_tokens"]

    run(scenario())


def test_a_model_without_tokenizer_is_for_the_tinker_api(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            refused = await complete(await server.client())
            assert (refused.status, refused.json["error"]["param"]) == (400, "model")

    run(scenario())


def test_the_template_of_the_tests_is_what_the_tokenizer_has(tmp_path: Path) -> None:
    assert load_tokenizer(str(write_tokenizer(tmp_path))).chat_template == TEMPLATE
