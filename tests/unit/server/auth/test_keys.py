"""Keys, tokens and their holders."""

from __future__ import annotations

import base64
import json
import logging
import os
from pathlib import Path
from typing import Any

import jwt
import pytest
from support.in_process import BreakableStore, Clock, run, with_store

from tinsmith.config import ServerConfig
from tinsmith.errors import InvalidInputError, TinkerError
from tinsmith.server.auth.authenticator import CACHE_S, ISSUER, Authenticator
from tinsmith.server.auth.identity import Caller
from tinsmith.server.auth.keys import caller_of, create_key, digest_of, installation_secret, is_usable, local_key
from tinsmith.server.auth.start_keys import prepare_keys
from tinsmith.server.refusals import NotAllowedError, NotAuthenticatedError, NotReadyError
from tinsmith.store.base import statement
from tinsmith.store.rows import KeyRow, OrgRow, ProjectRow, UserRow
from tinsmith.store.sqlite import SqliteStore

SECRET = b"s" * 32


def test_a_key_and_all_that_belongs_to_it() -> None:
    async def scenario(store: BreakableStore) -> None:
        made = await create_key(
            store, name="laptop", now=5.0, org="acme", user="ann", email="a@x", project="p", scopes=("train", "read")
        )
        assert made.key.startswith("tml-")
        assert len(made.key) > 40
        [row] = await store.read(KeyRow, "key_by_digest", digest=digest_of(made.key))
        assert row == made.row
        assert made.key not in repr(row)
        assert len(row.hint) < 16
        assert [org.org_id for org in await store.read(OrgRow, "orgs")] == ["acme"]
        assert (await store.read(UserRow, "user", user_id="acme.ann"))[0].email == "a@x"
        assert (await store.read(ProjectRow, "project", org_id="acme", project_id="p"))[0].org_id == "acme"
        caller = caller_of(row, "a@x")
        assert (caller.org_id, caller.user_id, caller.scopes) == ("acme", "acme.ann", frozenset({"train", "read"}))

    with_store(scenario)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"scopes": ("fly",)}, "'fly'"),
        ({"scopes": ()}, "none given"),
        ({"key": "sk-123456789012"}, "must begin with tml-"),
        ({"key": "tml-short"}, "at least 12"),
        ({"org": ""}, "org"),
        ({"user": ""}, "user"),
    ],
)
def test_keys_that_cannot_be_made(options: dict[str, Any], says: str) -> None:
    async def scenario(store: BreakableStore) -> None:
        with pytest.raises(InvalidInputError, match=says):
            await create_key(store, **{"name": "x", "now": 0.0, **options})
        assert await store.read(KeyRow, "keys") == []

    with_store(scenario)


def test_two_organisations_never_share_a_user() -> None:
    async def scenario(store: BreakableStore) -> None:
        await create_key(store, name="x", now=0.0, org="a", user="b.c")
        for org, user in (("a.b", "c"), ("local", "a.b.c")):
            with pytest.raises(InvalidInputError, match="belongs to another organisation"):
                await create_key(store, name="x", now=0.0, org=org, user=user)
        await create_key(store, name="again", now=0.0, org="a", user="b.c")

    with_store(scenario)


def test_usable_keys() -> None:
    row = KeyRow(key_id=1, digest="", hint="", org_id="o", user_id="u", name="n", created_at=0.0)
    fields = row.parameters()
    assert is_usable(row, 10.0)
    assert is_usable(KeyRow(**{**fields, "expires_at": 10.1}), 10.0)
    assert not is_usable(KeyRow(**{**fields, "expires_at": 10.0}), 10.0)
    assert not is_usable(KeyRow(**{**fields, "revoked_at": 3.0}), 10.0)


def test_what_scopes_allow() -> None:
    def may(*scopes: str) -> list[str]:
        caller = Caller(org_id="o", user_id="u", key_id=1, scopes=frozenset(scopes))
        return [scope for scope in ("train", "sample", "read", "admin") if caller.may(scope)]

    assert may("all") == ["train", "sample", "read"]
    assert may("admin") == ["train", "sample", "read", "admin"]
    assert may("sample") == ["sample"]
    assert may() == []
    with pytest.raises(NotAllowedError, match="needs the scope 'train'; the key has: read, sample"):
        Caller(org_id="o", user_id="u", key_id=1, scopes=frozenset({"sample", "read"})).need("train")


def test_what_is_whose() -> None:
    ann = Caller(org_id="acme", user_id="ann", key_id=1)
    boss = Caller(org_id="acme", user_id="boss", key_id=2, scopes=frozenset({"admin"}))
    assert ann.owns("acme", "ann", None)
    assert not ann.owns("acme", "bob", None)
    assert not ann.owns("other", "ann", None)
    assert boss.owns("acme", "ann", "any")
    assert not boss.owns("other", "boss", None)
    assert ann.sees("acme", "any")
    assert not ann.sees("other", None)


class Keys:
    """An authenticator with one key."""

    def __init__(self, store: BreakableStore) -> None:
        self.store = store
        self.clock = Clock(1000.0)
        self.auth = Authenticator(store, SECRET, token_ttl_s=60, clock=self.clock, ticks=self.clock)

    async def make(self, **options: Any) -> str:
        made = await create_key(self.store, **{"name": "x", "now": 0.0, "email": "a@x", **options})
        self.key_id = made.row.key_id
        return made.key

    async def refused(self, credential: str | None, says: str) -> None:
        with pytest.raises(NotAuthenticatedError, match=says) as caught:
            await self.auth.caller(credential)
        assert not credential or credential not in str(caught.value)


def test_credentials_that_are_none() -> None:
    async def scenario(store: BreakableStore) -> None:
        keys = Keys(store)
        await keys.refused(None, "no API key was sent; set TINKER_API_KEY")
        await keys.refused("", "no API key was sent")
        await keys.refused("password", "neither a key")
        await keys.refused("tml-" + "x" * 40, "unknown here, revoked or expired")
        await keys.refused("eyJnonsense", "not valid here")
        await keys.refused("eyJé.é.é", "not valid here")

    with_store(scenario)


def test_a_revoked_key_is_dead_within_two_seconds() -> None:
    async def scenario(store: BreakableStore) -> None:
        keys = Keys(store)
        key = await keys.make()
        token = keys.auth.issue(await keys.auth.caller(key))
        assert (await keys.auth.caller(token)).is_token
        await store.write(statement("revoke_key", key_id=keys.key_id, revoked_at=1.0))
        assert (await keys.auth.caller(key)).email == "a@x"  # remembered
        keys.clock.advance(CACHE_S)
        await keys.refused(key, "revoked or expired")
        await keys.refused(token, "revoked or expired")  # a token dies with its key

    with_store(scenario)


def test_forgetting_makes_a_revocation_act_at_once() -> None:
    async def scenario(store: BreakableStore) -> None:
        keys = Keys(store)
        key = await keys.make()
        await keys.auth.caller(key)
        await store.write(statement("revoke_key", key_id=keys.key_id, revoked_at=1.0))
        keys.auth.forget()
        await keys.refused(key, "revoked or expired")

    with_store(scenario)


def test_a_key_expires_on_time_also_when_it_is_remembered() -> None:
    async def scenario(store: BreakableStore) -> None:
        keys = Keys(store)
        key = await keys.make(expires_at=1000.5)
        await keys.auth.caller(key)
        keys.clock.advance(0.4)
        await keys.auth.caller(key)
        keys.clock.advance(0.1)
        await keys.refused(key, "expired")

    with_store(scenario)


def test_tokens() -> None:
    async def scenario(store: BreakableStore) -> None:
        keys = Keys(store)
        caller = await keys.auth.caller(await keys.make(org="acme", user="ann"))
        token = keys.auth.issue(caller)
        claims = jwt.decode(token, options={"verify_signature": False})
        assert claims["iss"].startswith("passport-")
        assert claims["sub"] == "tml:organization_user:acme:acme.ann"
        assert (claims["email"], claims["exp"] - claims["iat"]) == ("a@x", 60)
        assert (await keys.auth.caller(token)).user_id == "acme.ann"
        keys.clock.advance(60)
        await keys.refused(token, "has expired")

    with_store(scenario)


def _forgeries(key_id: int) -> dict[str, str]:
    claims: dict[str, Any] = {"iss": ISSUER, "kid": key_id, "exp": 10**10, "sub": "x"}

    def unsigned(header: dict[str, str]) -> str:
        parts = [json.dumps(part).encode() for part in (header, claims)]
        return ".".join(base64.urlsafe_b64encode(part).rstrip(b"=").decode() for part in parts) + "."

    good = jwt.encode(claims, SECRET, algorithm="HS256")
    head, _, signature = good.split(".")
    other = base64.urlsafe_b64encode(json.dumps({**claims, "kid": key_id + 1}).encode()).rstrip(b"=").decode()
    return {
        "another secret": jwt.encode(claims, b"t" * 32, algorithm="HS256"),
        "alg none": unsigned({"alg": "none", "typ": "JWT"}),
        "alg None": unsigned({"alg": "None", "typ": "JWT"}),
        "another algorithm": jwt.encode(claims, b"s" * 64, algorithm="HS512"),
        "another issuer": jwt.encode({**claims, "iss": "passport-else"}, SECRET, algorithm="HS256"),
        "no expiry": jwt.encode({k: v for k, v in claims.items() if k != "exp"}, SECRET, algorithm="HS256"),
        "no key": jwt.encode({k: v for k, v in claims.items() if k != "kid"}, SECRET, algorithm="HS256"),
        "changed claims": f"{head}.{other}.{signature}",
        "no signature": f"{head}.{good.split('.')[1]}.",
        "an unknown key": jwt.encode({**claims, "kid": key_id + 1}, SECRET, algorithm="HS256"),
        "a key that is no number": jwt.encode({**claims, "kid": "x' OR 1=1"}, SECRET, algorithm="HS256"),
        "an expiry that is no number": jwt.encode({**claims, "exp": "soon"}, SECRET, algorithm="HS256"),
    }


@pytest.mark.parametrize("forgery", list(_forgeries(1)))
def test_forged_tokens(forgery: str) -> None:
    async def scenario(store: BreakableStore) -> None:
        keys = Keys(store)
        await keys.make()
        await keys.refused(_forgeries(keys.key_id)[forgery], "not valid here|unknown here")

    with_store(scenario)


def test_the_local_key_is_made_once_and_only_its_owner_can_read_it(tmp_path: Path) -> None:
    async def scenario(store: BreakableStore) -> None:
        key = await local_key(store, tmp_path, 0.0)
        assert await local_key(store, tmp_path, 1.0) == key
        assert oct(os.stat(tmp_path / "local.key").st_mode & 0o777) == "0o600"
        [row] = await store.read(KeyRow, "keys")
        assert json.loads(row.scopes) == ["admin", "all"]
        secret = installation_secret(tmp_path)
        assert installation_secret(tmp_path) == secret
        assert len(secret) == 32
        assert oct(os.stat(tmp_path / "secret").st_mode & 0o777) == "0o600"

    with_store(scenario)


def test_a_local_key_that_was_revoked_is_replaced(tmp_path: Path) -> None:
    async def scenario(store: BreakableStore) -> None:
        key = await local_key(store, tmp_path, 0.0)
        [row] = await store.read(KeyRow, "keys")
        await store.write(statement("revoke_key", key_id=row.key_id, revoked_at=1.0))
        new = await local_key(store, tmp_path, 2.0)
        assert new != key
        assert (tmp_path / "local.key").read_text().strip() == new
        assert await local_key(store, tmp_path, 3.0) == new

    with_store(scenario)


def test_who_may_start_a_server(tmp_path: Path) -> None:
    async def scenario(store: BreakableStore) -> None:
        def config(**options: Any) -> ServerConfig:
            return ServerConfig(data_dir=tmp_path, **options)

        with pytest.raises(NotReadyError, match="'tinsmith key create NAME --data-dir"):
            await prepare_keys(config(host="0.0.0.0"), store, 0.0)
        await create_key(store, name="old", now=0.0, org="acme", user="ann", expires_at=5.0)
        with pytest.raises(NotReadyError):
            await prepare_keys(config(host="0.0.0.0"), store, 5.0)
        assert await prepare_keys(config(host="0.0.0.0"), store, 4.0) is None
        given = "tml-" + "g" * 30
        for _ in range(2):
            assert await prepare_keys(config(host="0.0.0.0", api_key=given), store, 0.0) is None, "it is in no file"
        [row] = await store.read(KeyRow, "key_by_digest", digest=digest_of(given))
        await store.write(statement("revoke_key", key_id=row.key_id, revoked_at=1.0))
        with pytest.raises(TinkerError, match="revoked or expired"):
            await prepare_keys(config(api_key=given), store, 2.0)
        assert await prepare_keys(config(), store, 0.0) == tmp_path / "local.key"

    with_store(scenario)


def test_a_key_is_in_no_log_no_repr_and_no_database(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        caplog.set_level(logging.DEBUG)
        store = SqliteStore(tmp_path / "db.sqlite")
        await store.open()
        key = await local_key(store, tmp_path, 0.0)
        made = await create_key(store, name="x", now=0.0, org="acme", user="ann")
        auth = Authenticator(store, SECRET)
        caller = await auth.caller(made.key)
        token = auth.issue(caller)
        shown = repr([made, made.row, caller, auth, ServerConfig(api_key=made.key, data_dir=tmp_path)])
        await store.close()
        files = b"".join(path.read_bytes() for path in tmp_path.glob("db.sqlite*"))
        for secret in (key, made.key, token):
            assert secret not in caplog.text
            assert secret not in shown
            assert secret.encode() not in files

    run(scenario())
