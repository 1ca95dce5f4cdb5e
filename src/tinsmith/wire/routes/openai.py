"""The routes that clients of OpenAI call, under the two paths at which they look for them.

They are declared like all others, and differ in the form of their errors (`dialect`). `wire/messages/openai.py` has
their bodies. Answers are OpenAI's, and `server/dialects` makes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tinsmith.wire.messages import openai
from tinsmith.wire.routes.door import LARGE, Door, needs
from tinsmith.wire.routes.table import Method, Route

PREFIXES: Mapping[str, str] = {"openai": "/v1", "hosted_openai": "/oai/api/v1"}
"""The usual path, and that of the hosted service."""


def _at(
    prefix: str, name: str, method: Method, path: str, door: Door, request: type[Any] | None = None, **rest: Any
) -> Route:
    whole = PREFIXES[prefix] + path
    return Route(
        name=f"{prefix}_{name}", method=method, path=whole, request=request, door=door, dialect="openai", **rest
    )


def _declare(prefix: str) -> tuple[Route, ...]:
    sample = needs("sample", owner="checkpoint", cost="wait", body=LARGE)
    return (
        _at(
            prefix,
            "models",
            "GET",
            "/models",
            needs("sample", "read", owner="caller", cost="scan"),
            response=openai.ModelList,
        ),
        _at(
            prefix,
            "model",
            "GET",
            "/models/{model}",
            needs("sample", "read", owner="checkpoint", cost="rows"),
            response=openai.ListedModel,
        ),
        _at(prefix, "completions", "POST", "/completions", sample, openai.CompletionRequest),
        _at(prefix, "chat", "POST", "/chat/completions", sample, openai.ChatRequest),
        _at(
            prefix,
            "embeddings",
            "POST",
            "/embeddings",
            needs("sample", owner="nothing", cost="memory"),
            openai.EmbeddingRequest,
        ),
    )


OPENAI_ROUTES: tuple[Route, ...] = tuple(route for prefix in PREFIXES for route in _declare(prefix))
OPENAI_BY_NAME: Mapping[str, Route] = {route.name: route for route in OPENAI_ROUTES}
