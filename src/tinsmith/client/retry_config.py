"""How a sampling client retries, in the official client's terms."""

from __future__ import annotations

from dataclasses import dataclass

from tinsmith.errors import APIConnectionError, RetryableException


@dataclass
class RetryConfig:
    """Settings of `SamplingClient`. `max_connections` is replaced by what the server allows."""

    max_connections: int | None = 1000
    progress_timeout: float = 7200
    retry_delay_base: float = 0.5
    retry_delay_max: float = 10.0
    jitter_factor: float = 0.25
    enable_retry_logic: bool = True
    enable_stuck_detection: bool = True
    retryable_exceptions: tuple[type[Exception], ...] = (TimeoutError, APIConnectionError, RetryableException)
