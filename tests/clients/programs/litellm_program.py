"""What users do with litellm: completion calls through its `openai/` provider. Prints one JSON object.

Arguments: the base model, a checkpoint that has learnt its lessons. Address and key come from the environment.
"""

import asyncio
import json
import sys

import litellm

BASE, TUNED = (f"openai/{name}" for name in sys.argv[1:])
HI = [{"role": "user", "content": "Hi"}]
ADD = [{"role": "user", "content": "Add 2 and 3"}]
SETTINGS = {"temperature": 0, "max_tokens": 80, "num_retries": 0}
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}},
}


def chat() -> dict:
    answer = litellm.completion(model=TUNED, messages=HI, logprobs=True, top_logprobs=1, **SETTINGS)
    choice = answer.choices[0]
    return {
        "content": choice.message.content,
        "finish": choice.finish_reason,
        "usage": [answer.usage.prompt_tokens, answer.usage.completion_tokens],
        "logprobs": [token.logprob for token in choice.logprobs.content],
    }


def streamed() -> str:
    chunks = list(litellm.completion(model=TUNED, messages=HI, stream=True, **SETTINGS))
    return litellm.stream_chunk_builder(chunks, messages=HI).choices[0].message.content


def text() -> str:
    prompt = "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n"
    model = TUNED.replace("openai/", "text-completion-openai/")
    return litellm.text_completion(model=model, prompt=prompt, **SETTINGS).choices[0].text


def tools() -> list:
    message = litellm.completion(model=TUNED, messages=ADD, tools=[TOOL], **SETTINGS).choices[0].message
    call = message.tool_calls[0]
    result = {"role": "tool", "tool_call_id": call.id, "content": "5"}
    last = litellm.completion(model=TUNED, messages=[*ADD, message, result], tools=[TOOL], **SETTINGS)
    return [call.function.name, json.loads(call.function.arguments), last.choices[0].message.content]


def refused() -> dict:
    """The class of what is raised."""
    attempts = {
        "gone": {"model": TUNED + "-gone", "messages": HI},
        "key": {"model": TUNED, "messages": HI, "api_key": "tml-wrong"},
        "long": {"model": BASE, "messages": [{"role": "user", "content": "a" * 1000}]},
    }
    raised = {}
    for name, arguments in attempts.items():
        try:
            litellm.completion(**SETTINGS, **arguments)
        except Exception as error:
            raised[name] = [type(error).__name__, str(error)]
    return raised


async def together() -> list:
    asked = [
        litellm.acompletion(model=TUNED, messages=[{"role": "user", "content": text}], **SETTINGS)
        for text in ("Hi", "Bye")
    ]
    return [answer.choices[0].message.content for answer in await asyncio.gather(*asked)]


steps = (chat, streamed, text, tools, refused)
print(json.dumps({step.__name__: step() for step in steps} | {"together": asyncio.run(together())}))
