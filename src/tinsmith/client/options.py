"""Names of the official client's request options, for programs that mention them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypedDict

from tinsmith.errors import InvalidInputError

_FROM_TIMEOUT: Any = object()


@dataclasses.dataclass(frozen=True, slots=True, init=False)
class Timeout:
    """Seconds for each part of a request, None for no limit; a part that is not given takes `timeout`."""

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
                raise InvalidInputError(f"Timeout: give one number for all parts, or also {name}", field=name)
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
