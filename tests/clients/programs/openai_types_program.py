"""Prints what the openai package reads of our answers, as one JSON object; its own types have checked every field.

Argument: the model. Address and key come from the environment.
"""

import asyncio
import json
import sys

import openai
from openai import AsyncOpenAI, OpenAI

(MODEL,) = sys.argv[1:]
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "look", "description": "d", "parameters": {"type": "object"}}}


def strict(value):
    """Refuse a field that the client's types do not know, lack or read otherwise; reading an answer checks nothing."""
    fields = value.model_dump(exclude_unset=True, warnings=False)
    if fields["object"] == "text_completion":  # the type of parts, too, whose reason is null until the last
        for choice in fields["choices"]:
            choice["finish_reason"] = choice["finish_reason"] or "stop"
    type(value).model_validate(fields, strict=True, extra="forbid")
    return value


def sync_calls(client, found):
    found["models"] = [strict(model).id for model in client.models.list()]
    found["model"] = strict(client.models.retrieve(MODEL)).id
    whole = strict(client.completions.create(model=MODEL, prompt="abc", max_tokens=6, seed=7, logprobs=2))
    found["completion"] = whole.model_dump()
    parts = [
        strict(chunk)
        for chunk in client.completions.create(model=MODEL, prompt="abc", max_tokens=6, seed=7, logprobs=2, stream=True)
    ]
    found["completion_parts"] = [part.model_dump() for part in parts]
    asked = {"model": MODEL, "messages": MESSAGES, "max_tokens": 6, "seed": 7, "logprobs": True, "top_logprobs": 2}
    found["chat"] = strict(client.chat.completions.create(**asked)).model_dump()
    stream = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    found["chat_parts"] = [strict(chunk).model_dump() for chunk in stream]
    found["tools"] = strict(client.chat.completions.create(**asked, tools=[TOOL])).model_dump()
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES, max_tokens=6, seed=7) as events:
        for _ in events:
            pass
        found["helper"] = events.current_completion_snapshot.model_dump()


def errors(client, found):
    for name, make in {
        "NotFoundError": lambda: client.completions.create(model="nothing", prompt="x"),
        "BadRequestError": lambda: client.completions.create(model=MODEL, prompt="x", best_of=3),
        "AuthenticationError": lambda: client.with_options(api_key="tml-wrong").models.list(),
    }.items():
        try:
            make()
        except openai.APIStatusError as error:
            found.setdefault("errors", {})[name] = [type(error).__name__, error.code, error.param, error.status_code]


async def async_calls(found):
    async with AsyncOpenAI() as client:
        asked = {"model": MODEL, "messages": MESSAGES, "max_tokens": 6, "seed": 7}
        answers = await asyncio.gather(*(client.chat.completions.create(**asked) for _ in range(5)))
        found["together"] = [strict(answer).choices[0].message.content for answer in answers]
        text = ""
        async for chunk in await client.chat.completions.create(**asked, stream=True):
            text += strict(chunk).choices[0].delta.content or ""
        found["async_stream"] = text
        stream = await client.completions.create(model=MODEL, prompt="abc", max_tokens=2000, stream=True)
        async for _ in stream:
            break
        await stream.close()


def main():
    found = {}
    with OpenAI(max_retries=0) as client:
        sync_calls(client, found)
        errors(client, found)
    asyncio.run(async_calls(found))
    print(json.dumps(found))


main()
