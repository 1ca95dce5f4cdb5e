"""Turn a failed HTTP response into the exception that a user sees, and say how long to wait before a retry.

It depends on no HTTP library; the caller passes status, headers and body.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any

import msgspec

from tinsmith.errors import (
    RETRYABLE_STATUSES,
    STATUS_ERRORS,
    APIStatusError,
    InternalServerError,
    RequestFailedError,
    RequestInfo,
    ResponseInfo,
    redacted,
)

LONG_WAIT_S = 60.0
"""If a server asks for a longer wait, the error says so; clients that retry wait out shorter ones."""
YEAR_S = 366 * 86_400
MAX_TEXT = 2000
"""The most characters of a response that go into a message; proxies respond with whole pages."""


def status_error(
    status: int, body: bytes, headers: Mapping[str, str], request: RequestInfo | None = None
) -> APIStatusError:
    """Return the exception for a response with an error status: what the server said, where, and what to do."""
    decoded = decode_error_body(body)
    error_type = STATUS_ERRORS.get(status, InternalServerError if status >= 500 else APIStatusError)
    said = f"Error code: {status} - {_shown(decoded)}" if decoded not in (None, "") else f"Error code: {status}"
    where = f" ({request.method} {request.url})" if request is not None else ""
    hint = f" {error_type.hint}" if error_type.hint else ""
    hint += long_wait(status, headers)
    response = ResponseInfo(status, dict(headers), request, body[: 4 * MAX_TEXT].decode(errors="replace"))
    error = error_type(f"{said}{where}{hint}", response, decoded)
    error.retryable = is_retryable(status, headers)
    return error


def failed_operation(answer: Mapping[str, Any], request_id: str) -> RequestFailedError | None:
    """Return the exception for a 200 response that reports a failed operation (it has the key `error`), else None."""
    if "error" not in answer:
        return None
    category = answer.get("category")
    return RequestFailedError(_shown(answer["error"]), request_id, category if isinstance(category, str) else "unknown")


def decode_error_body(body: bytes) -> Any:
    """Return the JSON in a body, else its text, or None if it is empty."""
    if not body:
        return None
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return body.decode(errors="replace")[:MAX_TEXT]


def is_retryable(status: int, headers: Mapping[str, str]) -> bool:
    """Whether the same request may succeed later; the header `x-should-retry` takes precedence."""
    word = _header(headers, "x-should-retry")
    if word in ("true", "false"):
        return word == "true"
    return status >= 500 or status in RETRYABLE_STATUSES


def long_wait(status: int, headers: Mapping[str, str], now: datetime | None = None) -> str:
    """Return a sentence that says until when the server asks clients to wait; empty if that is soon, or unknown."""
    seconds = retry_after_s(headers, now) if is_retryable(status, headers) else None
    if seconds is None or seconds <= LONG_WAIT_S:
        return ""
    return f" The server asks to wait until {moment_after(seconds, now or datetime.now(UTC))}."


def moment_after(seconds: float, now: datetime) -> str:
    """Return a moment in the future as a date, with what is left until then."""
    if seconds > YEAR_S:
        return "more than a year from now"
    minutes = math.ceil(seconds / 60)
    left = f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"
    moment = now + timedelta(seconds=seconds + 0.5)  # rounded: a microsecond before midnight is midnight
    return f"{moment:%Y-%m-%d %H:%M} UTC (in {left})"


def retry_after_s(headers: Mapping[str, str], now: datetime | None = None) -> float | None:
    """Return how long the server asks to wait: `retry-after-ms`, else `Retry-After` in seconds or as an HTTP date."""
    milliseconds = _number(_header(headers, "retry-after-ms"))
    if milliseconds is not None:
        return milliseconds / 1000
    value = _header(headers, "retry-after")
    seconds = _number(value)
    if seconds is not None or value is None:
        return seconds
    try:
        moment = parsedate_to_datetime(value)
    except (ValueError, IndexError, OverflowError):
        return None
    moment = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    return max(0.0, (moment - (now or datetime.now(UTC))).total_seconds())


def _header(headers: Mapping[str, str], name: str) -> str | None:
    for key, value in headers.items():
        if key.lower() == name:
            return value.strip()
    return None


def _number(text: str | None) -> float | None:
    try:
        number = float(text) if text is not None else -1.0
    except ValueError:
        return None
    return number if 0 <= number < float("inf") else None


def _shown(decoded: Any) -> str:
    if isinstance(decoded, Mapping) and set(decoded) == {"detail"}:
        decoded = decoded["detail"]
    text = redacted(decoded if isinstance(decoded, str) else msgspec.json.encode(decoded).decode())
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 3] + "..."
