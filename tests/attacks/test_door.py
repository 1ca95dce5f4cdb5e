"""What a key must not do beyond its scopes, what a body must not do before it is read, and what a refusal leaves."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from support.in_process import (
    Answer,
    Client,
    Gate,
    Recorder,
    begun,
    create_model,
    forward_backward,
    run,
    sample,
    serving,
    until,
)

from tinsmith.engine.protocol import ModelCard, Status
from tinsmith.errors import InvalidInputError, StoreError
from tinsmith.server.auth.admission import MAX_TOGETHER
from tinsmith.server.data_dir import remove_tree
from tinsmith.server.http.endpoint import Endpoint
from tinsmith.server.redaction import redacted_text
from tinsmith.server.routes import own
from tinsmith.wire.codecs import zstd
from tinsmith.wire.routes.door import ELSEWHERE, Door
from tinsmith.wire.routes.table import Route


def test_a_route_that_does_not_say_who_may_call_it_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="door"):
        Route(name="x", method="GET", path="/x")  # type: ignore[call-arg]
    for missing in ("owner", "cost"):
        declared: dict[str, Any] = {"scopes": frozenset({"read"}), "owner": "nothing", "cost": "memory"}
        with pytest.raises(TypeError, match=missing):
            Door(**{name: value for name, value in declared.items() if name != missing})
    for field, value in (
        ("scopes", frozenset()),
        ("scopes", frozenset({"all"})),
        ("open_to", "anybody"),
        ("open_to", "everybody"),  # with a scope that nobody would check
        ("owner", "nobody"),
        ("cost", "free"),
    ):
        declared = {"scopes": frozenset({"read"}), "owner": "nothing", "cost": "memory", field: value}
        with pytest.raises(InvalidInputError, match="scopes" if value == "everybody" else field):
            Door(**declared)

    async def scenario() -> None:
        async with serving(tmp_path) as server:
            closed = Route(name="x", method="GET", path="/x", door=ELSEWHERE)
            with pytest.raises(ValueError, match="x is open to nobody"):
                Endpoint(server.services, closed, own.alive)

    run(scenario())


def test_a_read_key_ends_moves_takes_back_and_begins_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        gate = Gate("forward_backward")
        async with serving(tmp_path, backend=Recorder(hold=gate)) as server:
            ann, session, model = await begun(server)
            reader = await server.client("ann", scopes=("read",))
            promise = await ann.post("forward_backward", forward_backward(model, 1))
            for method, path, message in (
                ("POST", f"sessions/{session}/finish", {"reason": {"type": "success"}}),
                ("POST", "cancel_future", {"request_id": promise.json["request_id"]}),
                ("POST", "retrieve_future", {"request_id": promise.json["request_id"]}),
                ("PUT", f"sessions/{session}/project", {"project_id": "x"}),
                ("POST", "create_session", {}),
                ("POST", "session_heartbeat", {"session_id": session}),
            ):
                answer = await reader.call(method, path, message)
                assert (answer.status, answer.json["code"]) == (403, "not_allowed"), (path, answer)
            gate.opened.set()
            await ann.result(promise)

    run(scenario())


def test_a_sample_key_sees_no_lists_and_touches_no_training(tmp_path: Path) -> None:
    async def scenario() -> None:
        gate = Gate("forward_backward")
        async with serving(tmp_path, backend=Recorder(hold=gate)) as server:
            ann, session, model = await begun(server)
            sampler = await server.client("ann", scopes=("sample",))
            promise = await ann.post("forward_backward", forward_backward(model, 1))
            for method, path, message in (
                ("POST", "cancel_future", {"request_id": promise.json["request_id"]}),
                ("POST", "retrieve_future", {"request_id": promise.json["request_id"]}),
                ("POST", f"sessions/{session}/finish", {"reason": {"type": "success"}}),
                ("GET", "checkpoints", None),
                ("GET", f"training_runs/{model}/checkpoints", None),
                ("GET", f"models/{model}/checkpoints", None),
                ("GET", "/tinsmith/v1/status", None),
            ):
                answer = await sampler.call(method, path, message)
                assert (answer.status, answer.json["code"]) == (403, "not_allowed"), (path, answer)
            gate.opened.set()
            await ann.result(promise)

    run(scenario())


def test_a_train_key_takes_back_no_sample(tmp_path: Path) -> None:
    async def scenario() -> None:
        gate = Gate("sample")
        async with serving(tmp_path, backend=Recorder(hold=gate)) as server:
            ann = await server.client("ann")
            trainer = await server.client("ann", scopes=("train",))
            promise = await ann.post("asample", sample(await ann.sampler(await ann.session()), 1))
            for path in ("cancel_future", "retrieve_future"):
                answer = await trainer.post(path, {"request_id": promise.json["request_id"]})
                assert (answer.status, answer.json["code"]) == (403, "not_allowed"), answer
            gate.opened.set()
            await ann.result(promise)

    run(scenario())


@pytest.mark.parametrize("scope", ["train", "sample"])
def test_each_kind_of_work_goes_through_with_the_one_scope_that_it_needs(tmp_path: Path, scope: str) -> None:
    """What official clients do, from the first call to the last."""

    async def scenario() -> None:
        async with serving(tmp_path) as server:
            owner = await server.client("ann")
            path = await owner.save(await owner.model(await owner.session()), 1, "w", "save_weights_for_sampler")
            client = await server.client("ann", scopes=(scope,))
            for name, message in (("client/config", {}), ("auth/token", {}), ("client/dynamic_config", {})):
                assert (await client.post(name, message)).status == 200
            assert (await client.get("get_server_capabilities")).status == 200
            session = await client.session()
            assert (await client.post("session_heartbeat", {"session_id": session})).status == 200
            assert (await client.post("weights_info", {"tinker_path": path})).status == 200
            if scope == "train":
                model = await client.model(session)
                assert (await client.post("get_info", {"model_id": model})).status == 200
                await client.result(await client.post("forward_backward", forward_backward(model, 1)))
                await client.save(model, 2, "mine")
                load = {"session_id": session, "model_seq_id": 1, "path": f"tinker://{model}/weights/mine"}
                await client.result(await client.post("load_weights", load))
            else:
                sampler = await client.sampler(session, model_path=path)
                assert (await client.get(f"samplers/{sampler}")).status == 200
                promise = await client.post("asample", sample(sampler, 1))
                target = {"sampling_session_id": sampler, "cloned_sampler_id": 0}
                assert (await client.post("retrieve_futures", {"target": target})).status == 200
                await client.result(promise)
                assert (await client.post("cancel_future", {"request_id": promise.json["request_id"]})).status == 200
            batch: dict[str, Any] = {"events": [], "platform": "x", "sdk_version": "x", "session_id": session}
            assert (await client.post("telemetry", batch)).status == 200
            assert (await client.post(f"sessions/{session}/finish", {"reason": {"type": "success"}})).status == 200

    run(scenario())


def test_a_body_that_is_too_large_for_its_route_is_refused_before_it_is_read(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann, session, _ = await begun(server)
            for path in ("/api/v1/create_session", "/api/v1/optim_step", "/api/v1/create_model"):
                announced = {"x-api-key": ann.key, "content-length": str(10**6)}
                answer = await server.request("POST", path, b"", announced, pieces=[])  # to read on would wait for ever
                assert (answer.status, answer.json["code"]) == (413, "limit_exceeded"), answer
                assert "larger than the allowed 65536 bytes" in answer.detail
                whole = b"{" + b" " * 70_000 + b"}"
                parts = [whole[:40_000], whole[40_000:]]  # without a word on how large it is
                assert (await server.request("POST", path, b"", {"x-api-key": ann.key}, parts)).status == 413
                packed = {"x-api-key": ann.key, "content-encoding": "zstd"}
                answer = await server.request("POST", path, zstd.compress(b"{" + b" " * 10**6 + b"}"), packed)
                assert (answer.status, answer.json["code"]) == (413, "limit_exceeded"), answer
                assert "unpacks to more than the allowed 65536 bytes" in answer.detail
            assert (await ann.post("create_model", create_model(session, 3))).status == 200

    run(scenario())


def lines(caplog: pytest.LogCaptureFixture) -> list[Any]:
    return [record for record in caplog.records if getattr(record, "event", "") == "refused"]


def test_every_refusal_leaves_a_line_that_says_who_was_refused_what(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        caplog.set_level(logging.INFO)
        async with serving(tmp_path) as server:
            ann = await server.client("ann")
            reader = await server.client("ann", scopes=("read",))
            for client, method, path, message, status, code in (
                (Client(server, ""), "GET", "sessions", None, 401, "not_authenticated"),
                (reader, "POST", "create_session", {}, 403, "not_allowed"),
                (ann, "GET", "sessions/nobodys", None, 404, "unknown_resource"),
                (ann, "POST", "create_session", b" " * 70_000, 413, "limit_exceeded"),
                (ann, "GET", "sessions?limit=x", None, 400, "invalid_input"),
                (ann, "POST", "/tinsmith/v1/samples", b"\x91\xc4\x01x", 200, "malformed_body"),
                (ann, "GET", "/tinsmith/v1/tokenizer?model=x", None, 400, "invalid_input"),
            ):
                caplog.clear()
                assert (await client.call(method, path, message)).status == status
                (line,) = lines(caplog)
                assert (line.code, line.key_id) == (code, client.key_id)
                assert line.org_id == ("acme" if client.key else "")
                assert line.status == (422 if status == 200 else status)
                assert line.route in line.getMessage()

    run(scenario())


def test_a_flood_of_refusals_leaves_a_few_lines_and_forges_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        caplog.set_level(logging.INFO)
        async with serving(tmp_path) as server:
            ann, eve = await server.client("ann"), await server.client("eve", org="other")
            for number in range(200):
                await eve.get(f"sessions/{number}")
            await eve.post("get_info", {"model_id": "x\n2027-01-15 ERROR the disk is on fire\x1b[2J"})
            await ann.get("sessions/unknown")
            assert [(line.route, line.org_id) for line in lines(caplog)] == [
                ("get_session", "other"),
                ("get_info", "other"),
                ("get_session", "acme"),
            ]
            assert not any(set("\n\x1b") & set(line.getMessage()) for line in lines(caplog))
            server.services.refusals.clock = lambda: time.monotonic() + 3600.0
            await eve.get("sessions/200")
            assert "199 more" in lines(caplog)[-1].getMessage()

    run(scenario())


def test_no_answer_shows_where_things_lie_on_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Real failures of files and disks, and an engine that cannot start: clients read what, operators also where."""

    async def scenario() -> None:
        async with serving(tmp_path, poll_s=0.001) as server:
            ann, session, model = await begun(server)
            data, files = tmp_path / "data", server.services.files
            answers: list[bytes] = []

            async def ask(method: str, path: str, message: Any = None) -> Answer:
                answer = await ann.call(method, path, message)
                answers.append(answer.body)
                if "request_id" in answer.body.decode() and answer.status == 200:
                    while (outcome := await ann.poll(answer)).status == 408:
                        pass
                    answers.append(outcome.body)
                return answer

            saved = await ann.save(model, 1, "good")
            checkpoints = next(data.glob("checkpoints/*"))
            (directory,) = checkpoints.glob("weights/*")
            for name in directory.iterdir():
                name.write_bytes(b"spoiled")
            await ask("POST", "load_weights", {"model_id": model, "seq_id": 2, "path": saved})
            remove_tree(directory)
            gone = await ask("POST", "load_weights", {"model_id": model, "seq_id": 3, "path": saved})
            assert (gone.status, gone.json["field"]) == (400, "path")
            await ask("GET", f"training_runs/{model}/checkpoints/weights/good/external_weights_urls")
            await ask("GET", f"training_runs/{model}/checkpoints/weights/good/archive")
            remove_tree(checkpoints)
            checkpoints.write_bytes(b"a file where a directory should be")
            await ask("POST", "save_weights", {"model_id": model, "seq_id": 4, "path": "bad"})
            assert b"Errno" in answers[-1]
            remove_tree(data / "traces")
            await ask("GET", f"sessions/{session}/trace_export")
            failure = StoreError(f"{data}/tinsmith.sqlite: no room for the database (disk full)")
            monkeypatch.setattr(server.store, "is_down", True)
            monkeypatch.setattr("support.in_process.StoreError", lambda _: failure)
            assert (await ask("POST", "create_session", {})).status == 503
            monkeypatch.setattr(server.store, "is_down", False)
            limit, files._min_free_bytes, files._has_room_until = files._min_free_bytes, 2**62, 0.0
            assert (await ask("POST", "create_session", {})).status == 503
            files._min_free_bytes = limit
            broken = Status(state="failed", reason=f"InvalidInputError: {tmp_path}/models/x has no config.json")
            monkeypatch.setattr(type(server.backend), "status", broken)
            assert (await ask("GET", "/readyz")).status == 503
            await ask("GET", "/tinsmith/v1/status")
            assert len(answers) == 12
            for body in answers:
                assert str(tmp_path).encode() not in body, body
            assert str(tmp_path) in caplog.text

    run(scenario())


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (
            "[Errno 28] No space left on device: '/data/my runs/a b.bin'",
            "[Errno 28] No space left on device: '.../a b.bin'",
        ),
        ("/srv/tinsmith/db.sqlite: locked", ".../db.sqlite: locked"),
        ("InvalidInputError: /srv/models/x has no config.json", "InvalidInputError: .../x has no config.json"),
        ("(see /tmp/x.log)", "(see .../x.log)"),
        ("C extension at file:///usr/lib/x.so", "C extension at .../x.so"),
        ("tinker://a-b:train:0/weights/x is damaged", "tinker://a-b:train:0/weights/x is damaged"),
        (
            "GET /api/v1/sessions/x reads JSON; see /openapi.json",
            "GET /api/v1/sessions/x reads JSON; see /openapi.json",
        ),
        (
            "/tinsmith/v1/samples: 1/2 of it, and/or http://h/a/b",
            "/tinsmith/v1/samples: 1/2 of it, and/or http://h/a/b",
        ),
        ("Qwen/Qwen3-8B is not served here", "Qwen/Qwen3-8B is not served here"),
    ],
)
def test_what_is_told_keeps_names_and_drops_places(text: str, shown: str) -> None:
    assert redacted_text(text) == shown


def test_one_tenant_cannot_take_all_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are read by threads, of which there are few for all: forty slow reads of one leave some to others."""

    async def scenario() -> None:
        released = threading.Event()
        begun: list[Path] = []

        def slow(directory: Path) -> bytes:
            begun.append(directory)
            assert len(begun) > MAX_TOGETHER["files"] or released.wait(20)
            return b"{}"

        monkeypatch.setattr(own, "_tokenizer_files", slow)
        card = ModelCard(name="m", vocab_size=32, max_context_length=24, tokenizer_directory=str(tmp_path))
        async with serving(tmp_path, backend=Recorder((card,))) as server:
            ann, eve = await server.client("ann"), await server.client("eve", org="other")
            path = "/tinsmith/v1/tokenizer?model=m"
            held = [asyncio.create_task(eve.get(path)) for _ in range(40)]
            await until(lambda: len(begun) == MAX_TOGETHER["files"])
            assert (await ann.get(path)).status == 200
            assert not any(task.done() for task in held)
            assert (await eve.get("get_server_capabilities")).status == 200
            released.set()
            assert [(await task).status for task in held] == [200] * 40

    run(scenario())
