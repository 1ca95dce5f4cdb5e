"""Who calls: what a key or a token stands for, and what it may do.

Does not know: HTTP, how keys are kept.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tinsmith.server.refusals import NotAllowedError

SCOPES = ("all", "train", "sample", "read", "admin")
"""What a key may do: train (and save), sample, read (lists and downloads), admin (usage and audit of the whole
organisation, other members' work); `all` is the first three."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The holder of a credential."""

    org_id: str
    user_id: str
    key_id: int
    project_id: str | None = None
    scopes: frozenset[str] = frozenset({"all"})
    requests_per_minute: int | None = None
    tokens_per_day: int | None = None
    email: str | None = None
    is_token: bool = field(default=False)
    """Whether a short-lived token was presented instead of the key."""

    def may(self, scope: str) -> bool:
        return scope in self.scopes or "admin" in self.scopes or (scope != "admin" and "all" in self.scopes)

    def need(self, scope: str) -> None:
        """Refuse a call that the credential's scopes do not cover."""
        if not self.may(scope):
            held = ", ".join(sorted(self.scopes)) or "none"
            raise NotAllowedError(f"this call needs the scope {scope!r}; the key has: {held}")

    def owns(self, org_id: str, user_id: str) -> bool:
        """Whether something of this owner may be changed by the caller."""
        return org_id == self.org_id and (user_id == self.user_id or "admin" in self.scopes)

    def sees(self, org_id: str) -> bool:
        """Whether something of this organisation may be read where a call asks for all that is accessible."""
        return org_id == self.org_id
