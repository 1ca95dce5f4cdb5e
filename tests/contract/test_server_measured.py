"""What a run measured, as the server tells it: by number, in pages, from either encoding, for its owner alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.in_process import Client, forward_backward, optim_step, run, serving

from tinsmith.server import measured as measured_module
from tinsmith.wire.proto_outputs import decode_metrics, decode_output, encode_output
from tinsmith.wire.tensors import TensorData
from tinsmith.wire.training import ForwardBackwardOutput


def path_of(model: str, query: str = "") -> str:
    return f"/tinsmith/v1/training_runs/{model}/metrics{query}"


async def trained(client: Client, steps: int) -> str:
    session = await client.session()
    model = await client.model(session)
    for number in range(steps):
        await client.result(await client.post("forward_backward", forward_backward(model, 2 * number + 1)))
        await client.result(await client.post("optim_step", optim_step(model, 2 * number + 2)))
    return model


def test_points_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann = await server.client("ann")
            model = await trained(ann, 3)
            await ann.save(model, 7, "kept")
            answer = (await ann.call("GET", path_of(model))).json
            assert [point["seq"] for point in answer["points"]] == [1, 2, 3, 4, 5, 6]
            assert [point["kind"] for point in answer["points"]] == ["forward_backward", "optim_step"] * 3
            for point in answer["points"]:
                is_pass = point["kind"] == "forward_backward"
                assert point["datums"] == (1 if is_pass else 0)
                assert ("loss:sum" in point["metrics"]) == is_pass
            assert answer["next_after"] is None
            assert (answer["state"], answer["session_status"], answer["fault"]) == ("live", "active", None)
            assert (answer["requests"], answer["queued"]) == (8, 0)

    run(scenario())


def test_pages_follow_one_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_module, "MAX_POINTS", 4)

    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann = await server.client("ann")
            model = await trained(ann, 3)
            seen, after = [], -1
            while True:
                page = (await ann.call("GET", path_of(model, f"?after={after}&limit=100"))).json
                seen.append([point["seq"] for point in page["points"]])
                if page["next_after"] is None:
                    break
                after = page["next_after"]
            assert seen == [[1, 2, 3, 4], [5, 6]]
            head = (await ann.call("GET", path_of(model, "?limit=0"))).json
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
            assert "is not a whole number" in answer.detail

    run(scenario())


def test_a_key_that_may_not_read_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            model = await trained(await server.client("ann"), 0)
            sampler = await server.client("sam", scopes=("sample",))
            assert (await sampler.call("GET", path_of(model))).status == 403

    run(scenario())


def test_a_run_that_is_over_says_so_and_points_go_with_their_results(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann = await server.client("ann")
            model = await trained(ann, 1)
            session = model.partition(":")[0]
            await ann.post(f"sessions/{session}/finish", {"reason": {"type": "success"}})
            answer = (await ann.call("GET", path_of(model))).json
            assert (answer["state"], answer["session_status"], len(answer["points"])) == ("parked", "finished", 2)
            server.clock.advance(server.services.config.result_grace_s + 1)
            await server.sweep()
            answer = (await ann.call("GET", path_of(model))).json
            assert (answer["state"], answer["points"]) == ("parked", [])

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
