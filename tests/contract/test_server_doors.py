"""Every door of the server, tried with every kind of key that must not open it.

The walk goes over the whole route table and our own endpoints. What belongs to a stranger must read exactly as what
does not exist; secrets must be nowhere but in the hands of their holders.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jwt
import pytest
from support.in_process import (
    BASE,
    Answer,
    Client,
    Recorder,
    Server,
    create_model,
    forward_backward,
    optim_step,
    run,
    sample,
    serving,
)

from tinsmith.server.auth import ISSUER
from tinsmith.server.keys import installation_secret
from tinsmith.store.base import statement
from tinsmith.store.rows import JobRow, TelemetryRow
from tinsmith.store.sqlite import SqliteStore
from tinsmith.wire.routes import BY_NAME, ROUTES

GRAPH = {
    "nodes": [
        {"op": "placeholder", "name": "logprobs", "target": "logprobs"},
        {"op": "output", "name": "output", "target": "output", "args": [{"node": "logprobs"}]},
    ]
}


@dataclass(frozen=True)
class World:
    """The ids of what somebody has."""

    session: str
    model: str
    sampler: str
    request: str
    loss: str
    name: str = "mine"

    @property
    def path(self) -> str:
        return f"tinker://{self.model}/weights/{self.name}"

    @property
    def checkpoint(self) -> dict[str, str]:
        return {"training_run_id": self.model, "checkpoint_id": f"weights/{self.name}"}

    def hidden(self, answer: Answer) -> tuple[int, str]:
        """An answer without these ids, to compare it with another's."""
        text = answer.body.decode()
        for value in (self.path, self.sampler, self.model, self.session, self.request, self.loss, self.name):
            text = text.replace(value, "?")
        return answer.status, text


NOWHERE = World(
    session="00000000-0000-4000-8000-000000000000",
    model="00000000-0000-4000-8000-000000000000:train:0",
    sampler="00000000-0000-4000-8000-000000000000:sample:0",
    request="0" * 32,
    loss="loss-" + "0" * 32,
    name="none",
)

Ask = tuple[str, str, Any]
"""Method, path, message."""


def ask(name: str, message: Any = None, query: str = "", **parameters: str) -> Ask:
    route = BY_NAME[name]
    return route.method, route.url_path(**parameters) + query, message


def target(world: World) -> dict[str, Any]:
    return {"target": {"sampling_session_id": world.sampler, "cloned_sampler_id": 0}, "timeout": 0.001}


def custom_loss(world: World) -> dict[str, Any]:
    inputs = [{"name": "logprobs", "rank": 1}]
    return {
        "session_id": world.session,
        "custom_loss_seq_id": 77,
        "name": "x",
        "inputs": inputs,
        "graph": GRAPH,
    }


OF_SOMEBODY: dict[str, Callable[[World], list[Ask]]] = {
    "session_heartbeat": lambda w: [ask("session_heartbeat", {"session_id": w.session})],
    "finish_session": lambda w: [
        ask("finish_session", {"reason": {"type": "success"}}, session_id=w.session),
    ],
    "get_session": lambda w: [ask("get_session", session_id=w.session)],
    "assign_session_project": lambda w: [
        ask("assign_session_project", {"project_id": "theirs"}, session_id=w.session),
    ],
    "export_session_trace": lambda w: [ask("export_session_trace", session_id=w.session)],
    "create_model": lambda w: [ask("create_model", create_model(w.session, 5))],
    "get_info": lambda w: [ask("get_info", {"model_id": w.model})],
    "forward_backward": lambda w: [ask("forward_backward", forward_backward(w.model, 50))],
    "forward": lambda w: [
        ask(
            "forward",
            {
                "model_id": w.model,
                "seq_id": 50,
                "forward_input": forward_backward(w.model, 1)["forward_backward_input"],
            },
        )
    ],
    "optim_step": lambda w: [ask("optim_step", optim_step(w.model, 50))],
    "unload_model": lambda w: [ask("unload_model", {"model_id": w.model})],
    "create_custom_loss": lambda w: [ask("create_custom_loss", custom_loss(w))],
    "save_weights": lambda w: [ask("save_weights", {"model_id": w.model, "seq_id": 50, "path": "x"})],
    "save_weights_for_sampler": lambda w: [
        ask("save_weights_for_sampler", {"model_id": w.model, "seq_id": 50, "path": "x"}),
        ask("save_weights_for_sampler", {"model_id": w.model, "seq_id": 50, "sampling_session_seq_id": 9}),
    ],
    "save_weights_external": lambda w: [
        ask("save_weights_external", {"model_id": w.model, "seq_id": 50, "path": "x"}),
    ],
    "load_weights": lambda w: [
        ask("load_weights", {"model_id": w.model, "seq_id": 50, "path": w.path}),
        ask("load_weights", {"session_id": w.session, "model_seq_id": 5, "path": w.path}),
    ],
    "weights_info": lambda w: [ask("weights_info", {"tinker_path": w.path})],
    "copy_weights": lambda w: [
        ask("copy_weights", {"source_path": w.path}),
        ask("copy_weights", {"source_path": w.path, "session_id": w.session, "model_seq_id": 3}),
    ],
    "create_sampling_session": lambda w: [
        ask("create_sampling_session", {"session_id": w.session, "sampling_session_seq_id": 9, "base_model": BASE}),
        ask("create_sampling_session", {"session_id": w.session, "sampling_session_seq_id": 9, "model_path": w.path}),
    ],
    "join_sampling_session": lambda w: [ask("join_sampling_session", {"sampling_session_id": w.sampler})],
    "asample": lambda w: [ask("asample", sample(w.sampler, 50)), ask("asample", sample(w.sampler))],
    "get_sampler": lambda w: [ask("get_sampler", sampler_id=w.sampler)],
    "retrieve_future": lambda w: [
        ask("retrieve_future", {"request_id": w.request}),
        ask("retrieve_future", {"request_id": w.request, "allow_metadata_only": True}),
    ],
    "retrieve_futures": lambda w: [ask("retrieve_futures", target(w))],
    "cancel_future": lambda w: [ask("cancel_future", {"request_id": w.request})],
    "get_training_run": lambda w: [ask("get_training_run", training_run_id=w.model)],
    "list_checkpoints": lambda w: [ask("list_checkpoints", training_run_id=w.model)],
    "list_model_checkpoints": lambda w: [ask("list_model_checkpoints", training_run_id=w.model)],
    "delete_checkpoint": lambda w: [ask("delete_checkpoint", **w.checkpoint)],
    "publish_checkpoint": lambda w: [ask("publish_checkpoint", **w.checkpoint)],
    "unpublish_checkpoint": lambda w: [ask("unpublish_checkpoint", **w.checkpoint)],
    "set_checkpoint_ttl": lambda w: [ask("set_checkpoint_ttl", {"ttl_seconds": 5}, **w.checkpoint)],
    "get_external_weights_urls": lambda w: [ask("get_external_weights_urls", **w.checkpoint)],
    "get_checkpoint_archive": lambda w: [ask("get_checkpoint_archive", **w.checkpoint)],
    "run_metrics": lambda w: [("GET", f"/tinsmith/v1/training_runs/{w.model}/metrics", None)],
    "sample_stream": lambda w: [("POST", "/tinsmith/v1/sample_stream", sample(w.sampler, 50))],
    "sample_results": lambda w: [("POST", "/tinsmith/v1/sample_results", target(w))],
}
"""Calls that name something, by route; our own endpoints are the last. Each body of `samples` is walked elsewhere."""

HOURS = "?starting_on=2027-01-15T00:00:00Z&ending_before=2027-01-16T00:00:00Z"
OF_ONESELF: dict[str, Ask] = {
    "get_server_capabilities": ask("get_server_capabilities"),
    "client_config": ask("client_config", {}),
    "client_dynamic_config": ask("client_dynamic_config", {}),
    "auth_token": ask("auth_token", {}),
    "get_api_key": ask("get_api_key"),
    "telemetry": ask("telemetry", {"events": [], "platform": "x", "sdk_version": "x", "session_id": "x"}),
    "create_session": ask("create_session", {}),
    "list_sessions": ask("list_sessions"),
    "search_sessions": ask("search_sessions", {}),
    "list_training_runs": ask("list_training_runs"),
    "list_user_checkpoints": ask("list_user_checkpoints"),
    "get_billing_usage": ask("get_billing_usage", query=HOURS),
    "get_current_checkpoint_storage_usage": ask("get_current_checkpoint_storage_usage"),
    "get_audit_log": ask("get_audit_log"),
    "import_weights": ("POST", "/tinsmith/v1/import_weights", {}),
    "import_parts": ("POST", "/tinsmith/v1/import_parts", {}),
    "quota": ("GET", "/tinsmith/v1/quota", None),
    "status": ("GET", "/tinsmith/v1/status", None),
    "usage": ("GET", f"/tinsmith/v1/usage{HOURS}", None),
    "tokenizer": ("GET", f"/tinsmith/v1/tokenizer?model={BASE}", None),
    "samples": ("POST", "/tinsmith/v1/samples", b"\x90"),
    "delete_api_key": ask("delete_api_key"),
}
"""Calls that show or change what is the caller's own; the last one ends the key."""

OPEN = {"/api/v1/healthz", "/healthz", "/readyz", "/openapi.json", "/tinsmith/v1/version", "/metrics"}
"""Endpoints for everybody; /metrics only while the server listens on loopback."""


OWN = {
    "sample_stream",
    "samples",
    "sample_results",
    "run_metrics",
    "import_weights",
    "import_parts",
    "quota",
    "status",
    "tokenizer",
    "usage",
}
"""Names of those above that are not in the route table."""


async def send(client: Client, question: Ask) -> Answer:
    method, path, message = question
    return await client.call(method, path, message)


async def settle_in(server: Server, client: Client) -> World:
    """Somebody who has something of everything."""
    session = await client.session(display_name="mine", user_metadata={"secret": "plan"})
    model = await client.model(session)
    promise = await client.post("forward_backward", forward_backward(model, 1))
    await client.result(promise)
    await client.save(model, 2, "mine")
    sampler = await client.sampler(session)
    await client.result(await client.post("asample", sample(sampler, 1)))
    made = World(session=session, model=model, sampler=sampler, request=promise.json["request_id"], loss="")
    loss = await client.result(await client.post("create_custom_loss", custom_loss(made)))
    return World(
        session=session, model=model, sampler=sampler, request=made.request, loss=loss.json["loss_id"], name="mine"
    )


def test_the_walk_knows_every_route(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            named = (set(OF_SOMEBODY) | set(OF_ONESELF)) - OWN
            assert named | {"healthz"} == {route.name for route in ROUTES}
            protocol = {route.path for route in ROUTES}
            own = {route.path for route in server.app.routes} - {
                path.replace("{checkpoint_id}", "{checkpoint_id:checkpoint}") for path in protocol
            }
            assert own == (OPEN - {"/api/v1/healthz"}) | {
                *(f"/tinsmith/v1/{name}" for name in OWN - {"run_metrics"}),
                "/tinsmith/v1/training_runs/{training_run_id}/metrics",
                "/tinsmith/v1/download/{name:path}",
            }

    run(scenario())


async def bad_credentials(server: Server, data: Path) -> dict[str, str]:
    """Keys and tokens that must open nothing, by what is wrong with them."""
    revoked = await server.client("revoked")
    expired = await server.client("expired", expires_at=server.clock() + 10)
    late = await server.client("late")
    tokens = {
        "a token that expired": late,
        "a token of a revoked key": revoked,
        "a token of an expired key": expired,
    }
    found = {name: (await client.post("auth/token")).json["jwt"] for name, client in tokens.items()}
    claims = {"iss": ISSUER, "kid": late.key_id, "exp": 10**11, "sub": "x"}
    found["a forged token"] = jwt.encode(claims, b"x" * 32, algorithm="HS256")
    found["an unsigned token"] = jwt.encode(claims, None, algorithm="none")
    found["a token of nobody"] = jwt.encode({**claims, "kid": 1}, installation_secret(data), algorithm="HS256")
    server.clock.advance(3601)
    await server.store.write(statement("revoke_key", key_id=revoked.key_id, revoked_at=server.clock()))
    found |= {"a revoked key": revoked.key, "an expired key": expired.key}
    found |= {"no key": "", "no such key": "tml-" + "x" * 43, "something else": "sk-123", "bytes": "\xff\xfe"}
    return found


def test_no_door_opens_without_a_good_key(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, session_timeout_s=10**6) as server:
            ann = await server.client("ann")
            world = await settle_in(server, ann)
            credentials = await bad_credentials(server, tmp_path / "data")
            before = list(server.backend.submitted)
            questions = [question for make in OF_SOMEBODY.values() for question in make(world)]
            questions += OF_ONESELF.values()
            for name, credential in credentials.items():
                nobody = Client(server, credential)
                for question in questions:
                    answer = await send(nobody, question)
                    assert answer.status == 401, (name, question, answer)
                    assert answer.json["code"] == "not_authenticated"
                    assert set(answer.json) == {"detail", "code"}
                    for secret in (world.session, world.request, credential):
                        assert not secret or secret not in answer.body.decode("latin-1")
            assert server.backend.submitted == before
            await ann.result(world.request)

    run(scenario())


def test_what_is_open_to_everybody_tells_nothing_of_anybody(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            world = await settle_in(server, await server.client("ann"))
            for path in sorted(OPEN):
                answer = await server.request("GET", path)
                assert answer.status == 200
                for secret in (world.session, "acme", "plan"):
                    assert secret not in answer.body.decode()
            for path in ("secret", "local.key", "tinsmith.sqlite", "../data/secret", "checkpoints"):
                answer = await server.request("GET", f"/tinsmith/v1/download/{path}?expires=9999999999&signature=00")
                assert answer.status in (401, 404)
        async with serving(tmp_path / "public", host="0.0.0.0") as server:
            assert (await server.request("GET", "/metrics")).status == 401
            assert (await (await server.client()).get("/metrics")).status == 200

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
                    assert answer.json["code"] == "unknown_resource"
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
