"""What users do with the openai package: sync, async and streaming. Prints one JSON object; see test_openai.py.

Arguments: the base model, a checkpoint that has learnt its lessons. Address and key come from the environment.
"""

import asyncio
import json
import sys

import openai
import pydantic

BASE, TUNED = sys.argv[1:]
HI = [{"role": "user", "content": "Hi"}]
ADD = [{"role": "user", "content": "Add 2 and 3"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
client = openai.OpenAI(max_retries=0)


class Answer(pydantic.BaseModel):
    """What a structured answer is. It is bounded, so that a model that draws at random completes it, too."""

    city: str = pydantic.Field(max_length=12)
    size: int = pydantic.Field(ge=0, le=999)


def completions() -> dict:
    answer = client.completions.create(model=TUNED, prompt="the", max_tokens=8, temperature=1.0, seed=7, logprobs=2)
    text = answer.choices[0].text
    stream = client.completions.create(
        model=TUNED,
        prompt="the",
        max_tokens=8,
        temperature=1.0,
        seed=7,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    scored = client.completions.create(model=TUNED, prompt="the end", max_tokens=0, echo=True, logprobs=1)
    several = client.completions.create(model=BASE, prompt=[[100, 101], [102]], max_tokens=3, n=2, seed=1)
    return {
        "text": text,
        "logprobs": answer.choices[0].logprobs.model_dump(),
        "usage": answer.usage.model_dump(),
        "finish": answer.choices[0].finish_reason,
        "streamed": "".join(choice.text for chunk in chunks for choice in chunk.choices),
        "streamed_usage": chunks[-1].usage.model_dump(),
        "scored": scored.choices[0].model_dump(),
        "several": [choice.index for choice in several.choices],
    }


def chat() -> dict:
    answer = client.chat.completions.create(
        model=TUNED, messages=HI, temperature=0, max_tokens=40, logprobs=True, top_logprobs=2
    )
    base = client.chat.completions.create(model=BASE, messages=HI, temperature=0, max_tokens=12)
    stopped = client.chat.completions.create(model=TUNED, messages=HI, temperature=0, max_tokens=40, stop=["lo th"])
    with client.chat.completions.stream(
        model=TUNED, messages=HI, temperature=0, max_tokens=40, stream_options={"include_usage": True}
    ) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_completion()
    return {
        "content": answer.choices[0].message.content,
        "role": answer.choices[0].message.role,
        "finish": answer.choices[0].finish_reason,
        "usage": answer.usage.model_dump(),
        "logprobs": [token.model_dump() for token in answer.choices[0].logprobs.content],
        "base": base.choices[0].message.content,
        "model": answer.model,
        "stopped": [stopped.choices[0].message.content, stopped.choices[0].finish_reason],
        "streamed": final.choices[0].message.content,
        "streamed_usage": final.usage.model_dump(),
        "events": sorted(set(events)),
    }


def tools() -> dict:
    """Call a tool, answer the call, and read the model's answer; both as a whole and as a stream."""
    first = client.chat.completions.create(model=TUNED, messages=ADD, tools=[TOOL], temperature=0, max_tokens=80)
    message = first.choices[0].message
    call = message.tool_calls[0]
    result = {
        "role": "tool",
        "tool_call_id": call.id,
        "content": str(sum(json.loads(call.function.arguments).values())),
    }
    second = client.chat.completions.create(
        model=TUNED, messages=[*ADD, message, result], tools=[TOOL], temperature=0, max_tokens=80
    )
    with client.chat.completions.stream(
        model=TUNED, messages=ADD, tools=[TOOL], temperature=0, max_tokens=80
    ) as stream:
        streamed = stream.get_final_completion().choices[0]
    return {
        "finish": first.choices[0].finish_reason,
        "content": message.content,
        "call": [call.function.name, json.loads(call.function.arguments)],
        "answer": second.choices[0].message.content,
        "streamed": [streamed.finish_reason, streamed.message.tool_calls[0].function.arguments],
    }


def forced() -> dict:
    """The base model knows nothing; masks alone make it write what was asked for."""
    parsed = client.chat.completions.parse(
        model=BASE, messages=HI, response_format=Answer, max_tokens=200, temperature=1.0, seed=3
    )
    required = client.chat.completions.create(
        model=BASE, messages=ADD, tools=[TOOL], tool_choice="required", max_tokens=200, temperature=1.0, seed=3
    )
    call = required.choices[0].message.tool_calls[0].function
    return {
        "parsed": parsed.choices[0].message.parsed.model_dump() if parsed.choices[0].finish_reason == "stop" else None,
        "finish": parsed.choices[0].finish_reason,
        "call": [call.name, sorted(json.loads(call.arguments))],
    }


async def together() -> list:
    """Several requests at once, one of them streaming, one abandoned."""
    async with openai.AsyncOpenAI(max_retries=0) as client:

        async def ask(text: str) -> str:
            answer = await client.chat.completions.create(
                model=TUNED, messages=[{"role": "user", "content": text}], temperature=0, max_tokens=40
            )
            return answer.choices[0].message.content

        async def streamed() -> str:
            stream = await client.chat.completions.create(
                model=TUNED, messages=HI, temperature=0, max_tokens=40, stream=True
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])

        async def left() -> str:
            stream = await client.completions.create(model=BASE, prompt="a", max_tokens=400, stream=True)
            async for _ in stream:
                await stream.close()
                return "left"

        return await asyncio.gather(ask("Hi"), ask("Bye"), streamed(), left())


def models() -> list:
    return [model.id for model in client.models.list()]


def refused() -> dict:
    """The class and the message of what is raised."""
    gone = TUNED.rpartition("/")[0] + "/gone"
    attempts = {
        "gone": lambda: client.chat.completions.create(model=gone, messages=HI),
        "unknown": lambda: client.chat.completions.create(model="gpt-9", messages=HI),
        "parameter": lambda: client.completions.create(model=BASE, prompt="a", best_of=2),
        "temperature": lambda: client.completions.create(model=BASE, prompt="a", temperature=-1),
        "key": lambda: client.with_options(api_key="tml-wrong").models.list(),
        "embeddings": lambda: client.embeddings.create(model=BASE, input="a"),
        "long": lambda: client.completions.create(model=BASE, prompt="a" * 1000),
    }
    raised = {}
    for name, attempt in attempts.items():
        try:
            attempt()
        except openai.APIStatusError as error:
            raised[name] = [type(error).__name__, error.status_code, error.code, error.param, error.message]
    return raised


steps = (completions, chat, tools, forced, models, refused)
print(json.dumps({step.__name__: step() for step in steps} | {"together": asyncio.run(together())}))
