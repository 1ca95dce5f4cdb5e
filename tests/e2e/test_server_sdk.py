"""Our own client against a running server: what goes beyond the program that all releases run."""

from __future__ import annotations

import asyncio
import datetime
import json
import pickle
import signal
import subprocess
import sys
import textwrap
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.fault_proxy import FaultProxy
from support.server_process import HELD_BACKEND, ServerProcess

from tinsmith import (
    AdamParams,
    BadRequestError,
    ModelInput,
    NotFoundError,
    SamplingClient,
    SamplingParams,
    ServiceClient,
    TinkerError,
)

pytestmark = pytest.mark.usefixtures("clean_environment")

MODEL = "tinsmith/arithmetic"
PROMPT = ModelInput.from_ints([1, 2, 3])
PARAMS = SamplingParams(max_tokens=4, seed=9)
WAIT_S = 60


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    settings = {"poll_s": 0.5, "metadata_above_bytes": 1000}
    with ServerProcess(tmp_path_factory.mktemp("sdk") / "data", backend=HELD_BACKEND, **settings) as process:
        yield process


@pytest.fixture
def client(server: ServerProcess, connect: Callable[..., ServiceClient]) -> Iterator[ServiceClient]:
    yield connect(server.url, api_key=server.key)
    for gate in ("hold", "hold_tokens"):
        (server.data_dir / gate).unlink(missing_ok=True)


@pytest.fixture
def sampler(client: ServiceClient) -> SamplingClient:
    return client.create_sampling_client(base_model=MODEL)


def call(server: ServerProcess, path: str, body: Any = None, key: str | None = None) -> tuple[int, Any]:
    """One raw request, with what it answers whatever its status."""
    data = json.dumps(body).encode() if body is not None else None
    headers = {"x-api-key": key or server.key, "content-type": "application/json"}
    request = urllib.request.Request(f"{server.url}{path}", data=data, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def queued(server: ServerProcess) -> int:
    count: int = call(server, "/tinsmith/v1/status")[1]["queued"]
    return count


def test_streamed_tokens_come_one_by_one_and_are_those_of_the_sample(
    server: ServerProcess, sampler: SamplingClient
) -> None:
    whole = sampler.sample(PROMPT, 1, PARAMS).result(WAIT_S).sequences[0]
    server.hold("hold_tokens")

    async def consume() -> list[int]:
        tokens: list[int] = []
        async for piece in sampler.sample_stream(PROMPT, PARAMS):
            tokens += piece.tokens
            if len(tokens) == 2 and (server.data_dir / "hold_tokens").exists():
                server.release("hold_tokens")  # the rest can only come after these two were seen
        return tokens

    assert asyncio.run(asyncio.wait_for(consume(), WAIT_S)) == whole.tokens


def test_a_stream_goes_on_after_its_connection_broke(
    server: ServerProcess, client: ServiceClient, connect: Callable[..., ServiceClient]
) -> None:
    def drawn() -> int:
        return sum(execution.kind == "sample" for execution in server.executions)

    before = drawn()
    server.hold("hold_tokens")
    with FaultProxy(server.url) as proxy:
        sampler = connect(proxy.url, api_key=server.key).create_sampling_client(base_model=MODEL)
        whole = client.create_sampling_client(base_model=MODEL).sample(PROMPT, 2, PARAMS).result(WAIT_S).sequences

        async def consume() -> list[list[int]]:
            tokens: list[list[int]] = [[], []]
            async for piece in sampler.sample_stream(PROMPT, PARAMS, 2):
                tokens[piece.index] += piece.tokens
                if (server.data_dir / "hold_tokens").exists() and sum(map(len, tokens)) == 2:
                    await asyncio.to_thread(proxy.drop_all)
                    server.release("hold_tokens")
            return tokens

        found = asyncio.run(asyncio.wait_for(consume(), WAIT_S))
    assert found == [sequence.tokens for sequence in whole]
    assert drawn() == before + 2, "the sample and the stream, once each"


def test_leaving_a_stream_frees_its_place(
    server: ServerProcess, sampler: SamplingClient, eventually: Callable[..., None]
) -> None:
    server.hold("hold_tokens")

    async def leave() -> None:
        pieces = sampler.sample_stream(PROMPT, SamplingParams(max_tokens=10, seed=1))
        async for _ in pieces:
            break
        await pieces.aclose()  # type: ignore[attr-defined]

    asyncio.run(asyncio.wait_for(leave(), WAIT_S))
    eventually(lambda: queued(server) == 0, 15)


def test_a_cancelled_sample_leaves_the_server(
    server: ServerProcess, sampler: SamplingClient, eventually: Callable[..., None]
) -> None:
    server.hold()
    future = sampler.sample(PROMPT, 1, PARAMS)
    eventually(lambda: queued(server) == 1, 15)
    assert future.cancel()
    eventually(lambda: queued(server) == 0, 15)


def test_ctrl_c_ends_a_program_and_cancels_its_work(server: ServerProcess, eventually: Callable[..., None]) -> None:
    program = f"""
        import tinsmith
        with tinsmith.ServiceClient() as client:
            sampler = client.create_sampling_client(base_model="{MODEL}")
            sampler.sample(tinsmith.ModelInput.from_ints([1]), 1, tinsmith.SamplingParams(max_tokens=2)).result()
    """
    server.hold()
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], env=server.environment, stderr=subprocess.PIPE, text=True
    )
    try:
        eventually(lambda: queued(server) == 1, WAIT_S)
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=WAIT_S)
    finally:
        child.kill()
        child.wait()
        server.release()
    assert child.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in errors
    eventually(lambda: queued(server) == 0, 15)


def requests_for(server: ServerProcess, route: str) -> int:
    """How often a path was asked for, as the server counts."""
    text = urllib.request.urlopen(f"{server.url}/metrics", timeout=WAIT_S).read().decode()
    lines = [line for line in text.splitlines() if line.startswith("tinsmith_requests_total") and f'"{route}"' in line]
    return int(sum(float(line.rpartition(" ")[2]) for line in lines))


def test_many_samples_at_once_are_those_that_each_gives_alone(server: ServerProcess, sampler: SamplingClient) -> None:
    params = [SamplingParams(max_tokens=4, seed=seed) for seed in range(300)]
    alone = [sampler.sample(PROMPT, 1, each).result(WAIT_S).sequences[0].tokens for each in params[:20]]
    before = requests_for(server, "asample")
    futures = [sampler.sample(PROMPT, 1, each) for each in params]
    together = [future.result(WAIT_S).sequences[0].tokens for future in futures]
    assert together[:20] == alone
    assert len({tuple(tokens) for tokens in together}) > 250
    assert requests_for(server, "asample") - before < 100


def test_one_wrong_sample_among_many_fails_alone(sampler: SamplingClient) -> None:
    right, wrong = SamplingParams(max_tokens=2, seed=1), SamplingParams(max_tokens=10**6)

    async def all_at_once() -> list[Any]:
        asked = [sampler.sample_async(PROMPT, 1, wrong if number == 7 else right) for number in range(20)]
        return await asyncio.gather(*asked, return_exceptions=True)

    answers = asyncio.run(asyncio.wait_for(all_at_once(), WAIT_S))
    assert [index for index, answer in enumerate(answers) if isinstance(answer, Exception)] == [7]
    assert isinstance(answers[7], BadRequestError)
    assert "sampling_params.max_tokens: 1000000" in str(answers[7])


def test_samples_given_up_before_they_are_answered_leave_the_server(
    server: ServerProcess, sampler: SamplingClient, eventually: Callable[..., None]
) -> None:
    server.hold()

    async def leave() -> None:
        asked = [asyncio.ensure_future(sampler.sample_async(PROMPT, 1, PARAMS)) for _ in range(30)]
        await asyncio.sleep(0.01)
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)

    asyncio.run(asyncio.wait_for(leave(), WAIT_S))
    eventually(lambda: queued(server) == 0, 15)


def test_a_model_without_a_tokenizer_is_refused_by_name(client: ServiceClient) -> None:
    trainer = client.create_lora_training_client(MODEL, rank=2)
    with pytest.raises(TinkerError, match=f"the server has no tokenizer for {MODEL}, and"):
        trainer.get_tokenizer()


def test_pickled_samplers_work_in_other_processes(
    server: ServerProcess, sampler: SamplingClient, tmp_path: Path
) -> None:
    expected = [sequence.tokens for sequence in sampler.sample(PROMPT, 2, PARAMS).result(WAIT_S).sequences]
    program = """
        import pickle, sys
        from tinsmith import ModelInput, SamplingParams
        sampler = pickle.load(sys.stdin.buffer)
        answer = sampler.sample(ModelInput.from_ints([1, 2, 3]), 2, SamplingParams(max_tokens=4, seed=9)).result(60)
        print([sequence.tokens for sequence in answer.sequences])
    """
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", textwrap.dedent(program)],
            input=pickle.dumps(sampler),
            env=server.environment,
            capture_output=True,
            timeout=WAIT_S,
        )
        assert (done.returncode, done.stderr) == (0, b"")
        assert json.loads(done.stdout) == expected


def test_large_results_are_announced_before_they_are_sent(
    server: ServerProcess, client: ServiceClient, sampler: SamplingClient
) -> None:
    long = SamplingParams(max_tokens=3000, seed=1, stop=[])
    answer = sampler.sample(PROMPT, 1, long).result(WAIT_S)
    assert len(answer.sequences[0].tokens) == 3000
    request_id = (answer.sequences[0].sequence_id or "").partition(":")[0]
    status, told = call(server, "/api/v1/retrieve_future", {"request_id": request_id, "allow_metadata_only": True})
    assert status == 200
    assert told["status"] == "complete_metadata"
    assert told["response_payload_size"] > 2 * 4 * 3000


def test_a_thousand_outstanding_samples(sampler: SamplingClient) -> None:
    futures = [sampler.sample(PROMPT, 1, SamplingParams(max_tokens=2, seed=seed)) for seed in range(1000)]
    tokens = [future.result(WAIT_S).sequences[0].tokens for future in futures]
    again = sampler.sample(PROMPT, 1, SamplingParams(max_tokens=2, seed=777)).result(WAIT_S)
    assert tokens[777] == again.sequences[0].tokens
    assert len({tuple(pair) for pair in tokens}) > 100


def test_a_long_poll_says_position_and_reason(
    server: ServerProcess, client: ServiceClient, datum: Any, eventually: Callable[..., None]
) -> None:
    trainer = client.create_lora_training_client(MODEL, rank=2)
    server.hold()
    futures = [trainer.forward_backward([datum(1, 2)], "cross_entropy") for _ in range(3)]
    eventually(lambda: queued(server) == 3, 15)
    trace = call(server, f"/api/v1/sessions/{trainer.model_id.split(':')[0]}/trace_export")[1]["url"]
    with urllib.request.urlopen(trace, timeout=WAIT_S) as file:
        events = json.load(file)["traceEvents"]
    ids = {
        event["args"]["seq"]: event["args"]["request_id"] for event in events if event.get("cat") == "forward_backward"
    }
    status, told = call(server, "/api/v1/retrieve_future", {"request_id": ids[max(ids)]})
    assert status == 408
    assert told["type"] == "try_again"
    assert told["queue_state"] == "active"
    assert told["queue_state_reason"] == "2 ahead of it; waits for 2 earlier operations of the same model"
    server.release()
    assert [future.result(WAIT_S).metrics["tokens:sum"] for future in futures] == [2.0, 2.0, 2.0]


def test_two_keys_do_not_see_one_another(
    server: ServerProcess, client: ServiceClient, connect: Callable[..., ServiceClient], datum: Any
) -> None:
    made = json.loads(server.run("key", "create", "stranger", "--org", "strangers", "--format", "json").stdout)
    stranger = connect(server.url, api_key=made["key"])
    trainer = client.create_lora_training_client(MODEL, rank=2)
    trainer.forward_backward([datum(1, 2)], "cross_entropy").result(WAIT_S)
    state = trainer.save_state("mine").result(WAIT_S)
    weights = trainer.save_weights_for_sampler("mine").result(WAIT_S)
    rest, other = client.create_rest_client(), stranger.create_rest_client()
    session_id = trainer.model_id.split(":")[0]

    assert trainer.model_id in [run.training_run_id for run in rest.iter_training_runs()]
    assert list(other.iter_training_runs()) == []
    assert list(other.iter_checkpoints()) == []
    assert session_id not in list(other.iter_sessions())
    for attempt in (
        lambda: other.get_training_run(trainer.model_id).result(WAIT_S),
        lambda: other.get_weights_info_by_tinker_path(state.path).result(WAIT_S),
        lambda: other.get_session(session_id).result(WAIT_S),
        lambda: other.delete_checkpoint_from_tinker_path(state.path).result(WAIT_S),
        lambda: stranger.create_sampling_client(model_path=weights.path),
        lambda: stranger.create_training_client_from_state(state.path),
    ):
        with pytest.raises(NotFoundError):
            attempt()
    rest.publish_checkpoint_from_tinker_path(weights.path).result(WAIT_S)
    shared = stranger.create_sampling_client(model_path=weights.path)
    assert shared.sample(PROMPT, 1, PARAMS).result(WAIT_S).sequences


def test_a_download_goes_on_where_it_stopped(
    server: ServerProcess, client: ServiceClient, datum: Any, tmp_path: Path
) -> None:
    trainer = client.create_lora_training_client(MODEL, rank=2)
    exported = trainer.save_weights_external("out").result(WAIT_S).path
    rest = client.create_rest_client()
    whole = {path.name: path.read_bytes() for path in rest.download_external_weights(exported, tmp_path / "a").result()}
    name = max(whole, key=lambda key: len(whole[key]))
    url = rest.get_external_weights_urls(exported).result(WAIT_S).urls[name]
    with urllib.request.urlopen(url, timeout=WAIT_S) as answer:
        validator = answer.headers["etag"]
    folder = tmp_path / "b"
    folder.mkdir()
    (folder / f"{name}.part").write_bytes(whole[name][:100])
    (folder / f"{name}.part.from").write_text(validator)
    seen: list[int] = []
    again = rest.download_external_weights(
        exported, folder, progress=lambda told: seen.append(told.received) if told.path.name == name else None
    ).result(WAIT_S)
    assert {path.name: path.read_bytes() for path in again} == whole
    assert min(seen) > 100, "it began anew"
    with pytest.raises(urllib.error.HTTPError, match=r"40[134]"):
        urllib.request.urlopen(url.replace("signature=", "signature=0"), timeout=WAIT_S)


def test_trace_usage_and_audit_tell_what_happened(
    server: ServerProcess, client: ServiceClient, sampler: SamplingClient, datum: Any
) -> None:
    trainer = client.create_lora_training_client(MODEL, rank=2)
    trainer.forward_backward([datum(1, 2, 3)], "cross_entropy").result(WAIT_S)
    trainer.optim_step(AdamParams()).result(WAIT_S)
    with pytest.raises(TinkerError):
        trainer.save_state("not/a/name").result(WAIT_S)
    path = trainer.save_state("kept").result(WAIT_S).path
    sampler.sample(PROMPT, 2, PARAMS).result(WAIT_S)
    session_id = trainer.model_id.split(":")[0]
    rest = client.create_rest_client()

    with urllib.request.urlopen(rest.export_session_trace(session_id).result(WAIT_S), timeout=WAIT_S) as answer:
        events = json.load(answer)["traceEvents"]
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    spans = [
        (lanes[event["tid"]], event["name"]) for event in events if event["ph"] == "b" and event["name"] != "running"
    ]
    assert sorted(spans) == sorted(
        [
            (f"{session_id}/models", "create_model"),
            *((trainer.model_id, name) for name in ("forward_backward", "optim_step", "save_weights")),
            (sampler.sampling_session_id, "sample"),
        ]
    )
    for span in (event for event in events if event["ph"] == "b"):
        ends = [event["ts"] for event in events if event["ph"] == "e" and event["id"] == span["id"]]
        assert min(ends) >= span["ts"]

    now = datetime.datetime.now(datetime.UTC).replace(minute=0, second=0, microsecond=0)
    hour = datetime.timedelta(hours=1)
    usage = rest.get_billing_usage(now - hour, now + 2 * hour).result(WAIT_S)
    counted = {
        event.event_info.type: getattr(event.event_info, "token_count", None)
        or getattr(event.event_info, "count", None)
        for event in usage.data
        if event.session_id == session_id
    }
    assert counted == {"training": 3, "sampling_prefill": 3, "sampling_sample": 8, "checkpoint": 1}

    entries = rest.get_audit_log("checkpoints").result(WAIT_S).entries
    assert [entry.event for entry in entries if entry.tinker_path == path] == ["checkpoint_created"]
    rest.delete_checkpoint_from_tinker_path(path).result(WAIT_S)
    entries = rest.get_audit_log("checkpoints").result(WAIT_S).entries
    assert sorted(entry.event for entry in entries if entry.tinker_path == path) == [
        "checkpoint_created",
        "checkpoint_deleted",
    ]


def test_a_failed_job_is_told_with_its_reason(client: ServiceClient, datum: Any) -> None:
    trainer = client.create_lora_training_client(MODEL, rank=2)
    other = client.create_lora_training_client(MODEL, rank=4)
    path = other.save_state("rank4").result(WAIT_S).path
    with pytest.raises(BadRequestError, match="rank"):
        trainer.load_state(path).result(WAIT_S)
    assert trainer.forward_backward([datum(1, 2)], "cross_entropy").result(WAIT_S).metrics["tokens:sum"] == 2
