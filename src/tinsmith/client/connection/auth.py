"""The credential of a request: a key or the output of a credential command, exchanged for a short-lived token that is
refreshed before it expires. Never logs or shows a credential."""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from tinsmith.config import ClientConfig, check_key
from tinsmith.errors import TinkerError

logger = logging.getLogger(__name__)

REFRESH_MARGIN_S = 300.0
"""A token is refreshed this long before it expires, in the background."""
MUST_REFRESH_S = 60.0
"""If less time than this is left, requests wait for the new token."""
FAILURE_PAUSE_S = 60.0


class Auth:
    """The credential of one client."""

    def __init__(self, config: ClientConfig, *, clock: Callable[[], float] = time.time) -> None:
        self._config = config
        self._clock = clock
        self._exchange: Callable[[str], Awaitable[str]] | None = None
        self._uses_command = False
        self._token: str | None = None
        self._expires = 0.0
        self._not_before = 0.0
        self._lock = asyncio.Lock()
        self._refreshing: asyncio.Task[None] | None = None

    async def credential(self, *, force_command: bool = False) -> str:
        """Return the key (or JWT) that was set, or what the credential command prints."""
        key = self._config.api_key
        command = self._config.credential_cmd
        if key and command is None:
            return check_key(key)
        if key and (key.startswith("eyJ") or (key.startswith("tml-") and not force_command)):
            return key
        if command is not None:
            return await _run_command(command)
        raise TinkerError(
            "No API key is set for this server: set TINKER_API_KEY to one (it starts with tml-), or store it with "
            "`tinsmith auth login`. A stored key is only sent to the server it was stored for."
        )

    def use_tokens(self, exchange: Callable[[str], Awaitable[str]], *, force_command: bool) -> None:
        """Send tokens from now on, which `exchange` returns for the credential."""
        self._exchange, self._uses_command = exchange, force_command

    def header_at_hand(self) -> str | None:
        """Return the value of `x-api-key` if it is available without waiting, else None."""
        key = self._config.api_key
        if self._exchange is None and self._config.credential_cmd is None and key:
            return check_key(key)
        return None

    async def header(self) -> str:
        """Return the value of `x-api-key` for the next request."""
        if self._exchange is None:
            return await self.credential()
        if self._config.api_key and self._config.api_key.startswith("eyJ"):
            return self._config.api_key
        left = self._expires - self._clock()
        if self._token is None or left <= MUST_REFRESH_S:
            await self._refresh()
        elif left <= REFRESH_MARGIN_S and self._clock() >= self._not_before and self._refreshing is None:
            self._refreshing = asyncio.get_running_loop().create_task(self._refresh())
            self._refreshing.add_done_callback(self._refreshed)
        assert self._token is not None
        return self._token

    def claims(self) -> dict[str, Any] | None:
        """Return the claims of the current token; None without one."""
        key = self._config.api_key
        token = self._token or (key if key and key.startswith("eyJ") else None)
        return _claims(token) if token else None

    async def close(self) -> None:
        if self._refreshing is not None:
            self._refreshing.cancel()
            await asyncio.wait([self._refreshing], timeout=1)

    def _refreshed(self, task: asyncio.Task[None]) -> None:
        self._refreshing = None
        if not task.cancelled() and task.exception() is not None:
            logger.warning("refreshing the access token failed; using the old one until it expires")

    async def _refresh(self) -> None:
        assert self._exchange is not None
        async with self._lock:
            if self._token is not None and self._expires - self._clock() > REFRESH_MARGIN_S:
                return
            try:
                token = await self._exchange(await self.credential(force_command=self._uses_command))
            except TinkerError:
                self._not_before = self._clock() + FAILURE_PAUSE_S
                if self._token is None:
                    raise
                return
            self._token = token
            expiry = _claims(token).get("exp")
            self._expires = float(expiry) if isinstance(expiry, (int, float)) else 0.0


async def _run_command(command: str) -> str:
    process = await asyncio.create_subprocess_shell(
        command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    output, errors = await process.communicate()
    credential = output.decode(errors="replace").strip()
    if process.returncode or not credential:
        reason = errors.decode(errors="replace").strip()[-200:] or "it printed nothing"
        raise TinkerError(f"TINKER_CREDENTIAL_CMD failed (exit code {process.returncode}): {reason}")
    return credential


def _claims(token: str) -> dict[str, Any]:
    """Return a JWT's claims without verifying them; the server does that."""
    try:
        payload = token.split(".")[1]
        decoded = msgspec.json.decode(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    except (IndexError, ValueError, binascii.Error, msgspec.DecodeError):
        return {}
    return decoded if isinstance(decoded, dict) else {}
