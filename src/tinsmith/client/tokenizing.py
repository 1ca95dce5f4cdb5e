"""Where a model's tokenizer comes from: the server that serves one, a directory, or the hub."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

import msgspec

from tinsmith.client.operations import Operations
from tinsmith.errors import BadRequestError, NotFoundError, TinkerError, WireError
from tinsmith.transport.base import Purpose
from tinsmith.wire.routes import Route

TOKENIZER = Route(name="tokenizer", method="GET", path="/tinsmith/v1/tokenizer")


def tokenizer_of(holder: Operations, model_name: str | None, tokenizer_id: str | None) -> Any:
    """The tokenizer of a model, cached by its content."""
    from tinsmith.client.tokenizers import TokenizerFiles, load_tokenizer, tokenizer_source

    if not model_name and not tokenizer_id:
        raise TinkerError("the server names no model, so its tokenizer cannot be found; load one yourself")
    served = holder.submit("get_tokenizer", _from_server(holder, model_name or "")).result()
    if served is not None:
        return load_tokenizer(
            TokenizerFiles(
                tokenizer_json=served["tokenizer_json"].encode(),
                config=served.get("tokenizer_config") or {},
                chat_template=served.get("chat_template"),
            )
        )
    try:
        return load_tokenizer(tokenizer_source(model_name or "", tokenizer_id))
    except TinkerError as error:
        raise TinkerError(f"the server has no tokenizer for {model_name or tokenizer_id}, and {error}") from error


async def _from_server(holder: Operations, model_name: str) -> dict[str, Any] | None:
    """The files that the server has; None if it has none. A server that fails is an error: another tokenizer from
    elsewhere might not be the one that the model was trained with."""
    connection = holder.connection
    await connection.ready()
    if not connection.extensions.get("tokenizer"):
        return None
    url = f"{connection.config.base_url}{TOKENIZER.path}?{urlencode({'model': model_name})}"
    try:
        response = await connection.send(TOKENIZER, None, url=url, purpose=Purpose.REST)
    except (NotFoundError, BadRequestError):
        return None
    try:
        answer = msgspec.json.decode(response.body)
    except msgspec.DecodeError as error:
        raise WireError(f"the answer of {response.url} is not JSON: {error}") from None
    if not isinstance(answer, dict) or not isinstance(answer.get("tokenizer_json"), str):
        raise WireError(f"the answer of {response.url} holds no tokenizer_json")
    return answer
