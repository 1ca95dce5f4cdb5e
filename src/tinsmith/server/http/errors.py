"""The one table from errors to HTTP: which status and body a refusal has.

409 is not in it: official clients retry a 409 for five minutes (protocol section 1). They retry a 429 for as long, and
a sample's 429 for ever, so an error that a short wait does not fix is not a 429 either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from tinsmith.errors import InvalidInputError, LimitExceededError, StoreError, TinkerError, WireError
from tinsmith.server.redaction import redacted_text
from tinsmith.server.refusals import (
    GoneError,
    NotAllowedError,
    NotAuthenticatedError,
    NotReadyError,
    OverBudgetError,
    OverLimitError,
    SlowBodyError,
    UnknownResourceError,
    UnsupportedBodyError,
)
from tinsmith.wire.routes.table import Dialect

STATUSES: Mapping[type[TinkerError], int] = {
    LimitExceededError: 413,
    InvalidInputError: 400,
    WireError: 422,
    NotAuthenticatedError: 401,
    NotAllowedError: 403,
    UnknownResourceError: 404,
    GoneError: 410,
    UnsupportedBodyError: 415,
    SlowBodyError: 408,
    OverBudgetError: 403,
    OverLimitError: 429,
    NotReadyError: 503,
    StoreError: 503,
}
"""The first class that the error is an instance of gives the status."""


def status_of(error: TinkerError) -> int:
    """Return the HTTP status of an error; 500 if the table does not have it."""
    return next((status for kind, status in STATUSES.items() if isinstance(error, kind)), 500)


def body_of(error: TinkerError, dialect: Dialect = "tinker") -> bytes:
    """Return the JSON body, in the form that the route's clients read."""
    return msgspec.json.encode(FORMS[dialect](error))


def _tinker(error: TinkerError) -> dict[str, Any]:
    """Return `detail` for people, `code` for programs, and `field` if one is wrong."""
    answer: dict[str, Any] = {"detail": redacted_text(str(error)), "code": error.code}
    field = getattr(error, "field", None)
    if field is not None:
        answer["field"] = field
    if isinstance(error, OverLimitError):
        answer["retry_after_s"] = error.retry_after_s
        answer["remaining"] = error.remaining
    return answer


def _openai(error: TinkerError) -> dict[str, Any]:
    """Return what OpenAI's clients read: the same, and a type that follows from the status."""
    status = status_of(error)
    field = getattr(error, "field", None)
    kind = OPENAI_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    code = OPENAI_CODES.get(error.code, error.code)
    return {"error": {"message": redacted_text(str(error)), "type": kind, "param": field, "code": code}}


def _anthropic(error: TinkerError) -> dict[str, Any]:
    """Return what Anthropic's clients read. There is no request id: a request that is refused has not got one yet."""
    status = status_of(error)
    kind = ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": redacted_text(str(error))}, "request_id": None}


FORMS: Mapping[Dialect, Callable[[TinkerError], dict[str, Any]]] = {
    "tinker": _tinker,
    "openai": _openai,
    "anthropic": _anthropic,
}
OPENAI_TYPES: Mapping[int, str] = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
OPENAI_CODES: Mapping[str, str] = {"not_authenticated": "invalid_api_key", "over_limit": "rate_limit_exceeded"}
"""Codes under which programs know our own."""
ANTHROPIC_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    410: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""The types of Anthropic's errors by status; 503 is what Anthropic sends as 529."""


def headers_of(error: TinkerError) -> dict[str, str]:
    """Return when to retry, for temporary errors; a client that sends too slowly is disconnected."""
    if isinstance(error, SlowBodyError):
        return {"connection": "close"}
    if isinstance(error, OverBudgetError) or not isinstance(error, (OverLimitError, NotReadyError)):
        return {}
    seconds = max(0.0, error.retry_after_s)
    headers = {"retry-after": str(max(1, round(seconds))), "retry-after-ms": str(round(seconds * 1000))}
    if isinstance(error, OverLimitError):
        headers["x-ratelimit-remaining"] = str(error.remaining)
    return headers
