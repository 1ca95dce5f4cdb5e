"""From a recorded request to an answer: who asks, which route, what is in the body, which handler.

Does not know: sockets, scripted faults, or what any single route does (the handlers are passed in).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import msgspec

from support.server_answers import Answer, RefusedError
from support.server_recording import Recorded, unpacked
from support.server_state import State
from support.server_vintages import Vintage, without_younger
from tinsmith.errors import InvalidInputError, WireError
from tinsmith.wire.codecs import json_codec, proto_training
from tinsmith.wire.message import Message
from tinsmith.wire.routes import table as routes
from tinsmith.wire.routes.table import Route

OWNER = "tml:organization_user:owner"
STRANGER = "tml:organization_user:stranger"
MODELS = ("stub/model", "stub/other")
MAX_CONTEXT = 32768


@dataclass(kw_only=True)
class Settings:
    """How the server behaves; a test may change any of it while the server runs."""

    flags: dict[str, Any] = field(default_factory=dict)
    """The answer to client/config."""
    dynamic_flags: dict[str, Any] = field(default_factory=dict)
    poll_s: float = 30.0
    """How long a poll is held before it is told to try again."""
    pending_polls: int = 0
    """So many first polls of each promise are told to try again at once..."""
    pending_form: Literal["408", "try_again"] = "408"
    queue_state: str = "active"
    queue_state_reason: str | None = None
    metadata_above_bytes: int | None = None
    heeds_if_range: bool = True
    """Results larger than this are announced before they are sent, to clients that allow it."""
    lose_next: int = 0
    """So many polls lose their promise: 410, until the same request is submitted again."""
    extra_metrics: dict[str, float] = field(default_factory=dict)
    """Added to the metrics of every forward and forward_backward."""
    optim_metrics: dict[str, float] = field(default_factory=dict)
    trace_pending: int = 0
    """So many trace exports are answered as pending first."""
    archive_pending: int = 0
    """So many archive requests are answered 503 first."""
    jwt_lifetime_s: float = 3600.0
    session_messages: dict[str, str] = field(default_factory=dict)
    """info_message, warning_message, error_message of create_session."""
    stream_tokens_per_event: int = 1
    stream_split_bytes: int | None = None
    """Write token streams in pieces of this size, whatever they cut through."""
    stream_pause_after: int | None = None
    """After so many events a token stream waits for `release`."""
    stream_error_after: int | None = None
    """After so many events a token stream ends with an error event."""
    tokenizers: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Tokenizer files by model name."""
    compress_answers: Literal["gzip", "zstd"] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A request that was understood."""

    route: Route
    parameters: Mapping[str, str]
    query: Any
    request: Any
    """The body as the route's wire type."""
    content: bytes
    """The body as it came, unpacked: equal content is the same request sent again."""
    recorded: Recorded
    user: str


Result: TypeAlias = Answer | Message | Mapping[str, Any] | None
Handler: TypeAlias = "Callable[[Core, Call], Awaitable[Result]]"


class Core:
    """The server without its sockets."""

    def __init__(self, vintage: Vintage, key: str, foreign_key: str, handlers: Mapping[str, Handler]) -> None:
        self.vintage = vintage
        self.key = key
        self.settings = Settings(poll_s=vintage.poll_s)
        self.state = State(vintage)
        self.url = ""
        self.users = {key: OWNER, foreign_key: STRANGER}
        """Who a key or token belongs to."""
        self.files: dict[str, bytes] = {}
        """What signed addresses lead to, by path."""
        self.releases = 0
        self._released = asyncio.Event()
        self._handlers = handlers
        self._patterns = [(route, _pattern(route)) for route in routes.ROUTES if vintage.has(route)]

    @property
    def has_extensions(self) -> Mapping[str, bool]:
        """What client/config says of our own routes."""
        return self.settings.flags.get("tinsmith") or {}

    def has_flag(self, name: str) -> bool:
        return bool(self.settings.flags.get(name))

    def release(self) -> None:
        self.releases += 1
        self._released.set()
        self._released.clear()

    async def wait_for_release(self, since: int) -> None:
        """Wait until `release` is called, counting from an earlier value of `releases`."""
        while self.releases <= since:
            await self._released.wait()

    async def answer(self, recorded: Recorded) -> Answer:
        """The normal answer to a request."""
        try:
            route, parameters = self._match(recorded)
            user = self._user(route, recorded)
            try:
                call = self._call(route, parameters, recorded, user)
                result = await self._handlers[route.name](self, call)
            except RefusedError as refused:
                if 400 <= refused.status < 500:
                    self.close_number(recorded)
                raise
        except RefusedError as refused:
            return Answer.of_json({"detail": refused.detail}, refused.status)
        return self._encode(result)

    def user_of(self, token: str | None, default: str) -> str:
        """Who may read, given an access token of somebody else."""
        if token is None:
            return default
        if token not in self.users:
            raise RefusedError(403, "the weights access token is not valid")
        return self.users[token]

    def close_number(self, recorded: Recorded) -> None:
        """A training request was refused for good: its number will not come again, unless in another encoding."""
        body = recorded.body if isinstance(recorded.body, dict) else {}
        model = self.state.models.get(str(body.get("model_id")))
        seq_id = body.get("seq_id")
        if model is None or not isinstance(seq_id, int):
            return
        if recorded.is_protobuf and not self.vintage.has_protobuf:
            model.unread.add(seq_id)
        else:
            model.jobs.refuse(seq_id)
            self.state.start(*model.jobs.take_ready())

    def _match(self, recorded: Recorded) -> tuple[Route, dict[str, str]]:
        is_path_known = False
        for route, pattern in self._patterns:
            match = pattern.fullmatch(recorded.path)
            if match is not None:
                is_path_known = True
                if route.method == recorded.method:
                    return route, match.groupdict()
        if is_path_known:
            raise RefusedError(405, "Method Not Allowed")
        if not any(_pattern(route).fullmatch(recorded.path) for route in routes.ROUTES):
            self.state.violate(f"{recorded.method} {recorded.path} is not a path of the protocol")
        raise RefusedError(404, "Not Found")

    def _user(self, route: Route, recorded: Recorded) -> str:
        if route is routes.HEALTHZ:
            return OWNER
        if recorded.key not in self.users:
            raise RefusedError(401, "the API key is not valid")
        is_raw_key_right = route in (routes.CLIENT_CONFIG, routes.AUTH_TOKEN)
        if self.has_flag("pjwt_auth_enabled") and recorded.key == self.key and not is_raw_key_right:
            self.state.violate(f"{recorded.name}: the raw key was sent where a token is wanted")
        return self.users[recorded.key]

    def _call(self, route: Route, parameters: Mapping[str, str], recorded: Recorded, user: str) -> Call:
        content = self._content(route, recorded)
        query = None
        try:
            if route.query is not None:
                query = msgspec.convert(dict(recorded.query), route.query, strict=False)
            request = self._request(route, recorded, content) if route.request is not None else None
        except (InvalidInputError, WireError, msgspec.ValidationError) as error:
            self.state.violate(f"{recorded.method} {recorded.name}: {error}")
            raise RefusedError(422, str(error)) from None
        return Call(
            route=route,
            parameters=parameters,
            query=query,
            request=request,
            content=content,
            recorded=recorded,
            user=user,
        )

    def _content(self, route: Route, recorded: Recorded) -> bytes:
        if recorded.is_protobuf:
            if not self.vintage.has_protobuf:
                raise RefusedError(self.vintage.protobuf_refusal, "the body is not JSON")
            if "protobuf" not in route.body_encodings:
                self.state.violate(f"{recorded.name}: a protobuf body where the protocol has JSON")
                raise RefusedError(415, "the body is not JSON")
        if recorded.headers.get("content-encoding") == "zstd" and not self.has_flag("proto_compress_fwdbwd"):
            self.state.violate(f"{recorded.name}: a compressed body though the server did not ask for it")
        try:
            return unpacked(recorded.headers, recorded.raw_body)
        except WireError as error:
            raise RefusedError(422, str(error)) from None

    def _request(self, route: Route, recorded: Recorded, content: bytes) -> Any:
        if recorded.is_protobuf:
            return proto_training.decode_request(content)
        plain = msgspec.json.decode(content or b"{}")
        return _message_of(route.request, without_younger(plain, route.request, self.vintage.line))

    def _encode(self, result: Result) -> Answer:
        if isinstance(result, Answer):
            return result
        if result is None:
            return Answer(204)
        if not isinstance(result, Message):
            return Answer.of_json(result)
        plain = msgspec.json.decode(json_codec.encode(result))
        return Answer.of_json(without_younger(plain, type(result), self.vintage.line))


def _message_of(type_: Any, plain: Any) -> Any:
    return type_.model_validate(plain)


def _pattern(route: Route) -> re.Pattern[str]:
    """A checkpoint id is two path segments, every other parameter one."""
    path = re.sub(r"{checkpoint_id}", r"(?P<checkpoint_id>[^/]+/[^/]+)", route.path)
    return re.compile(re.sub(r"{(\w+)}", r"(?P<\1>[^/]+)", path))
