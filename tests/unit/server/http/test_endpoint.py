"""From ASGI to calls and back: limits, encodings, errors; and the documents made from the route table."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.in_process import (
    Recorder,
    Server,
    create_model,
    forward_backward,
    optim_step,
    run,
    sample,
    serving,
    settled,
)

from tinsmith.errors import ConstraintError, InvalidInputError, LimitExceededError, StoreError, TinkerError, WireError
from tinsmith.server import refusals
from tinsmith.server.http import errors
from tinsmith.server.http.endpoint import check_announced, read_body, unpacked
from tinsmith.server.http.openapi import openapi
from tinsmith.server.ops.traces import trace_of
from tinsmith.store.rows import JobHeadRow, ResultHeadRow, SessionRow
from tinsmith.wire.codecs import zstd
from tinsmith.wire.routes.served import SERVED_ROUTES


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InvalidInputError("x", field="f"), 400),
        (WireError("x", field="f"), 422),
        (LimitExceededError("x", field="body"), 413),
        (refusals.NotAuthenticatedError("x"), 401),
        (refusals.NotAllowedError("x"), 403),
        (refusals.UnknownResourceError("x"), 404),
        (refusals.SlowBodyError("x"), 408),
        (refusals.GoneError("x"), 410),
        (refusals.UnsupportedBodyError("x"), 415),
        (refusals.OverLimitError("x", retry_after_s=0.25, remaining=3), 429),
        (refusals.OverBudgetError("x", retry_after_s=3600.0, remaining=3), 403),
        (refusals.OverBudgetError("x", retry_after_s=math.inf, remaining=3), 403),
        (refusals.NotReadyError("x", retry_after_s=2.0), 503),
        (StoreError("x"), 503),
        (ConstraintError("x"), 503),
        (TinkerError("x"), 500),
    ],
)
def test_the_status_and_body_of_each_error(error: TinkerError, status: int) -> None:
    assert errors.status_of(error) == status
    assert status != 409
    body = msgspec.json.decode(errors.body_of(error))
    assert (body["detail"], body["code"]) == ("x", error.code)
    assert body.get("field") == getattr(error, "field", None)
    headers = errors.headers_of(error)
    assert ("retry-after" in headers) == (status in (429, 503) and not isinstance(error, StoreError))


def test_errors_that_pass_say_when_and_none_shows_a_key() -> None:
    headers = errors.headers_of(refusals.OverLimitError("x", retry_after_s=0.25, remaining=3))
    assert headers == {"retry-after": "1", "retry-after-ms": "250", "x-ratelimit-remaining": "3"}
    assert b"abcdefgh" not in errors.body_of(InvalidInputError("tml-abcdefghijkl is wrong", field="x"))


def test_a_spent_budget_says_in_its_body_what_is_left_and_when_it_resets() -> None:
    later, never = (refusals.OverBudgetError("x", retry_after_s=s, remaining=3) for s in (3600.0, math.inf))
    assert msgspec.json.decode(errors.body_of(later)) | {"detail": ""} == {
        "detail": "",
        "code": "over_budget",
        "retry_after_s": 3600.0,
        "remaining": 3,
    }
    assert msgspec.json.decode(errors.body_of(never))["retry_after_s"] is None
    assert errors.headers_of(later) == {}


def pieces(*parts: bytes) -> Any:
    messages = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    if messages:
        messages[-1]["more_body"] = False

    async def receive() -> Any:
        if not messages:
            await asyncio.Event().wait()
        return messages.pop(0)

    return receive


def test_bodies_within_their_limit() -> None:
    async def scenario() -> None:
        assert await read_body(pieces(b""), 5, 1) == b""
        assert await read_body(pieces(b"12345"), 5, 1) == b"12345"
        assert await read_body(pieces(b"12", b"3", b"45"), 5, 1) == b"12345"
        for parts in ((b"123456",), (b"123", b"456")):
            with pytest.raises(LimitExceededError, match="larger than the allowed 5 bytes"):
                await read_body(pieces(*parts), 5, 1)
        for announced in ("6", "9" * 30):
            with pytest.raises(LimitExceededError, match="larger than the allowed 5 bytes"):
                check_announced({"content-length": announced}, 5)
        for odd in ("²", "-1", "x", "", "5"):
            check_announced({"content-length": odd}, 5)

    run(scenario())


def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    async def scenario() -> None:
        with pytest.raises(refusals.SlowBodyError, match=r"within 0\.01 s"):
            await read_body(pieces(), 5, 0.01)

        async def gone() -> Any:
            return {"type": "http.disconnect"}

        with pytest.raises(WireError, match="disconnected"):
            await read_body(gone, 5, 1)

    run(scenario())


def test_a_body_that_drips_is_not_waited_for_either() -> None:
    async def scenario() -> None:
        async def drip() -> Any:
            await asyncio.sleep(0.005)
            return {"type": "http.request", "body": b"x", "more_body": True}

        with pytest.raises(refusals.SlowBodyError, match="too slowly"):
            await read_body(drip, 10**6, 0.02)

    run(scenario())


def test_content_encodings() -> None:
    body = b"x" * 1000

    async def scenario() -> None:
        assert await unpacked(body, {}, 10) == body
        assert await unpacked(body, {"content-encoding": "identity"}, 10) == body
        assert await unpacked(zstd.compress(body), {"content-encoding": " ZSTD "}, 1000) == body
        with pytest.raises(LimitExceededError, match="unpacks to more than the allowed 999 bytes"):
            await unpacked(zstd.compress(body), {"content-encoding": "zstd"}, 999)
        with pytest.raises(refusals.UnsupportedBodyError, match="content-encoding 'gzip' is not supported; send zstd"):
            await unpacked(body, {"content-encoding": "gzip"}, 10)
        with pytest.raises(WireError, match="not valid zstd"):
            await unpacked(body, {"content-encoding": "zstd"}, 10)

    run(scenario())


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/api/v1/nothing", 404),
        ("GET", "/api/v1/create_session", 405),
        ("PATCH", "/api/v1/sessions", 405),
        ("POST", "/healthz", 405),
        ("GET", "/tinsmith/v1/download/x", 401),
    ],
)
def test_what_is_not_there_is_said_in_json(tmp_path: Path, method: str, path: str, status: int) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            answer = await server.request(method, path)
            assert answer.status == status
            assert answer.headers["content-type"] == "application/json"
            assert set(answer.json) >= {"detail", "code"}

    run(scenario())


def test_a_fault_of_ours_is_said_in_json_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann = await server.client()
            session = await ann.session()
            server.services.access.sessions[session] = None  # type: ignore[assignment]
            del server.services.broker._pending  # every handler that needs it fails
            answer = await ann.post("retrieve_future", {"request_id": "x"})
            assert answer.status == 500
            assert answer.json["detail"] == "internal server error (AttributeError); the server's log has the cause"
            assert "retrieve_future failed" in caplog.text

    run(scenario())


def test_both_ways_to_send_a_credential(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann = await server.client()
            token = (await ann.post("auth/token")).json["jwt"]
            for headers in (
                {"X-Api-Key": ann.key},
                {"authorization": f"Bearer {ann.key}"},
                {"authorization": f"bearer {token}"},
                {"x-api-key": token},
            ):
                for path in ("/api/v1/auth/apikey/me", "/tinsmith/v1/quota"):
                    assert (await server.request("GET", path, headers=headers)).status == 200

    run(scenario())


def test_scopes_are_asked_for(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            reader = await server.client("reader", scopes=("read",))
            sampler = await server.client("sampler", scopes=("sample",))
            session = await sampler.session()
            assert (await reader.get("sessions")).status == 200
            refused = await sampler.get("sessions")
            assert (refused.status, refused.json["code"]) == (403, "not_allowed")
            made = await sampler.sampler(session)
            await sampler.result(await sampler.post("asample", sample(made, 1)))
            assert (await sampler.post("create_model", create_model(session))).status == 403
            assert (await reader.post("asample", sample(made, 2))).status == 403
            assert (await reader.post("/tinsmith/v1/sample_stream", sample(made, 2))).status == 403
            assert server.backend.kinds() == ["sample"]

    run(scenario())


def test_limits_of_sessions_models_and_rates(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, max_sessions=2, max_models=1) as server:
            ann, bob = await server.client("ann"), await server.client("bob", requests_per_minute=2)
            session = await ann.session()
            await ann.session()
            over = await ann.post("create_session", {})
            assert (over.status, over.json["code"]) == (429, "over_limit")
            assert "you have 2 active sessions (limit 2)" in over.detail
            assert over.headers["retry-after"] == "10"
            await ann.model(session)
            over = await ann.post("create_model", create_model(session, 1))
            assert "you have 1 live models (limit 1)" in over.detail
            again = await ann.post("create_model", create_model(session, 0))
            assert again.status == 200
            await bob.session()
            await bob.session()
            over = await bob.get("sessions")
            assert (over.status, over.json["remaining"]) == (429, 0)
            assert "a limit of 2 requests per minute" in over.detail

    run(scenario())


def test_a_server_that_goes_down_or_has_no_room_takes_no_new_work_and_answers_for_the_old(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann = await server.client()
            session = await ann.session()
            model = await ann.model(session)
            promise = await ann.post("forward_backward", forward_backward(model, 1))
            await ann.result(promise)
            assert (await ann.get("/readyz")).status == 200
            server.services.admission.is_draining = True
            assert (await ann.get("/readyz")).json["reason"] == "draining"
            for route, message in (
                ("create_session", {}),
                ("optim_step", optim_step(model, 2)),
                ("create_model", create_model(session, 1)),
            ):
                answer = await ann.post(route, message)
                assert (answer.status, answer.json["code"]) == (503, "not_ready")
                assert "retry-after" in answer.headers
            assert (await ann.post("forward_backward", forward_backward(model, 1))).json == promise.json
            server.services.admission.is_draining = False
            files = server.services.files
            files._min_free_bytes, files._has_room_until = 2**62, 0.0
            assert "no new work is accepted until there is more" in (await ann.post("create_session", {})).detail
            await ann.result(promise)
            files._min_free_bytes = 1
            await ann.result(await ann.post("optim_step", optim_step(model, 2)))  # its number was not closed

    run(scenario())


def test_large_results_are_announced_and_sent_in_the_form_that_is_asked_for(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, metadata_above_bytes=10) as server:
            ann = await server.client()
            model = await ann.model(await ann.session())
            promise = await ann.post("forward_backward", forward_backward(model, 1))
            request = {"request_id": promise.json["request_id"], "allow_metadata_only": True}
            told = (await ann.post("retrieve_future", request)).json
            assert told["status"] == "complete_metadata"
            binary = await ann.poll(promise, accept="application/x-protobuf, application/json")
            assert binary.headers["content-type"] == "application/x-protobuf"
            assert len(binary.body) == told["response_payload_size"]
            assert (await ann.poll(promise)).json["metrics"]["tokens:sum"] == 3.0
            server.services.broker.forget([model])
            assert (await ann.poll(promise, accept="application/x-protobuf")).body == binary.body  # from the store

    run(scenario())


def test_a_long_poll_wakes_at_once_and_says_where_it_stands(tmp_path: Path) -> None:
    async def scenario() -> None:
        opened = asyncio.Event()
        async with serving(tmp_path, backend=Recorder(hold=lambda job: opened.wait())) as server:
            ann = await server.client()
            session = await ann.session()
            promise = await ann.post("create_model", create_model(session))
            polls = [asyncio.create_task(ann.poll(promise)) for _ in range(3)]
            await settled()
            opened.set()
            assert [(await poll).status for poll in polls] == [200] * 3

    run(scenario())


def test_audit_of_a_day(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann = await server.client()
            model = await ann.model(await ann.session())
            await ann.save(model, 1, "w")
            entries = (await ann.get("audit", day="2027-01-15")).json["entries"]
            assert [entry["event"] for entry in entries] == ["checkpoint_created"]
            assert (await ann.get("audit", day="2027-01-16", event_type="checkpoints")).json["entries"] == []
            assert (await ann.get("audit", day="9999-12-31")).json["entries"] == []
            for day in ("yesterday", "2027-13-01", "2027"):
                answer = await ann.get("audit", day=day)
                assert (answer.status, answer.json["field"]) == (400, "day")

    run(scenario())


def test_the_description_names_every_route_and_only_what_it_defines() -> None:
    document = msgspec.json.decode(openapi())
    described = {
        (operation["operationId"], method.upper(), path)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }
    routes = SERVED_ROUTES
    assert described == {(route.name, route.method, route.path) for route in routes}
    schemas = document["components"]["schemas"]

    def references(value: Any) -> list[str]:
        if isinstance(value, dict):
            own = [value["$ref"]] if "$ref" in value else []
            return own + [name for item in value.values() for name in references(item)]
        return [name for item in value for name in references(item)] if isinstance(value, list) else []

    assert {name.removeprefix("#/components/schemas/") for name in references(document)} <= set(schemas)
    for route in routes:
        operation = document["paths"][route.path][route.method.lower()]
        named = {parameter["name"] for parameter in operation["parameters"] if parameter["in"] == "path"}
        assert named == set(route.parameters)
        assert all(parameter["required"] for parameter in operation["parameters"] if parameter["in"] == "path")
        takes_body = route.request is not None or route.body_encodings != ("json",)
        assert ("requestBody" in operation) == takes_body
        scopes = [scope for alternative in operation["security"] for scope in alternative.get("key", ())]
        assert scopes == sorted(route.door.scopes)
        assert ({} in operation["security"] or not scopes) == (route.door.open_to != "keys")
        assert {"200", "default"} <= set(operation["responses"])
    assert document["openapi"].startswith("3.1")
    assert document["info"].keys() >= {"title", "version"}


def test_the_description_is_served_to_everyone(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            answer = await server.request("GET", "/openapi.json")
            assert (answer.status, answer.body) == (200, openapi())

    run(scenario())


def test_a_trace_has_a_line_per_lane_and_spans_for_waiting_and_running() -> None:
    session = SessionRow(session_id="s", org_id="o", user_id="u", created_at=0.0, heartbeat_at=0.0)

    def job(request_id: str, lane: str, seq: int, state: str = "done") -> JobHeadRow:
        known = {"kind": "optim_step", "session_id": "s", "org_id": "o", "user_id": "u", "digest": ""}
        return JobHeadRow(
            request_id=request_id, lane=lane, seq=seq, state=state, created_at=10.0, size_bytes=5, **known
        )

    result = ResultHeadRow(request_id="a", encoding="json", digest="", started_at=11.0, finished_at=12.5, size_bytes=7)
    trace = trace_of(session, [job("a", "m1", 1), job("b", "m2", 1, "queued")], {"a": result})
    events = trace["traceEvents"]
    assert [event["args"]["name"] for event in events if event["ph"] == "M"] == ["session s", "m1", "m2"]
    spans = [(event["ph"], event["name"], event["ts"]) for event in events if event["ph"] in "be"]
    assert spans == [
        ("b", "optim_step", 10.0e6),
        ("b", "running", 11.0e6),
        ("e", "running", 12.5e6),
        ("e", "optim_step", 12.5e6),
    ]
    [waiting] = [event for event in events if event["ph"] == "i"]
    assert waiting["name"] == "optim_step (queued)"
    assert all({"pid", "tid", "ph", "name"} <= set(event) for event in events)


def test_a_trace_of_a_real_session_can_be_fetched_without_a_key(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann = await server.client()
            session = await ann.session()
            model = await ann.model(session)
            await ann.result(await ann.post("forward_backward", forward_backward(model, 1)))
            exported = (await ann.get(f"sessions/{session}/trace_export")).json
            assert exported["status"] == "ready"
            url = exported["url"].removeprefix("http://server.test")
            answer = await download(server, url)
            names = {event["name"] for event in answer.json["traceEvents"]}
            assert {"create_model", "forward_backward", "running"} <= names
            server.clock.advance(901)
            assert (await download(server, url)).status == 401

    run(scenario())


async def download(server: Server, url: str) -> Any:
    return await server.request("GET", url)
