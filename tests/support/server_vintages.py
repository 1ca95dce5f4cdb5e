"""What servers of different times and makes have: routes, fields, encodings, ids, the form of failures.

A vintage named by a release answers like a server of that time: it ignores younger fields, leaves them out of its
answers and does not have younger routes, while it keeps the old ones.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec

from support.official_values import NEVER
from support.releases import line_of
from tinsmith.wire.routes import table as routes
from tinsmith.wire.routes.table import Route

PROTOBUF_SINCE = (0, 19)
SEQUENCE_IDS_SINCE = (0, 26)


@dataclass(frozen=True, slots=True, kw_only=True)
class Vintage:
    name: str
    line: tuple[int, int]
    """The release whose fields it knows."""
    route_names: frozenset[str]
    has_protobuf: bool
    protobuf_refusal: int = 415
    has_plain_ids: bool = False
    """Ids without a colon, and request ids that are numbers."""
    fails_with_400: bool = False
    """A failed operation is an HTTP 400 on retrieve_future rather than a 200 that says `error`."""
    poll_s: float = 30.0
    """How long a poll is held."""

    @property
    def has_sequence_ids(self) -> bool:
        return self.line >= SEQUENCE_IDS_SINCE

    def has(self, route: Route) -> bool:
        return route.name in self.route_names


def _release(version: str) -> Vintage:
    line = line_of(version)
    return Vintage(
        name=version,
        line=line,
        route_names=frozenset(route.name for route in routes.ROUTES if line_of(route.since) <= line),
        has_protobuf=line >= PROTOBUF_SINCE,
    )


_SKYRL_ROUTES = frozenset(
    {
        *("healthz", "get_server_capabilities", "client_config", "telemetry", "create_session", "session_heartbeat"),
        *("create_model", "get_info", "unload_model", "forward_backward", "forward", "optim_step"),
        *("save_weights", "load_weights", "save_weights_for_sampler", "weights_info"),
        *("create_sampling_session", "asample", "get_sampler", "retrieve_future"),
        *("list_training_runs", "get_training_run", "list_checkpoints", "delete_checkpoint", "get_checkpoint_archive"),
    }
)


def _skyrl(name: str, *, has_protobuf: bool) -> Vintage:
    return Vintage(
        name=name,
        line=(0, 7),
        route_names=_SKYRL_ROUTES,
        has_protobuf=has_protobuf,
        protobuf_refusal=422,
        has_plain_ids=True,
        fails_with_400=True,
        poll_s=300.0,
    )


VINTAGES: Mapping[str, Vintage] = {
    **{version: _release(version) for version in ("0.3", "0.15", "0.19", "0.24", "0.25", "0.36")},
    "skyrl": _skyrl("skyrl", has_protobuf=True),
    "skyrl-422": _skyrl("skyrl-422", has_protobuf=False),
}
"""`skyrl` reads and writes protobuf, `skyrl-422` is the same from before it could: 422 for a body that is not JSON."""


def without_younger(value: Any, type_: Any, line: tuple[int, int]) -> Any:
    """Plain values of a message type without the fields that came after a release."""
    if isinstance(value, list):
        item_type = typing.get_args(type_)[0] if typing.get_origin(type_) is list else Any
        return [without_younger(item, item_type, line) for item in value]
    if not isinstance(value, dict) or not _is_message(type_):
        return value
    fields = _fields(type_)
    kept = {}
    for key, item in value.items():
        since, field_type = fields.get(key, ((0, 0), Any))
        if since <= line:
            kept[key] = without_younger(item, field_type, line)
    return kept


def _is_message(type_: Any) -> bool:
    return isinstance(type_, type) and issubclass(type_, msgspec.Struct)


@lru_cache(maxsize=512)
def _fields(cls: Any) -> dict[str, tuple[tuple[int, int], Any]]:
    """Each field's first release, and its type without annotations and None."""
    found: dict[str, tuple[tuple[int, int], Any]] = {}
    hints = typing.get_type_hints(cls, include_extras=True)
    for name, hint in hints.items():
        since = (0, 0)
        while typing.get_origin(hint) is typing.Annotated:
            hint, *metadata = typing.get_args(hint)
            for meta in metadata:
                extra = getattr(meta, "extra", None) or {}
                since = line_of(extra["since"]) if "since" in extra else NEVER if "extension" in extra else since
        members = [member for member in typing.get_args(hint) if member is not type(None)]
        is_optional = type(None) in typing.get_args(hint) and len(members) == 1
        found[name] = (since, members[0] if is_optional else hint)
    return found
