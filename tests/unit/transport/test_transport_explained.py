"""The messages for each error of the HTTP library; without a network."""

from __future__ import annotations

import errno
import ssl
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from tinsmith.errors import APITimeoutError, InvalidInputError
from tinsmith.transport.aiohttp_transport import LIMITS, _may_repeat, _Payload, _Unanswered, explained
from tinsmith.transport.base import HttpRequest, Purpose

REQUEST = HttpRequest(
    method="POST", url="https://h:8000/x", headers={"x-api-key": "tml-secret"}, purpose=Purpose.TRAIN, timeout_s=7
)
PLACE: Any = SimpleNamespace(host="h", port=8000, ssl=True, is_ssl=True)
INFO: Any = SimpleNamespace(real_url="https://h:8000/x", headers={"x-api-key": "tml-secret"})


def os_error(number: int) -> OSError:
    return OSError(number, errno.errorcode[number])


def untrusted() -> Exception:
    error = ssl.SSLCertVerificationError(1, "certificate verify failed")
    error.verify_message = "self-signed certificate"
    made = aiohttp.ClientConnectorCertificateError(PLACE, error)
    made.__cause__ = error
    return made


def caused(error: Exception, cause: BaseException) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (aiohttp.ClientConnectorError(PLACE, os_error(errno.ECONNREFUSED)), "nothing is listening at h:8000"),
        (aiohttp.ClientConnectorError(PLACE, os_error(errno.ENETUNREACH)), "h:8000 cannot be reached (ENETUNREACH)"),
        (aiohttp.ClientConnectorError(PLACE, os_error(errno.EMFILE)), "h:8000 cannot be reached (EMFILE)"),
        (aiohttp.ClientConnectorDNSError(PLACE, OSError(-2, "Name not known")), "cannot resolve the host name h"),
        (untrusted(), "the certificate of h:8000 is not trusted (self-signed certificate)"),
        (aiohttp.ClientConnectorSSLError(PLACE, OSError(1, "WRONG_VERSION")), "TLS with h:8000 failed (WRONG_VERSION)"),
        (aiohttp.ClientProxyConnectionError(PLACE, os_error(errno.ECONNREFUSED)), "the proxy rejected"),
        (aiohttp.ClientHttpProxyError(INFO, (), status=407, message="Auth"), "the request (Auth)"),
        (aiohttp.ConnectionTimeoutError("x"), "no connection to h:8000 in 5 s"),
        (aiohttp.ServerTimeoutError("x"), "no response in 7 s"),
        (TimeoutError(), "no response in 7 s"),
        (aiohttp.ServerDisconnectedError(), "without a response (Server disconnected)"),
        (aiohttp.ClientOSError(errno.ECONNRESET, "Reset by peer"), "without a response (Reset by peer)"),
        (ConnectionResetError(errno.ECONNRESET, "Reset by peer"), "without a response (Reset by peer)"),
        (aiohttp.ClientConnectionError("x"), "without a response (no reason known)"),
        (aiohttp.ClientPayloadError("x"), "the response was cut off (no reason known)"),
        (aiohttp.ClientResponseError(INFO, (), status=400, message="Bad status\n line."), "HTTP (Bad status line)"),
        (aiohttp.InvalidURL("http://user:tml-secret@/"), "not sent: the URL or a header is not valid."),
        (aiohttp.NonHttpUrlClientError("ftp://user:tml-secret@h"), "not sent: the URL or a header is not valid."),
        (ValueError("header tml-secret"), "not sent: the URL or a header is not valid."),
        (caused(aiohttp.ClientConnectionError(), InvalidInputError("body: shrank")), "not sent: body: shrank"),
    ],
)
def test_the_words_say_where_and_why(error: Exception, words: str) -> None:
    told = explained(error, REQUEST)
    assert str(told).startswith("POST https://h:8000/x: ")
    assert words in str(told)
    assert "tml-secret" not in str(told)
    assert told.__cause__ is None
    assert isinstance(told, APITimeoutError) is isinstance(error, TimeoutError)


@pytest.mark.parametrize("error", [untrusted(), ValueError(), aiohttp.InvalidURL("x")])
def test_what_will_not_get_better_is_not_retried(error: Exception) -> None:
    assert not explained(error, REQUEST).retryable


def test_connections_are_limited_to_100_at_first() -> None:
    assert set(LIMITS) == set(Purpose)
    assert sum(LIMITS.values()) == 100


RESET = aiohttp.ClientConnectionResetError("Cannot write to closing transport")
GONE = aiohttp.ServerDisconnectedError()
HALF: Any = aiohttp.ServerDisconnectedError(SimpleNamespace(code=200))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("error", "method", "body", "was_sent", "expected"),
    [
        (RESET, "GET", None, False, True),
        (RESET, "POST", None, False, True),
        (RESET, "POST", b"x", False, True),
        (RESET, "POST", b"x", True, False),
        (_Unanswered(GONE, was_used=True), "GET", None, False, True),
        (_Unanswered(GONE, was_used=True), "PUT", b"x", True, True),
        (_Unanswered(GONE, was_used=True), "POST", None, False, False),
        (_Unanswered(GONE, was_used=True), "POST", b"x", True, False),
        (_Unanswered(GONE, was_used=True), "POST", b"x", False, True),
        (_Unanswered(HALF, was_used=True), "GET", None, False, False),
        (_Unanswered(GONE, was_used=False), "GET", None, False, False),
        (_Unanswered(GONE, was_used=False), "POST", b"x", False, False),
        (TimeoutError(), "GET", None, False, False),
        (aiohttp.ClientPayloadError(), "GET", None, False, False),
    ],
)
def test_when_a_request_is_sent_again_in_silence(
    error: Exception, method: str, body: bytes | None, was_sent: bool, expected: bool
) -> None:
    made = replace(REQUEST, method=method, body=body)
    payload = _Payload(made) if body else None
    if payload is not None:
        payload.was_sent = was_sent
    assert _may_repeat(error, made, payload) is expected
