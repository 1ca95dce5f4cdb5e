"""Where a model's tokenizer comes from: the server that serves one, a directory, or the hub."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

import msgspec

from tinsmith.client.operations import Operations
from tinsmith.errors import TinkerError
from tinsmith.transport.base import HttpRequest, Purpose

TOKENIZER_PATH = "/tinsmith/v1/tokenizer"


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
    connection = holder.connection
    await connection.ready()
    if not connection.extensions.get("tokenizer"):
        return None
    request = HttpRequest(
        method="GET",
        url=f"{connection.config.base_url}{TOKENIZER_PATH}?{urlencode({'model': model_name})}",
        headers=await connection.headers(),
        purpose=Purpose.REST,
    )
    response = await connection.transport().send(request)
    if response.status != 200:
        return None
    answer = msgspec.json.decode(response.body)
    return answer if isinstance(answer, dict) and isinstance(answer.get("tokenizer_json"), str) else None
