"""One client's way to one server.

Owns: the handshake, headers, encoding and decoding of calls, the transport and the retry policy in use.
Does not know: sessions, models, samplers; `polling` asks for results.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import random
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Concatenate, ParamSpec, TypeVar
from urllib.parse import urlencode

import msgspec

from tinsmith.client.auth import Auth
from tinsmith.client.deadlines import patience_s
from tinsmith.client.limits import SHARED, Limits
from tinsmith.client.outage import Affected, Outage
from tinsmith.client.runner import Runner
from tinsmith.config import ClientConfig
from tinsmith.errors import (
    APIConnectionError,
    APIResponseValidationError,
    APIStatusError,
    InternalServerError,
    NotFoundError,
    RequestInfo,
    ResponseInfo,
    TinkerError,
    WireError,
)
from tinsmith.transport.base import HttpRequest, HttpResponse, Purpose, Transport
from tinsmith.transport.breaker import CircuitBreaker
from tinsmith.transport.retry import RetryPolicy, RetryWait, retrying
from tinsmith.version import PROTOCOL_VERSION, __version__
from tinsmith.wire import faults, json_codec
from tinsmith.wire.message import Message
from tinsmith.wire.routes import AUTH_TOKEN, CLIENT_CONFIG, CLIENT_DYNAMIC_CONFIG, Route
from tinsmith.wire.service import ClientConfigRequest, ClientConfigResponse, ClientDynamicConfigResponse

logger = logging.getLogger(__name__)

C = TypeVar("C")
P = ParamSpec("P")
T = TypeVar("T")

JSON_TYPE = "application/json"
PROTOBUF_TYPE = "application/x-protobuf"
MIN_REFRESH_S = 10.0
MAX_DELAY_S = 5.0
"""The longest pause between two attempts: a server that comes back is noticed soon."""


def decoded(
    answer: Callable[Concatenate[C, Route, P], Awaitable[HttpResponse]],
) -> Callable[Concatenate[C, Route, P], Coroutine[Any, Any, Any]]:
    """The same call, with its answer decoded as the route says."""

    async def call(connection: C, route: Route, /, *arguments: P.args, **options: P.kwargs) -> Any:
        return promised_answer(route, await answer(connection, route, *arguments, **options))

    return call


class Connection:
    """Calls of one client, all run in its runner's loop."""

    def __init__(
        self, config: ClientConfig, *, runner: Runner | None = None, transport: Transport | None = None
    ) -> None:
        self.config = config
        self.runner = runner or Runner()
        self.limits: Limits = SHARED.find(config.base_url, config.api_key or config.credential_cmd)
        self.auth = Auth(config)
        self.breaker = CircuitBreaker(threshold=20, cool_down_s=1.0)
        self.outage = Outage()
        self.server = ClientConfigResponse()
        self.dynamic = ClientDynamicConfigResponse()
        self.extensions: Mapping[str, Any] = {}
        self.speaks_protobuf = True
        """Whether forward_backward bodies go out as protobuf; turned off by a server that refuses them."""
        self.has_taken_protobuf = False
        self.prefers_forward_route = False
        """Whether forward passes go to their own route: before 0.23 `forward_only` was unknown, and so a backward."""
        self._transport = transport
        self._has_answered = False
        self._usual = RetryPolicy(deadline_s=config.retry_deadline_s, max_delay_s=MAX_DELAY_S)
        self._first_contact = RetryPolicy(deadline_s=config.first_contact_s, max_delay_s=MAX_DELAY_S)
        self._key_prefix = f"tinsmith-{uuid.uuid4()}-"
        self._key_numbers = itertools.count()
        self._ready: asyncio.Task[None] | None = None
        self._fixed_headers = {
            "user-agent": f"AsyncTinker/Python {PROTOCOL_VERSION} tinsmith/{__version__}",
            "x-stainless-package-version": PROTOCOL_VERSION,
            **config.default_headers,
        }

    async def ready(self) -> None:
        """Shake hands once; later callers wait for the same handshake."""
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
        """Make a call; its answer as it came."""
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
        body: bytes | memoryview | None,
        *,
        url: str | None = None,
        headers: Mapping[str, str] | None = None,
        purpose: Purpose,
        policy: RetryPolicy | None = None,
        timeout_s: float | None = None,
        credential: str | None = None,
    ) -> HttpResponse:
        """Send a body with retries; an error status becomes its exception. One idempotency key for all attempts."""
        url = url or self.config.base_url + route.path
        policy = policy or self.policy()
        idempotency = None if route.method == "GET" else self._unique()
        if policy.max_attempts == 1:  # polls and samples, which persist by themselves
            return await self._attempt(route, url, body, headers, purpose, timeout_s, credential, idempotency, 0)

        async def attempt(number: int) -> HttpResponse:
            return await self._attempt(route, url, body, headers, purpose, timeout_s, credential, idempotency, number)

        return await self.persist(route, url, attempt, policy)

    async def persist(
        self,
        route: Route,
        url: str,
        attempt: Callable[[int], Awaitable[T]],
        policy: RetryPolicy,
        trouble: Affected | None = None,
    ) -> T:
        """Try until it succeeds or the policy gives up; says once what it waits for. An attempt that goes on for long
        after it has reached the server says by `trouble` that it has."""
        self._check_breaker(route)
        trouble = trouble or Affected(self.outage)
        try:
            result = await retrying(
                attempt,
                policy,
                on_wait=lambda wait: self._say(url, wait, trouble),
                clock=time.monotonic,
                sleep=asyncio.sleep,
                random=random.random,
            )
        except (APIConnectionError, InternalServerError) as error:
            self.breaker.failed(route.name, error)
            raise
        except APIStatusError:
            self.breaker.succeeded(route.name)
            raise
        finally:
            trouble.over()
        self.breaker.succeeded(route.name)
        return result

    @property
    def is_ready(self) -> bool:
        ready = self._ready
        return ready is not None and ready.done() and not ready.cancelled() and ready.exception() is None

    async def headers(self, extra: Mapping[str, str] | None = None, credential: str | None = None) -> dict[str, str]:
        """The headers of every request, and those of this one."""
        if credential is None:
            credential = self.auth.header_at_hand() or await self.auth.header()
        headers = {**self._fixed_headers, "accept": JSON_TYPE, "x-api-key": credential}
        if extra:
            headers.update(extra)
        return headers

    def policy(self, since: float | None = None) -> RetryPolicy:
        """How long to go on: less patience for a server that has never answered. With `since` the time of the call
        counts, so that calls which queued behind one another share one wait."""
        policy = self._usual if self._has_answered else self._first_contact
        if since is None:
            return policy
        return dataclasses.replace(policy, deadline_s=max(policy.deadline_s - (time.monotonic() - since), 0.01))

    def _unique(self) -> str:
        """An idempotency key, unique without asking the system for randomness at every call."""
        return f"{self._key_prefix}{next(self._key_numbers)}"

    def transport(self) -> Transport:
        if self._transport is None:
            from tinsmith.transport.direct import DirectTransport

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
        body: bytes | memoryview | None,
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
        response = await self.transport().send(request)
        self._has_answered = True
        if "x-deprecation-note" in response.headers:
            level = logging.ERROR if response.headers.get("x-deprecation-level") == "error" else logging.WARNING
            logger.log(level, "%s: %s", route.name, response.headers["x-deprecation-note"])
        if response.status >= 400:
            raise faults.status_error(response.status, response.body, response.headers, RequestInfo(route.method, url))
        return response

    def _check_breaker(self, route: Route) -> None:
        """An endpoint that failed many times in a row is not asked for a moment; the error says so at once."""
        try:
            self.breaker.check(route.name)
        except APIConnectionError as error:
            error.retryable = False
            raise

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
        except NotFoundError:  # a server from before 0.18
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
            self.prefers_forward_route = True  # from before 0.25, or one that leaves it out
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
        """Keep the settings that a server may change while we run; a failure keeps the last ones."""
        while True:
            await asyncio.sleep(max(MIN_REFRESH_S, self.dynamic.refresh_interval_sec))
            try:
                answer = await self.send(
                    CLIENT_DYNAMIC_CONFIG,
                    hello,
                    headers={"content-type": JSON_TYPE},
                    purpose=Purpose.SESSION,
                    policy=RetryPolicy(max_attempts=1),
                    timeout_s=10.0,
                )
                self.dynamic = decode_answer(CLIENT_DYNAMIC_CONFIG, answer, ClientDynamicConfigResponse)
            except TinkerError as error:
                logger.debug("refreshing the dynamic configuration failed: %s", error)

    def _say(self, url: str, wait: RetryWait, trouble: Affected) -> None:
        """Once per incident, at the first wait of whoever notices first: what is wrong and how long we go on."""
        if trouble.begin():
            left = patience_s(self.policy().deadline_s - wait.elapsed_s)
            logger.warning("%s; trying again for up to %.0f s (%s)", wait.error, left, url)


def promised_answer(route: Route, response: HttpResponse) -> Any:
    """An answer as what its route promises; None where that is no body."""
    return None if route.response is None else decode_answer(route, response, route.response)


def decode_answer(route: Route, response: HttpResponse, type_: Any) -> Any:
    """A JSON answer as its type; anything else than the promised shape is an APIResponseValidationError."""
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
            message=f"{error} (answer of {route.method} {response.url}; is this a Tinker server?)",
        ) from error


def _extensions(body: bytes) -> Mapping[str, Any]:
    """What a server offers beyond the protocol, announced in its configuration."""
    announced = msgspec.json.decode(body)
    extensions = announced.get("tinsmith") if isinstance(announced, dict) else None
    return extensions if isinstance(extensions, dict) else {}
