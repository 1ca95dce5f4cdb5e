"""Options with the official client's names: `RetryConfig` for sampling clients, `Timeout` and `RequestOptions`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

from tinsmith.errors import APIConnectionError, InvalidInputError, RetryableException


@dataclass
class RetryConfig:
    """How a `SamplingClient` retries. `max_connections` has no effect: the server's limits apply instead."""

    max_connections: int | None = 1000
    progress_timeout: float = 7200
    retry_delay_base: float = 0.5
    retry_delay_max: float = 10.0
    jitter_factor: float = 0.25
    enable_retry_logic: bool = True
    enable_stuck_detection: bool = True
    retryable_exceptions: tuple[type[Exception], ...] = (TimeoutError, APIConnectionError, RetryableException)


_FROM_TIMEOUT: Any = object()


@dataclasses.dataclass(frozen=True, slots=True, init=False)
class Timeout:
    """Seconds for each part of a request, None for no limit; parts that are not given use `timeout`."""

    connect: float | None
    read: float | None
    write: float | None
    pool: float | None

    def __init__(
        self,
        timeout: float | None = _FROM_TIMEOUT,
        *,
        connect: float | None = _FROM_TIMEOUT,
        read: float | None = _FROM_TIMEOUT,
        write: float | None = _FROM_TIMEOUT,
        pool: float | None = _FROM_TIMEOUT,
    ) -> None:
        parts = {"connect": connect, "read": read, "write": write, "pool": pool}
        for name, seconds in parts.items():
            seconds = timeout if seconds is _FROM_TIMEOUT else seconds
            if seconds is _FROM_TIMEOUT:
                raise InvalidInputError(f"Timeout: pass one number for all parts, or set {name} as well", field=name)
            object.__setattr__(self, name, seconds)

    def as_dict(self) -> dict[str, float | None]:
        return dataclasses.asdict(self)


class RequestOptions(TypedDict, total=False):
    """Per-request settings as the official client names them."""

    headers: Mapping[str, str]
    max_retries: int
    timeout: float | Timeout | None
    params: Mapping[str, object]
    extra_json: Mapping[str, object]
    idempotency_key: str
    follow_redirects: bool
