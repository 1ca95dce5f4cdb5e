"""What a run measured, as the server tells it: by step, in pages, from either encoding, for its owner alone, and for
longer than its results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.in_process import BreakableStore, Client, Server, datum, forward_backward, optim_step, run, serving

from tinsmith.server.runs import curves as curves_module
from tinsmith.server.runs import progress as measured_module
from tinsmith.store.base import statement
from tinsmith.store.rows import StepRow
from tinsmith.wire.codecs import json_codec
from tinsmith.wire.codecs.proto_outputs import decode_metrics, decode_output, encode_output
from tinsmith.wire.codecs.proto_training import encode_request
from tinsmith.wire.messages.training import ForwardBackwardOutput, ForwardBackwardRequest
from tinsmith.wire.values.tensors import TensorData


def path_of(model: str, query: str = "") -> str:
    return f"/tinsmith/v1/training_runs/{model}/metrics{query}"


async def trained(client: Client, steps: int) -> str:
    session = await client.session()
    model = await client.model(session)
    await go_on(client, model, steps)
    return model


async def go_on(client: Client, model: str, steps: int, first: int = 1) -> None:
    for number in range(steps):
        await client.result(await client.post("forward_backward", forward_backward(model, first + 2 * number)))
        await client.result(await client.post("optim_step", optim_step(model, first + 2 * number + 1)))


async def told(client: Client, model: str, query: str = "") -> Any:
    return (await client.call("GET", path_of(model, query))).json


def test_points_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann = await server.client("ann")
            model = await trained(ann, 3)
            await ann.save(model, 7, "kept")
            answer = await told(ann, model)
            assert [point["seq"] for point in answer["points"]] == [2, 4, 6]
            assert [point["step"] for point in answer["points"]] == [1, 2, 3]
            for point in answer["points"]:
                assert (point["kind"], point["datums"]) == ("optim_step", 1)
                assert point["seconds"] > 0
                assert {"loss:sum", "tokens:sum", "optim/grad_norm", "optim/learning_rate"} <= set(point["metrics"])
            assert answer["next_after"] is None
            assert (answer["state"], answer["session_status"], answer["fault"]) == ("live", "active", None)
            assert (answer["requests"], answer["queued"]) == (8, 0)
            assert (answer["steps"], answer["last"]) == (3, answer["points"][-1])

    run(scenario())


def test_pages_follow_one_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_module, "MAX_POINTS", 2)

    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann = await server.client("ann")
            model = await trained(ann, 3)
            seen, after = [], -1
            while True:
                page = await told(ann, model, f"?after={after}&limit=100")
                seen.append([point["seq"] for point in page["points"]])
                if page["next_after"] is None:
                    break
                after = page["next_after"]
            assert seen == [[2, 4], [6]]
            head = await told(ann, model, "?limit=0")
            assert (head["points"], head["next_after"]) == ([], None)

    run(scenario())


@pytest.mark.parametrize("query", ["?after=x", "?limit=1.5", "?after=" + "9" * 20, "?limit="])
def test_a_query_that_is_no_number_is_refused(tmp_path: Path, query: str) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann = await server.client("ann")
            model = await trained(ann, 0)
            answer = await ann.call("GET", path_of(model, query))
            assert answer.status == 400
            assert answer.json["field"] in ("after", "limit")

    run(scenario())


def test_a_key_that_may_not_read_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            model = await trained(await server.client("ann"), 0)
            sampler = await server.client("sam", scopes=("sample",))
            assert (await sampler.call("GET", path_of(model))).status == 403

    run(scenario())


async def finished(server: Server, client: Client, model: str) -> None:
    """The session of a model is over, and its results are gone."""
    session = model.partition(":")[0]
    await client.post(f"sessions/{session}/finish", {"reason": {"type": "success"}})
    server.clock.advance(server.services.config.result_grace_s + 1)
    await server.sweep()


def test_points_outlive_the_results(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann = await server.client("ann")
            model = await trained(ann, 3)
            before = await told(ann, model)
            assert before["has_journal"] is True
            await finished(server, ann, model)
            after = await told(ann, model)
            assert (after["state"], after["session_status"], after["requests"]) == ("parked", "finished", 0)
            assert after["has_journal"] is False
            assert (after["points"], after["steps"]) == (before["points"], 3)

    run(scenario())


def test_points_go_when_nothing_else_is_left_of_the_run(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann = await server.client("ann")
            model = await trained(ann, 1)
            path = await ann.save(model, 3, "kept")
            await finished(server, ann, model)
            server.clock.advance(server.services.config.curve_grace_s + 3600)
            await server.sweep()
            assert len((await told(ann, model))["points"]) == 1, "a checkpoint is left"
            run_id, _, name = path.removeprefix("tinker://").partition("/")
            assert (await ann.call("DELETE", f"training_runs/{run_id}/checkpoints/{name}")).status in (200, 204)
            server.clock.advance(3601)
            await server.sweep()
            assert (await told(ann, model))["points"] == []

    run(scenario())


def test_a_step_is_one_point_however_often_it_is_sent_computed_or_written(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann = await server.client("ann")
            model = await trained(ann, 2)
            for number, message in ((3, forward_backward(model, 3)), (4, optim_step(model, 4))):
                route = "forward_backward" if number == 3 else "optim_step"
                await ann.result(await ann.post(route, message))  # sent again
            server.backend.lose()
            await go_on(ann, model, 1, first=5)  # the steps before are computed again
            steps = await server.rows(StepRow, "steps_after", model_id=model, after=-1, limit=99)
            assert [(row.step, row.seq) for row in steps] == [(1, 2), (2, 4), (3, 6)]
            assert await server.store.write(statement("insert_step", steps[1])) == 0  # written again

    run(scenario())


def test_a_restart_goes_on_with_the_passes_of_the_open_step(tmp_path: Path) -> None:
    losses = []

    async def scenario() -> None:
        store = BreakableStore()
        await store.open()
        async with serving(tmp_path, store=store) as server:
            ann = await server.client("ann")
            model = await trained(ann, 1)
            promise = await ann.post("forward_backward", forward_backward(model, 3, datum(5, 9, 2), datum(7, 1)))
            result = (await ann.result(promise)).json
            losses.append(result["metrics"]["loss:sum"])
            evaluated = json_codec.decode(
                msgspec.json.encode({**forward_backward(model, 4), "forward_only": True}), ForwardBackwardRequest
            )
            body, protobuf = encode_request(evaluated), {"content_type": "application/x-protobuf"}
            await ann.result(await ann.call("POST", "forward_backward", body, **protobuf))
        async with serving(tmp_path, store=store) as server:
            ann = Client(server, ann.key)
            promise = await ann.post("forward_backward", forward_backward(model, 5))
            losses.append((await ann.result(promise)).json["metrics"]["loss:sum"])
            await ann.result(await ann.post("optim_step", optim_step(model, 6)))
            first, second = (await told(ann, model))["points"]
            assert (first["step"], second["step"], second["datums"]) == (1, 2, 3)
            assert second["metrics"]["loss:sum"] == pytest.approx(sum(losses))
        await store.close()

    run(scenario())


@pytest.mark.parametrize("then", ["read", "train", "prune"])
def test_steps_of_a_database_from_before_are_taken_up(tmp_path: Path, then: str) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann = await server.client("ann")
            model = await trained(ann, 3)
            expected = [(point["step"], point["seq"], point["metrics"]) for point in (await told(ann, model))["points"]]
            await server.store.write(statement("delete_steps", model_id=model))  # as if they had never been kept
            await server.services.runs.forget(model)
            if then == "train":
                await go_on(ann, model, 1, first=7)
            elif then == "prune":
                await finished(server, ann, model)
            points = (await told(ann, model))["points"]
            assert [(point["step"], point["seq"], point["metrics"]) for point in points[:3]] == expected
            assert [point["step"] for point in points] == ([1, 2, 3, 4] if then == "train" else [1, 2, 3])

    run(scenario())


def test_rows_from_before_the_prefix_have_todays_names(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann = await server.client("ann")
            model = await trained(ann, 1)
            [row] = await server.rows(StepRow, "last_step", model_id=model)
            former = msgspec.structs.replace(row, metrics=row.metrics.replace("optim/", ""))
            assert former != row
            expected = (await told(ann, model))["points"]
            await server.store.write(statement("delete_steps", model_id=model), statement("insert_step", former))
            assert (await told(ann, model))["points"] == expected

    run(scenario())


def test_a_long_run_is_thinned_as_it_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves_module.Curve.__init__, "__defaults__", (0, 8))

    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann = await server.client("ann")
            model = await trained(ann, 9)
            steps = [point["step"] for point in (await told(ann, model))["points"]]
            assert steps == [1, 3, 5, 7, 8, 9]

    run(scenario())


def test_stages_of_jobs_are_timed(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            await trained(await server.client("ann"), 2)
            text = (await server.request("GET", "/metrics")).body.decode()
            for stage in ("waiting", "running"):
                assert f'tinsmith_job_seconds_count{{kind="optim_step",stage="{stage}"}} 2.0' in text

    run(scenario())


def outputs(count: int, **metrics: float) -> ForwardBackwardOutput:
    rows: Any = [{"logprobs": TensorData([0.5] * (i % 3 + 1), "float32", [i % 3 + 1])} for i in range(count)]
    return ForwardBackwardOutput("TorchLossReturn", rows, metrics)


@pytest.mark.parametrize("count", [0, 1, 7])
def test_metrics_are_read_without_the_tensors(count: int) -> None:
    output = outputs(count, **{"loss:sum": 2.5, "zero:mean": 0.0})
    body = encode_output(output)
    assert decode_metrics(body) == (decode_output(body).metrics, count)
