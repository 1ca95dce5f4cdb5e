"""Custom losses: the numbers of autograd, in call order, and a loss that fails does not block its run."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest
from support.tinker_server import Status, TinkerServer

from tinsmith import AdamParams, InvalidInputError, TrainingClient, UnprocessableEntityError
from tinsmith.client.losses import custom_loss
from tinsmith.wire.values.inputs import Datum, ModelInput
from tinsmith.wire.values.tensors import TensorData, sparse_if_smaller

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.usefixtures("hard_limit", "clean_environment")

STEP = AdamParams(learning_rate=1e-3)


def squares(data: Any, logprobs: Any) -> Any:
    """Squares of the logprobs, each datum by its position, and the product of the first two tokens."""
    loss = sum((i + 1) * (tensor**2).sum() for i, tensor in enumerate(logprobs)) + logprobs[0][0] * logprobs[-1][-1]
    return loss, {"custom/mean": float(logprobs[0].detach().mean()), "datums": len(data)}


def by_hand(logprobs: list[list[float]]) -> tuple[float, list[list[float]]]:
    """The loss above and its gradients, without torch's help from the client."""
    tensors = [torch.tensor(row, dtype=torch.float32, requires_grad=True) for row in logprobs]
    loss, _ = squares([], tensors)
    loss.backward()
    return float(loss.detach()), [tensor.grad.tolist() for tensor in tensors]


def weights_sent(server: TinkerServer) -> list[list[float]]:
    """The weights of the backward pass, datum by datum, in the order of the data."""
    backward = [request for request in server.find("forward_backward") if not request.body.get("forward_only")]
    backward.sort(key=lambda request: request.body["seq_id"])
    data = [datum for request in backward for datum in request.body["forward_backward_input"]["data"]]
    return [datum["loss_fn_inputs"]["weights"]["data"] for datum in data]


def test_the_numbers_are_those_of_autograd(
    trainer: TrainingClient, server: TinkerServer, datum: Any, logprobs_of: Any, loss_of: Any
) -> None:
    data = [datum(1, 2, 3), datum(40, 50), datum(600)]
    result = trainer.forward_backward_custom(data, squares).result(15)
    loss, gradients = by_hand([logprobs_of(item) for item in data])

    assert result.metrics["loss:sum"] == pytest.approx(loss, rel=1e-6)
    assert result.metrics["custom/mean"] == pytest.approx(sum(logprobs_of(data[0])) / 3, rel=1e-6)
    assert result.metrics["datums"] == 3
    for sent, gradient in zip(weights_sent(server), gradients, strict=True):
        assert sent == pytest.approx([-value for value in gradient], rel=1e-6)
    surrogate = sum(
        -p * w
        for item, sent in zip(data, weights_sent(server), strict=True)
        for p, w in zip(logprobs_of(item), sent, strict=True)
    )
    assert result.metrics["surrogate_loss:sum"] == pytest.approx(surrogate, rel=1e-5)
    assert [output["logprobs"].tolist() for output in result.loss_fn_outputs] == [logprobs_of(item) for item in data]
    assert server.violations == []


def test_the_first_pass_leaves_no_gradient(trainer: TrainingClient, server: TinkerServer, datum: Any) -> None:
    trainer.forward_backward_custom([datum(1)], squares).result(15)

    assert [request.body.get("forward_only", False) for request in server.find("forward_backward")] == [True, False]
    assert server.state.models[trainer.model_id].passes == 1


def test_several_chunks(make_server: Any, connect: Any, datum: Any, logprobs_of: Any) -> None:
    server = make_server(flags={"fwdbwd_max_chunk_len": 2})
    trainer = connect(server).create_lora_training_client("stub/model", rank=4)
    data = [datum(10 * i, 10 * i + 1) for i in range(5)]
    result = trainer.forward_backward_custom(data, squares).result(15)
    stepped = trainer.optim_step(STEP).result(10)
    loss, gradients = by_hand([logprobs_of(item) for item in data])

    assert result.metrics["loss:sum"] == pytest.approx(loss, rel=1e-6)
    assert len(server.find("forward_backward")) == 6
    for sent, gradient in zip(weights_sent(server), gradients, strict=True):
        assert sent == pytest.approx([-value for value in gradient], rel=1e-6)
    assert [output["logprobs"].tolist() for output in result.loss_fn_outputs] == [logprobs_of(item) for item in data]
    assert stepped.metrics == {"step": 1.0}
    assert [number for _, number, _ in server.executed] == list(range(1, 8))
    assert server.violations == []


def test_what_is_called_next_comes_after_the_backward_pass(
    trainer: TrainingClient, server: TinkerServer, datum: Any
) -> None:
    may_go_on = threading.Event()

    def slow(data: Any, logprobs: Any) -> Any:
        may_go_on.wait(10)
        return squares(data, logprobs)

    custom = trainer.forward_backward_custom([datum(1)], slow)
    stepped = trainer.optim_step(STEP)
    server.wait_for("forward_backward", timeout_s=10)
    with pytest.raises(TimeoutError):
        stepped.result(0.3)
    assert server.find("optim_step") == []
    may_go_on.set()
    custom.result(10)
    stepped.result(10)

    assert [name for _, _, name in server.executed] == ["forward_backward", "forward_backward", "optim_step"]
    assert server.state.models[trainer.model_id].passes == 1


def test_the_loss_runs_beside_the_clients_loop(trainer: TrainingClient, datum: Any) -> None:
    def asks_the_server(data: Any, logprobs: Any) -> Any:
        assert trainer.get_info().model_id == trainer.model_id  # would be refused on the client's own thread
        return squares(data, logprobs)

    assert trainer.forward_backward_custom([datum(1)], asks_the_server).result(10)


@pytest.mark.parametrize("chunk_len", [1024, 2])
def test_a_loss_that_raises_stalls_nothing(make_server: Any, connect: Any, datum: Any, chunk_len: int) -> None:
    server = make_server(flags={"fwdbwd_max_chunk_len": chunk_len})
    trainer = connect(server).create_lora_training_client("stub/model", rank=4)

    def broken(data: Any, logprobs: Any) -> Any:
        raise ZeroDivisionError("of mine")

    failed = trainer.forward_backward_custom([datum(i) for i in range(5)], broken)
    stepped = trainer.optim_step(STEP)

    error = failed.exception(10)
    assert type(error) is ZeroDivisionError
    assert error.args == ("of mine",)
    assert stepped.result(10).metrics == {"step": 1.0}
    assert server.state.models[trainer.model_id].passes == 0, "no gradient of the failed loss"
    assert server.stuck == {}
    assert trainer.forward_backward_custom([datum(1)], squares).result(10)
    assert server.violations == []


@pytest.mark.parametrize(
    ("loss_fn", "said"),
    [
        (lambda data, logprobs: logprobs[0].sum(), "loss, metrics"),
        (lambda data, logprobs: (3.0, {}), "torch tensor"),
        (lambda data, logprobs: (logprobs[0], {}), "one number"),
        (lambda data, logprobs: (logprobs[0].sum().detach(), {}), "does not depend"),
        (lambda data, logprobs: (logprobs[0].sum() * float("nan"), {}), "nan"),
        (lambda data, logprobs: (logprobs[0].sum(), {"a": "b"}), "metric 'a'"),
    ],
)
def test_a_loss_without_a_gradient_is_refused_and_stalls_nothing(
    trainer: TrainingClient, server: TinkerServer, datum: Any, loss_fn: Any, said: str
) -> None:
    failed = trainer.forward_backward_custom([datum(1, 2), datum(3)], loss_fn)
    stepped = trainer.optim_step(STEP)

    error = failed.exception(10)
    assert isinstance(error, InvalidInputError)
    assert said in str(error)
    assert stepped.result(10).metrics == {"step": 1.0}


def test_a_refused_forward_pass_stalls_nothing(trainer: TrainingClient, server: TinkerServer, datum: Any) -> None:
    trainer.forward_backward([datum(1)], "cross_entropy").result(10)
    server.script("forward_backward", [Status(422)])
    failed = trainer.forward_backward_custom([datum(1)], squares)
    stepped = trainer.optim_step(STEP)

    assert isinstance(failed.exception(10), UnprocessableEntityError)
    assert stepped.result(10).metrics == {"step": 1.0}
    assert server.stuck == {}


def test_data_without_targets_are_refused_at_once(trainer: TrainingClient, server: TinkerServer, datum: Any) -> None:
    bare = datum(1).replace(loss_fn_inputs={})
    with pytest.raises(InvalidInputError, match=r"data\[1\].*target_tokens"):
        trainer.forward_backward_custom([datum(1), bare], squares)
    trainer.optim_step(STEP).result(10)
    assert [number for _, number, _ in server.executed] == [1]


def test_many_custom_passes_in_flight_keep_their_order(
    trainer: TrainingClient, server: TinkerServer, datum: Any
) -> None:
    async def run() -> list[Any]:
        futures: list[Any] = []
        for i in range(8):
            futures.append(await trainer.forward_backward_custom_async([datum(i)], squares))
            futures.append(await trainer.optim_step_async(STEP))
        return await asyncio.gather(*futures)

    results = asyncio.run(run())
    assert [results[i].metrics["step"] for i in range(1, 16, 2)] == list(range(1, 9))
    assert [name for _, _, name in server.executed] == ["forward_backward", "forward_backward", "optim_step"] * 8
    assert server.violations == []


def sparse_datum() -> Datum:
    """A datum whose targets, and so the weights of its forward pass, are a few cells of a table."""
    targets = np.zeros((40, 8), np.int64)
    targets[0, 0] = 3
    return Datum(ModelInput.from_ints(list(range(40))), {"target_tokens": sparse_if_smaller(TensorData(targets))})


def squares_of_all(data: Any, logprobs: Any) -> Any:
    return sum((tensor**2).sum() for tensor in logprobs), {}


def one_cell(data: Any, logprobs: Any) -> Any:
    return sum(tensor[0, 0] for tensor in logprobs), {}


@pytest.mark.parametrize("is_parallel", [True, False])
@pytest.mark.parametrize(
    ("loss_fn", "backward", "room"),
    [
        (squares_of_all, [1, 1, 1, 1], 1),
        (squares_of_all, [1, 1, 1, 1], 4),
        (squares_of_all, [2, 2], 5),
        (one_cell, [3, 1], 4),
        (one_cell, [4], 5),
    ],
)
def test_a_backward_pass_may_be_larger_or_smaller_than_its_forward_pass(
    make_server: Any, connect: Any, is_parallel: bool, loss_fn: Any, backward: list[int], room: int
) -> None:
    """Every request has a number of its own however many there are, and numbers that are not needed are closed."""
    data = [sparse_datum() for _ in range(4)]
    limit = room * max(datum.estimated_bytes for datum in custom_loss.forward_data(data))
    flags = {"fwdbwd_max_chunk_bytes_count": limit, "parallel_fwdbwd_chunks": is_parallel}
    server = make_server(flags=flags)
    trainer = connect(server).create_lora_training_client("stub/model", rank=4)

    for step in (1.0, 2.0):
        custom = trainer.forward_backward_custom(data, loss_fn)
        stepped = trainer.optim_step(STEP)
        assert custom.result(10).loss_fn_outputs
        assert stepped.result(10).metrics == {"step": step}

    sent = [request.body for request in server.find("forward_backward")]
    numbers = [body["seq_id"] for body in sent] + [request.body["seq_id"] for request in server.find("optim_step")]
    assert sorted(numbers) == list(range(1, max(numbers) + 1)), "each number once"
    assert [number for _, number, _ in server.executed] == sorted(numbers), "and none is waited for"
    passes = [body for body in sent if not body.get("forward_only")]
    passes.sort(key=lambda body: int(body["seq_id"]))
    assert [len(body["forward_backward_input"]["data"]) for body in passes] == backward * 2
    assert server.stuck == {}
    assert server.violations == []
