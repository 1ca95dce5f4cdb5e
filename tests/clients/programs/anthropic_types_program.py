"""Prints what the anthropic package reads of our answers, as one JSON object; its own types have checked every field.

The model's answer is always the same: a thought, a text, and a call. Argument: the model. Address and key come from the
environment.
"""

import asyncio
import json
import os
import sys

import anthropic
from anthropic import Anthropic, AsyncAnthropic

(MODEL,) = sys.argv[1:]
HELLO = [{"role": "user", "content": "hello"}]
TOOL = {"name": "look", "description": "d", "input_schema": {"type": "object", "properties": {"at": {}}}}
ASKED = {"model": MODEL, "messages": HELLO, "max_tokens": 64, "system": "Be brief.", "tools": [TOOL]}


def strict(value):
    """Refuse a field that the client's types do not know, lack or read otherwise; reading an answer checks nothing."""
    fields = value.model_dump(exclude_unset=True, warnings=False)
    type(value).model_validate(fields, strict=True, extra="forbid")
    return value


def sync_calls(client, found):
    whole = strict(client.messages.create(**ASKED))
    found["whole"] = whole.model_dump()
    found["request_id"] = whole._request_id
    found["count"] = strict(client.messages.count_tokens(model=MODEL, messages=HELLO)).model_dump()
    found["parts"] = [strict(event).model_dump() for event in client.messages.create(**ASKED, stream=True)]
    with client.messages.stream(**ASKED) as stream:
        found["text_stream"] = list(stream.text_stream)
        found["helper"] = stream.get_final_message().model_dump()
    call = whole.content[-1]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "a tree"}]}
    turns = [*HELLO, {"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
    found["next"] = strict(client.messages.create(**{**ASKED, "messages": turns})).model_dump()
    thinking = {"type": "enabled", "budget_tokens": 32}
    found["thinking"] = strict(client.messages.create(**ASKED, thinking=thinking)).model_dump()


def errors(client, found):
    for name, make in {
        "NotFoundError": lambda: client.messages.create(**{**ASKED, "model": "claude-opus-4-5"}),
        "BadRequestError": lambda: client.messages.create(**ASKED, extra_body={"mcp_servers": []}),
        "AuthenticationError": lambda: client.with_options(api_key="tml-wrong").messages.create(**ASKED),
        "a path that is not there": lambda: client.get("/v1/nothing", cast_to=object),
    }.items():
        try:
            make()
        except anthropic.APIStatusError as error:
            found.setdefault("errors", {})[name] = [type(error).__name__, error.type, error.status_code]


async def async_calls(found):
    async with AsyncAnthropic(api_key=None, auth_token=os.environ["ANTHROPIC_API_KEY"]) as client:
        answers = await asyncio.gather(*(client.messages.create(**ASKED) for _ in range(4)))
        found["together"] = [strict(answer).content[1].text for answer in answers]
        async with client.messages.stream(**ASKED) as stream:
            found["async_stream"] = "".join([text async for text in stream.text_stream])


def main():
    found = {}
    with Anthropic(max_retries=0) as client:
        sync_calls(client, found)
        errors(client, found)
    asyncio.run(async_calls(found))
    print(json.dumps(found))


main()
