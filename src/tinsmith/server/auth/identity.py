"""The caller of a request: what a key or a token stands for, and what it may do."""

from __future__ import annotations

from dataclasses import dataclass, field

from tinsmith.server.refusals import NotAllowedError

SCOPES = ("all", "train", "sample", "read", "admin")
"""What a key may do: train (and save), sample, read (lists and downloads), admin (usage and audit of the whole
organisation, other members' work); `all` is the first three, `admin` covers them too. Which routes take which scope is
declared in `wire.routes.table` and `wire.routes.own`."""


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

    def need(self, *scopes: str) -> None:
        """Refuse a call if the credential has none of these scopes."""
        if not any(map(self.may, scopes)):
            needed = " or ".join(map(repr, sorted(scopes)))
            held = ", ".join(sorted(self.scopes)) or "none"
            raise NotAllowedError(f"this call needs the scope {needed}; the key has: {held}")

    def owns(self, org_id: str, user_id: str, project_id: str | None) -> bool:
        """Whether the caller may change something of this owner in this project."""
        return self.sees(org_id, project_id) and (user_id == self.user_id or "admin" in self.scopes)

    def sees(self, org_id: str, project_id: str | None) -> bool:
        """Whether the caller may read something of this organisation and project; a key of a project sees nothing
        outside of it."""
        return org_id == self.org_id and self.project_id in (None, project_id)

    def project_for(self, asked: str | None) -> str | None:
        """Return the project of something new; a key of a project creates nothing outside of it."""
        if self.project_id is not None and asked not in (None, self.project_id):
            raise NotAllowedError(
                f"project_id: this key is limited to the project {self.project_id!r}; leave project_id out"
            )
        return asked if asked is not None else self.project_id

    @property
    def namespace(self) -> tuple[bytes, ...]:
        """Return what separates callers who may choose the same name for something."""
        return self.org_id.encode(), self.user_id.encode(), (self.project_id or "").encode()
