"""Why the server may say no. `http_errors` knows which status each one is; nothing here does.

Wrong input is `InvalidInputError` or `WireError` of the package's own tree.
"""

from __future__ import annotations

from tinsmith.errors import TinkerError


class RefusedError(TinkerError):
    """The request is not carried out. The text is for the caller: what, where, and what to do."""

    code = "refused"


class NotAuthenticatedError(RefusedError):
    """No key, or one that is unknown, revoked or expired."""

    code = "not_authenticated"


class NotAllowedError(RefusedError):
    """The key is good, and its scopes do not cover this."""

    code = "not_allowed"


class UnknownResourceError(RefusedError):
    """No such thing for this caller; what belongs to strangers reads the same."""

    code = "unknown_resource"


class UnsupportedBodyError(RefusedError):
    """The body has a type or an encoding that this route does not read."""

    code = "unsupported_body"


class SlowBodyError(RefusedError):
    """The body did not arrive in time."""

    code = "slow_body"


class GoneError(RefusedError):
    """It was there and is over: a session that ended, a promise that was pruned."""

    code = "gone"


class OverLimitError(RefusedError):
    """Too much for now; the same request succeeds after `retry_after_s`."""

    code = "over_limit"
    retryable = True

    def __init__(self, message: str, *, retry_after_s: float, remaining: int = 0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.remaining = remaining


class NotReadyError(RefusedError):
    """The server cannot take work now: it drains, its disk is full, its database is away."""

    code = "not_ready"
    retryable = True

    def __init__(self, message: str, *, retry_after_s: float = 5.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
