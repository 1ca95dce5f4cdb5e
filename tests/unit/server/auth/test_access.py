"""Who may access what: every rule of the one place that decides it."""

from __future__ import annotations

from typing import Any

import pytest
from support.in_process import BreakableStore, Clock, run

from tinsmith.errors import InvalidInputError
from tinsmith.server.auth.access import Access
from tinsmith.server.auth.authenticator import Authenticator
from tinsmith.server.auth.identity import Caller
from tinsmith.server.auth.keys import create_key
from tinsmith.server.refusals import GoneError, UnknownResourceError
from tinsmith.store.base import statement
from tinsmith.store.rows import CheckpointRow, CustomLossRow, JobRow, ModelRow, SamplerRow, SessionRow

OWNER: dict[str, Any] = {"org_id": "acme", "user_id": "ann"}
ANN = Caller(**OWNER, key_id=1)
BOB = Caller(org_id="acme", user_id="bob", key_id=2)
BOSS = Caller(org_id="acme", user_id="boss", key_id=3, scopes=frozenset({"admin"}))
EVE = Caller(org_id="other", user_id="ann", key_id=4, scopes=frozenset({"all", "admin"}))
PATH = "tinker://s:train:0/weights/w"


def session(**fields: Any) -> SessionRow:
    return SessionRow(**{"session_id": "s", **OWNER, "created_at": 0.0, "heartbeat_at": 0.0, **fields})


def checkpoint(**fields: Any) -> CheckpointRow:
    known = {"path": PATH, "model_id": "s:train:0", "kind": "weights", "name": "w", "session_id": "s", **OWNER}
    rest = {"base_model": "b", "lora": "{}", "optimizer": "{}", "directory": "/d", "size_bytes": 1, "digest": "x"}
    return CheckpointRow(**{**known, **rest, "created_at": 0.0, **fields})


class Rules:
    def __init__(self, store: BreakableStore) -> None:
        self.store = store
        self.clock = Clock(1000.0)
        self.auth = Authenticator(store, b"s" * 32, clock=self.clock, ticks=self.clock)
        self.access = Access(store, self.auth, clock=self.clock)

    async def fill(self) -> None:
        model = ModelRow(
            model_id="s:train:0",
            session_id="s",
            **OWNER,
            base_model="b",
            lora="{}",
            optimizer="{}",
            created_at=0.0,
            used_at=0.0,
        )
        sampler = SamplerRow(sampler_id="s:sample:0", session_id="s", **OWNER, base_model="b", created_at=0.0)
        loss = CustomLossRow(loss_id="l", session_id="s", **OWNER, name="n", request=b"", created_at=0.0)
        job = JobRow(
            request_id="r", lane="l", seq=1, kind="k", session_id="s", **OWNER, digest="", job=b"", created_at=0.0
        )
        await self.store.write(
            statement("insert_session", session()),
            statement("insert_model", model),
            statement("insert_sampler", sampler),
            statement("insert_custom_loss", loss),
            statement("insert_job", job),
            statement("put_checkpoint", checkpoint()),
        )


def rules(scenario: Any) -> None:
    async def whole() -> None:
        store = BreakableStore()
        await store.open()
        try:
            made = Rules(store)
            await made.fill()
            await scenario(made)
        finally:
            await store.close()

    run(whole())


def hidden(error: Exception, name: str) -> str:
    return str(error).replace(repr(name), "?").replace(f" {name} ", " ? ")


LOOKUPS: dict[str, tuple[str, str]] = {
    "session": ("s", "session"),
    "model": ("s:train:0", "training run"),
    "sampler": ("s:sample:0", "sampling session"),
    "live_session": ("s", "session"),
    "live_model": ("s:train:0", "training run"),
    "live_sampler": ("s:sample:0", "sampling session"),
    "custom_loss": ("l", "custom loss"),
    "job": ("r", "request"),
    "checkpoint": (PATH, "checkpoint"),
}


@pytest.mark.parametrize("lookup", list(LOOKUPS))
def test_owners_and_administrators_find_and_strangers_cannot_tell_it_from_missing(lookup: str) -> None:
    async def scenario(made: Rules) -> None:
        name, noun = LOOKUPS[lookup]
        missing = "tinker://s:train:0/weights/none" if lookup == "checkpoint" else "none"
        find = getattr(made.access, lookup)
        for stranger in (BOB, EVE):
            with pytest.raises(UnknownResourceError, match=noun) as theirs:
                await find(stranger, name)
            with pytest.raises(UnknownResourceError) as absent:
                await find(stranger, missing)
            assert hidden(theirs.value, name) == hidden(absent.value, missing)
        for owner in (ANN, BOSS):
            assert await find(owner, name) is not None
        for stranger in (BOB, EVE):  # also when it is in memory now
            with pytest.raises(UnknownResourceError):
                await find(stranger, name)

    rules(scenario)


@pytest.mark.parametrize("lookup", ["session", "model"])
def test_members_of_the_organisation_may_read_where_a_call_asks_for_that(lookup: str) -> None:
    async def scenario(made: Rules) -> None:
        find = getattr(made.access, lookup)
        assert await find(BOB, LOOKUPS[lookup][0], to_read=True) is not None
        with pytest.raises(UnknownResourceError):
            await find(EVE, LOOKUPS[lookup][0], to_read=True)

    rules(scenario)


def test_published_checkpoints_are_for_all_to_read_and_for_nobody_to_change() -> None:
    async def scenario(made: Rules) -> None:
        await made.store.write(statement("set_checkpoint_public", path=PATH, public=True))
        assert (await made.access.checkpoint(EVE, PATH)).name == "w"
        for stranger in (BOB, EVE):
            with pytest.raises(UnknownResourceError):
                await made.access.checkpoint(stranger, PATH, to_change=True)
        assert (await made.access.checkpoint(ANN, PATH, to_change=True)).name == "w"

    rules(scenario)


def test_an_owners_key_opens_a_checkpoint_for_reading() -> None:
    async def scenario(made: Rules) -> None:
        await made.store.write(statement("put_checkpoint", checkpoint(org_id="acme", user_id="acme.ann")))
        owner = await create_key(made.store, name="x", now=0.0, org="acme", user="ann")
        other = await create_key(made.store, name="x", now=0.0, org="acme", user="zoe")
        assert (await made.access.checkpoint(EVE, PATH, token=owner.key)).name == "w"
        token = made.auth.issue(await made.auth.caller(owner.key))
        assert (await made.access.checkpoint(EVE, PATH, token=token)).name == "w"
        for wrong in (other.key, "tml-unknown-key", "nonsense", ""):
            with pytest.raises(UnknownResourceError):
                await made.access.checkpoint(EVE, PATH, token=wrong)
        with pytest.raises(UnknownResourceError):
            await made.access.checkpoint(EVE, PATH, to_change=True, token=owner.key)

    rules(scenario)


def test_an_expired_checkpoint_is_gone_at_once() -> None:
    async def scenario(made: Rules) -> None:
        await made.store.write(statement("set_checkpoint_expires_at", path=PATH, expires_at=1000.0))
        with pytest.raises(UnknownResourceError, match="does not exist, has expired"):
            await made.access.checkpoint(ANN, PATH)
        with pytest.raises(InvalidInputError, match="Invalid tinker path"):
            await made.access.checkpoint(ANN, "../../etc/passwd")

    rules(scenario)


def test_refused_requests_have_no_promise() -> None:
    async def scenario(made: Rules) -> None:
        row = (await made.store.read(JobRow, "job", request_id="r"))[0]
        refused = JobRow(**{**row.parameters(), "request_id": "no", "seq": 2, "state": "refused"})
        await made.store.write(statement("insert_job", refused))
        with pytest.raises(UnknownResourceError):
            await made.access.job(ANN, "no")

    rules(scenario)


@pytest.mark.parametrize("lookup", ["live_session", "live_model", "live_sampler"])
def test_what_is_over_is_gone(lookup: str) -> None:
    async def scenario(made: Rules) -> None:
        over = statement("set_session_status", session(status="finished", ended_at=5.0))
        await made.store.write(over)
        with pytest.raises(GoneError, match=r"session s has ended \(finished\)"):
            await getattr(made.access, lookup)(ANN, LOOKUPS[lookup][0])

    rules(scenario)


@pytest.mark.parametrize("lookup", ["live_session", "live_model", "live_sampler"])
def test_a_session_that_fell_silent_comes_back_with_its_models(lookup: str) -> None:
    async def scenario(made: Rules) -> None:
        await made.store.write(
            statement("set_session_status", session(status="expired", ended_at=5.0)),
            statement("unload_models_of_session", session_id="s"),
        )
        assert await getattr(made.access, lookup)(ANN, LOOKUPS[lookup][0]) is not None
        [row] = await made.store.read(SessionRow, "session", session_id="s")
        assert (row.status, row.ended_at) == ("active", None)
        assert (await made.access.live_model(ANN, "s:train:0")).state == "live"
        assert made.access.sessions["s"].heartbeat_at == 1000.0

    rules(scenario)


def test_a_silent_session_whose_journal_is_gone_does_not_come_back() -> None:
    async def scenario(made: Rules) -> None:
        await made.store.write(
            statement("set_session_status", session(status="expired", ended_at=5.0)),
            statement("set_session_pruned", session_id="s"),
        )
        with pytest.raises(GoneError, match="has ended"):
            await made.access.live_session(ANN, "s")

    rules(scenario)


def test_an_unloaded_model_is_gone_to_work_and_there_to_read() -> None:
    async def scenario(made: Rules) -> None:
        await made.store.write(statement("set_model_state", model_id="s:train:0", state="unloaded"))
        with pytest.raises(GoneError, match="was unloaded; resume from a checkpoint"):
            await made.access.live_model(ANN, "s:train:0")
        assert (await made.access.model(ANN, "s:train:0")).state == "unloaded"

    rules(scenario)


def test_forgetting_a_session() -> None:
    async def scenario(made: Rules) -> None:
        await made.access.live_model(ANN, "s:train:0")
        await made.access.live_sampler(ANN, "s:sample:0")
        assert made.access.forget_session("s") == (["s:train:0"], ["s:sample:0"])
        assert made.access.forget_session("s") == ([], [])
        assert (made.access.sessions, made.access.models, made.access.samplers) == ({}, {}, {})

    rules(scenario)
