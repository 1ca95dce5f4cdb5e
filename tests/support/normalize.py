"""Two recorded streams made comparable: what differs by chance or by design of a client is taken out.

- Ids are named by their order of first appearance; clones of a sampler (random numbers) too.
- Telemetry and heartbeats are dropped; they follow a clock.
- The handshake (client/config, dynamic_config, auth/token) is kept once per distinct content: how often it is made
  depends on how a client shares its connections.
- Polls are collapsed to the promises they asked for, with what the client said it would accept.
- Training requests stand in the order of their sequence numbers, per model. Everything else is sorted, because the
  protocol does not order it; samples lose their number, which says only which of several calls came first.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from support.server_recording import Recorded
from support.server_state import CLONE_BLOCK

KEPT_HEADERS = re.compile(r"content-type|content-encoding|accept|x-sdk-method|x-tinker-.*")
TIMING_HEADERS = frozenset({"x-tinker-create-promise-roundtrip-time", "x-tinker-request-iteration"})
DROPPED = frozenset({"telemetry", "session_heartbeat"})
HANDSHAKE = frozenset({"client/config", "client/dynamic_config", "auth/token"})
MISSING = "<missing>"
_IDS = re.compile(
    r"(?P<uuid>[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12})"
    r"|(?P<session>session[-_][0-9a-f]{4,8})"
    r"|(?P<model>model_[0-9a-f]{8})"
    r"|(?P<sampler>sampling_[0-9a-f]{8})"
    r"|(?P<server>https?://127\.0\.0\.1:\d+)"
    r"|(?P<clone>\d{10,})"
)


@dataclass(frozen=True)
class Normal:
    """A request without what does not matter. Equal ones mean the same to a server."""

    group: str
    """Requests of one group are compared with each other."""
    order: tuple[Any, ...]
    method: str
    path: str
    query: str
    headers: str
    body: str

    @property
    def title(self) -> str:
        return f"{self.group} {self.order}" if self.order else f"{self.method} {self.path}"


@dataclass
class _Names:
    """Names for ids, by kind and order of appearance."""

    known: dict[str, str] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def text(self, value: str) -> str:
        return _IDS.sub(self._name, value)

    def value(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {key: self._field(key, item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.value(item) for item in value]
        return value

    def _field(self, key: str, item: Any) -> Any:
        if key == "sdk_version":
            return "<version>"
        if key == "seq_id" and isinstance(item, int) and item >= CLONE_BLOCK:
            return f"{self._clone(item // CLONE_BLOCK)} + {item % CLONE_BLOCK}"
        if key == "cloned_sampler_id" and isinstance(item, int) and item > 0:
            return self._clone(item)
        return self.value(item)

    def _name(self, match: re.Match[str]) -> str:
        kind = str(match.lastgroup)
        if kind == "clone":
            number = int(match[0])
            return f"{self._clone(number // CLONE_BLOCK)} + {number % CLONE_BLOCK}"
        return self._known(kind, match[0])

    def _clone(self, number: int) -> str:
        return self._known("clone", str(number))

    def _known(self, kind: str, value: str) -> str:
        if f"{kind} {value}" not in self.known:
            self.counts[kind] = self.counts.get(kind, 0) + 1
            self.known[f"{kind} {value}"] = f"<{kind} {self.counts[kind]}>"
        return self.known[f"{kind} {value}"]


def normalize(requests: Iterable[Recorded]) -> list[Normal]:
    """The requests of one run in a form that can be compared with another run's."""
    names = _Names()
    polls: dict[str, dict[str, Any]] = {}
    normal: list[Normal] = []
    for request in requests:
        if request.name in DROPPED:
            continue
        if request.name == "retrieve_future":
            _add_poll(polls, request, names)
        elif request.name == "retrieve_futures":
            target = (request.body or {}).get("target")
            polls.setdefault(_json(names.value(target)), {"path": request.name})
        else:
            normal.append(_normal(request, names))
    normal += [Normal("polls", (key,), "POST", poll["path"], "", "", _json(poll)) for key, poll in polls.items()]
    handshake = {request for request in normal if request.group == "handshake"}
    rest = [request for request in normal if request.group != "handshake"]
    return sorted([*handshake, *rest], key=lambda one: (one.group, one.order, one.path, one.query, one.body))


def _add_poll(polls: dict[str, dict[str, Any]], request: Recorded, names: _Names) -> None:
    request_id = names.text(str((request.body or {}).get("request_id")))
    accept, kind = request.headers.get("accept"), request.headers.get("x-tinker-request-type")
    polls.setdefault(request_id, {"path": request.name, "accept": accept, "request_type": kind})


def _normal(request: Recorded, names: _Names) -> Normal:
    headers = {
        name: names.text(value)
        for name, value in request.headers.items()
        if KEPT_HEADERS.fullmatch(name) and name not in TIMING_HEADERS
    }
    body = names.value(request.body)
    group, order = _place(request.name, body)
    if group.startswith("sampling "):
        del body["seq_id"]
    return Normal(
        group,
        order,
        request.method,
        names.text(request.name),
        _json(names.value(dict(request.query))),
        _json(headers),
        _json(body),
    )


def _place(name: str, body: Any) -> tuple[str, tuple[Any, ...]]:
    """The group of a request, and its place among those that the protocol orders."""
    if name in HANDSHAKE:
        return "handshake", ()
    given = body if isinstance(body, dict) else {}
    if "model_id" in given and "seq_id" in given:
        return f"training {given['model_id']}", (given["seq_id"],)
    if "sampling_session_id" in given and "seq_id" in given:
        clone = f" {given['seq_id'].split(' + ')[0]}" if isinstance(given["seq_id"], str) else ""
        return f"sampling {given['sampling_session_id']}{clone}", ()
    return "other", ()


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def differences(first: list[Normal], second: list[Normal]) -> list[str]:
    """What one stream has and the other has not, in words; empty if they mean the same."""
    left, right = _by_key(first), _by_key(second)
    found: list[str] = []
    for key in sorted(left.keys() | right.keys(), key=str):
        ours, theirs = left.get(key, []), right.get(key, [])
        for a in list(ours):
            if a in theirs:
                ours.remove(a)
                theirs.remove(a)
        for a, b in zip(ours, theirs, strict=False):
            found += _compare(a, b)
        shared = min(len(ours), len(theirs))
        found += [f"only in the first: {one.title} {_short(one.body)}" for one in ours[shared:]]
        found += [f"only in the second: {one.title} {_short(one.body)}" for one in theirs[shared:]]
    return found


def _by_key(stream: list[Normal]) -> dict[tuple[Any, ...], list[Normal]]:
    groups: dict[tuple[Any, ...], list[Normal]] = {}
    for one in stream:
        key = (one.group, one.order) if one.order else (one.group, one.method, one.path)
        groups.setdefault(key, []).append(one)
    return groups


def _compare(a: Normal, b: Normal) -> list[str]:
    """Each place at which two requests for the same thing differ."""
    found = []
    for name in ("method", "path", "query", "headers", "body"):
        one, other = getattr(a, name), getattr(b, name)
        if one == other:
            continue
        if name in ("query", "headers", "body"):
            places = _places(json.loads(one or "null"), json.loads(other or "null"), name)
        else:
            places = [f"{name}: {one!r} != {other!r}"]
        found += [f"{a.title}: {place}" for place in places]
    return found


def _places(a: Any, b: Any, where: str) -> list[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        keys = sorted(a.keys() | b.keys())
        return [place for key in keys for place in _places(a.get(key, MISSING), b.get(key, MISSING), f"{where}.{key}")]
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return [place for i, (x, y) in enumerate(zip(a, b, strict=True)) for place in _places(x, y, f"{where}[{i}]")]
    is_same = a == b or (a != a and b != b)
    return [] if is_same else [f"{where}: {_short(a)} != {_short(b)}"]


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 200 else text[:197] + "..."
