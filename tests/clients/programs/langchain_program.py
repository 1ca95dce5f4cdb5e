"""What users do with LangChain's ChatOpenAI: invoke, stream, batch, tools, structured output. Prints one JSON object.

Arguments: the base model, a checkpoint that has learnt its lessons. Address and key come from the environment.
"""

import asyncio
import json
import sys

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

BASE, TUNED = sys.argv[1:]
chat = ChatOpenAI(model=TUNED, temperature=0, max_tokens=80, max_retries=0)


class Place(BaseModel):
    """A city and how many live there."""

    city: str
    size: int


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def invoked() -> dict:
    answer = chat.bind(logprobs=True, top_logprobs=1).invoke("Hi")
    return {
        "content": answer.content,
        "usage": answer.usage_metadata,
        "finish": answer.response_metadata["finish_reason"],
        "logprobs": [token["logprob"] for token in answer.response_metadata["logprobs"]["content"]],
    }


def streamed() -> list:
    chunks = list(chat.stream("Hi", stream_usage=True))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole = whole + chunk
    return [whole.content, whole.usage_metadata["total_tokens"]]


def tools() -> list:
    """One turn of an agent: the model calls, the tool answers, the model speaks."""
    agent = chat.bind_tools([add])
    messages = [HumanMessage("Add 2 and 3")]
    call = agent.invoke(messages)
    results = [ToolMessage(str(add.invoke(made["args"])), tool_call_id=made["id"]) for made in call.tool_calls]
    return [[made["args"] for made in call.tool_calls], agent.invoke([*messages, call, *results]).content]


def structured() -> list:
    """The base model knows nothing; a mask makes it write the object, or the length ends it."""
    asked = ChatOpenAI(model=BASE, temperature=1, max_tokens=300, seed=3, max_retries=0)
    answer = asked.with_structured_output(Place, method="json_schema", include_raw=True).invoke("Hi")
    return [
        answer["parsed"].model_dump() if answer["parsed"] else None,
        answer["raw"].response_metadata["finish_reason"],
    ]


def text() -> str:
    prompt = "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n"
    return OpenAI(model=TUNED, temperature=0, max_tokens=40, max_retries=0).invoke(prompt)


def refused() -> str:
    """The class of what a prompt raises that does not fit."""
    try:
        return chat.invoke("a" * 1000).content
    except Exception as error:
        return type(error).__name__


async def together() -> list:
    answers = await chat.abatch(["Hi", "Bye"])
    return [answer.content for answer in answers]


steps = (invoked, streamed, tools, structured, text, refused)
print(json.dumps({step.__name__: step() for step in steps} | {"together": asyncio.run(together())}))
