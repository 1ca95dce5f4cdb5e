"""Find the holder of a credential: a key, looked up by its digest, or a short-lived signed token. `access` decides what
the holder may do."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import jwt

from tinsmith.server.auth.identity import Caller
from tinsmith.server.auth.keys import PREFIX, caller_of, digest_of, is_usable
from tinsmith.server.refusals import NotAuthenticatedError
from tinsmith.store.base import Store
from tinsmith.store.rows import KeyRow, UserRow

ISSUER = "passport-tinsmith"
"""Clients read claims of tokens whose issuer begins with `passport-` (protocol section 3)."""
ALGORITHM = "HS256"
CACHE_S = 2.0
"""How long a key's row is cached; revoking a key takes effect within this time."""
MAX_CACHED = 10_000
"""Cached callers; there are as many as valid keys, and tenants cannot create these."""
MAX_TOKENS = 256
"""Cached tokens of one key, whose holder can ask for any number."""
TOKEN = "token:"
"""Prefix of cache entries for callers who presented a token."""


class _Known(NamedTuple):
    """A cached caller: until when (monotonic), and when the key expires (wall clock)."""

    until: float
    expires_at: float | None
    caller: Caller


class Authenticator:
    """Finds the caller of a credential."""

    def __init__(
        self,
        store: Store,
        secret: bytes,
        *,
        token_ttl_s: float = 3600.0,
        clock: Callable[[], float] = time.time,
        ticks: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock` decides what has expired; `ticks`, a monotonic clock, how long a row is cached."""
        self._store = store
        self._secret = secret
        self._token_ttl_s = token_ttl_s
        self._clock = clock
        self._ticks = ticks
        self._cache: dict[str, _Known] = {}
        self._keys: dict[str, _Known] = {}
        """The same callers by the key itself, which saves hashing it."""
        self._tokens: dict[str, tuple[float, int]] = {}
        """Expiry and key of tokens with a valid signature; checking it takes longer than everything else here."""
        self._tokens_of: dict[int, deque[str]] = {}
        """The same by key, the oldest first."""

    async def caller(self, credential: str | None) -> Caller:
        """Return the holder of a key or token."""
        if not credential:
            raise NotAuthenticatedError("no API key was sent; set TINKER_API_KEY (header x-api-key)")
        known = self._keys.get(credential)
        if known is not None and self._is_fresh(known):
            return known.caller
        if credential.startswith(PREFIX):
            digest = digest_of(credential)
            caller = await self._by_digest(digest)
            if len(self._keys) >= MAX_CACHED:
                self._keys.clear()
            self._keys[credential] = self._cache[digest]
            return caller
        if credential.startswith("eyJ"):
            return await self._by_token(credential)
        raise NotAuthenticatedError(f"the credential is neither a key ({PREFIX}...) nor a token (eyJ...)")

    def issue(self, caller: Caller) -> str:
        """Return a token for this caller, valid for `token_ttl_s`; revoking the key also revokes the token."""
        now = int(self._clock())
        claims = {
            "iss": ISSUER,
            "sub": f"tml:organization_user:{caller.org_id}:{caller.user_id}",
            "org_id": caller.org_id,
            "email": caller.email,
            "kid": caller.key_id,
            "iat": now,
            "exp": now + int(self._token_ttl_s),
        }
        return jwt.encode(claims, self._secret, algorithm=ALGORITHM)

    def forget(self) -> None:
        """Ask the store again for every key."""
        self._cache.clear()
        self._keys.clear()

    def _remember(self, token: str, known: tuple[float, int]) -> None:
        """Cache a valid token; a key's oldest one makes room for it."""
        mine = self._tokens_of.setdefault(known[1], deque())
        if len(mine) >= MAX_TOKENS:
            self._tokens.pop(mine.popleft(), None)
        mine.append(token)
        self._tokens[token] = known

    async def _by_token(self, token: str) -> Caller:
        known = self._tokens.get(token)
        if known is None:
            known = self._checked(token)
            self._remember(token, known)
        expires_at, key_id = known
        if expires_at <= self._clock():
            self._tokens.pop(token, None)
            raise NotAuthenticatedError("the token has expired; get a new one from auth/token")
        return await self._cached(f"{TOKEN}{key_id}", "key", key_id=key_id)

    def _checked(self, token: str) -> tuple[float, int]:
        """Return the expiry and the key of a token that this server signed."""
        try:
            claims = jwt.decode(
                token,
                self._secret,
                algorithms=[ALGORITHM],
                issuer=ISSUER,
                options={"require": ["exp", "kid"], "verify_exp": False, "verify_iat": False},
            )
            return float(claims["exp"]), int(claims["kid"])
        except (jwt.InvalidTokenError, ValueError, TypeError) as error:
            raise NotAuthenticatedError(
                f"the token is not valid here ({error}); get a new one from auth/token"
            ) from None

    async def _by_digest(self, digest: str) -> Caller:
        return await self._cached(digest, "key_by_digest", digest=digest)

    async def _cached(self, name: str, query: str, **parameters: str | int) -> Caller:
        found = self._cache.get(name)
        if found is not None and self._is_fresh(found):
            return found.caller
        asked = self._ticks()
        rows = await self._store.read(KeyRow, query, **parameters)
        if not rows or not is_usable(rows[0], self._clock()):
            self._cache.pop(name, None)
            raise NotAuthenticatedError("the API key is unknown here, revoked or expired; check TINKER_API_KEY")
        users = await self._store.read(UserRow, "user", user_id=rows[0].user_id)
        caller = replace(caller_of(rows[0], users[0].email if users else None), is_token=name.startswith(TOKEN))
        if len(self._cache) >= MAX_CACHED:
            self._cache.clear()
        self._cache[name] = _Known(asked + CACHE_S, rows[0].expires_at, caller)
        return caller

    def _is_fresh(self, known: _Known) -> bool:
        if known.until <= self._ticks():
            return False
        return known.expires_at is None or known.expires_at > self._clock()
