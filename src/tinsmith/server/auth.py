"""From a credential to its holder: keys by digest, and short-lived signed tokens.

Does not know: HTTP. What a holder may touch is decided in `access`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import jwt

from tinsmith.server.identity import Caller
from tinsmith.server.keys import PREFIX, caller_of, digest_of, is_usable
from tinsmith.server.refusals import NotAuthenticatedError
from tinsmith.store.base import Store
from tinsmith.store.rows import KeyRow, UserRow

ISSUER = "passport-tinsmith"
"""Clients read claims of tokens whose issuer begins with `passport-` (protocol section 3)."""
ALGORITHM = "HS256"
CACHE_S = 2.0
"""How long a key's row is trusted without asking the store: revoking takes at most this long to act."""
MAX_CACHED = 10_000
TOKEN = "token:"
"""Begins the cache's names of callers who presented a token."""


class Authenticator:
    """Knows callers by what they present."""

    def __init__(
        self, store: Store, secret: bytes, *, token_ttl_s: float = 3600.0, clock: Callable[[], float] = time.time
    ) -> None:
        self._store = store
        self._secret = secret
        self._token_ttl_s = token_ttl_s
        self._clock = clock
        self._cache: dict[str, tuple[float, Caller]] = {}
        self._keys: dict[str, tuple[float, Caller]] = {}
        """The same by the key itself, which saves its digest."""
        self._tokens: dict[str, tuple[float, int]] = {}
        """Tokens whose signature was checked: expiry and key. Checking again would take longer than all the rest."""

    async def caller(self, credential: str | None) -> Caller:
        """The holder of a key or token."""
        if not credential:
            raise NotAuthenticatedError("no key was sent; set TINKER_API_KEY (header x-api-key)")
        known = self._keys.get(credential)
        if known is not None and known[0] > self._clock():
            return known[1]
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
        """A token for this caller, valid for an hour or so; it dies with its key."""
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

    async def _by_token(self, token: str) -> Caller:
        known = self._tokens.get(token)
        if known is None:
            known = self._checked(token)
            if len(self._tokens) >= MAX_CACHED:
                self._tokens.clear()
            self._tokens[token] = known
        expires_at, key_id = known
        if expires_at <= self._clock():
            self._tokens.pop(token, None)
            raise NotAuthenticatedError("the token has expired; get a new one by auth/token")
        return await self._cached(f"{TOKEN}{key_id}", "key", key_id=key_id)

    def _checked(self, token: str) -> tuple[float, int]:
        """The expiry and the key of a token that this server signed."""
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
            raise NotAuthenticatedError(f"the token is not valid here ({error}); get a new one by auth/token") from None

    async def _by_digest(self, digest: str) -> Caller:
        return await self._cached(digest, "key_by_digest", digest=digest)

    async def _cached(self, name: str, query: str, **parameters: str | int) -> Caller:
        found = self._cache.get(name)
        now = self._clock()
        if found is not None and found[0] > now:
            return found[1]
        rows = await self._store.read(KeyRow, query, **parameters)
        if not rows or not is_usable(rows[0], now):
            self._cache.pop(name, None)
            raise NotAuthenticatedError("the key is unknown here, revoked or expired; check TINKER_API_KEY")
        users = await self._store.read(UserRow, "user", user_id=rows[0].user_id)
        caller = replace(caller_of(rows[0], users[0].email if users else None), is_token=name.startswith(TOKEN))
        if len(self._cache) >= MAX_CACHED:
            self._cache.clear()
        expiry = rows[0].expires_at
        until = now + CACHE_S
        self._cache[name] = (min(until, expiry) if expiry is not None else until, caller)
        return caller
