"""From a failed HTTP response to an exception, and how long to wait before a retry."""

from __future__ import annotations

import copy
import json
import pickle
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinsmith import errors
from tinsmith.errors import RequestErrorCategory, RequestInfo
from tinsmith.wire.rules.faults import MAX_TEXT, failed_operation, is_retryable, long_wait, retry_after_s, status_error

NOW = datetime(1994, 11, 6, 8, 49, 7, tzinfo=UTC)
REQUEST = RequestInfo("GET", "http://localhost:8000/api/v1/training_runs/run:train:0")

NAMED = {
    400: errors.BadRequestError,
    401: errors.AuthenticationError,
    402: errors.BillingError,
    403: errors.PermissionDeniedError,
    404: errors.NotFoundError,
    409: errors.ConflictError,
    422: errors.UnprocessableEntityError,
    429: errors.RateLimitError,
}


def expected_class(status: int) -> type[errors.APIStatusError]:
    return NAMED.get(status, errors.InternalServerError if status >= 500 else errors.APIStatusError)


@pytest.mark.parametrize("status", range(400, 530))
def test_every_status_has_its_class_and_retry_rule(status: int) -> None:
    error = status_error(status, b'{"detail": "no"}', {}, REQUEST)
    assert type(error) is expected_class(status)
    assert error.status_code == error.response.status_code == status
    assert error.retryable is (status >= 500 or status in (402, 408, 409, 429))
    assert str(error).startswith(f"Error code: {status} - no")


@pytest.mark.parametrize(
    ("body", "decoded", "said"),
    [
        (b'{"detail": "bad rank"}', {"detail": "bad rank"}, "Error code: 400 - bad rank"),
        (b'{"detail": [{"loc": ["rank"]}]}', {"detail": [{"loc": ["rank"]}]}, 'Error code: 400 - [{"loc":["rank"]}]'),
        (b'{"error": "x", "code": 3}', {"error": "x", "code": 3}, 'Error code: 400 - {"error":"x","code":3}'),
        (b'{"detail": "a", "code": 3}', {"detail": "a", "code": 3}, 'Error code: 400 - {"detail":"a","code":3}'),
        (b"plain words", "plain words", "Error code: 400 - plain words"),
        (b'"a JSON text"', "a JSON text", "Error code: 400 - a JSON text"),
        (b"[]", [], "Error code: 400 - []"),
        (b"0", 0, "Error code: 400 - 0"),
        (b"", None, "Error code: 400"),
        (b"null", None, "Error code: 400"),
        (b'""', "", "Error code: 400"),
        (b'{"cut": ', '{"cut": ', 'Error code: 400 - {"cut": '),
        (b"\xff\xfe", "��", "Error code: 400 - ��"),
        (b"9" * 30, int("9" * 30), "Error code: 400 - " + "9" * 30),
    ],
)
def test_the_body_is_decoded_and_said(body: bytes, decoded: Any, said: str) -> None:
    error = status_error(400, body, {})
    assert error.body == decoded
    assert str(error) == said


@pytest.mark.parametrize(
    "body",
    [
        b"<html>" + b"<p>bad gateway</p>" * 100_000,
        json.dumps({"detail": "x" * 1_000_000}).encode(),
        json.dumps({"list": list(range(100_000))}).encode(),
        b"[" * 100_000 + b"]" * 100_000,
        b"9" * 100_000,
        b"\xff" * 1_000_000,
    ],
    ids=["html", "long detail", "long list", "deep", "digits", "not utf-8"],
)
def test_a_huge_body_makes_a_bounded_message(body: bytes) -> None:
    error = status_error(502, body, {}, REQUEST)
    assert len(str(error)) < MAX_TEXT + 300
    assert len(error.response.text) <= 4 * MAX_TEXT
    assert REQUEST.url in str(error)


@given(body=st.binary(max_size=64), status=st.integers(400, 599))
@settings(deadline=None, max_examples=100)
def test_any_body_makes_an_error_with_a_text(body: bytes, status: int) -> None:
    assert str(status_error(status, body, {})).startswith(f"Error code: {status}")


def test_the_message_says_where_the_request_went() -> None:
    error = status_error(404, b"", {}, REQUEST)
    assert f"(GET {REQUEST.url})" in str(error)
    assert error.request == error.response.request == REQUEST


EVENING = datetime(2026, 11, 18, 15, 44, 18, 1, UTC)


@pytest.mark.parametrize(
    ("status", "headers", "says"),
    [
        (429, {"Retry-After": "29741.999999"}, "The server asks to wait until 2026-11-19 00:00 UTC (in 8 h 16 min)."),
        (503, {"retry-after-ms": "61000"}, "The server asks to wait until 2026-11-18 15:45 UTC (in 2 min)."),
        (503, {"retry-after": "1e300"}, "The server asks to wait until more than a year from now."),
        (429, {"retry-after": "60"}, ""),
        (429, {}, ""),
        (404, {"retry-after": "3600"}, ""),
        (429, {"retry-after": "3600", "x-should-retry": "false"}, ""),
    ],
)
def test_a_long_wait_is_said_with_its_end(status: int, headers: dict[str, str], says: str) -> None:
    assert long_wait(status, headers, EVENING).strip() == says
    assert ("The server asks to wait" in str(status_error(status, b"x", headers))) == bool(says)


@pytest.mark.parametrize(
    ("status", "hint"),
    [(401, "TINKER_API_KEY"), (402, "balance"), (403, "scope"), (404, "base URL"), (429, "Retry-After"), (500, "log")],
)
def test_the_message_hints_at_what_to_do(status: int, hint: str) -> None:
    error = status_error(status, b'{"detail": "no"}', {})
    assert hint in str(error).removeprefix(f"Error code: {status} - no")


def test_the_answers_headers_are_kept() -> None:
    assert status_error(400, b"x", {"X-Request-Id": "r1"}).response.headers == {"X-Request-Id": "r1"}


@pytest.mark.parametrize(
    ("status", "word", "expected"),
    [
        (500, "false", False),
        (503, " false ", False),
        (409, "false", False),
        (400, "true", True),
        (404, "true", True),
        (500, "true", True),
        (400, "maybe", False),
        (500, "", True),
    ],
)
@pytest.mark.parametrize("header", ["x-should-retry", "X-Should-Retry"])
def test_the_servers_word_on_retrying_goes_first(header: str, status: int, word: str, expected: bool) -> None:
    assert is_retryable(status, {header: word}) is expected
    assert status_error(status, b"x", {header: word}).retryable is expected


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))])
@pytest.mark.parametrize(("status", "word"), [(500, "false"), (400, "true"), (408, None)])
def test_copies_keep_the_retry_decision(copied: Any, status: int, word: str | None) -> None:
    error = status_error(status, b"x", {} if word is None else {"x-should-retry": word})
    assert copied(error).retryable is error.retryable


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, None),
        ({"retry-after-ms": "1500"}, 1.5),
        ({"Retry-After-Ms": "0"}, 0.0),
        ({"retry-after-ms": "250.5"}, 0.2505),
        ({"retry-after-ms": "1500", "retry-after": "9"}, 1.5),
        ({"retry-after-ms": "soon", "retry-after": "9"}, 9.0),
        ({"retry-after-ms": "-1", "retry-after": "9"}, 9.0),
        ({"retry-after-ms": "nan"}, None),
        ({"retry-after-ms": "inf"}, None),
        ({"Retry-After": "3"}, 3.0),
        ({"retry-after": " 2.5 "}, 2.5),
        ({"retry-after": "0"}, 0.0),
        ({"retry-after": "-3"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "inf"}, None),
        ({"retry-after": "-inf"}, None),
        ({"retry-after": "1e999"}, None),
        ({"retry-after": ""}, None),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "Sun, 06 Nov 1994 08:49:37 GMT"}, 30.0),
        ({"retry-after": "Sunday, 06-Nov-94 08:49:37 GMT"}, 30.0),
        ({"retry-after": "Sun Nov  6 08:49:37 1994"}, 30.0),
        ({"retry-after": "Sun, 06 Nov 1994 10:49:37 +0200"}, 30.0),
        ({"retry-after": "Sun, 06 Nov 1994 08:49:07 GMT"}, 0.0),
        ({"retry-after": "Sun, 06 Nov 1994 08:00:00 GMT"}, 0.0),
        ({"retry-after": "Thu, 01 Jan 1970 00:00:00 GMT"}, 0.0),
        ({"retry-after": "Sun, 06 Nov 99999 08:49:37 GMT"}, None),
        ({"retry-after": "Sun, 66 Nov 1994 08:49:37 GMT"}, None),
        ({"retry-after": "Sun, 06 Nov"}, None),
    ],
)
def test_how_long_the_server_asks_to_wait(headers: dict[str, str], expected: float | None) -> None:
    assert retry_after_s(headers, NOW) == expected


@given(
    st.text(max_size=40) | st.from_regex(r"[A-Z][a-z]{2},? \d{1,2}[ -][A-Z][a-z]{2}[ -]\d{2,6} [\d:]{1,9} [+\-A-Z]?\d*")
)
@settings(deadline=None, max_examples=60)
def test_no_retry_after_value_breaks_the_client(value: str) -> None:
    waited = retry_after_s({"retry-after": value, "retry-after-ms": value}, NOW)
    assert waited is None or 0 <= waited < float("inf")


@pytest.mark.parametrize(
    ("answer", "text", "category"),
    [
        ({"error": "out of memory", "category": "server"}, "out of memory", RequestErrorCategory.Server),
        ({"error": "bad token", "category": "User"}, "bad token", RequestErrorCategory.User),
        ({"error": "hm"}, "hm", RequestErrorCategory.Unknown),
        ({"error": "hm", "category": None}, "hm", RequestErrorCategory.Unknown),
        ({"error": "hm", "category": ["user"]}, "hm", RequestErrorCategory.Unknown),
        ({"error": {"detail": "deep"}}, "deep", RequestErrorCategory.Unknown),
        ({"error": {"why": 3}}, '{"why":3}', RequestErrorCategory.Unknown),
        ({"error": "x", "type": "try_again"}, "x", RequestErrorCategory.Unknown),
    ],
)
def test_an_answer_with_an_error_is_a_failed_operation(
    answer: dict[str, Any], text: str, category: RequestErrorCategory
) -> None:
    error = failed_operation(answer, "request-1")
    assert error is not None
    assert (error.message, error.request_id, error.category) == (text, "request-1", category)


@pytest.mark.parametrize("nothing", ["", None, {}, {"detail": ""}])
def test_a_failure_without_a_reason_still_has_a_text(nothing: Any) -> None:
    error = failed_operation({"error": nothing}, "request-1")
    assert error is not None
    assert str(error).strip()


def test_a_long_failure_is_cut() -> None:
    error = failed_operation({"error": "x" * 1_000_000}, "request-1")
    assert error is not None
    assert len(str(error)) <= MAX_TEXT


@pytest.mark.parametrize("answer", [{}, {"type": "try_again"}, {"path": "tinker://r/weights/w", "errors": []}])
def test_other_answers_are_no_failure(answer: dict[str, Any]) -> None:
    assert failed_operation(answer, "request-1") is None
