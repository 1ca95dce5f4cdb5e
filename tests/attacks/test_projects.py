"""A key of a project is confined to it: everything outside reads as missing, and nothing can be made or moved there.

And project names belong to organisations: nobody can take another's name, or learn that it exists.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.doors import OF_SOMEBODY, World, ask, send, settle_in
from support.in_process import Answer, Client, Server, forward_backward, run, sample, serving

from tinsmith.server.auth.keys import create_key
from tinsmith.store.rows import AuditRow, ProjectRow
from tinsmith.wire.routes.table import ROUTES

DAY = "?starting_on=2027-01-15T00:00:00Z&ending_before=2027-01-16T00:00:00Z"
EVERYWHERE = "access_scope=accessible"


async def two_projects(server: Server, **options: Any) -> tuple[Client, World, Client, World]:
    """One user with a key for each of two projects, and something of everything in both."""
    red = await server.client("ann", project="red", **options)
    blue = await server.client("ann", project="blue", **options)
    return red, await settle_in(server, red), blue, await settle_in(server, blue)


@pytest.mark.parametrize("scopes", [("all",), ("all", "admin")])
def test_what_is_outside_the_project_reads_as_missing(tmp_path: Path, scopes: tuple[str, ...]) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            red, _, _, theirs = await two_projects(server, scopes=scopes)
            before = list(server.backend.submitted)
            for name, make in OF_SOMEBODY.items():
                for question in make(theirs):
                    answer = await send(red, question)
                    assert (answer.status, answer.error["code"]) == (404, "unknown_resource"), (name, answer)
            assert server.backend.submitted == before

    run(scenario())


def test_what_has_left_memory_reads_as_missing_too(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            red, _, blue, theirs = await two_projects(server)
            services = server.services
            services.broker.forget([theirs.model, theirs.sampler])
            services.access.forget_session(theirs.session)
            for name in ("retrieve_future", "cancel_future", "get_sampler", "get_info", "retrieve_futures"):
                assert (await send(red, OF_SOMEBODY[name](theirs)[0])).status == 404, name
            await blue.result(theirs.request)

    run(scenario())


def test_what_is_anothers_cannot_be_used_in_the_project(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            red, own, _, theirs = await two_projects(server)
            custom = {"loss_fn": "custom", "loss_fn_config": {"loss_id": theirs.loss}}
            for route, message in (
                ("load_weights", {"model_id": own.model, "seq_id": 3, "path": theirs.path}),
                ("load_weights", {"session_id": own.session, "model_seq_id": 4, "path": theirs.path}),
                ("forward_backward", forward_backward(own.model, 4, **custom)),
                (
                    "create_sampling_session",
                    {"session_id": own.session, "sampling_session_seq_id": 4, "model_path": theirs.path},
                ),
                ("copy_weights", {"source_path": theirs.path, "session_id": own.session, "model_seq_id": 9}),
                ("copy_weights", {"source_path": own.path, "session_id": theirs.session, "model_seq_id": 9}),
            ):
                assert (await red.post(route, message)).status == 404, route

    run(scenario())


def shown(answer: Answer) -> str:
    assert answer.status == 200, answer
    return answer.body.decode()


@pytest.mark.parametrize("scopes", [("all",), ("all", "admin")])
def test_lists_show_the_project_alone(tmp_path: Path, scopes: tuple[str, ...]) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            red, own, _, theirs = await two_projects(server, scopes=scopes)
            plain = await server.client("ann", scopes=scopes)
            outside = await settle_in(server, plain)
            await server.services.jobs.drain()
            questions = {
                "list_sessions": ask("list_sessions"),
                "list_sessions of all": ask("list_sessions", query=f"?{EVERYWHERE}"),
                "search_sessions": ask("search_sessions", {}),
                "search_sessions of all": ask("search_sessions", {"owner": {"type": "accessible"}}),
                "list_training_runs": ask("list_training_runs"),
                "list_training_runs of all": ask("list_training_runs", query=f"?{EVERYWHERE}"),
                "list_user_checkpoints": ask("list_user_checkpoints"),
                "get_billing_usage": ask("get_billing_usage", query=DAY),
                "get_audit_log": ask("get_audit_log"),
                "status": ("GET", "/tinsmith/v1/status", None),
                "usage": ("GET", f"/tinsmith/v1/usage{DAY}&by=session", None),
            }
            for name, question in questions.items():
                text = shown(await send(red, question))
                assert own.session in text, name
                for hidden in (theirs.session, outside.session, "blue"):
                    assert hidden not in text, name
                assert outside.session in shown(await send(plain, question)), name
            for name, question in {
                "search": ask("search_sessions", {"project_ids": ["blue"]}),
                "runs": ask("list_training_runs", query="?project_id=blue"),
                "storage": ask("get_current_checkpoint_storage_usage", query="?project_id=blue"),
            }.items():
                answer = (await send(red, question)).json
                assert not any(answer.get(field) for field in ("sessions", "training_runs", "data")), name
                assert answer.get("cursor", {}).get("total_count", 0) == 0, name
            stored = (await send(red, ask("get_current_checkpoint_storage_usage"))).json["data"]
            assert [item["project_id"] for item in stored] == ["red"]
            pages = (await send(red, ask("list_training_runs"))).json
            assert pages["cursor"]["total_count"] == len(pages["training_runs"]) == 1
            assert (await send(red, ask("list_user_checkpoints"))).json["cursor"]["total_count"] == 1
            assert (await send(red, ("GET", "/tinsmith/v1/status", None))).json["queued"] == 0

    run(scenario())


def test_nothing_is_made_or_moved_outside_the_project(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            red, own, _, _ = await two_projects(server)
            plain = await server.client("ann")
            for question in (
                ask("create_session", {"project_id": "blue"}),
                ask("assign_session_project", {"project_id": "blue"}, session_id=own.session),
                ask("copy_weights", {"source_path": own.path, "destination_project_id": "blue"}),
            ):
                answer = await send(red, question)
                assert (answer.status, answer.json["code"]) == (403, "not_allowed"), question
                assert "'red'" in answer.detail
            assert (await send(red, ask("create_session", {"project_id": "red"}))).status == 200
            moved = ask("assign_session_project", {"project_id": "blue"}, session_id=own.session)
            assert (await send(plain, moved)).status == 200
            for name in ("get_session", "get_info", "join_sampling_session", "retrieve_future", "weights_info"):
                assert (await send(red, OF_SOMEBODY[name](own)[0])).status == 404, name

    run(scenario())


def test_what_is_made_again_under_one_idempotency_key_is_found_in_its_own_project_only(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            red, _, blue, theirs = await two_projects(server)
            await send(blue, ask("publish_checkpoint", **theirs.checkpoint))
            copies = [
                (await client.post("copy_weights", {"source_path": theirs.path}, x_idempotency_key="k")).json
                for client in (red, blue)
            ]
            assert copies[0]["tinker_path"] != copies[1]["tinker_path"]

    run(scenario())


def test_samples_of_another_project_are_not_taken(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            red, own, _, theirs = await two_projects(server)
            bodies = [msgspec.json.encode(sample(world.sampler, 60)) for world in (own, theirs)]
            answer = await red.call("POST", "/tinsmith/v1/samples", msgspec.msgpack.encode(bodies))
            assert [status for status, *_ in msgspec.msgpack.decode(answer.body)] == [200, 404]

    run(scenario())


def test_two_organisations_have_projects_of_one_name_and_learn_nothing_of_each_other(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann, eve = await server.client("ann"), await server.client("eve", org="other")
            sessions = [await client.session(project_id="demo") for client in (ann, eve)]
            for client, session in zip((ann, eve), sessions, strict=True):
                taken = await client.call("PUT", f"sessions/{session}/project", {"project_id": "demo"})
                free = await client.call("PUT", f"sessions/{session}/project", {"project_id": "nobodys"})
                assert (taken.status, taken.body) == (free.status, free.body) == (200, b"{}")
                await client.call("PUT", f"sessions/{session}/project", {"project_id": "demo"})
            await create_key(server.store, name="x", now=0.0, org="third", user="x", project="demo")
            for org in ("acme", "other", "third"):
                (row,) = await server.rows(ProjectRow, "project", org_id=org, project_id="demo")
                assert row.org_id == org
            for client, theirs in ((ann, sessions[1]), (eve, sessions[0])):
                found = await client.post("sessions/search", {"project_ids": ["demo"], "owner": {"type": "accessible"}})
                assert theirs not in found.body.decode()

    run(scenario())


def test_the_audit_log_says_to_which_project_an_entry_belongs(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            red, own, *_ = await two_projects(server)
            await send(red, ask("publish_checkpoint", **own.checkpoint))
            await send(red, ask("assign_session_project", {"project_id": "red"}, session_id=own.session))
            await send(red, ask("copy_weights", {"source_path": own.path}))
            await send(red, ask("delete_checkpoint", **own.checkpoint))
            rows = await server.rows(AuditRow, "audit_of_org", org_id="acme", since=0.0, until=1e12, limit=99)
            assert {row.event: row.project_id for row in rows if row.project_id != "blue"} == dict.fromkeys(
                (
                    "checkpoint_created",
                    "checkpoint_published",
                    "checkpoint_copied",
                    "checkpoint_deleted",
                    "session_assigned_to_project",
                ),
                "red",
            )

    run(scenario())


def test_the_walk_covers_every_route_that_names_something() -> None:
    named = {route.name for route in ROUTES if route.door.owner not in ("nothing", "caller")}
    assert named <= set(OF_SOMEBODY)
