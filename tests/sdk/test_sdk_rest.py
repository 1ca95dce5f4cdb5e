"""Runs, checkpoints, sessions and administration: each call's values, its twin, and lists of any length."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest
from support.tinker_server import Replace, TinkerServer

from tinsmith import (
    AdminClient,
    ExperimentalWarning,
    InvalidInputError,
    ModelInput,
    NotFoundError,
    RestClient,
    SamplingParams,
    ServiceClient,
    TinkerError,
    TrainingClient,
)
from tinsmith.types import SessionSearchRequest

pytestmark = pytest.mark.usefixtures("hard_limit", "clean_environment")

OWNER = "tml:organization_user:owner"


@pytest.fixture
def rest(client: ServiceClient) -> RestClient:
    return client.create_rest_client()


@pytest.fixture
def saved(trainer: TrainingClient) -> str:
    path: str = trainer.save_state("first", ttl_seconds=7200, user_metadata={"step": "1"}).result(10).path
    return path


def post(server: TinkerServer, path: str, body: dict[str, Any]) -> Any:
    headers = {"content-type": "application/json", "x-api-key": server.key}
    request = urllib.request.Request(f"{server.url}/api/v1/{path}", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.load(answer)


def test_a_training_run_by_id_and_by_path(rest: RestClient, trainer: TrainingClient, saved: str) -> None:
    run = rest.get_training_run(trainer.model_id).result(10)

    assert (run.training_run_id, run.base_model, run.model_owner) == (trainer.model_id, "stub/model", OWNER)
    assert (run.is_lora, run.lora_rank, run.corrupted) == (True, 4, False)
    assert run.last_checkpoint is not None
    assert run.last_checkpoint.tinker_path == saved
    assert run.last_sampler_checkpoint is None
    assert rest.get_training_run_by_tinker_path(saved).result(10) == run


def test_queries_reach_the_server(rest: RestClient, server: TinkerServer) -> None:
    rest.list_training_runs(7, 3, "accessible", "project-1").result(10)
    assert server.find("training_runs")[0].query == {
        "limit": "7",
        "offset": "3",
        "access_scope": "accessible",
        "project_id": "project-1",
    }
    rest.list_user_checkpoints(5, 2).result(10)
    assert server.find("checkpoints")[0].query == {"limit": "5", "offset": "2"}


def test_runs_are_listed_newest_first(rest: RestClient, client: ServiceClient) -> None:
    made = [client.create_lora_training_client("stub/model", rank=rank).model_id for rank in (1, 2, 3)]
    page = rest.list_training_runs(limit=2).result(10)

    assert [run.training_run_id for run in page.training_runs] == [made[2], made[1]]
    assert (page.cursor.offset, page.cursor.limit, page.cursor.total_count) == (0, 2, 3)
    rest_of_it = rest.list_training_runs(limit=2, offset=2).result(10)
    assert [run.lora_rank for run in rest_of_it.training_runs] == [1]


def test_checkpoints_of_a_run_and_of_the_user(rest: RestClient, trainer: TrainingClient, saved: str) -> None:
    sampler_path = trainer.save_weights_for_sampler("second").result(10).path
    listed = rest.list_checkpoints(trainer.model_id).result(10).checkpoints

    assert [item.tinker_path for item in listed] == [sampler_path, saved]
    assert [item.checkpoint_type for item in listed] == ["sampler", "training"]
    first = listed[1]
    assert (first.checkpoint_id, first.public, first.user_metadata) == ("weights/first", False, {"step": "1"})
    assert first.expires_at == first.time + timedelta(hours=2)
    assert first.size_bytes is not None
    assert first.size_bytes > 4096
    assert rest.list_user_checkpoints().result(10).checkpoints == listed


def test_what_a_checkpoint_was_made_with(rest: RestClient, saved: str) -> None:
    info = rest.get_weights_info_by_tinker_path(saved).result(10)
    assert (info.base_model, info.is_lora, info.lora_rank) == ("stub/model", True, 4)
    assert (info.train_attn, info.train_mlp, info.train_unembed) == (True, True, True)


def test_publishing_and_taking_back(rest: RestClient, server: TinkerServer, saved: str) -> None:
    assert rest.publish_checkpoint_from_tinker_path(saved).result(10) is None
    assert server.state.checkpoints[saved].is_public
    assert rest.unpublish_checkpoint_from_tinker_path(saved).result(10) is None
    assert not server.state.checkpoints[saved].is_public


def test_setting_and_removing_the_time_to_live(rest: RestClient, server: TinkerServer, saved: str) -> None:
    rest.set_checkpoint_ttl_from_tinker_path(saved, 3600).result(10)
    checkpoint = server.state.checkpoints[saved]
    assert checkpoint.expires_at == checkpoint.created_at + timedelta(hours=1)
    rest.set_checkpoint_ttl_from_tinker_path(saved, None).result(10)
    assert checkpoint.expires_at is None
    assert [request.body for request in server.find(".*/ttl")] == [{"ttl_seconds": 3600}, {"ttl_seconds": None}]


def test_deleting_by_path_and_by_id(
    rest: RestClient, trainer: TrainingClient, server: TinkerServer, saved: str
) -> None:
    other = trainer.save_state("other").result(10).path
    rest.delete_checkpoint_from_tinker_path(saved).result(10)
    assert list(server.state.checkpoints) == [other]
    rest.delete_checkpoint(trainer.model_id, "weights/other").result(10)
    assert server.state.checkpoints == {}
    error = rest.delete_checkpoint_from_tinker_path(saved).exception(10)
    assert isinstance(error, NotFoundError)
    assert saved in str(error)


@pytest.mark.parametrize("path", ["weights/first", "tinker://run/weights", "tinker://run/other/x", "http://a/b/c"])
def test_a_path_that_is_none_is_refused_before_any_request(rest: RestClient, server: TinkerServer, path: str) -> None:
    for call in (
        rest.delete_checkpoint_from_tinker_path,
        rest.publish_checkpoint_from_tinker_path,
        rest.get_training_run_by_tinker_path,
        rest.get_external_weights_urls,
    ):
        with pytest.raises(ValueError, match="tinker"):
            call(path)
    assert server.requests == []


def test_copying_weights_into_a_project(rest: RestClient, server: TinkerServer, saved: str) -> None:
    copy = rest.copy_weights(saved, "project-1", ttl_seconds=60, weights_access_token=server.foreign_key)
    assert isinstance(copy.exception(10), TinkerError), "the token is of somebody who may not read it"
    copied = rest.copy_weights(saved, "project-1", ttl_seconds=60).result(10)

    assert copied in server.state.checkpoints
    assert server.state.checkpoints[copied].project_id == "project-1"
    sent = server.find("copy_weights")
    assert sent[0].headers["x-tinker-weights-access-token"] == server.foreign_key
    assert "x-tinker-weights-access-token" not in sent[1].headers
    with pytest.raises(InvalidInputError, match="destination_project_id"):
        rest.copy_weights(saved)


def test_copying_weights_with_the_service_client(client: ServiceClient, server: TinkerServer, saved: str) -> None:
    copied = client.copy_weights(saved).result(10)
    assert copied in server.state.checkpoints
    assert copied != saved


def test_sessions(rest: RestClient, connect: Any, server: TinkerServer) -> None:
    config = connect(server).holder.connection.config
    with ServiceClient({"team": "a"}, display_name="Night run", config=config) as named:
        run = named.create_lora_training_client("stub/model", rank=1).model_id
        sampler = named.create_sampling_client(base_model="stub/model").sampling_session_id
        session_id = server.find("create_sampling_session")[0].body["session_id"]
        session = rest.get_session(session_id).result(10)
        assert session.training_run_ids == [run]
        assert session.sampler_ids == [sampler]
        assert session.user_metadata == {"team": "a"}
        assert session.display_name == "Night run"
        assert rest.list_sessions().result(10).sessions == [session_id]
        assert rest.get_sampler(sampler).result(10).base_model == "stub/model"
        assert rest.assign_session_project(session_id, "project-9").result(10) is None
        assert server.state.sessions[session_id].project_id == "project-9"


def test_searching_sessions(rest: RestClient, server: TinkerServer) -> None:
    for name in ("Night run", "Day run", "Night watch"):
        post(server, "create_session", {"display_name": name, "user_metadata": {}, "tags": [], "sdk_version": "0"})
    with pytest.warns(ExperimentalWarning):
        page = rest.search_sessions(SessionSearchRequest(display_name="night", limit=1)).result(10)
    assert [session.display_name for session in page.sessions] == ["Night watch"]
    assert page.next_cursor is not None
    with pytest.warns(ExperimentalWarning):
        following = rest.search_sessions(
            SessionSearchRequest(display_name="night", limit=1, cursor=page.next_cursor)
        ).result(10)
    assert [session.display_name for session in following.sessions] == ["Night run"]


def test_the_address_of_a_trace(rest: RestClient, trainer: TrainingClient, server: TinkerServer) -> None:
    session_id = trainer.model_id.partition(":")[0]
    url = rest.export_session_trace(session_id).result(10)
    with urllib.request.urlopen(url, timeout=10) as answer:
        assert answer.read() == f"pftrace of {session_id}".encode()


def test_a_trace_that_fails_says_why(rest: RestClient, server: TinkerServer) -> None:
    server.script("sessions/s/trace_export", [Replace(lambda _: {"status": "failed", "error": "too old"})])
    assert "too old" in str(rest.export_session_trace("s").exception(10))


def test_who_a_token_belongs_to(make_server: Any, connect: Any, datum: Any) -> None:
    server = make_server(flags={"pjwt_auth_enabled": True})
    client = connect(server)
    rest = client.create_rest_client()
    who = rest.whoami().result(10)

    assert (who.user_urn, who.org_urn) == (OWNER, "tml:organization:test-organization")
    assert who.email == "owner@example.com"
    client.create_lora_training_client("stub/model", rank=4).forward_backward([datum(1)], "cross_entropy").result(10)
    with_the_key = {request.name for request in server.requests if request.key == server.key}
    assert with_the_key == {"client/config", "auth/token"}
    assert len(server.find("auth/token")) == 1
    assert server.violations == []


def test_a_server_without_tokens_cannot_tell_who(rest: RestClient) -> None:
    assert isinstance(rest.whoami().exception(10), RuntimeError)


def test_administration(client: ServiceClient, server: TinkerServer, saved: str) -> None:
    client.create_sampling_client(base_model="stub/model").sample(
        ModelInput.from_ints([1, 2]), 1, SamplingParams(max_tokens=3)
    ).result(10)
    admin = AdminClient(base_url=server.url, api_key=server.key)
    entries = admin.get_audit_log("checkpoints", date(2026, 1, 1)).result(10).entries
    assert [(entry.event, entry.tinker_path) for entry in entries] == [("checkpoint_saved", saved)]
    start = datetime(2026, 1, 1, tzinfo=UTC)
    usage = admin.get_billing_usage(start, start + timedelta(days=1)).result(10)
    by_kind = {event.event_info.type: event.event_info for event in usage.data}
    assert by_kind["sampling_prefill"].token_count == 2
    assert by_kind["sampling_sample"].token_count == 3
    storage = admin.get_current_checkpoint_storage_usage().result(10)
    assert storage.data[0].checkpoint_count == 1
    assert storage.data[0].size_bytes > 4096
    assert server.find("billing/usage/events")[0].query["starting_on"].startswith("2026-01-01T00:00:00")
    methods = {request.headers.get("x-sdk-method") for request in server.requests}
    assert {"get_audit_log", "get_billing_usage", "get_current_checkpoint_storage_usage"} <= methods
    rest = client.create_rest_client()
    assert rest.get_audit_log("checkpoints").result(10).entries == entries
    assert rest.get_current_checkpoint_storage_usage().result(10) == storage


def test_twins_return_the_values_themselves(rest: RestClient, trainer: TrainingClient, saved: str) -> None:
    async def ask() -> list[Any]:
        return await asyncio.gather(
            rest.get_training_run_async(trainer.model_id),
            rest.get_training_run_by_tinker_path_async(saved),
            rest.list_training_runs_async(),
            rest.list_checkpoints_async(trainer.model_id),
            rest.list_user_checkpoints_async(),
            rest.list_sessions_async(),
            rest.get_session_async(trainer.model_id.partition(":")[0]),
            rest.publish_checkpoint_from_tinker_path_async(saved),
            rest.set_checkpoint_ttl_from_tinker_path_async(saved, 3600),
            rest.copy_weights_async(saved, "project-1"),
        )

    answers = asyncio.run(ask())
    assert answers[0] == answers[1]
    assert answers[2].training_runs[0].training_run_id == trainer.model_id
    assert answers[3].checkpoints[0].tinker_path == saved
    assert answers[7:9] == [None, None]


def test_all_checkpoints_are_found_page_by_page(rest: RestClient, trainer: TrainingClient, server: Any) -> None:
    saves = [trainer.save_state(f"step-{i}") for i in range(230)]
    paths = [save.result(15).path for save in saves]

    assert [item.tinker_path for item in rest.iter_checkpoints()] == paths[::-1]
    assert [request.query["offset"] for request in server.find("checkpoints")] == ["0", "100", "200"]


def test_all_sessions_are_found_page_by_page(rest: RestClient, server: TinkerServer) -> None:
    made = [post(server, "create_session", {"tags": [], "sdk_version": "0"})["session_id"] for _ in range(200)]

    assert list(rest.iter_sessions()) == made[::-1]


def test_all_runs_are_found_page_by_page(rest: RestClient, client: ServiceClient) -> None:
    async def make() -> list[Any]:
        return await asyncio.gather(
            *(client.create_lora_training_client_async("stub/model", rank=1) for _ in range(105))
        )

    made = {model.model_id for model in asyncio.run(make())}
    assert {run.training_run_id for run in rest.iter_training_runs()} == made
    assert next(iter(rest.iter_training_runs())).base_model == "stub/model"


def test_a_server_with_smaller_pages_hides_nothing(rest: RestClient, client: ServiceClient, server: Any) -> None:
    made = {client.create_lora_training_client("stub/model", rank=1).model_id for _ in range(5)}

    def page(request: Any) -> Any:
        offset = int(request.query["offset"])
        runs = [
            {
                "training_run_id": run_id,
                "base_model": "stub/model",
                "model_owner": OWNER,
                "is_lora": True,
                "last_request_time": "2026-01-01T00:00:00Z",
            }
            for run_id in sorted(made)[offset : offset + 2]
        ]
        return {"training_runs": runs, "cursor": {"offset": offset, "limit": 2, "total_count": 5}}

    server.script("training_runs", [Replace(page)] * 10)
    assert {run.training_run_id for run in rest.iter_training_runs()} == made


def test_a_client_of_its_own_needs_no_session(server: TinkerServer) -> None:
    with RestClient(base_url=server.url, api_key=server.key) as rest:
        assert rest.list_training_runs().result(10).training_runs == []
    assert server.find("create_session") == []
    with pytest.raises(TinkerError, match="closed"):
        rest.list_sessions()
