"""Checks raw answers against OpenAI's published schemas, and prints them as one JSON object.

The classes of openapiopenai are generated from OpenAI's OpenAPI document. Here they refuse every field that it does
not have, except those of EXTENSIONS, which the program counts. Arguments: the model, and `once` if it draws one sample
for a request and scores no prompts. Address and key come from the environment.
"""

import copy
import json
import os
import sys

import openapiopenai.models as schemas
import urllib3

MODEL, *KIND = sys.argv[1:]
URL = os.environ["OPENAI_BASE_URL"]
HEADERS = {"authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
HTTP = urllib3.PoolManager()
HELLO = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "look", "description": "d", "parameters": {"type": "object"}}}
EXTENSIONS = {"reasoning_content", "root"}
"""Fields of ours that other servers have, too, and OpenAI does not."""
ECHOED = {"echo": True, "logprobs": 1, "max_tokens": 0}
"""Not streamed: the server refuses to."""
found = {"extensions": {}, "answers": {}}


def checked(name: str, schema: type, body: dict) -> dict:
    """Refuse what does not fit a schema; its classes are strict about types, enumerations and required fields."""
    known = without_extensions(copy.deepcopy(body), name)
    for choice in known.get("choices", ()):
        drop_first_score(choice.get("logprobs") or {})
    schema.model_validate(known, extra="forbid")
    found["answers"].setdefault(name, []).append(body)
    return body


def drop_first_score(scores: dict) -> None:
    """Nothing predicts the first token of a prompt: OpenAI answers null, too, though its document says numbers."""
    if scores.get("token_logprobs", ())[:1] == [None]:
        assert scores["top_logprobs"][0] is None
        del scores["token_logprobs"][0], scores["top_logprobs"][0]


def without_extensions(value: object, name: str) -> object:
    if isinstance(value, dict):
        for key in EXTENSIONS & set(value):
            found["extensions"].setdefault(key, []).append(name)
            del value[key]
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        without_extensions(part, name)
    return value


def ask(path: str, body: dict | None = None, **headers: str) -> urllib3.BaseHTTPResponse:
    method = "GET" if body is None else "POST"
    return HTTP.request(method, URL + path, json=body, headers=HEADERS | headers, retries=False)


def answer(name: str, schema: type, path: str, **body: object) -> None:
    given = ask(path, {"model": MODEL, **body})
    assert given.status == 200, given.data
    checked(name, schema, given.json())


def stream(name: str, schema: type, path: str, **body: object) -> None:
    """Check each chunk of a stream. Those of completions have the schema of the whole, and no reason at first."""
    given = ask(path, {"model": MODEL, "stream": True, "stream_options": {"include_usage": True}, **body})
    assert given.status == 200, given.data
    parts = given.data.decode().split("\n\n")
    events = [part.removeprefix("data: ") for part in parts if part and not part.startswith(":")]  # comments: no news
    assert events.pop() == "[DONE]"
    for event in events:
        chunk = json.loads(event)
        if chunk["usage"] and "chat" in path:  # the document's type for it there is older than OpenAI's answers
            schemas.CompletionUsage.model_validate(chunk["usage"], extra="forbid")
            del chunk["usage"]["prompt_tokens_details"]
        if schema is schemas.CreateCompletionResponse:
            for choice in chunk["choices"]:
                choice["finish_reason"] = choice["finish_reason"] or "stop"
            chunk["usage"] = chunk["usage"] or {"completion_tokens": 0, "prompt_tokens": 0, "total_tokens": 0}
        checked(name, schema, chunk)


def error(name: str, path: str, body: dict | None, status: int, **headers: str) -> None:
    given = ask(path, body, **headers)
    assert given.status == status, (name, given.status, given.data)
    checked("errors", schemas.ErrorResponse, given.json())


def main() -> None:
    text = {"prompt": "abc", "max_tokens": 4, "seed": 7}
    talk = {"messages": HELLO, "max_tokens": 64, "seed": 7}
    is_once = KIND == ["once"]
    for more in ({}, {"logprobs": 2}, *(() if is_once else ({"n": 2}, ECHOED))):
        answer("completions", schemas.CreateCompletionResponse, "/completions", **text | more)
        if more is not ECHOED:
            stream("completion_chunks", schemas.CreateCompletionResponse, "/completions", **text | more)
    for more in ({}, {"logprobs": True, "top_logprobs": 2}, {"tools": [TOOL]}, *(() if is_once else ({"n": 2},))):
        answer("chats", schemas.CreateChatCompletionResponse, "/chat/completions", **talk | more)
        stream("chat_chunks", schemas.CreateChatCompletionStreamResponse, "/chat/completions", **talk | more)
    checked("models", schemas.ListModelsResponse, ask("/models").json())
    checked("model", schemas.Model, ask(f"/models/{MODEL}").json())
    error("a model that is not there", "/completions", {"model": "nothing", "prompt": "a"}, 404)
    error("a parameter", "/chat/completions", {"model": MODEL, "messages": HELLO, "best_of": 2}, 400)
    error("a type", "/chat/completions", {"model": MODEL, "messages": "hello"}, 400)
    error("a value", "/completions", {"model": MODEL, "prompt": "a", "temperature": -1}, 400)
    error("embeddings", "/embeddings", {"model": MODEL, "input": "a"}, 400)
    error("a key", "/models", None, 401, authorization="Bearer tml-wrong")
    error("a path", "/nothing", None, 404)
    error("a method", "/completions", None, 405)
    print(json.dumps(found))


main()
