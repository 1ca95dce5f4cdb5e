"""A client's tokens: exchanged once, refreshed in time; the old one is used while it is valid."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import pytest

from tinsmith.client.connection.auth import FAILURE_PAUSE_S, MUST_REFRESH_S, REFRESH_MARGIN_S, Auth
from tinsmith.config import ClientConfig
from tinsmith.errors import TinkerError

LIFE_S = 3600.0


def token(number: int, expires: float) -> str:
    payload = base64.urlsafe_b64encode(json.dumps({"exp": expires, "sub": f"user-{number}"}).encode()).decode()
    return f"eyJhbGciOiJub25lIn0.{payload.rstrip('=')}.signature-{number}"


class Exchange:
    """Gives a new token for each call; can be made to fail or to wait."""

    def __init__(self) -> None:
        self.now = 1_000_000.0
        self.asked: list[str] = []
        self.is_down = False
        self.gate: asyncio.Event | None = None

    async def __call__(self, credential: str) -> str:
        self.asked.append(credential)
        if self.gate is not None:
            await self.gate.wait()
        if self.is_down:
            raise TinkerError("no tokens now")
        return token(len(self.asked), self.now + LIFE_S)


def auth(exchange: Exchange, **settings: Any) -> Auth:
    made = Auth(
        ClientConfig(base_url="http://127.0.0.1:1", **{"api_key": "tml-key", **settings}), clock=lambda: exchange.now
    )
    made.use_tokens(exchange, force_command=False)
    return made


def test_a_token_is_asked_for_once_by_all_who_need_it() -> None:
    async def scenario() -> None:
        exchange = Exchange()
        one = auth(exchange)
        assert one.header_at_hand() is None
        headers = await asyncio.gather(*(one.header() for _ in range(20)))
        assert set(headers) == {token(1, exchange.now + LIFE_S)}
        assert exchange.asked == ["tml-key"]
        assert one.claims() == {"exp": exchange.now + LIFE_S, "sub": "user-1"}

    asyncio.run(scenario())


def test_a_token_is_renewed_in_the_background_before_it_expires() -> None:
    async def scenario() -> None:
        exchange = Exchange()
        one = auth(exchange)
        first = await one.header()
        exchange.now += LIFE_S - REFRESH_MARGIN_S + 1
        exchange.gate = asyncio.Event()
        assert await one.header() == first, "nobody waits for the new one yet"
        assert await one.header() == first
        await asyncio.sleep(0)
        exchange.gate.set()
        await asyncio.sleep(0.01)
        assert await one.header() == token(2, exchange.now + LIFE_S)
        assert len(exchange.asked) == 2
        await one.close()

    asyncio.run(scenario())


def test_a_renewal_that_fails_is_tried_again_later_and_the_old_token_used() -> None:
    async def scenario() -> None:
        exchange = Exchange()
        one = auth(exchange)
        first = await one.header()
        exchange.now += LIFE_S - REFRESH_MARGIN_S + 1
        exchange.is_down = True
        for _ in range(5):
            assert await one.header() == first
            await asyncio.sleep(0.001)
        assert len(exchange.asked) == 2, "not at every request"
        exchange.now += FAILURE_PAUSE_S
        exchange.is_down = False
        assert await one.header() == first
        await asyncio.sleep(0.01)
        assert await one.header() == token(3, exchange.now + LIFE_S)

    asyncio.run(scenario())


def test_a_token_that_is_nearly_over_is_waited_for() -> None:
    async def scenario() -> None:
        exchange = Exchange()
        one = auth(exchange)
        await one.header()
        exchange.now += LIFE_S - MUST_REFRESH_S + 1
        assert await one.header() == token(2, exchange.now + LIFE_S)

    asyncio.run(scenario())


def test_without_any_token_a_failed_exchange_is_the_callers_error() -> None:
    async def scenario() -> None:
        exchange = Exchange()
        exchange.is_down = True
        with pytest.raises(TinkerError, match="no tokens now"):
            await auth(exchange).header()

    asyncio.run(scenario())


def test_a_token_given_as_the_key_is_not_exchanged() -> None:
    async def scenario() -> None:
        exchange = Exchange()
        given = token(9, 1.0)
        one = auth(exchange, api_key=given)
        assert await one.header() == given
        assert exchange.asked == []
        assert one.claims() == {"exp": 1.0, "sub": "user-9"}

    asyncio.run(scenario())


def test_closing_ends_a_renewal_under_way() -> None:
    async def scenario() -> None:
        exchange = Exchange()
        one = auth(exchange)
        await one.header()
        exchange.now += LIFE_S - REFRESH_MARGIN_S + 1
        exchange.gate = asyncio.Event()
        await one.header()
        await asyncio.sleep(0)
        await one.close()
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(scenario())
