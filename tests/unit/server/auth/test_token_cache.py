"""A token's signature is checked once; its expiry, and that of its key, are checked every time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tinsmith.server.auth.authenticator import CACHE_S, Authenticator
from tinsmith.server.auth.keys import create_key
from tinsmith.server.refusals import NotAuthenticatedError
from tinsmith.store.base import statement
from tinsmith.store.memory import MemoryStore


def with_token(act: Callable[[Any, Any, list[float], str, int], Any]) -> None:
    async def run() -> None:
        store, now = MemoryStore(), [1000.0]
        await store.open()
        try:
            made = await create_key(store, name="one", now=now[0])
            clocks = {"clock": lambda: now[0], "ticks": lambda: now[0]}
            authenticator = Authenticator(store, b"s" * 32, token_ttl_s=100, **clocks)
            caller = await authenticator.caller(made.key)
            assert not caller.is_token
            await act(authenticator, store, now, authenticator.issue(caller), made.row.key_id)
        finally:
            await store.close()

    asyncio.run(run())


def test_a_known_token_expires_in_time() -> None:
    async def act(authenticator: Any, store: Any, now: list[float], token: str, key_id: int) -> None:
        assert (await authenticator.caller(token)).is_token
        now[0] += 99
        assert (await authenticator.caller(token)).key_id == key_id
        now[0] += 2
        for _ in range(2):
            with pytest.raises(NotAuthenticatedError, match="expired"):
                await authenticator.caller(token)

    with_token(act)


def test_a_known_token_dies_with_its_key() -> None:
    async def act(authenticator: Any, store: Any, now: list[float], token: str, key_id: int) -> None:
        await authenticator.caller(token)
        await store.write(statement("revoke_key", key_id=key_id, revoked_at=now[0]))
        now[0] += CACHE_S + 1
        with pytest.raises(NotAuthenticatedError, match="revoked"):
            await authenticator.caller(token)

    with_token(act)


def test_a_changed_token_is_refused_also_when_the_right_one_is_known() -> None:
    async def act(authenticator: Any, store: Any, now: list[float], token: str, key_id: int) -> None:
        await authenticator.caller(token)
        for _ in range(2):
            with pytest.raises(NotAuthenticatedError, match="not valid here"):
                await authenticator.caller(token[:-2] + ("A" if token[-2] != "A" else "B") + token[-1])

    with_token(act)
