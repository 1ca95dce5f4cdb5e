"""Every door of the server, tried with every kind of key that must not open it.

The walk goes over the whole route table and our own endpoints. What belongs to a stranger must read exactly as what
does not exist; secrets must be nowhere but in the hands of their holders.
"""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from support.doors import (
    ALL,
    NOWHERE,
    OF_ONESELF,
    OF_SOMEBODY,
    ask,
    bad_credentials,
    only_sampling,
    questions_of,
    send,
    settle_in,
    walked,
)
from support.in_process import Client, Recorder, create_model, forward_backward, optim_step, run, serving

from tinsmith.store.rows import JobRow, TelemetryRow
from tinsmith.store.sqlite import SqliteStore
from tinsmith.wire.routes.door import SCOPES
from tinsmith.wire.routes.own import DOWNLOAD


def test_the_walk_knows_every_route(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            by_owner = {route.name: route.door.owner in ("nothing", "caller", "signature") for route in ALL}
            assert set(OF_SOMEBODY) == {name for name, is_own in by_owner.items() if not is_own} - {"samples"}
            assert {route.name for route in server.app.routes} == set(by_owner)
            assert all(questions_of(route, NOWHERE) for route in ALL)

    run(scenario())


def test_no_door_opens_without_a_good_key(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, session_timeout_s=10**6) as server:
            ann = await server.client("ann")
            world = await settle_in(server, ann)
            credentials = await bad_credentials(server, tmp_path / "data")
            before = list(server.backend.submitted)
            locked = [route for route in ALL if route.door.open_to == "keys"]
            questions = [question for route in locked for question in questions_of(route, world)]
            for name, credential in credentials.items():
                nobody = Client(server, credential)
                for question in questions:
                    answer = await send(nobody, question)
                    assert answer.status == 401, (name, question, answer)
                    assert answer.error["code"] == "not_authenticated"
                    assert set(answer.error) == {"detail", "code"}
                    for secret in (world.session, world.request, credential):
                        assert not secret or secret not in answer.body.decode("latin-1")
            assert server.backend.submitted == before
            await ann.result(world.request)

    run(scenario())


@pytest.mark.parametrize("as_token", [False, True])
@pytest.mark.parametrize("scope", SCOPES)
def test_a_key_of_one_scope_opens_the_doors_that_name_it_and_no_others(
    tmp_path: Path, scope: str, as_token: bool
) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, poll_s=0.001, host="0.0.0.0") as server:
            ann = await server.client("ann")
            world = await (only_sampling(ann) if scope == "sample" else settle_in(server, ann))
            holder = await server.client("ann", scopes=(scope,))
            if as_token:
                holder = Client(server, (await holder.post("auth/token")).json["jwt"])
            for route in walked():
                for question in questions_of(route, world):
                    answer = await send(holder, question)
                    is_named = route.door.open_to == "everybody" or scope == "admin" or scope in route.door.scopes
                    if not is_named:
                        assert (answer.status, answer.error["code"]) == (403, "not_allowed"), (route.name, answer)
                        assert f"the key has: {scope}" in answer.detail
                    else:
                        assert answer.status not in (401, 403) or route is DOWNLOAD, (route.name, answer)
                        assert answer.status < 500, (route.name, answer)

    run(scenario())


def test_what_is_open_to_everybody_tells_nothing_of_anybody(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            world = await settle_in(server, await server.client("ann"))
            for route in (route for route in ALL if route.door.open_to in ("everybody", "machine")):
                if route is DOWNLOAD:
                    continue
                answer = await server.request(route.method, route.path)
                assert answer.status == 200
                for secret in (world.session, "acme", "plan"):
                    assert secret not in answer.body.decode()
            for path in ("secret", "local.key", "tinsmith.sqlite", "../data/secret", "checkpoints"):
                answer = await server.request("GET", f"/tinsmith/v1/download/{path}?expires=9999999999&signature=00")
                assert answer.status in (401, 404)
        async with serving(tmp_path / "public", host="0.0.0.0") as server:
            assert (await server.request("GET", "/metrics")).status == 401
            assert (await (await server.client()).get("/metrics")).status == 403
            admin = await server.client(scopes=("admin",))
            assert (await admin.get("/metrics")).status == 200
            assert "timings" not in (await (await server.client()).get("/tinsmith/v1/status")).json
            assert "timings" in (await admin.get("/tinsmith/v1/status")).json

    run(scenario())


@pytest.mark.parametrize("user", ["a stranger", "a colleague"])
def test_what_is_anothers_reads_as_missing(tmp_path: Path, user: str) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann = await server.client("ann")
            world = await settle_in(server, ann)
            org = "acme" if user == "a colleague" else "other"
            eve = await server.client("eve", org=org, scopes=("all", "admin") if org == "other" else ("all",))
            before = list(server.backend.submitted)
            jobs = await server.rows(JobRow, "jobs_of_lane_after", lane=world.model, seq=-1, limit=100)
            for name, make in OF_SOMEBODY.items():
                for theirs, missing in zip(make(world), make(NOWHERE), strict=True):
                    answer, absent = await send(eve, theirs), await send(eve, missing)
                    assert answer.status == 404, (name, theirs, answer)
                    assert answer.error["code"] == "unknown_resource"
                    assert world.hidden(answer) == NOWHERE.hidden(absent), name
            assert server.backend.submitted == before
            assert await server.rows(JobRow, "jobs_of_lane_after", lane=world.model, seq=-1, limit=100) == jobs
            for name, question in OF_ONESELF.items():
                answer = await send(eve, question)
                assert answer.status in (200, 404, 400), (name, answer)
                if name != "status" or org == "other":
                    for secret in (world.session, world.model, "plan", "acme.ann"):
                        assert secret.encode() not in answer.body, name
            assert (await ann.get(f"sessions/{world.session}")).status == 200
            await ann.result(await ann.post("forward_backward", forward_backward(world.model, 3)))

    run(scenario())


def test_what_is_anothers_cannot_be_used_with_what_is_ones_own(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            world = await settle_in(server, await server.client("ann"))
            eve = await server.client("eve", org="other")
            own = await settle_in(server, eve)
            custom = {"loss_fn": "custom", "loss_fn_config": {"loss_id": world.loss}}
            questions = [
                ("load_weights", {"model_id": own.model, "seq_id": 3, "path": world.path}),
                ("load_weights", {"session_id": own.session, "model_seq_id": 4, "path": world.path}),
                ("forward_backward", forward_backward(own.model, 4, **custom)),
                (
                    "create_sampling_session",
                    {"session_id": own.session, "sampling_session_seq_id": 4, "model_path": world.path},
                ),
                ("copy_weights", {"source_path": world.path, "session_id": own.session, "model_seq_id": 9}),
                ("copy_weights", {"source_path": own.path, "session_id": world.session, "model_seq_id": 9}),
            ]
            before = list(server.backend.submitted)
            for route, message in questions:
                answer = await eve.post(route, message)
                assert (answer.status, answer.json["code"]) == (404, "unknown_resource"), route
            wrong_token = {"source_path": world.path, "weights_access_token": eve.key}
            assert (await eve.post("copy_weights", wrong_token)).status == 404
            weak = await server.client("ann", scopes=("sample",))
            weak_token = {"source_path": world.path, "weights_access_token": weak.key}
            assert (await eve.post("copy_weights", weak_token)).status == 404, "who may only sample hands out no files"
            assert server.backend.submitted == before
            await eve.result(await eve.post("optim_step", optim_step(own.model, 5)))  # the refused numbers are closed

    run(scenario())


def test_a_published_checkpoint_can_be_read_by_all_and_changed_by_its_owner(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann, eve = await server.client("ann"), await server.client("eve", org="other")
            world = await settle_in(server, ann)
            await send(ann, ask("publish_checkpoint", **world.checkpoint))
            for name in ("weights_info", "get_external_weights_urls"):
                assert (await send(eve, OF_SOMEBODY[name](world)[0])).status == 200
            assert (await send(eve, OF_SOMEBODY["get_checkpoint_archive"](world)[0])).status == 302
            for name in ("delete_checkpoint", "publish_checkpoint", "unpublish_checkpoint", "set_checkpoint_ttl"):
                assert (await send(eve, OF_SOMEBODY[name](world)[0])).status == 404
            await send(ann, ask("unpublish_checkpoint", **world.checkpoint))
            assert (await send(eve, OF_SOMEBODY["weights_info"](world)[0])).status == 404

    run(scenario())


def test_colleagues_see_what_they_ask_to_see_of_one_another_and_strangers_do_not(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            world = await settle_in(server, await server.client("ann"))
            bob, eve = await server.client("bob"), await server.client("eve", org="other")
            wide = "?access_scope=accessible"
            for question in (
                ask("get_session", query=wide, session_id=world.session),
                ask("get_training_run", query=wide, training_run_id=world.model),
            ):
                assert (await send(bob, question)).status == 200
                assert (await send(eve, question)).status == 404
            for question in (
                ask("list_sessions", query=wide),
                ask("list_training_runs", query=wide),
                ask("search_sessions", {"owner": {"type": "accessible"}}),
                ask(
                    "search_sessions",
                    {"owner": {"type": "user", "owner_urns": ["tml:organization_user:acme:acme.ann"]}},
                ),
            ):
                assert world.session in (await send(bob, question)).body.decode()
                assert world.session not in (await send(eve, question)).body.decode()

    run(scenario())


def test_a_key_that_was_deleted_by_its_holder_opens_nothing_more(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann = await server.client("ann")
            token = (await ann.post("auth/token")).json["jwt"]
            assert (await send(ann, ask("delete_api_key"))).status == 200
            for credential in (ann.key, token):
                assert (await Client(server, credential).get("sessions")).status == 401

    run(scenario())


def test_secrets_are_in_no_log_no_answer_and_no_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        caplog.set_level(logging.DEBUG)
        store = SqliteStore(tmp_path / "db.sqlite")
        await store.open()
        async with serving(tmp_path, store=store, backend=Recorder()) as server:
            ann = await server.client("ann")
            world = await settle_in(server, ann)
            token = (await ann.post("auth/token")).json["jwt"]
            secrets = [ann.key, token]
            holder = Client(server, token)
            for make in OF_SOMEBODY.values():
                for question in make(NOWHERE):
                    await send(ann, question)
                    await send(holder, question)
            for secret in secrets:  # where a confused client might put it
                await ann.post("create_model", create_model(world.session, 9, base_model=secret))
                await ann.post("weights_info", {"tinker_path": secret})
                await ann.post("copy_weights", {"source_path": world.path, "weights_access_token": secret})
                load = {"model_id": world.model, "seq_id": 3, "path": world.path, "weights_access_token": secret}
                await ann.post("load_weights", load)
                answer = await ann.post("get_info", {"model_id": secret})
                assert secret not in answer.body.decode()
                event = {
                    "event": "UNHANDLED_EXCEPTION",
                    "event_id": "e",
                    "event_session_index": 0,
                    "severity": "ERROR",
                    "timestamp": "2027-01-15T00:00:00Z",
                    "error_type": "x",
                    "error_message": f"401 with key {secret}",
                    "traceback": f"headers={{'x-api-key': '{secret}'}}",
                }
                batch = {"events": [event], "platform": "x", "sdk_version": "x", "session_id": world.session}
                assert (await ann.post("telemetry", batch)).status == 200
            await server.services.jobs.drain()
            await server.sweep()
            assert len(await server.rows(TelemetryRow, "telemetry_newest", limit=9)) == 2
            shown = repr([server.services.config, server.services.authenticator, *server.services.runs.all()])
        await store.close()
        kept = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
        for secret in secrets:
            assert secret not in caplog.text
            assert secret not in shown
            assert secret.encode() not in kept

    run(scenario())
