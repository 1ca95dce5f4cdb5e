"""The exception tree: which class derives from which, and what survives copying."""

from __future__ import annotations

import builtins
import copy
import inspect
import pickle
import traceback
from typing import Any

import pytest

from tinsmith import errors
from tinsmith.errors import RequestErrorCategory, RequestInfo, ResponseInfo

PARENTS: dict[str, tuple[str, ...]] = {
    "TinkerError": ("Exception",),
    "InvalidInputError": ("TinkerError", "ValueError"),
    "UnknownFieldError": ("InvalidInputError", "TypeError"),
    "UnknownLossInputError": ("InvalidInputError", "KeyError"),
    "WireError": ("TinkerError", "ValueError"),
    "LimitExceededError": ("WireError",),
    "RequestFailedError": ("TinkerError",),
    "MissingPackageError": ("TinkerError", "ImportError"),
    "RunRecoveredError": ("TinkerError",),
    "StoreError": ("TinkerError",),
    "ConstraintError": ("StoreError",),
    "StorageFullError": ("StoreError",),
    "StoreTakenError": ("StoreError",),
    "UnstorableError": ("StoreError",),
    "StoreUnavailableError": ("StoreError",),
    "NonFiniteError": ("TinkerError",),
    "DamagedCheckpointError": ("TinkerError",),
    "MissingArgumentError": ("InvalidInputError", "TypeError"),
    "ContextLengthError": ("InvalidInputError",),
    "APIError": ("TinkerError",),
    "APIResponseValidationError": ("APIError",),
    "APIConnectionError": ("APIError",),
    "APITimeoutError": ("APIConnectionError",),
    "APIStatusError": ("APIError",),
    "BadRequestError": ("APIStatusError",),
    "AuthenticationError": ("APIStatusError",),
    "BillingError": ("APIStatusError",),
    "PermissionDeniedError": ("APIStatusError",),
    "NotFoundError": ("APIStatusError",),
    "ConflictError": ("APIStatusError",),
    "UnprocessableEntityError": ("APIStatusError",),
    "RateLimitError": ("APIStatusError",),
    "InternalServerError": ("APIStatusError",),
    "RetryableException": ("Exception",),
}

CODES: dict[str, tuple[str, bool]] = {
    "TinkerError": ("tinker_error", False),
    "InvalidInputError": ("invalid_input", False),
    "UnknownFieldError": ("unknown_field", False),
    "UnknownLossInputError": ("unknown_loss_input", False),
    "WireError": ("malformed_body", False),
    "LimitExceededError": ("limit_exceeded", False),
    "RequestFailedError": ("request_failed", False),
    "MissingPackageError": ("missing_package", False),
    "RunRecoveredError": ("run_recovered", False),
    "StoreError": ("store_error", False),
    "ConstraintError": ("store_constraint", False),
    "StorageFullError": ("storage_full", False),
    "StoreTakenError": ("store_taken", False),
    "UnstorableError": ("unstorable", False),
    "StoreUnavailableError": ("store_unavailable", True),
    "NonFiniteError": ("non_finite", False),
    "DamagedCheckpointError": ("damaged_checkpoint", False),
    "MissingArgumentError": ("missing_argument", False),
    "ContextLengthError": ("context_length_exceeded", False),
    "APIError": ("api_error", False),
    "APIResponseValidationError": ("invalid_response", False),
    "APIConnectionError": ("connection_error", True),
    "APITimeoutError": ("timeout", True),
    "APIStatusError": ("status_error", False),
    "BadRequestError": ("bad_request", False),
    "AuthenticationError": ("authentication_failed", False),
    "BillingError": ("billing", True),
    "PermissionDeniedError": ("permission_denied", False),
    "NotFoundError": ("not_found", False),
    "ConflictError": ("conflict", True),
    "UnprocessableEntityError": ("unprocessable", False),
    "RateLimitError": ("rate_limited", True),
    "InternalServerError": ("server_error", True),
    "RetryableException": ("promise_lost", True),
}

REQUEST = RequestInfo("POST", "http://localhost:8000/api/v1/asample")
RESPONSE = ResponseInfo(418, {"x-request-id": "r1"}, REQUEST, '{"detail": "short and stout"}')
BODY = {"detail": "short and stout"}


def instance(name: str) -> Exception:
    """An exception of the class with every attribute set to something of its own."""
    cls: Any = getattr(errors, name)
    if issubclass(cls, (errors.InvalidInputError, errors.WireError)):
        error = cls("stop: wrong", field="stop")
    elif cls is errors.RequestFailedError:
        error = cls("out of memory", "request-1", "server")
    elif cls is errors.APIResponseValidationError:
        error = cls(RESPONSE, BODY, message="no session_id")
    elif issubclass(cls, errors.APIStatusError):
        error = cls("Error code: 418", RESPONSE, BODY)
    elif issubclass(cls, errors.APIConnectionError):
        error = cls(REQUEST, "refused")
    elif cls is errors.APIError:
        error = cls("failed", REQUEST, body=BODY)
    elif cls is errors.MissingPackageError:
        error = cls("torch", "a loss")
    else:
        error = cls("failed")
    assert isinstance(error, Exception)
    return error


def attributes(error: BaseException) -> dict[str, Any]:
    named = {name: getattr(error, name) for name in dir(error) if not name.startswith("_")}
    return {name: value for name, value in named.items() if not callable(value)}


def all_classes() -> set[str]:
    return {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, Exception) and not issubclass(value, Warning)
    }


def test_the_tables_here_name_every_class() -> None:
    assert set(PARENTS) == set(CODES) == all_classes()


@pytest.mark.parametrize("name", PARENTS)
def test_the_tree_is_this(name: str) -> None:
    bases = tuple(getattr(errors, parent, None) or getattr(builtins, parent) for parent in PARENTS[name])
    assert getattr(errors, name).__bases__ == bases


@pytest.mark.parametrize("name", CODES)
def test_code_and_retryable_are_stable(name: str) -> None:
    cls = getattr(errors, name)
    assert (cls.code, cls.retryable) == CODES[name]


def test_codes_are_unique() -> None:
    codes = [code for code, _ in CODES.values()]
    assert len(set(codes)) == len(codes)


@pytest.mark.parametrize("name", PARENTS)
def test_every_class_says_what_to_do(name: str) -> None:
    assert getattr(errors, name).__doc__


def test_warnings_are_of_the_expected_kinds() -> None:
    assert issubclass(errors.ExperimentalWarning, FutureWarning)
    assert issubclass(errors.PrecisionWarning, UserWarning)


def test_one_clause_catches_everything_but_a_lost_promise() -> None:
    outside = {name for name in PARENTS if not issubclass(getattr(errors, name), errors.TinkerError)}
    assert outside == {"RetryableException"}


@pytest.mark.parametrize("name", PARENTS)
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickling_keeps_every_attribute(name: str, protocol: int) -> None:
    error = instance(name)
    restored = pickle.loads(pickle.dumps(error, protocol))
    assert type(restored) is type(error)
    assert attributes(restored) == attributes(error)
    assert str(restored) == str(error)


@pytest.mark.parametrize("name", PARENTS)
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_copying_keeps_every_attribute(name: str, copied: Any) -> None:
    error = instance(name)
    restored = copied(error)
    assert restored is not error
    assert type(restored) is type(error)
    assert attributes(restored) == attributes(error)


@pytest.mark.parametrize("copied", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))])
def test_copying_keeps_what_was_set_on_the_instance(copied: Any) -> None:
    error = instance("InternalServerError")
    error.retryable = False  # type: ignore[attr-defined]
    assert copied(error).retryable is False


@pytest.mark.parametrize("name", PARENTS)
def test_the_text_is_never_empty(name: str) -> None:
    error = instance(name)
    assert str(error).strip()
    assert str(error) in "".join(traceback.format_exception_only(error))


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (errors.APIConnectionError(), "Connection error."),
        (errors.APITimeoutError(), "Request timed out."),
        (errors.APIResponseValidationError(ResponseInfo(200)), "The answer does not have the promised shape."),
    ],
)
def test_errors_without_a_text_bring_their_own(error: errors.APIError, text: str) -> None:
    assert str(error) == error.message == text


def test_a_key_error_of_ours_shows_its_text_unquoted() -> None:
    assert str(errors.UnknownLossInputError("no dtype for 'x'")) == "no dtype for 'x'"


def test_input_errors_are_caught_by_the_builtin_clauses() -> None:
    for name, builtin in (
        ("InvalidInputError", ValueError),
        ("UnknownFieldError", TypeError),
        ("UnknownFieldError", ValueError),
        ("UnknownLossInputError", KeyError),
        ("WireError", ValueError),
        ("LimitExceededError", ValueError),
    ):
        with pytest.raises(builtin):
            raise instance(name)


def test_status_errors_carry_the_answer() -> None:
    error = instance("NotFoundError")
    assert isinstance(error, errors.NotFoundError)
    assert (error.status_code, error.response, error.body, error.request) == (418, RESPONSE, BODY, REQUEST)


def test_a_failed_operation_carries_its_id_and_category() -> None:
    error = errors.RequestFailedError("no", "request-1", "User")
    assert (error.message, error.request_id, error.category) == ("no", "request-1", RequestErrorCategory.User)


@pytest.mark.parametrize(
    ("text", "member"),
    [
        ("user", RequestErrorCategory.User),
        ("User", RequestErrorCategory.User),
        ("USER", RequestErrorCategory.User),
        ("server", RequestErrorCategory.Server),
        ("SeRvEr", RequestErrorCategory.Server),
        ("unknown", RequestErrorCategory.Unknown),
        ("RequestErrorCategory.User", RequestErrorCategory.Unknown),
        ("cosmic rays", RequestErrorCategory.Unknown),
        ("", RequestErrorCategory.Unknown),
        (None, RequestErrorCategory.Unknown),
        (7, RequestErrorCategory.Unknown),
    ],
)
def test_the_category_reads_any_case_and_never_fails(text: Any, member: RequestErrorCategory) -> None:
    assert RequestErrorCategory(text) is member


def test_categories_are_written_in_lower_case() -> None:
    assert [str(member) for member in RequestErrorCategory] == ["unknown", "server", "user"]


def test_request_and_response_infos_are_frozen() -> None:
    with pytest.raises(AttributeError):
        REQUEST.url = "http://elsewhere"  # type: ignore[misc]
    with pytest.raises(AttributeError):
        RESPONSE.status_code = 200  # type: ignore[misc]


def test_infos_hold_no_request_headers() -> None:
    assert not hasattr(REQUEST, "headers")
