"""What users do with the anthropic package: sync, async, streaming and tools. Prints one JSON object.

Arguments: the base model, a checkpoint that has learnt its lessons. Address and key come from the environment.
"""

import asyncio
import json
import sys

import anthropic

BASE, TUNED = sys.argv[1:]
HI = [{"role": "user", "content": "Hi"}]
ADD = [{"role": "user", "content": [{"type": "text", "text": "Add 2 and 3"}]}]
TOOL = {
    "name": "add",
    "description": "Add two numbers.",
    "input_schema": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}
GREEDY = {"temperature": 0}
"""This release has no argument for it."""
client = anthropic.Anthropic(max_retries=0)


def messages() -> dict:
    answer = client.messages.create(model=TUNED, messages=HI, max_tokens=40, extra_body=GREEDY)
    stopped = client.messages.create(
        model=TUNED, messages=HI, max_tokens=40, extra_body=GREEDY, stop_sequences=["lo th"]
    )
    short = client.messages.create(model=TUNED, messages=HI, max_tokens=3, extra_body=GREEDY)
    counted = client.messages.count_tokens(model=TUNED, messages=HI)
    return {
        "content": [block.model_dump(exclude_none=True) for block in answer.content],
        "role": answer.role,
        "stop": answer.stop_reason,
        "usage": [answer.usage.input_tokens, answer.usage.output_tokens],
        "counted": counted.input_tokens,
        "stopped": [stopped.content[0].text, stopped.stop_reason, stopped.stop_sequence],
        "short": [short.content[0].text, short.stop_reason],
    }


def streamed() -> dict:
    with client.messages.stream(model=TUNED, messages=HI, max_tokens=40, extra_body=GREEDY) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_message()
    return {
        "text": final.content[0].text,
        "stop": final.stop_reason,
        "usage": final.usage.output_tokens,
        "events": events,
    }


def tools() -> dict:
    """Call a tool, answer the call, and read the model's answer; both as a whole and as a stream."""
    options = {"model": TUNED, "tools": [TOOL], "max_tokens": 80, "extra_body": GREEDY}
    first = client.messages.create(messages=ADD, **options)
    call = next(block for block in first.content if block.type == "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": str(sum(call.input.values()))}
    turns = [*ADD, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = client.messages.create(messages=turns, **options)
    with client.messages.stream(messages=ADD, **options) as stream:
        final = stream.get_final_message()
    return {
        "stop": first.stop_reason,
        "call": [call.name, call.input],
        "answer": second.content[0].text,
        "streamed": [final.stop_reason, next(block.input for block in final.content if block.type == "tool_use")],
    }


async def together() -> list:
    async with anthropic.AsyncAnthropic(max_retries=0) as client:

        async def ask(text: str) -> str:
            messages = [{"role": "user", "content": text}]
            answer = await client.messages.create(model=TUNED, messages=messages, max_tokens=40, extra_body=GREEDY)
            return answer.content[0].text

        async def stream() -> str:
            async with client.messages.stream(model=TUNED, messages=HI, max_tokens=40, extra_body=GREEDY) as stream:
                return "".join([text async for text in stream.text_stream])

        return await asyncio.gather(ask("Hi"), ask("Bye"), stream())


def refused() -> dict:
    """The class and the type of what is raised."""
    attempts = {
        "gone": lambda: client.messages.create(model=f"{TUNED}-gone", messages=HI, max_tokens=4),
        "key": lambda: client.with_options(api_key="tml-wrong").messages.create(model=BASE, messages=HI, max_tokens=4),
        "temperature": lambda: client.messages.create(
            model=BASE, messages=HI, max_tokens=4, extra_body={"temperature": -1}
        ),
        "long": lambda: client.messages.create(
            model=BASE, messages=[{"role": "user", "content": "a" * 1000}], max_tokens=4
        ),
    }
    raised = {}
    for name, attempt in attempts.items():
        try:
            attempt()
        except anthropic.APIStatusError as error:
            raised[name] = [type(error).__name__, error.status_code, error.body["error"]["type"], error.message]
    return raised


steps = (messages, streamed, tools, refused)
print(json.dumps({step.__name__: step() for step in steps} | {"together": asyncio.run(together())}))
