"""The routes that clients of Anthropic call, under the two paths at which they look for them.

They are declared like all others, and differ in the form of their errors (`dialect`). `wire/messages/anthropic.py` has
their bodies. Answers are Anthropic's, and `server/dialects` makes them.
"""

from __future__ import annotations

from collections.abc import Mapping

from tinsmith.wire.messages import anthropic
from tinsmith.wire.routes.door import LARGE, needs
from tinsmith.wire.routes.table import Route

ANTHROPIC_PREFIXES: Mapping[str, str] = {"anthropic": "/v1", "hosted_anthropic": "/anthropic/api/v1"}
"""The usual path, which is beside OpenAI's, and that of the hosted service."""
VERSION_HEADER = "anthropic-version"
"""Every client of Anthropic sends it. It tells whose client asks for a path that no route has."""


def _declare(prefix: str) -> tuple[Route, ...]:
    path = f"{ANTHROPIC_PREFIXES[prefix]}/messages"
    return (
        Route(
            name=f"{prefix}_messages",
            method="POST",
            path=path,
            request=anthropic.MessagesRequest,
            door=needs("sample", owner="checkpoint", cost="wait", body=LARGE),
            dialect="anthropic",
        ),
        Route(
            name=f"{prefix}_count_tokens",
            method="POST",
            path=f"{path}/count_tokens",
            request=anthropic.CountTokensRequest,
            response=anthropic.TokenCount,
            door=needs("sample", owner="checkpoint", cost="rows", body=LARGE),
            dialect="anthropic",
        ),
    )


ANTHROPIC_ROUTES: tuple[Route, ...] = tuple(route for prefix in ANTHROPIC_PREFIXES for route in _declare(prefix))
