"""The whole exception tree. Domain errors know nothing of HTTP libraries.

TinkerError                         root of everything tinsmith raises on purpose
├── InvalidInputError (ValueError)  an argument is wrong; nothing was sent
│   ├── UnknownFieldError (TypeError)     a field that the type does not have
│   ├── MissingArgumentError (TypeError)  an argument that must be given
│   ├── ContextLengthError                a prompt that fills the model's context
│   └── UnknownLossInputError (KeyError)  a plain list under a key whose dtype is not known
├── MissingPackageError (ImportError)  a package that is needed is not installed
├── WireError (ValueError)          received bytes do not follow the protocol
│   └── LimitExceededError          ... or are larger than the limit
├── RequestFailedError              the server accepted an operation and it failed
├── RunRecoveredError               a lost run was resumed from its last checkpoint
├── StoreError                      the server's database failed
│   ├── ConstraintError                   the row already exists
│   ├── UnstorableError                   a value that the database cannot store
│   ├── StorageFullError                  the disk is full
│   ├── StoreTakenError                   another server uses the database
│   └── StoreUnavailableError             locked by another process, or not reachable
├── NonFiniteError                  a loss or gradient is NaN or infinite; nothing was changed
├── DamagedCheckpointError          a checkpoint's files are missing or corrupt
└── APIError                        a call did not succeed
    ├── APIResponseValidationError  a 2xx response that does not have the expected shape
    ├── APIConnectionError          no response
    │   └── APITimeoutError         no response in time
    └── APIStatusError              a response with status 4xx or 5xx
        ├── BadRequestError 400            ├── ConflictError 409
        ├── AuthenticationError 401        ├── UnprocessableEntityError 422
        ├── BillingError 402               ├── RateLimitError 429
        ├── PermissionDeniedError 403      └── InternalServerError 5xx
        └── NotFoundError 404

RetryableException is not a TinkerError, as in the official client: the server no longer knows a promise.
Every class has a stable `code` and a `retryable` flag; the retry policy reads the flag, never the message.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MAX_MESSAGE = 2000
"""The longest message, in characters; a message may quote input of any size."""


def bounded(text: str) -> str:
    """Cut the middle out of a message that is too long."""
    return text if len(text) <= MAX_MESSAGE else f"{text[: MAX_MESSAGE - 500]} [...] {text[-400:]}"


_SECRET = re.compile(r"(tml-|eyJ)[A-Za-z0-9_\-.]{4,}")


def redacted(text: str) -> str:
    """Redact anything that looks like a key or a token: servers and proxies sometimes echo them."""
    return _SECRET.sub(lambda match: match[1] + "***", text)


class RequestErrorCategory(enum.StrEnum):
    """Who can fix a failed operation."""

    Unknown = "unknown"
    Server = "server"
    User = "user"

    @classmethod
    def _missing_(cls, value: object) -> RequestErrorCategory:
        # Some servers capitalise the word; a category we do not know must not hide the failure itself.
        lowered = value.lower() if isinstance(value, str) else None
        return next((member for member in cls if member.value == lowered), cls.Unknown)


@dataclass(frozen=True, slots=True)
class RequestInfo:
    """The request that failed: method and URL, never its headers, which contain the key."""

    method: str
    url: str


@dataclass(frozen=True, slots=True)
class ResponseInfo:
    """The response that caused an error."""

    status_code: int
    headers: Mapping[str, str] = field(default_factory=dict)
    request: RequestInfo | None = None
    text: str = ""


class TinkerError(Exception):
    """The base of all errors that this package raises on purpose."""

    code = "tinker_error"
    retryable = False


class InvalidInputError(TinkerError, ValueError):
    """An argument is wrong; the message names the field, the value and what is allowed. Nothing was sent."""

    code = "invalid_input"

    def __init__(self, message: str, *, field: str | None = None) -> None:
        message = bounded(message)
        super().__init__(message)
        self.message = message
        self.field = bounded(field) if field is not None else None

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), (self.message,), {"field": self.field}), self.__dict__


class UnknownFieldError(InvalidInputError, TypeError):
    """The type has no such field; the message lists those it has."""

    code = "unknown_field"


class MissingArgumentError(InvalidInputError, TypeError):
    """An argument that has no default was not given."""

    code = "missing_argument"


class ContextLengthError(InvalidInputError):
    """The prompt leaves no room for a sample; shorten it."""

    code = "context_length_exceeded"


class UnknownLossInputError(InvalidInputError, KeyError):
    """A list was passed under a key whose dtype is not defined: pass a numpy array or TensorData instead."""

    code = "unknown_loss_input"


class MissingPackageError(TinkerError, ImportError):
    """A feature needs a package that is not installed; the message has the command to install it."""

    code = "missing_package"

    def __init__(self, package: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs the package {package}, which is not installed: pip install {package}", name=package
        )
        self.purpose = purpose

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.name, self.purpose), self.__dict__


class WireError(TinkerError, ValueError):
    """Received bytes do not follow the protocol; `field` names the place."""

    code = "malformed_body"

    def __init__(self, message: str, *, field: str | None = None) -> None:
        message = bounded(message)
        super().__init__(message)
        self.message = message
        self.field = bounded(field) if field is not None else None

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), (self.message,), {"field": self.field}), self.__dict__


class LimitExceededError(WireError):
    """A body is larger than the limit, perhaps after decompression: send less at once, or raise the limit."""

    code = "limit_exceeded"


class RequestFailedError(TinkerError):
    """The server accepted an operation and it failed there. Category `user`: change the input; else: report it."""

    code = "request_failed"

    def __init__(self, message: str, request_id: str, category: RequestErrorCategory | str = "unknown") -> None:
        message = message or "The operation failed and the server gave no reason."
        super().__init__(message)
        self.message = message
        self.request_id = request_id
        self.category = RequestErrorCategory(category)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.request_id, self.category.value), self.__dict__


class RunRecoveredError(TinkerError):
    """A run was lost and resumed from its last checkpoint: go back to that step and continue."""

    code = "run_recovered"


class StoreError(TinkerError):
    """The server's database failed; the message says which database, why, and what to do."""

    code = "store_error"


class ConstraintError(StoreError):
    """A row with the same key already exists; nothing of this write was stored."""

    code = "store_constraint"


class UnstorableError(StoreError):
    """The database cannot store a value: it is too large, or of a wrong kind. Retrying does not help."""

    code = "unstorable"


class StorageFullError(StoreError):
    """The database's disk is full: free some space. What was acknowledged before is safe."""

    code = "storage_full"


class StoreTakenError(StoreError):
    """Another server uses the database, and only one may: stop it, or use another database."""

    code = "store_taken"


class StoreUnavailableError(StoreError):
    """The database is locked by another process or not reachable; the same call may succeed later."""

    code = "store_unavailable"
    retryable = True


class NonFiniteError(TinkerError):
    """A loss or gradient is NaN or infinite. Nothing was changed: look at the data, or lower the learning rate."""

    code = "non_finite"


class DamagedCheckpointError(TinkerError):
    """A file of a checkpoint is missing or not what was written; the message names it. Use another checkpoint."""

    code = "damaged_checkpoint"


class APIError(TinkerError):
    """A call did not succeed. `request` says where it went; `body` is the decoded answer, if there was one."""

    code = "api_error"

    def __init__(self, message: str, request: RequestInfo | None = None, *, body: object | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.request = request
        self.body = body

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), (self.message, self.request), {"body": self.body}), self.__dict__


class APIResponseValidationError(APIError):
    """The server answered 2xx with a body the protocol does not know: wrong URL, or an incompatible server."""

    code = "invalid_response"

    def __init__(self, response: ResponseInfo, body: object | None = None, *, message: str | None = None) -> None:
        super().__init__(message or "The answer does not have the promised shape.", response.request, body=body)
        self.response = response
        self.status_code = response.status_code

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), (self.response, self.body), {"message": self.message}), self.__dict__


class APIStatusError(APIError):
    """The server answered with an error status; `status_code`, `response` and `body` say which."""

    code = "status_error"
    hint = ""

    def __init__(self, message: str, response: ResponseInfo, body: object | None = None) -> None:
        super().__init__(message, response.request, body=body)
        self.response = response
        self.status_code = response.status_code

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), (self.message, self.response, self.body), {}), self.__dict__


class APIConnectionError(APIError):
    """No answer: server down, wrong address, or the network between. Check the URL in the message."""

    code = "connection_error"
    retryable = True
    is_not_started = False
    """Whether the server should be on this machine and nothing listens there."""

    def __init__(self, request: RequestInfo | None = None, message: str = "Connection error.") -> None:
        super().__init__(message, request)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), (self.request, self.message), {}), self.__dict__


class APITimeoutError(APIConnectionError):
    """No answer in time: the server is busy or unreachable; a longer timeout can be set per client and per call."""

    code = "timeout"

    def __init__(self, request: RequestInfo | None = None, message: str = "Request timed out.") -> None:
        super().__init__(request, message)


class BadRequestError(APIStatusError):
    """400: the server refused the request as it is; the message says which part."""

    code = "bad_request"


class AuthenticationError(APIStatusError):
    """401: the key is missing, wrong, revoked or expired."""

    code = "authentication_failed"
    hint = "Check the key (TINKER_API_KEY), and that it belongs to this server."


class BillingError(APIStatusError):
    """402: the account cannot pay for this; official clients wait and retry for up to an hour."""

    code = "billing"
    retryable = True
    hint = "Check the account's balance or plan."


class PermissionDeniedError(APIStatusError):
    """403: the key is valid but may not do this."""

    code = "permission_denied"
    hint = "Use a key with the needed scope or budget, or ask the owner to publish or share the resource."


class NotFoundError(APIStatusError):
    """404: no such resource for this key, or the server lacks this route."""

    code = "not_found"
    hint = "Check the id and the base URL; resources of other accounts also read as missing."


class ConflictError(APIStatusError):
    """409: the state of the resource does not allow this now."""

    code = "conflict"
    retryable = True


class UnprocessableEntityError(APIStatusError):
    """422: the request is well formed but its content is not acceptable."""

    code = "unprocessable"


class RateLimitError(APIStatusError):
    """429: too many requests; wait as long as `Retry-After` says."""

    code = "rate_limited"
    retryable = True
    hint = "Send fewer requests at once, or wait as long as Retry-After says."


class InternalServerError(APIStatusError):
    """5xx: the server failed; the same request may succeed later."""

    code = "server_error"
    retryable = True
    hint = "The server failed; see its log for the cause."


class RetryableException(Exception):  # noqa: N818 - the official name
    """The server no longer knows the promise of an operation; idempotent operations can be submitted again."""

    code = "promise_lost"
    retryable = True

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class ExperimentalWarning(FutureWarning):
    """The call may change or be removed without notice."""


class PrecisionWarning(UserWarning):
    """Numbers were rounded: the protocol has float32 and int64 only."""


STATUS_ERRORS: Mapping[int, type[APIStatusError]] = {
    400: BadRequestError,
    401: AuthenticationError,
    402: BillingError,
    403: PermissionDeniedError,
    404: NotFoundError,
    409: ConflictError,
    422: UnprocessableEntityError,
    429: RateLimitError,
}

RETRYABLE_STATUSES = frozenset({402, 408, 409, 429})


def _rebuild(cls: type[TinkerError], args: tuple[Any, ...], kwargs: dict[str, Any]) -> TinkerError:
    """Unpickle an exception whose constructor takes keywords."""
    return cls(*args, **kwargs)
