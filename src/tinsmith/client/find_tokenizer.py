"""Finding a model's tokenizer: on the server, in a directory, or on the Hugging Face hub."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

import msgspec

from tinsmith.client.connection.operations import Operations
from tinsmith.errors import BadRequestError, NotFoundError, TinkerError, WireError
from tinsmith.transport.base import Purpose
from tinsmith.wire.routes.own import TOKENIZER


def tokenizer_of(holder: Operations, model_name: str | None, tokenizer_id: str | None) -> Any:
    """Return the tokenizer of a model, cached by its content."""
    from tinsmith.text.tokenizer import TokenizerFiles, load_tokenizer, tokenizer_source

    if not model_name and not tokenizer_id:
        raise TinkerError(
            "the server does not name the base model, so its tokenizer cannot be found; load one with load_tokenizer()"
        )
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
    """Return the server's tokenizer files; None if it has none. An error of the server is raised: a tokenizer from
    elsewhere might not be the one that the model was trained with."""
    from tinsmith.text.tokenizer import MAX_FILE_BYTES

    connection = holder.connection
    await connection.ready()
    if not connection.extensions.get("tokenizer"):
        return None
    url = f"{connection.config.base_url}{TOKENIZER.path}?{urlencode({'model': model_name})}"
    try:
        response = await connection.send(TOKENIZER, None, url=url, purpose=Purpose.REST)
    except (NotFoundError, BadRequestError):
        return None
    if len(response.body) > MAX_FILE_BYTES:
        raise WireError(f"the response of {response.url} has {len(response.body)} bytes, too many for a tokenizer")
    try:
        answer = msgspec.json.decode(response.body)
    except msgspec.DecodeError as error:
        raise WireError(f"the response of {response.url} is not JSON: {error}") from None
    if not isinstance(answer, dict) or not isinstance(answer.get("tokenizer_json"), str):
        raise WireError(f"the response of {response.url} contains no tokenizer_json")
    return answer
