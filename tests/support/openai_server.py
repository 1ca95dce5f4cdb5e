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
    directory.mkdir(parents=True, exist_ok=True)
    alphabet = byte_alphabet()
    vocabulary = {character: byte for byte, character in enumerate(alphabet) if byte}
    merges = []
    for number, (left, right) in enumerate((a, b) for a in "abcdefghijklmnop" for b in "aeiouhrstlnmdgyc"):
        if 263 + number < ARITHMETIC.vocab_size:
            vocabulary[left + right] = 263 + number
            merges.append([left, right])
    added = [
        {
            "id": token,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": token in SPECIAL,
        }
        for token, text in sorted({**SPECIAL, **ADDED}.items())
    ]
    for token, text in {**SPECIAL, **ADDED}.items():
        vocabulary[text] = token
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    described = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": merges, "ignore_merges": False},
    }
    (directory / "tokenizer.json").write_text(json.dumps(described))
    config: dict[str, Any] = {"eos_token": "<|end|>"}
    if template is not None:
        config["chat_template"] = template
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


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


class Scripted(Recorder):
    """A backend whose model always answers with one text, a token at a time if it is streamed."""

    def __init__(self, directory: Path, text: str, *, template: str = TEMPLATE, end: int | None = 257) -> None:
        write_tokenizer(directory, template)
        super().__init__((card_with_tokenizer(directory),))
        drawn = load_tokenizer(str(directory)).encode(text)
        tokens = np.array([*drawn, *([] if end is None else [end])], np.int32)
        logprobs = -np.arange(tokens.size, dtype=np.float32) / 8
        self.response = SampleResponse([SampledSequence("stop", "", tokens, logprobs)])

    def submit(self, job: AnyJob, on_tokens: Any = None) -> Any:
        if not isinstance(job, Sample):
            return super().submit(job, on_tokens)
        self.submitted.append(job)
        for event in token_events(self.response) if on_tokens is not None else ():
            asyncio.get_running_loop().call_soon(on_tokens, event)
        future: asyncio.Future[Done] = asyncio.get_running_loop().create_future()
        done = Done(body=encode_response(self.response), encoding="protobuf")
        asyncio.get_running_loop().call_soon(future.set_result, done)
        return future
