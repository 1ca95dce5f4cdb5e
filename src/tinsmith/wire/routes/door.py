"""The access declaration of a route, its door: who may call it, whose data it touches, how large a body may be, and
what a call costs.

A route cannot be declared without a door, and a door that names nobody admits nobody. `server/auth` checks keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from tinsmith.errors import InvalidInputError

Scope: TypeAlias = Literal["train", "sample", "read", "admin"]
Openness: TypeAlias = Literal["keys", "machine", "everybody", "nobody"]
Owner: TypeAlias = Literal["nothing", "caller", "session", "model", "sampler", "checkpoint", "request", "signature"]
Cost: TypeAlias = Literal["memory", "rows", "scan", "files", "work", "wait"]

SCOPES: tuple[Scope, ...] = get_args(Scope)
KB = 1024
MB = 1024 * KB


@dataclass(frozen=True, slots=True)
class BodyLimit:
    """The largest body, as sent and unpacked; None means that the server's settings decide."""

    name: str
    max_bytes: int | None = None
    max_unpacked_bytes: int | None = None


SMALL = BodyLimit("small", 64 * KB, 64 * KB)
"""Names, numbers and a little metadata, as for most routes."""
IDS = BodyLimit("ids", 512 * KB, 512 * KB)
"""A list of ids: thousands of them. Twice as much, all of it the shortest ids, could take the loop 20 ms to decode."""
MEDIUM = BodyLimit("medium", MB, MB)
"""Batches of telemetry, the graph of a loss."""
LARGE = BodyLimit("large", 16 * MB, 16 * MB)
"""One prompt."""
BULK = BodyLimit("bulk")
"""Training data, many prompts, files: `max_body_bytes` and `max_unpacked_bytes` of the settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """The access declaration of a route."""

    scopes: frozenset[Scope] = frozenset()
    """A key must have one of these."""
    open_to: Openness = "keys"
    """`machine`: no key is needed while the server listens on loopback only. `everybody`: none is ever needed."""
    owner: Owner
    """What a call touches and must belong to the caller: `nothing` (no data of anybody), `caller` (the key itself, or
    lists of what the caller owns), or one object, which is "not found" for everybody else. `signature`: the URL is
    signed, and carries the permission of the user who asked for it."""
    body: BodyLimit = SMALL
    cost: Cost
    """What a call costs: `memory` answers at once, `rows` reads or writes a few rows of the store, `scan` reads many,
    `files` reads or writes files, `work` queues a job for the engine, `wait` may be held open."""

    def __post_init__(self) -> None:
        for field, value, known in (
            ("open_to", self.open_to, get_args(Openness)),
            ("owner", self.owner, get_args(Owner)),
            ("cost", self.cost, get_args(Cost)),
        ):
            if value not in known:
                raise InvalidInputError(f"{field}: {value!r} is not one of {', '.join(known)}", field=field)
        unknown = sorted(self.scopes.difference(SCOPES))
        if unknown:
            raise InvalidInputError(f"scopes: {unknown[0]!r} is not one of {', '.join(SCOPES)}", field="scopes")
        if bool(self.scopes) != (self.open_to in ("keys", "machine")):
            raise InvalidInputError(
                f"scopes: a route open to {self.open_to} cannot have {len(self.scopes)} scopes", field="scopes"
            )


ELSEWHERE = Door(open_to="nobody", owner="nothing", cost="memory")
"""For routes of other servers, which the client calls and our server does not have."""


def needs(*scopes: Scope, owner: Owner, cost: Cost, body: BodyLimit = SMALL) -> Door:
    """Admit keys with one of these scopes."""
    return Door(scopes=frozenset(scopes), owner=owner, body=body, cost=cost)


def any_key(owner: Owner, cost: Cost, body: BodyLimit = SMALL) -> Door:
    """Admit every valid key."""
    return needs(*SCOPES, owner=owner, cost=cost, body=body)


def everybody(owner: Owner, cost: Cost) -> Door:
    """Admit everybody, with or without a key."""
    return Door(open_to="everybody", owner=owner, cost=cost)
