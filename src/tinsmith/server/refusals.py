"""Errors with which the server refuses a request. `http.errors` maps them to HTTP statuses.

Invalid input is `InvalidInputError` or `WireError`, from the package's own error tree.
"""

from __future__ import annotations

from tinsmith.errors import TinkerError


class RefusedError(TinkerError):
    """The request was refused. The message tells the caller what is wrong and what to do."""

    code = "refused"


class NotAuthenticatedError(RefusedError):
    """There is no key, or it is unknown, revoked or expired."""

    code = "not_authenticated"


class NotAllowedError(RefusedError):
    """The key is valid, but its scopes do not allow this call."""

    code = "not_allowed"


class UnknownResourceError(RefusedError):
    """It does not exist, or the caller may not see it."""

    code = "unknown_resource"


class UnknownModelError(UnknownResourceError):
    """The name of a model stands for nothing that the caller may sample."""

    code = "model_not_found"


class UnsupportedBodyError(RefusedError):
    """The body has a type or an encoding that this route does not accept."""

    code = "unsupported_body"


class SlowBodyError(RefusedError):
    """The body did not arrive in time."""

    code = "slow_body"


class GoneError(RefusedError):
    """It existed and has ended: a finished session, or a request whose result was pruned."""

    code = "gone"


class OverLimitError(RefusedError):
    """A limit was reached; the same request may succeed after `retry_after_s`."""

    code = "over_limit"
    retryable = True

    def __init__(self, message: str, *, retry_after_s: float, remaining: int = 0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.remaining = remaining


class OverBudgetError(OverLimitError):
    """The key does not have enough tokens left for the day, and they do not reset soon; the message says when. Do not
    retry."""

    code = "over_budget"
    retryable = False


class NotReadyError(RefusedError):
    """The server cannot accept work now: it is shutting down, its disk is full, or its database is unreachable."""

    code = "not_ready"
    retryable = True

    def __init__(self, message: str, *, retry_after_s: float = 5.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
