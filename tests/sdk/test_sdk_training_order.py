"""Operations of one model: numbered in the caller's order, sent in it, overlapping, each exactly once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.tinker_server import Drop, Hold, Pass, Recorded, Status, TinkerServer

from tinsmith import AdamParams, ServiceClient, TrainingClient

pytestmark = pytest.mark.usefixtures("hard_limit", "clean_environment")

TRAINING = "forward_backward|optim_step"
STEP = AdamParams(learning_rate=1e-3)
LOSS = "cross_entropy"


def first_token(request: Recorded) -> int:
    token: int = request.body["forward_backward_input"]["data"][0]["model_input"]["chunks"][0]["tokens"][0]
    return token


def numbers(requests: list[Recorded]) -> list[int]:
    return [request.body["seq_id"] for request in requests]


def executed_numbers(server: TinkerServer) -> list[int | None]:
    return [number for _, number, _ in server.executed]


def test_operations_get_numbers_in_call_order_and_arrive_in_it(
    trainer: TrainingClient, server: TinkerServer, datum: Any
) -> None:
    futures: list[Any] = []
    for i in range(20):
        futures.append(trainer.forward_backward([datum(i)], LOSS))
        futures.append(trainer.optim_step(STEP))
    futures.append(trainer.save_state("end"))
    for future in futures:
        future.result(10)

    arrived = server.find(f"{TRAINING}|save_weights")
    assert numbers(arrived) == list(range(1, 42))
    assert [first_token(request) for request in server.find("forward_backward")] == list(range(20))
    assert executed_numbers(server) == list(range(1, 42))
    assert server.violations == []


def test_the_number_is_taken_in_the_callers_thread_not_when_the_loop_gets_to_it(
    client: ServiceClient, trainer: TrainingClient, server: TinkerServer, datum: Any
) -> None:
    let_go, is_blocked = threading.Event(), threading.Event()

    async def block_the_loop() -> None:
        is_blocked.set()
        let_go.wait(10)

    client.holder.submit("test", block_the_loop())
    assert is_blocked.wait(10)
    made: list[Any] = []
    for i, name in enumerate("abcde"):  # one after another, each from a thread of its own
        call: Callable[[], Any] = (
            (lambda: trainer.optim_step(STEP))
            if name == "c"
            else (lambda token=i: trainer.forward_backward([datum(token)], LOSS))
        )
        thread = threading.Thread(target=lambda call=call: made.append(call()))
        thread.start()
        thread.join(10)
        assert not thread.is_alive(), "a call waits for the loop"
    let_go.set()
    for future in made:
        future.result(10)

    assert [name for _, _, name in server.executed] == [
        "forward_backward",
        "forward_backward",
        "optim_step",
        "forward_backward",
        "forward_backward",
    ]
    assert [first_token(request) for request in server.find("forward_backward")] == [0, 1, 3, 4]


def test_a_step_is_submitted_before_the_result_of_the_pass_before_it(
    trainer: TrainingClient, server: TinkerServer, datum: Any
) -> None:
    server.pause_work()
    passed = trainer.forward_backward([datum(1, 2)], LOSS)
    stepped = trainer.optim_step(STEP)
    saved = trainer.save_state("after")
    server.wait_for("save_weights", timeout_s=10)

    assert numbers(server.find(f"{TRAINING}|save_weights")) == [1, 2, 3]
    assert server.executed == []
    assert not passed.done()
    server.resume_work()
    assert passed.result(10).metrics["loss:sum"] > 0
    assert stepped.result(10).metrics == {"step": 1.0}
    assert saved.result(10).path.endswith("/weights/after")


def test_a_submit_waits_for_the_acceptance_of_the_one_before(
    trainer: TrainingClient, server: TinkerServer, datum: Any
) -> None:
    server.script("forward_backward", [Hold()])
    passed, stepped = trainer.forward_backward([datum(1)], LOSS), trainer.optim_step(STEP)
    server.wait_for("forward_backward", timeout_s=10)
    threading.Event().wait(0.2)
    assert server.find("optim_step") == []

    server.release()
    passed.result(10)
    stepped.result(10)
    assert executed_numbers(server) == [1, 2]


def test_chunks_of_one_call_overlap_and_the_first_goes_last(
    make_server: Any, connect: Any, datum: Any, loss_of: Any, logprobs_of: Any
) -> None:
    server = make_server(flags={"fwdbwd_max_chunk_len": 2})
    trainer = connect(server).create_lora_training_client("stub/model", rank=4)
    data = [datum(10 * i, 10 * i + 1) for i in range(7)]
    server.script("forward_backward", [Hold(), Hold(), Hold()])

    passed = trainer.forward_backward(data, LOSS)
    stepped = trainer.optim_step(STEP)
    overlapping = server.wait_for("forward_backward", 3, timeout_s=10)
    assert sorted(numbers(overlapping)) == [2, 3, 4], "chunks two to four are under way at once, without the first"
    server.release()
    result = passed.result(10)

    assert numbers(server.find("forward_backward"))[-1] == 1
    assert numbers(server.find("optim_step")) == [5]
    assert executed_numbers(server) == [1, 2, 3, 4, 5]
    assert [output["logprobs"].tolist() for output in result.loss_fn_outputs] == [logprobs_of(d) for d in data]
    assert result.metrics["loss:sum"] == pytest.approx(loss_of(*data), rel=1e-6)
    assert stepped.result(10).metrics == {"step": 1.0}
    assert server.violations == []


def test_chunks_go_one_by_one_where_the_server_wants_that(make_server: Any, connect: Any, datum: Any) -> None:
    server = make_server(flags={"fwdbwd_max_chunk_len": 1, "parallel_fwdbwd_chunks": False})
    trainer = connect(server).create_lora_training_client("stub/model", rank=4)
    trainer.forward_backward([datum(i) for i in range(5)], LOSS).result(10)

    assert numbers(server.find("forward_backward")) == [1, 2, 3, 4, 5]


def test_sixty_four_threads_share_a_model(
    trainer: TrainingClient, server: TinkerServer, datum: Any, loss_of: Any
) -> None:
    threads, rounds = 64, 6
    start = threading.Barrier(threads)

    def work(thread: int) -> list[tuple[int, Any, Any]]:
        start.wait(10)
        made = []
        for i in range(rounds):
            token = thread * rounds + i
            made.append((token, trainer.forward_backward([datum(token)], LOSS), trainer.optim_step(STEP)))
        return made

    with ThreadPoolExecutor(threads) as pool:
        made = [entry for entries in pool.map(work, range(threads)) for entry in entries]
    results = [(token, passed.result(15), stepped.result(15)) for token, passed, stepped in made]

    total = 2 * threads * rounds
    assert sorted(numbers(server.find(TRAINING))) == list(range(1, total + 1))
    assert executed_numbers(server) == list(range(1, total + 1))
    for token, passed, _ in results:
        assert passed.metrics["loss:sum"] == pytest.approx(loss_of(datum(token)), rel=1e-6)
    assert sorted(stepped.metrics["step"] for *_, stepped in results) == list(range(1, threads * rounds + 1))
    number_of = {first_token(request): request.body["seq_id"] for request in server.find("forward_backward")}
    for thread in range(threads):
        own = [number_of[thread * rounds + i] for i in range(rounds)]
        assert own == sorted(own), "each thread's own operations keep its order"
    assert server.violations == []


def test_a_thousand_operations_from_asyncio(
    trainer: TrainingClient, server: TinkerServer, datum: Any, loss_of: Any
) -> None:
    async def run() -> list[Any]:
        futures: list[Any] = []
        for i in range(500):
            futures.append(await trainer.forward_backward_async([datum(i)], LOSS))
            futures.append(await trainer.optim_step_async(STEP))
        return await asyncio.gather(*futures)

    results = asyncio.run(run())

    assert numbers(server.find(TRAINING)) == list(range(1, 1001))
    assert executed_numbers(server) == list(range(1, 1001))
    for i in range(500):
        assert results[2 * i].metrics["loss:sum"] == pytest.approx(loss_of(datum(i)), rel=1e-6)
        assert results[2 * i + 1].metrics["step"] == i + 1
    assert server.violations == []


def test_lost_answers_and_dropped_connections_run_nothing_twice(
    trainer: TrainingClient, server: TinkerServer, datum: Any
) -> None:
    faults = [Drop(after_work=True), Drop(), Pass(), Status(503, {"retry-after-ms": "1"})] * 3
    server.script(TRAINING, faults)
    futures: list[Any] = []
    for i in range(6):
        futures += [trainer.forward_backward([datum(i)], LOSS), trainer.optim_step(STEP)]
    for future in futures:
        future.result(18)

    assert server.script_left("optim_step") == 0
    assert executed_numbers(server) == list(range(1, 13))
    assert server.violations == []


def test_refused_data_takes_no_number(trainer: TrainingClient, server: TinkerServer, datum: Any) -> None:
    with pytest.raises(ValueError, match=r"data\[1\]"):
        trainer.forward_backward([datum(1), "not a datum"], LOSS)  # type: ignore[list-item]
    with pytest.raises(ValueError, match="No data provided"):
        trainer.forward_backward([], LOSS)
    trainer.optim_step(STEP).result(10)

    assert numbers(server.find(TRAINING)) == [1]


def test_data_changed_after_the_call_is_sent_as_it_was(
    trainer: TrainingClient, server: TinkerServer, datum: Any
) -> None:
    server.script("forward_backward", [Hold()])
    held = trainer.forward_backward([datum(1)], LOSS)
    data = [datum(2)]
    config = {"clip_low_threshold": 0.5}
    later = trainer.forward_backward(data, "ppo", config)
    data[0] = datum(3)
    config["clip_low_threshold"] = 0.7
    server.wait_for("forward_backward", timeout_s=10)
    server.release()
    held.result(10)
    later.result(10)

    sent = server.find("forward_backward")[1]
    assert first_token(sent) == 2
    assert sent.body["forward_backward_input"]["loss_fn_config"] == {"clip_low_threshold": 0.5}


def test_two_models_of_a_client_are_numbered_apart(client: ServiceClient, server: TinkerServer, datum: Any) -> None:
    one = client.create_lora_training_client("stub/model", rank=4)
    other = client.create_lora_training_client("stub/other", rank=4)
    server.pause_work()
    futures = [model.forward_backward([datum(i)], LOSS) for i in range(3) for model in (one, other)]
    server.wait_for("forward_backward", 6, timeout_s=10)
    server.resume_work()
    for future in futures:
        future.result(10)

    for model in (one, other):
        assert [number for model_id, number, _ in server.executed if model_id == model.model_id] == [1, 2, 3]


def test_saved_weights_lead_to_the_console_of_their_server(trainer: TrainingClient, server: TinkerServer) -> None:
    saved = trainer.save_state("a").result(10)
    sampler = trainer.save_weights_for_sampler("b").result(10)
    run = trainer.model_id.replace(":", "%3A")

    assert saved.get_console_url() == f"{server.url}/checkpoints/{run}/weights%2Fa"
    assert sampler.get_console_url() == f"{server.url}/checkpoints/{run}/sampler_weights%2Fb"
    assert sampler.get_playground_url().startswith(
        f"{server.url}/playground?mode=checkpoint&checkpoint=tinker%3A%2F%2F"
    )
    assert trainer.get_console_url() == f"{server.url}/training_runs/{trainer.model_id}"
