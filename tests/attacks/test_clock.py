"""A clock that is set back, by a person or by a time server, makes nothing valid again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from support.in_process import BreakableStore, Clock, Recorder, with_store

from tinsmith.config import ServerConfig
from tinsmith.server.app import make_services
from tinsmith.server.auth.authenticator import CACHE_S, Authenticator
from tinsmith.server.auth.keys import create_key
from tinsmith.server.auth.signed_urls import Signer
from tinsmith.server.ops.clock import SteadyClock
from tinsmith.server.refusals import NotAuthenticatedError
from tinsmith.store.base import statement

DAY_S = 86_400.0


class Machine:
    """The clock on the wall, which can be set, and the seconds that really pass."""

    def __init__(self) -> None:
        self.wall = Clock(1_800_000_000.0)
        self.ticks = Clock(50.0)

    def pass_s(self, seconds: float) -> None:
        self.wall.advance(seconds)
        self.ticks.advance(seconds)


def refused(asking: Callable[[], Awaitable[object]]) -> Awaitable[None]:
    async def ask() -> None:
        with pytest.raises(NotAuthenticatedError):
            await asking()

    return ask()


@pytest.mark.parametrize("set_by", [-DAY_S, -3600.0, +3600.0])
def test_a_revoked_key_is_dead_whatever_happens_to_the_clock(set_by: float) -> None:
    async def scenario(store: BreakableStore) -> None:
        machine = Machine()
        auth = Authenticator(store, b"s" * 32, clock=SteadyClock(machine.wall, machine.ticks), ticks=machine.ticks)
        made = await create_key(store, name="x", now=0.0)
        token = auth.issue(await auth.caller(made.key))
        await auth.caller(token)
        await store.write(statement("revoke_key", key_id=made.row.key_id, revoked_at=1.0))
        machine.wall.advance(set_by)
        machine.pass_s(CACHE_S)
        await refused(lambda: auth.caller(made.key))
        await refused(lambda: auth.caller(token))

    with_store(scenario)


def test_a_clock_that_was_wrong_for_a_moment_lets_a_revoked_key_live_no_longer() -> None:
    """Set forward, used, put right: what was remembered in between is not believed until that time comes."""

    async def scenario(store: BreakableStore) -> None:
        machine = Machine()
        auth = Authenticator(store, b"s" * 32, clock=SteadyClock(machine.wall, machine.ticks), ticks=machine.ticks)
        made = await create_key(store, name="x", now=0.0)
        machine.wall.advance(DAY_S)
        await auth.caller(made.key)
        machine.wall.advance(-DAY_S)
        await store.write(statement("revoke_key", key_id=made.row.key_id, revoked_at=1.0))
        machine.pass_s(CACHE_S)
        await refused(lambda: auth.caller(made.key))

    with_store(scenario)


def test_what_has_expired_stays_expired(tmp_path: Path) -> None:
    async def scenario(store: BreakableStore) -> None:
        machine = Machine()
        clock = SteadyClock(machine.wall, machine.ticks)
        auth = Authenticator(store, b"s" * 32, token_ttl_s=60, clock=clock, ticks=machine.ticks)
        signer = Signer(b"s" * 32, clock=clock)
        lasting = await create_key(store, name="lasting", now=0.0)
        made = await create_key(store, name="x", now=0.0, expires_at=machine.wall() + 60)
        token = auth.issue(await auth.caller(lasting.key))
        address, _ = signer.url("", "file", 60)
        query = dict(part.split("=") for part in address.partition("?")[2].split("&"))
        await auth.caller(made.key)
        await auth.caller(token)
        signer.check("file", **query)
        machine.pass_s(61)
        for _ in range(2):
            await refused(lambda: auth.caller(made.key))
            await refused(lambda: auth.caller(token))
            with pytest.raises(NotAuthenticatedError):
                signer.check("file", **query)
            machine.wall.advance(-DAY_S)
        assert (await auth.caller(lasting.key)).key_id == lasting.row.key_id

    with_store(scenario)


def test_a_key_that_expires_soon_is_not_believed_for_longer() -> None:
    async def scenario(store: BreakableStore) -> None:
        machine = Machine()
        clock = SteadyClock(machine.wall, machine.ticks)
        auth = Authenticator(store, b"s" * 32, clock=clock, ticks=machine.ticks)
        made = await create_key(store, name="x", now=0.0, expires_at=machine.wall() + CACHE_S / 2)
        await auth.caller(made.key)
        machine.pass_s(CACHE_S / 2)
        await refused(lambda: auth.caller(made.key))

    with_store(scenario)


def test_the_clock_follows_the_wall_where_that_is_ahead() -> None:
    machine = Machine()
    clock = SteadyClock(machine.wall, machine.ticks)
    began = clock()
    machine.wall.advance(DAY_S)
    assert clock() == began + DAY_S, "say, after the machine slept"
    machine.wall.advance(-DAY_S)
    assert clock() == began, "a mistake that was put right does not stay"
    machine.wall.advance(-DAY_S)
    machine.ticks.advance(5)
    assert clock() == began + 5


def test_a_real_server_has_such_a_clock(tmp_path: Path) -> None:
    async def scenario(store: BreakableStore) -> None:
        services = make_services(ServerConfig(data_dir=tmp_path), store, Recorder())
        assert isinstance(services.clock, SteadyClock)
        assert services.authenticator._clock is services.clock
        assert services.signer._clock is services.clock

    with_store(scenario)
