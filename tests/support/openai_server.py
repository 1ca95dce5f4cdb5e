"""A server for clients of OpenAI: the backend of arithmetic, with a tokenizer of the bytes that it computes with.

Tokens below 256 are bytes, as the arithmetic takes them; the rest are special tokens, marks of chats, and a few pieces
of characters and words. Token 0 ends a sample.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np

from support.in_process import Answer, Client, Recorder
from tinsmith.engine.protocol import AnyJob, Done, ModelCard, Sample
from tinsmith.testing.backend import ARITHMETIC, MemoryBackend
from tinsmith.testing.engine import token_events
from tinsmith.text.token_bytes import byte_alphabet
from tinsmith.text.tokenizer import load_tokenizer
from tinsmith.wire.codecs.proto_sampling import encode_response
from tinsmith.wire.messages.sampling import SampledSequence, SampleResponse

SPECIAL = {0: "<|end|>", 256: "<|im_start|>", 257: "<|im_end|>", 258: "[TOOL_CALLS]"}
ADDED = {259: "<think>", 260: "</think>", 261: "<tool_call>", 262: "</tool_call>"}
TEMPLATE = (
    "{%- if tools %}<|im_start|>system\nTools: {{ tools | tojson }} Answer <tool_call>{...}</tool_call><|im_end|>\n"
    "{%- endif %}{%- for message in messages %}"
    "{%- if message.role == 'refuse' %}{{ raise_exception('no such role') }}{%- endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{%- endfor %}"
    "<|im_end|>\n{%- endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{%- endif %}"
)


def write_tokenizer(directory: Path, template: str | None = TEMPLATE) -> Path:
    """Write the tokenizer's files, and return their directory."""
    vocabulary = {character: byte for byte, character in enumerate(byte_alphabet()) if byte}
    pairs = [(a, b) for a in "abcdefghijklmnop" for b in "aeiouhrstlnmdgyc"][: ARITHMETIC.vocab_size - 263]
    vocabulary |= {left + right: 263 + number for number, (left, right) in enumerate(pairs)}
    return _write(directory, vocabulary, pairs, SPECIAL, ADDED, template)


def write_small_tokenizer(directory: Path) -> Path:
    """The same for a vocabulary of 32: small letters and a space; other characters have no tokens."""
    vocabulary = {chr(ord("a") + number): number + 1 for number in range(26)} | {"\u0120": 27}
    template = "{%- for message in messages %}{{ message.content }}{%- endfor %}"
    return _write(directory, vocabulary, [], {0: "<|end|>", 31: "<|im_end|>"}, {}, template)


def _write(
    directory: Path,
    vocabulary: dict[str, int],
    merges: list[tuple[str, str]],
    special: dict[int, str],
    others: dict[int, str],
    template: str | None,
) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    names = sorted({**special, **others}.items())
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {"type": "BPE", "vocab": vocabulary | {text: token for token, text in names}, "merges": merges}
    described = {
        "version": "1.0",
        "added_tokens": [{"id": token, "content": text, "special": token in special, **flags} for token, text in names],
        "pre_tokenizer": level,
        "decoder": level,
        "model": model,
    }
    (directory / "tokenizer.json").write_text(json.dumps(described))
    config = {"eos_token": "<|end|>"} | ({"chat_template": template} if template is not None else {})
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


FITTING: dict[str, list[Any]] = {
    "prompt": ["abc", [1, 2]],
    "messages": [[{"role": "user", "content": "abc"}]],
    "max_tokens": [0, 2],
    "max_completion_tokens": [None],
    "temperature": [0.0, 1.0],
    "top_p": [1.0],
    "top_k": [-1, 5],
    "n": [1, 2],
    "logprobs": [None],
    "top_logprobs": [None],
    "stop": [None, "a"],
    "stop_token_ids": [None],
    "logit_bias": [None],
    "response_format": [None, {"type": "text"}],
    "stream_options": [None],
    "tools": [None],
    "tool_choice": [None, "auto"],
    "parallel_tool_calls": [None, True],
    "modalities": [None, ["text"]],
    "chat_template_kwargs": [None, {}],
    "min_p": [None],
    "frequency_penalty": [None],
    "presence_penalty": [None],
    "repetition_penalty": [None],
}
"""Values by which requests of OpenAI's clients get far, for generated ones."""


def card_with_tokenizer(directory: Path, **changes: Any) -> ModelCard:
    """The arithmetic's card, with a tokenizer."""
    fields = {name: getattr(ARITHMETIC, name) for name in ARITHMETIC.__struct_fields__}
    return ModelCard(**{**fields, "tokenizer_directory": str(directory), **changes})


def backend(directory: Path, **options: Any) -> Recorder:
    return Recorder((card_with_tokenizer(write_tokenizer(directory)),), **options)


def served(config: Any) -> MemoryBackend:
    """For `tinsmith serve --backend`: the same in a process of its own."""
    return MemoryBackend((card_with_tokenizer(write_tokenizer(Path(config.data_dir) / "tokenizer")),))


async def complete(client: Client, **fields: Any) -> Answer:
    return await client.post("/v1/completions", {"model": ARITHMETIC.name, "prompt": "abc", "max_tokens": 8, **fields})


async def chat(client: Client, **fields: Any) -> Answer:
    messages = [{"role": "user", "content": "hello"}]
    return await client.post("/v1/chat/completions", {"model": ARITHMETIC.name, "messages": messages, **fields})


def chunks(answer: Answer) -> list[Any]:
    """The objects of a stream; it must end as a stream does."""
    assert answer.status == 200, answer.body
    events = [event for event in answer.body.decode().split("\n\n") if event and not event.startswith(":")]
    assert events[-1] == "data: [DONE]", events[-1]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-1]]


AT_ONCE = 64
"""Tokens that are sent before anything else runs."""


class Scripted(Recorder):
    """A backend whose model always answers with one text, a token at a time if it is streamed.

    Requests must ask for `samples` samples.
    """

    def __init__(
        self,
        directory: Path,
        text: str,
        *,
        template: str = TEMPLATE,
        end: int | None = 257,
        samples: int = 1,
        **card: Any,
    ) -> None:
        write_tokenizer(directory, template)
        super().__init__((card_with_tokenizer(directory, **card),))
        drawn = load_tokenizer(str(directory)).encode(text)
        tokens = np.array([*drawn, *([] if end is None else [end])], np.int32)
        logprobs = -np.arange(tokens.size, dtype=np.float32) / 8
        response = SampleResponse([SampledSequence("stop", "", tokens, logprobs)] * samples)
        self.done = Done(body=encode_response(response), encoding="protobuf")
        self.events = token_events(response)

    def submit(self, job: AnyJob, on_tokens: Any = None) -> Any:
        if not isinstance(job, Sample):
            return super().submit(job, on_tokens)
        self.submitted.append(job)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Done] = loop.create_future()
        events = self.events if on_tokens is not None else []

        def send(begin: int) -> None:
            """Send some tokens, each in a turn of its own, and then the rest: thousands at once would hold the loop."""
            if future.done():  # cancelled
                return
            for event in events[begin : begin + AT_ONCE]:
                loop.call_soon(on_tokens, event)
            if begin + AT_ONCE < len(events):
                loop.call_soon(send, begin + AT_ONCE)
            else:
                loop.call_soon(lambda: future.done() or future.set_result(self.done))

        send(0)
        return future
