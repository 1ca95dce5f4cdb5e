"""Requests of Anthropic's clients, and their streams put together again, with the rules that a stream must keep."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support.in_process import Answer, Client
from support.openai_server import Scripted
from tinsmith.testing.backend import ARITHMETIC

HELLO = [{"role": "user", "content": "hello"}]
ANTHROPIC_FITTING: dict[str, list[Any]] = {
    "messages": [[{"role": "user", "content": "abc"}], [{"role": "user", "content": [{"type": "text", "text": "a"}]}]],
    "max_tokens": [1, 2],
    "system": [None, "a"],
    "temperature": [0.0, 1.0],
    "top_p": [1.0],
    "top_k": [-1, 5],
    "stop_sequences": [None, ["a"]],
    "tools": [None],
    "tool_choice": [None, {"type": "auto"}],
    "thinking": [None, {"type": "adaptive"}],
    "output_config": [None, {}],
}
"""Values with which generated requests of Anthropic's clients are valid."""


async def message(client: Client, **fields: Any) -> Answer:
    body = {"model": ARITHMETIC.name, "messages": HELLO, "max_tokens": 64, **fields}
    return await client.post("/v1/messages", body)


async def count(client: Client, **fields: Any) -> Answer:
    return await client.post("/v1/messages/count_tokens", {"model": ARITHMETIC.name, "messages": HELLO, **fields})


def events(answer: Answer) -> list[dict[str, Any]]:
    """The events of a stream, without those that clients skip."""
    assert answer.status == 200, answer.body
    found = []
    for event in answer.body.decode().split("\n\n")[:-1]:
        name, data = event.split("\n")
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"
        found.append(json.loads(data.removeprefix("data: ")))
    return [event for event in found if event["type"] != "ping"]


def together(answer: Answer) -> dict[str, Any]:
    """The message that a stream is, as a client puts it together; its events must be in order."""
    first, *middle, delta, last = events(answer)
    assert (first["type"], delta["type"], last) == ("message_start", "message_delta", {"type": "message_stop"})
    made: dict[str, Any] = first["message"]
    assert made["content"] == []
    assert made["stop_reason"] is None
    is_open = False
    for event in middle:
        if event["type"] == "content_block_start":
            assert not is_open
            assert event["index"] == len(made["content"])
            made["content"].append(event["content_block"])
            is_open, pieces = True, ""
            continue
        assert is_open
        assert event["index"] == len(made["content"]) - 1
        block = made["content"][-1]
        if event["type"] == "content_block_stop":
            is_open = False
            if block["type"] == "tool_use":
                assert block["input"] == {}
                block["input"] = json.loads(pieces)
            continue
        name = {"text": "text", "thinking": "thinking", "tool_use": "partial_json"}[block["type"]]
        kind = "input_json" if name == "partial_json" else name
        assert event["delta"]["type"] == f"{kind}_delta"
        piece = event["delta"][name]
        assert piece, "no empty piece"
        if name == "partial_json":
            pieces += piece
        else:
            block[name] += piece
    assert not is_open
    return {**made, **delta["delta"], "usage": {**made["usage"], **delta["usage"]}}


def answered(answer: Answer) -> dict[str, Any]:
    """The message of an answer, streamed or not, without what differs from one to the next."""
    assert answer.status == 200, answer.body
    made = together(answer) if answer.headers["content-type"].startswith("text/event-stream") else answer.json
    assert made.pop("id").startswith("msg_")
    for block in made["content"]:
        if block["type"] == "tool_use":
            assert block.pop("id").startswith("toolu_")
    return {name: made[name] for name in made}


def served(config: Any) -> Scripted:
    """For `tinsmith serve --backend`: a model that always thinks, says something, and calls a tool."""
    return Scripted(Path(config.data_dir) / "tokenizer", ANSWER)


ANSWER = (
    '<think>\nhm, why\n</think>\n\nWait a bit. <tool_call>\n{"name": "look", "arguments": {"at": "é"}}\n</tool_call>'
)
