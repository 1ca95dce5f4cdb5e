"""Raw responses: status, headers and bytes of every call, of any path, and streamed into a file."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from datetime import date
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from support.tinker_server import Status, TinkerServer

from tinsmith import (
    AdminClient,
    APITimeoutError,
    ExperimentalWarning,
    InvalidInputError,
    NotFoundError,
    RawResponse,
    RestClient,
    ServiceClient,
    TrainingClient,
    deadline,
)
from tinsmith.errors import WireError
from tinsmith.types import SessionSearchRequest

pytestmark = pytest.mark.usefixtures("hard_limit", "clean_environment")


class Things:
    """What can be asked about."""

    def __init__(self, service: ServiceClient) -> None:
        trainer = service.create_lora_training_client("stub/model", rank=4)
        self.run = trainer.model_id
        self.session = self.run.partition(":")[0]
        self.sampler = service.create_sampling_client(base_model="stub/model").sampling_session_id
        self.path = trainer.save_state("first").result(10).path
        self.exported = trainer.save_weights_external("exported").result(10).path


def search(rest: Any) -> Any:
    with pytest.warns(ExperimentalWarning):
        return rest.search_sessions(SessionSearchRequest())


REST: dict[str, Callable[[Any, Things], Any]] = {
    "get_training_run": lambda rest, t: rest.get_training_run(t.run),
    "get_training_run_by_tinker_path": lambda rest, t: rest.get_training_run_by_tinker_path(t.path),
    "get_weights_info_by_tinker_path": lambda rest, t: rest.get_weights_info_by_tinker_path(t.path),
    "list_training_runs": lambda rest, t: rest.list_training_runs(),
    "list_checkpoints": lambda rest, t: rest.list_checkpoints(t.run),
    "list_user_checkpoints": lambda rest, t: rest.list_user_checkpoints(),
    "get_external_weights_urls": lambda rest, t: rest.get_external_weights_urls(t.exported),
    "publish_checkpoint_from_tinker_path": lambda rest, t: rest.publish_checkpoint_from_tinker_path(t.path),
    "unpublish_checkpoint_from_tinker_path": lambda rest, t: rest.unpublish_checkpoint_from_tinker_path(t.path),
    "set_checkpoint_ttl_from_tinker_path": lambda rest, t: rest.set_checkpoint_ttl_from_tinker_path(t.path, 60),
    "get_session": lambda rest, t: rest.get_session(t.session),
    "list_sessions": lambda rest, t: rest.list_sessions(),
    "assign_session_project": lambda rest, t: rest.assign_session_project(t.session, "p"),
    "get_sampler": lambda rest, t: rest.get_sampler(t.sampler),
    "search_sessions": lambda rest, t: search(rest),
}
ADMIN: dict[str, Callable[[Any, Things], Any]] = {
    "get_audit_log": lambda admin, t: admin.get_audit_log(day=date(2026, 1, 1)),
    "get_billing_usage": lambda admin, t: admin.get_billing_usage("2026-01-01T00:00:00", "2026-01-02T00:00:00"),
    "get_current_checkpoint_storage_usage": lambda admin, t: admin.get_current_checkpoint_storage_usage(),
}
DELETING: dict[str, Callable[[Any, Things], Any]] = {
    "delete_checkpoint": lambda rest, t: rest.delete_checkpoint(t.run, t.path.partition(f"{t.run}/")[2]),
    "delete_checkpoint_from_tinker_path": lambda rest, t: rest.delete_checkpoint_from_tinker_path(t.exported),
}


@pytest.fixture
def rest(client: ServiceClient) -> RestClient:
    return client.create_rest_client()


def test_every_call_gives_its_answer_as_it_came(connect: Any, server: TinkerServer) -> None:
    client = connect(server, heartbeat_s=600.0, telemetry=False)
    things = Things(client)
    rest, admin = client.create_rest_client(), AdminClient(client.holder)
    for plain, calls in ((rest, REST | ADMIN), (admin, ADMIN)):
        for name, call in calls.items():
            server.clear_requests()
            raw = call(plain.with_raw_response, things).result(10)
            value = call(plain, things).result(10)
            first, second = server.find(".*")
            assert (first.method, first.path, first.query, first.body) == (
                second.method,
                second.path,
                second.query,
                second.body,
            ), f"{name} sends the same request"
            assert isinstance(raw, RawResponse), name
            assert raw.status_code in (200, 204), name
            assert raw.url.startswith(f"{server.url}/api/v1/")
            assert raw.method == first.method
            if value is None:
                assert raw.parse() is None
            else:
                assert raw.headers["Content-Type"].startswith("application/json")
                assert type(raw.parse()) is type(value)
                assert raw.json(), name
                if name != "get_external_weights_urls":  # signed anew by each call
                    assert raw.parse() == value, name
    for name, call in DELETING.items():
        assert call(rest.with_raw_response, things).result(10).status_code in (200, 204), name


@pytest.mark.parametrize(("kind", "known"), [(RestClient, REST | ADMIN | DELETING), (AdminClient, ADMIN)])
def test_no_call_is_forgotten(client: ServiceClient, kind: Any, known: Any) -> None:
    """A public method is tried above, or refused by name."""
    raw = kind(client.holder).with_raw_response
    methods = {
        name
        for name, member in inspect.getmembers(kind)
        if not name.startswith("_") and callable(member) and not name.endswith("_async")
    }
    refused = {name for name in methods if not hasattr(raw, name)}
    assert methods - refused == set(known)
    assert refused >= {"close", "get_telemetry"}
    for name in refused:
        with pytest.raises(AttributeError, match=f"with_raw_response has no {name}"):
            getattr(raw, name)
    with pytest.raises(AttributeError, match="has no call 'no_such_call'"):
        raw.no_such_call  # noqa: B018
    assert not hasattr(raw, "iter_sessions_async")


def test_the_twins_are_awaited(rest: RestClient) -> None:
    async def run() -> RawResponse:
        answer = await rest.with_raw_response.list_sessions_async()
        assert isinstance(answer, RawResponse)
        return await rest.with_raw_response.get_async("/api/v1/healthz")

    assert asyncio.run(run()).json() == {"status": "ok"}


def test_unknown_fields_and_headers_are_there(rest: RestClient, server: TinkerServer) -> None:
    body = b'{"sessions": ["s-1"], "brand_new": {"a": [1, null]}}'
    headers = {"content-type": "application/json", "X-Trace": "t-1"}
    server.script("sessions", [Status(200, headers, body)])
    raw = rest.with_raw_response.list_sessions().result(10)

    assert raw.content == raw.read() == body
    assert raw.text() == body.decode()
    assert raw.json()["brand_new"] == {"a": [1, None]}
    assert raw.parse().sessions == ["s-1"]
    assert raw.headers["x-trace"] == raw.headers["X-Trace"] == raw.headers.get("x-TRACE") == "t-1"
    assert "X-Trace" in raw.headers
    assert raw.headers.get("x-none") is None
    assert "s-1" not in repr(raw)


def test_what_is_no_json_is_still_there_in_bytes(rest: RestClient, server: TinkerServer, tmp_path: Path) -> None:
    server.script("sessions", [Status(200, {"content-type": "text/plain"}, b"\xff plain")])
    raw = rest.with_raw_response.list_sessions().result(10)
    with pytest.raises(WireError, match="is not JSON"):
        raw.json()
    assert raw.write_to_file(tmp_path / "answer").read_bytes() == b"\xff plain"


def test_failures_are_the_same_errors_after_the_same_retries(rest: RestClient, server: TinkerServer) -> None:
    with pytest.raises(NotFoundError):
        rest.with_raw_response.get_training_run("nothing").result(10)
    with pytest.raises(NotFoundError):
        rest.with_raw_response.get("/api/v1/nothing").result(10)
    server.script("healthz", [Status(503, {"retry-after-ms": "1"})] * 2)
    assert rest.with_raw_response.get("/api/v1/healthz").result(10).status_code == 200
    assert len(server.find("healthz")) == 3


def test_any_path_can_be_asked_for_with_the_key(rest: RestClient, server: TinkerServer) -> None:
    raw = rest.with_raw_response.get("/api/v1/training_runs", params={"limit": 3}, headers={"x-mine": "1"}).result(10)

    assert raw.json()["training_runs"] == []
    assert raw.parse() == raw.json()
    (seen,) = server.find("training_runs")
    assert seen.query == {"limit": "3"}
    assert seen.headers["x-mine"] == "1"
    assert seen.headers["x-api-key"] == server.key


@pytest.mark.parametrize("path", ["api/v1/healthz", "//elsewhere/healthz", "http://elsewhere/healthz", ""])
def test_only_paths_of_the_server_are_asked_for(rest: RestClient, path: str) -> None:
    with pytest.raises(InvalidInputError, match="path"):
        rest.with_raw_response.get(path)


def test_a_call_as_it_came_has_a_deadline(rest: RestClient, server: TinkerServer) -> None:
    server.script("sessions", [Status(503)] * 100)
    with deadline(0.5):
        assert isinstance(rest.with_raw_response.list_sessions().exception(10), APITimeoutError)


class Elsewhere(BaseHTTPRequestHandler):
    """Another host, which must not see the key."""

    seen: list[dict[str, str]]

    def do_GET(self) -> None:
        self.seen.append({name.lower(): value for name, value in self.headers.items()})
        body = b"from elsewhere"
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def test_a_file_is_streamed_from_the_server_and_from_elsewhere(
    rest: RestClient, trainer: TrainingClient, server: TinkerServer, tmp_path: Path
) -> None:
    exported = trainer.save_weights_external("exported").result(10).path
    (name, url), *_ = rest.get_external_weights_urls(exported).result(10).urls.items()
    told: list[int] = []
    raw = rest.with_raw_response
    path = raw.stream_to_file(url, tmp_path / name, progress=lambda p: told.append(p.received)).result(10)

    assert path == tmp_path / name
    assert told[-1] == path.stat().st_size > 0
    assert [entry.name for entry in tmp_path.iterdir() if entry.name != "home"] == [name], "no partial file is left"
    health = raw.stream_to_file("/api/v1/healthz", tmp_path / "health").result(10)
    assert health.read_bytes() == raw.get("/api/v1/healthz").result(10).content
    assert server.find("healthz")[0].headers["x-api-key"] == server.key
    with pytest.raises(InvalidInputError, match="already exists"):
        raw.stream_to_file("/api/v1/healthz", health)
    with pytest.raises(InvalidInputError, match="neither a path nor"):
        raw.stream_to_file("ftp://elsewhere/file", tmp_path / "file")
    with pytest.raises(NotFoundError):
        raw.stream_to_file("/api/v1/nothing", tmp_path / "nothing").result(10)


def test_another_host_does_not_see_the_key(rest: RestClient, server: TinkerServer, tmp_path: Path) -> None:
    Elsewhere.seen = []
    with HTTPServer(("127.0.0.1", 0), Elsewhere) as elsewhere:
        thread = threading.Thread(target=elsewhere.serve_forever, args=(0.01,))
        thread.start()
        url = f"http://127.0.0.1:{elsewhere.server_port}/file"
        try:
            path = rest.with_raw_response.stream_to_file(url, tmp_path / "file", headers={"x-mine": "1"}).result(10)
        finally:
            elsewhere.shutdown()
            thread.join()
    assert path.read_bytes() == b"from elsewhere"
    assert Elsewhere.seen[0]["x-mine"] == "1"
    assert server.key not in str(Elsewhere.seen)
