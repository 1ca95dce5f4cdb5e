"""One client's connection to one server: the handshake, headers, encoding and decoding of calls, and retries.

Every request goes through `roundtrip` or `stream`, which ask the circuit breaker first; `send` adds the retry policy,
and `call` the types of a route. Sessions, models and samplers are built on top; `polling` waits for results.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any, Concatenate, ParamSpec, TypeVar
from urllib.parse import urlencode

import msgspec

from tinsmith.client.connection.auth import Auth
from tinsmith.client.connection.limits import SHARED, Limits
from tinsmith.client.connection.outage import Affected, Outage
from tinsmith.client.runtime.deadlines import left_s, patience_s
from tinsmith.client.runtime.runner import Runner
from tinsmith.config import ClientConfig
from tinsmith.errors import (
    APIConnectionError,
    APIResponseValidationError,
    APIStatusError,
    NotFoundError,
    RequestInfo,
    ResponseInfo,
    TinkerError,
    WireError,
)
from tinsmith.transport.base import HttpRequest, HttpResponse, Purpose, StreamedResponse, Transport
from tinsmith.transport.gate import CircuitBreaker
from tinsmith.transport.multipart import Multipart
from tinsmith.transport.retry import NO_RETRY, Retries, RetryPolicy, RetryWait, retrying
from tinsmith.version import PROTOCOL_VERSION, __version__
from tinsmith.wire.codecs import json_codec
from tinsmith.wire.message import Message
from tinsmith.wire.messages.service import ClientConfigRequest, ClientConfigResponse, ClientDynamicConfigResponse
from tinsmith.wire.routes.table import AUTH_TOKEN, CLIENT_CONFIG, CLIENT_DYNAMIC_CONFIG, Route
from tinsmith.wire.rules import faults

logger = logging.getLogger(__name__)

C = TypeVar("C")
P = ParamSpec("P")
T = TypeVar("T")

JSON_TYPE = "application/json"
PROTOBUF_TYPE = "application/x-protobuf"
MIN_REFRESH_S = 10.0
MAX_DELAY_S = 5.0
"""The longest delay between two attempts, so that a server that comes back is noticed soon."""
POLL_FIRST_DELAY_S = 0.25
POLL_MAX_DELAY_S = 2.0
POLL_MIN_DELAY_S = 0.2


def decoded(
    answer: Callable[Concatenate[C, Route, P], Awaitable[HttpResponse]],
) -> Callable[Concatenate[C, Route, P], Coroutine[Any, Any, Any]]:
    """Wrap a call so that its response is decoded into the route's type."""

    async def call(connection: C, route: Route, /, *arguments: P.args, **options: P.kwargs) -> Any:
        return promised_answer(route, await answer(connection, route, *arguments, **options))

    return call


class Connection:
    """The calls of one client; all run in its runner's loop."""

    def __init__(
        self,
        config: ClientConfig,
        *,
        runner: Runner | None = None,
        transport: Transport | None = None,
        is_joining: bool = False,
    ) -> None:
        """`is_joining`: another process has used this server, so it is waited for even if it seems not to be there."""
        self.config = config
        self.runner = runner or Runner()
        self.limits: Limits = SHARED.find(config.base_url, config.api_key or config.credential_cmd)
        self.auth = Auth(config)
        self.breaker = CircuitBreaker(threshold=20, cool_down_s=1.0, settle_s=config.connect_timeout_s)
        self.outage = Outage()
        self.server = ClientConfigResponse()
        self.dynamic = ClientDynamicConfigResponse()
        self.extensions: Mapping[str, Any] = {}
        self.speaks_protobuf = True
        """Whether forward_backward bodies are sent as protobuf; turned off when a server rejects them."""
        self.has_taken_protobuf = False
        self.prefers_forward_route = False
        """Whether forward passes use their own route: servers before 0.23 ignore `forward_only` and run a backward."""
        self._transport = transport
        self._has_answered = False
        self._is_joining = is_joining
        self._usual = RetryPolicy(deadline_s=config.retry_deadline_s, max_delay_s=MAX_DELAY_S, caller_left_s=left_s)
        self._first_contact = dataclasses.replace(self._usual, deadline_s=config.first_contact_s)
        self._key_prefix = f"tinsmith-{uuid.uuid4()}-"
        self._key_numbers = itertools.count()
        self._ready: asyncio.Task[None] | None = None
        self._fixed_headers = {
            "user-agent": f"AsyncTinker/Python {PROTOCOL_VERSION} tinsmith/{__version__}",
            "x-stainless-package-version": PROTOCOL_VERSION,
            **config.default_headers,
        }

    async def ready(self) -> None:
        """Perform the handshake once; concurrent callers wait for the same one."""
        if self.is_ready:
            return
        if self._ready is None or (self._ready.done() and (self._ready.cancelled() or self._ready.exception())):
            self._ready = self.runner.spawn(self._shake_hands())
        if not self._ready.done():
            await asyncio.shield(self._ready)
        else:
            self._ready.result()

    async def answer(
        self,
        route: Route,
        request: Any = None,
        *,
        path: Mapping[str, str] | None = None,
        query: Message | None = None,
        headers: Mapping[str, str] | None = None,
        purpose: Purpose = Purpose.REST,
        policy: RetryPolicy | None = None,
        timeout_s: float | None = None,
    ) -> HttpResponse:
        """Make a call and return its response undecoded."""
        await self.ready()
        body = None if request is None else json_codec.encode(request)
        return await self.send(
            route,
            body,
            url=self._url(route, path, query),
            headers={"content-type": JSON_TYPE, **(headers or {})} if route.method != "GET" else headers,
            purpose=purpose,
            policy=policy,
            timeout_s=timeout_s,
        )

    call = decoded(answer)

    async def send(
        self,
        route: Route,
        body: bytes | memoryview | Multipart | None,
        *,
        url: str | None = None,
        headers: Mapping[str, str] | None = None,
        purpose: Purpose,
        policy: RetryPolicy | None = None,
        timeout_s: float | None = None,
        credential: str | None = None,
    ) -> HttpResponse:
        """Send a body with retries. An error status raises its exception; all attempts share one idempotency key."""
        url = url or self.config.base_url + route.path
        policy = policy or self.policy()
        idempotency = None if route.method == "GET" else self._unique()
        if policy.max_attempts == 1:  # polls and samples among them, whose retries span several requests
            return await self._attempt(route, url, body, headers, purpose, timeout_s, credential, idempotency, 0)

        async def attempt(number: int) -> HttpResponse:
            return await self._attempt(route, url, body, headers, purpose, timeout_s, credential, idempotency, number)

        return await self.persist(url, attempt, policy)

    async def persist(
        self,
        url: str,
        attempt: Callable[[int], Awaitable[T]],
        policy: RetryPolicy,
        *,
        trouble: Affected | None = None,
        retries: Retries | None = None,
    ) -> T:
        """Try until it succeeds or the policy gives up, logging once what it waits for.

        An attempt that lasts long reports through `trouble` that it has reached the server, and through `retries` that
        it makes progress.
        """
        trouble = trouble or Affected(self.outage)
        try:
            return await retrying(
                attempt, policy, retries=retries, on_wait=lambda wait: self._log_wait(url, wait, trouble)
            )
        finally:
            trouble.over()

    async def roundtrip(self, endpoint: str, request: HttpRequest) -> HttpResponse:
        """Send one request and return its response, whatever the status, unless the breaker holds the endpoint back."""
        sent_at = self.breaker.check(endpoint)
        try:
            response = await self.transport().send(request)
        except BaseException as error:
            self.breaker.failed(endpoint, error, sent_at)
            if isinstance(error, APIConnectionError) and error.is_not_started and not self._was_there():
                error.retryable = False
            raise
        self._has_answered = True
        if response.status >= 500:
            self.breaker.failed(endpoint, _status_error(request, response), sent_at)
        else:
            self.breaker.succeeded(endpoint)
        return response

    def _was_there(self) -> bool:
        """Whether the server has answered before. Then it is restarting, if it is on this machine and refuses
        connections; else nobody has started it."""
        return self._has_answered or self._is_joining

    @asynccontextmanager
    async def stream(self, request: HttpRequest, endpoint: str | None = None) -> AsyncIterator[StreamedResponse]:
        """Send one request whose response is read as it arrives, unless the breaker holds the endpoint back.

        Without an endpoint, the request counts for its host: downloads come from signed addresses anywhere.
        """
        endpoint = endpoint or "/".join(request.info.url.split("/", 3)[:3])
        sent_at = self.breaker.check(endpoint)
        try:
            async with self.transport().stream(request) as response:
                if response.status < 500:
                    self.breaker.succeeded(endpoint)
                yield response
        except BaseException as error:
            self.breaker.failed(endpoint, error, sent_at)
            raise

    @property
    def is_ready(self) -> bool:
        ready = self._ready
        return ready is not None and ready.done() and not ready.cancelled() and ready.exception() is None

    async def headers(self, extra: Mapping[str, str] | None = None, credential: str | None = None) -> dict[str, str]:
        """Return the headers common to all requests, with `extra` added."""
        if credential is None:
            credential = self.auth.header_at_hand() or await self.auth.header()
        headers = {**self._fixed_headers, "accept": JSON_TYPE, "x-api-key": credential}
        if extra:
            headers.update(extra)
        return headers

    def policy(self, since: float | None = None) -> RetryPolicy:
        """Return the policy for a call: less patient with a server that has never answered.

        `since` is when the call was made: calls that waited for one another in a queue then share one deadline.
        """
        policy = self._usual if self._has_answered else self._first_contact
        if since is None:
            return policy
        return dataclasses.replace(policy, deadline_s=max(policy.deadline_s - (time.monotonic() - since), 0.01))

    def poll_policy(self) -> RetryPolicy:
        """Return the policy for polls, which are cheap: as patient, with shorter delays."""
        return dataclasses.replace(
            self.policy(),
            first_delay_s=POLL_FIRST_DELAY_S,
            max_delay_s=POLL_MAX_DELAY_S,
            min_delay_s=POLL_MIN_DELAY_S,
        )

    def _unique(self) -> str:
        """Return an idempotency key, unique without asking the system for randomness on every call."""
        return f"{self._key_prefix}{next(self._key_numbers)}"

    def transport(self) -> Transport:
        if self._transport is None:
            from tinsmith.transport.pool import DirectTransport

            self._transport = DirectTransport()
        return self._transport

    async def close(self) -> None:
        await self.auth.close()
        if self._transport is not None:
            await self._transport.close()

    async def _attempt(
        self,
        route: Route,
        url: str,
        body: bytes | memoryview | Multipart | None,
        headers: Mapping[str, str] | None,
        purpose: Purpose,
        timeout_s: float | None,
        credential: str | None,
        idempotency: str | None,
        number: int,
    ) -> HttpResponse:
        sent = await self.headers(headers, credential)
        sent["x-stainless-retry-count"] = str(number)
        if idempotency is not None:
            sent.setdefault("x-idempotency-key", idempotency)
        request = HttpRequest(
            method=route.method,
            url=url,
            headers=sent,
            body=body,
            timeout_s=timeout_s or self.config.request_timeout_s,
            connect_timeout_s=self.config.connect_timeout_s,
            purpose=purpose,
        )
        response = await self.roundtrip(route.name, request)
        if "x-deprecation-note" in response.headers:
            level = logging.ERROR if response.headers.get("x-deprecation-level") == "error" else logging.WARNING
            logger.log(level, "%s: %s", route.name, response.headers["x-deprecation-note"])
        if response.status >= 400:
            raise _status_error(request, response)
        return response

    def _url(self, route: Route, path: Mapping[str, str] | None, query: Message | None) -> str:
        url = self.config.base_url + (route.url_path(**(path or {})) if route.parameters else route.path)
        if query is None:
            return url
        values = msgspec.to_builtins(query)
        return f"{url}?{urlencode({name: value for name, value in values.items() if value is not None})}"

    async def _shake_hands(self) -> None:
        credential = await self.auth.credential()
        hello = json_codec.encode(ClientConfigRequest(sdk_version=PROTOCOL_VERSION))
        json_headers = {"content-type": JSON_TYPE}
        try:
            answer = await self.send(
                CLIENT_CONFIG, hello, headers=json_headers, purpose=Purpose.SESSION, credential=credential
            )
            self.server = decode_answer(CLIENT_CONFIG, answer, ClientConfigResponse)
            self.extensions = _extensions(answer.body)
        except NotFoundError:  # a server older than 0.18
            self.speaks_protobuf = False
            self.prefers_forward_route = True
            return
        if self.server.pjwt_auth_enabled:
            self.auth.use_tokens(
                self._exchange, force_command=self.server.credential_default_source == "credential_cmd"
            )
        try:
            answer = await self.send(CLIENT_DYNAMIC_CONFIG, hello, headers=json_headers, purpose=Purpose.SESSION)
        except APIStatusError as error:
            if error.status_code != 404:
                raise
            self.prefers_forward_route = True  # older than 0.25, or one that does not implement it
            return
        self.dynamic = decode_answer(CLIENT_DYNAMIC_CONFIG, answer, ClientDynamicConfigResponse)
        self.runner.spawn(self._refresh_dynamic(hello))

    async def _exchange(self, credential: str) -> str:
        answer = await self.send(
            AUTH_TOKEN,
            b"{}",
            headers={"content-type": JSON_TYPE},
            purpose=Purpose.SESSION,
            credential=credential,
        )
        token: str = decode_answer(AUTH_TOKEN, answer, AUTH_TOKEN.response).jwt
        return token

    async def _refresh_dynamic(self, hello: bytes) -> None:
        """Refresh the settings that a server may change at run time; after a failure the last ones stay."""
        while True:
            await asyncio.sleep(max(MIN_REFRESH_S, self.dynamic.refresh_interval_sec))
            try:
                answer = await self.send(
                    CLIENT_DYNAMIC_CONFIG,
                    hello,
                    headers={"content-type": JSON_TYPE},
                    purpose=Purpose.SESSION,
                    policy=NO_RETRY,
                    timeout_s=10.0,
                )
                self.dynamic = decode_answer(CLIENT_DYNAMIC_CONFIG, answer, ClientDynamicConfigResponse)
            except TinkerError as error:
                logger.debug("refreshing the dynamic configuration failed: %s", error)

    def _log_wait(self, url: str, wait: RetryWait, trouble: Affected) -> None:
        """Log once per outage what is wrong and how long the client keeps trying."""
        if trouble.begin():
            left = patience_s(self.policy().deadline_s - wait.elapsed_s)
            logger.warning("%s; trying again for up to %.0f s (%s)", wait.error, left, url)


def _status_error(request: HttpRequest, response: HttpResponse) -> APIStatusError:
    return faults.status_error(response.status, response.body, response.headers, request.info)


def promised_answer(route: Route, response: HttpResponse) -> Any:
    """Decode a response into its route's type; None if the route has no response body."""
    return None if route.response is None else decode_answer(route, response, route.response)


def decode_answer(route: Route, response: HttpResponse, type_: Any) -> Any:
    """Decode a JSON response; raise APIResponseValidationError if it does not have the expected shape."""
    try:
        return json_codec.decode(response.body, type_)
    except WireError as error:
        info = ResponseInfo(
            response.status,
            dict(response.headers),
            RequestInfo(route.method, response.url),
            response.body[:2000].decode(errors="replace"),
        )
        raise APIResponseValidationError(
            info,
            faults.decode_error_body(response.body[: 64 * 1024]),
            message=f"{error} (response of {route.method} {response.url}; is this a Tinker server?)",
        ) from error


def _extensions(body: bytes) -> Mapping[str, Any]:
    """Return what a server offers beyond the protocol, as announced in its configuration."""
    announced = msgspec.json.decode(body)
    extensions = announced.get("tinsmith") if isinstance(announced, dict) else None
    return extensions if isinstance(extensions, dict) else {}
