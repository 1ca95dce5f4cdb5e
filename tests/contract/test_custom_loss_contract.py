"""Custom losses compared with the official client's."""

from __future__ import annotations

import inspect
import json
import math
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name that everyone uses
from support.official import Oracle, RefusedError

from tinsmith.client.losses import custom_loss
from tinsmith.client.losses.loss_graph import LossHandle, trace
from tinsmith.errors import InvalidInputError
from tinsmith.wire.codecs import json_codec
from tinsmith.wire.messages.training import CreateCustomLossRequest, ForwardBackwardOutput
from tinsmith.wire.values.inputs import Datum, ModelInput
from tinsmith.wire.values.tensors import TensorData


def cross_entropy(logprobs: Any, weights: Any) -> Any:
    return -(logprobs * weights).sum(), {}


def importance_sampling(logprobs: Any, sampled: Any, advantages: Any) -> Any:
    ratio = torch.exp(logprobs - sampled)
    return -(ratio * advantages).sum(), {"custom/ratio:mean": ratio.mean(), "custom/tokens:sum": ratio.sum() * 0 + 1}


def clipped(logprobs: Any, sampled: Any, advantages: Any) -> Any:
    ratio = (logprobs - sampled).exp()
    bounded = ratio.clamp(min=0.8, max=1.2)
    return -torch.minimum(ratio * advantages, bounded * advantages).sum(), {
        "custom/clip_fraction:mean": (ratio != bounded).float().mean()
    }


def stopped_gradient(logprobs: Any, advantages: Any) -> Any:
    weight = torch.clamp(logprobs.detach().exp(), max=math.inf)
    return -(weight * logprobs * advantages).sum(), {}


def sliced(logprobs: Any, input: Any) -> Any:
    half = logprobs.size(0) // 2
    return logprobs[:half].sum() + logprobs[..., 1::2].mean() + input[[0, 1]].sum() + logprobs[None, :].sum(), {}


def typed(logprobs: Any) -> Any:
    zeros = torch.zeros_like(logprobs, dtype=torch.float64, layout=torch.strided, device=torch.device("cpu"))
    kept = logprobs.contiguous(memory_format=torch.contiguous_format).to(torch.bfloat16)
    return torch.where(kept > -math.inf, kept, zeros).sum() + torch.nan_to_num(logprobs, nan=math.nan).sum(), {}


def shaped(logprobs: Any, target_tokens: Any) -> Any:
    rows, columns = logprobs.shape
    flat = logprobs.reshape((rows * columns,)) * target_tokens.reshape(-1)
    return flat.sum() / logprobs.shape[0] + logprobs.sum(dim=(0, 1), keepdim=True).squeeze(), {}


def functional(logprobs: Any, reference: Any) -> Any:
    kl = F.kl_div(logprobs, reference, reduction="none", log_target=True)
    return kl.sum() + F.relu(logprobs).sum() - F.logsigmoid(logprobs).mean() + F.softmax(logprobs, dim=-1)[0], {}


def scalar_input(logprobs: Any, beta: Any) -> Any:
    return beta * logprobs.sum() / math.sqrt(logprobs.numel()), {"custom/a/b.c-d_0:sum": beta.detach()}


def listed(logprobs: Any) -> Any:
    parts = torch.stack([logprobs, logprobs * 2]) + torch.cat((logprobs, logprobs)).sum()
    return [parts.mean() ** 2 + abs(logprobs).sum() - -logprobs.T.sum() + sum([logprobs.sum(), 1]), {}]


def unpacked(logprobs: Any) -> Any:
    first, second = logprobs.split(2)
    best = logprobs.max(dim=0)
    unused = logprobs.exp()  # noqa: F841 - what is computed in vain is sent all the same
    return first.sum() * second.sum() + best.values + best[0] + torch.einsum("i,i->", logprobs, logprobs), {}


def operators(logprobs: Any, sum_1: Any) -> Any:
    logprobs += 1
    mask = (logprobs > 0) & ~(sum_1 >= 2) | (logprobs % 2 == 1)
    return (mask * (2 - logprobs) / (1 + sum_1) // 3).sum() + logprobs @ sum_1 + logprobs.clone().add_(1).sum(), {}


def special(logprobs: Any) -> Any:
    added = torch.ops.aten.sum.default(logprobs) + torch.linalg.norm(logprobs)
    return added + torch.special.expm1(logprobs).sum() + math.pi * F.softplus(logprobs).sum(), {}


LOSSES: list[tuple[Any, dict[str, int]]] = [
    (cross_entropy, {"logprobs": 1, "weights": 1}),
    (importance_sampling, {"advantages": 1, "sampled": 1, "logprobs": 1}),
    (clipped, {"logprobs": 1, "sampled": 1, "advantages": 1}),
    (stopped_gradient, {"logprobs": 1, "advantages": 1}),
    (sliced, {"logprobs": 1, "input": 1}),
    (typed, {"logprobs": 1}),
    (shaped, {"logprobs": 2, "target_tokens": 2}),
    (functional, {"logprobs": 1, "reference": 1}),
    (scalar_input, {"logprobs": 1, "beta": 0}),
    (listed, {"logprobs": 1}),
    (unpacked, {"logprobs": 1}),
    (operators, {"logprobs": 1, "sum_1": 1}),
    (special, {"logprobs": 1}),
]


def renamed(graph: dict[str, Any]) -> Any:
    """A graph whose nodes are named by their place."""
    names = {node["name"]: f"node{i}" for i, node in enumerate(graph["nodes"])}
    assert len(names) == len(graph["nodes"])

    def rename(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: names[item] if key == "ref" else rename(item) for key, item in value.items()}
        return [rename(item) for item in value] if isinstance(value, list) else value

    nodes = [{**rename(node), "name": names[node["name"]]} for node in graph["nodes"]]
    return {**graph, "nodes": nodes}


@pytest.mark.parametrize(("fn", "ranks"), LOSSES, ids=lambda value: getattr(value, "__name__", ""))
def test_losses_are_traced_alike(oracle: Oracle, fn: Any, ranks: dict[str, Any]) -> None:
    theirs = oracle.ask("trace", source=inspect.getsource(fn), name=fn.__name__, ranks=ranks)
    ours = trace(fn, ranks)
    handle = LossHandle(ours.name, tuple(ours.inputs), "session", ours.module)
    assert ours.name == theirs["name"]
    assert list(handle.input_names) == theirs["input_names"]
    assert [msgspec.to_builtins(item) for item in ours.inputs] == theirs["inputs"]
    request = CreateCustomLossRequest(
        session_id="session", custom_loss_seq_id=0, name=ours.name, inputs=ours.inputs, graph=ours.graph
    )
    sent = json.loads(json_codec.encode(request))
    assert oracle.ask("read_request", request=sent) == sent
    assert renamed(sent["graph"]) == renamed(theirs["graph"])


REFUSED = {
    "branch": "if logprobs.sum() > 0:\n        pass\n    return logprobs.sum(), {}",
    "loop": "total = 0\n    for x in logprobs:\n        total = total + x\n    return total, {}",
    "length": "return logprobs.sum() / len(logprobs), {}",
    "constant tensor": "return logprobs.sum() * torch.tensor(2.0), {}",
    "module": "return torch.nn.ReLU()(logprobs).sum(), {}",
    "host value": "return logprobs.sum(), {'custom/a:sum': logprobs.sum().item()}",
    "backward": "logprobs.sum().backward()\n    return logprobs.sum(), {}",
    "unknown method": "return logprobs.no_such_method(), {}",
    "complex": "return logprobs.sum() * 1j, {}",
    "range": "return logprobs.index_select(0, range(2)).sum(), {}",
    "function argument": "return logprobs.apply_(math.sin).sum(), {}",
    "no metrics": "return logprobs.sum()",
    "metrics of None": "return logprobs.sum(), None",
    "metric name": "return logprobs.sum(), {'loss:sum': logprobs.sum()}",
    "metric reduction": "return logprobs.sum(), {'custom/a:max': logprobs.sum()}",
    "metric of a number": "return logprobs.sum(), {'custom/a:sum': 1.0}",
    "loss of a number": "return 1.0, {}",
}


@pytest.mark.parametrize("body", REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_sent_is_refused_by_both(oracle: Oracle, body: str) -> None:
    source = f"def loss(logprobs):\n    {body}\n"
    names: dict[str, Any] = {"torch": torch, "math": math, "__name__": "losses"}
    exec(source, names)
    with pytest.raises(RefusedError):
        oracle.ask("trace", source=source, name="loss", ranks={"logprobs": 1})
    with pytest.raises(InvalidInputError):
        trace(names["loss"], {"logprobs": 1})


def test_a_traced_loss_runs_here_as_there(oracle: Oracle) -> None:
    logprobs = [[-1.0, -2.0, -3.0], [-0.5, -0.25]]
    inputs = [
        {
            "target_tokens": {"data": list(range(len(row))), "dtype": "int64", "shape": [len(row)]},
            "sampled": {"data": [-1.0] * len(row), "dtype": "float32", "shape": [len(row)]},
            "advantages": {"data": [0.5] * len(row), "dtype": "float32", "shape": [len(row)]},
        }
        for row in logprobs
    ]
    ranks: dict[str, Any] = {"logprobs": 1, "sampled": 1, "advantages": 1}
    theirs = oracle.ask(
        "run_handle",
        source=inspect.getsource(importance_sampling),
        name="importance_sampling",
        ranks=ranks,
        logprobs=logprobs,
        inputs=inputs,
    )
    traced = trace(importance_sampling, ranks)
    handle = LossHandle(traced.name, tuple(traced.inputs), "session", traced.module)
    data = [datum_of(item) for item in inputs]
    loss, metrics = custom_loss.loss_of_handle(handle)(data, [torch.tensor(row) for row in logprobs])
    assert float(loss) == pytest.approx(theirs["loss"], rel=1e-6)
    assert metrics == pytest.approx(theirs["metrics"], rel=1e-6)


def datum_of(inputs: dict[str, Any]) -> Datum:
    tensors = {key: TensorData(**value) for key, value in inputs.items()}
    return Datum(ModelInput.from_ints(list(range(len(tensors["target_tokens"])))), tensors)


def squares(data: Any, logprobs: Any) -> Any:
    loss = sum((tensor * tensor).sum() for tensor in logprobs)
    return loss, {"plain": 3.0, "b:mean": 2.0, "loss:sum": 99.0, "x:mean": 5.0, "surrogate_loss:sum": 4.0}


def one_cell(data: Any, logprobs: Any) -> Any:
    return sum(tensor.flatten()[-1] for tensor in logprobs).reshape(1), {}


TARGETS = {"data": [3, 4, 5], "dtype": "int64", "shape": [3]}
CUSTOM_DATA: dict[str, list[dict[str, Any]]] = {
    "plain": [{"target_tokens": TARGETS}, {"target_tokens": {"data": [1, 2], "dtype": "int64"}}],
    "weights and more": [
        {
            "target_tokens": TARGETS,
            "weights": {"data": [1.0, 0.5, 0.0], "dtype": "float32", "shape": [3]},
            "advantages": {"data": [1.0, 2.0, 3.0], "dtype": "float32", "shape": [3]},
        }
    ],
    "two dimensions": [{"target_tokens": {"data": list(range(60)), "dtype": "int64", "shape": [3, 20]}}],
}


@pytest.mark.parametrize("fn", [squares, one_cell], ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("inputs", CUSTOM_DATA.values(), ids=CUSTOM_DATA.keys())
def test_a_python_loss_sends_the_same(oracle: Oracle, inputs: list[dict[str, Any]], fn: Any) -> None:
    data = [datum_of(item) for item in inputs]
    logprobs = [-1.0 - 0.25 * datum.loss_fn_inputs["target_tokens"].array for datum in data]
    server = {"loss:sum": 7.5, "x:mean": 1.0}
    theirs = oracle.ask(
        "run_custom",
        source=inspect.getsource(fn),
        name=fn.__name__,
        inputs=inputs,
        logprobs=[array.tolist() for array in logprobs],
        metrics=server,
    )
    outputs = [{"logprobs": TensorData.from_numpy(array.astype(np.float32))} for array in logprobs]
    custom = custom_loss.gradients(fn, data, outputs)
    passes = [custom_loss.forward_data(data), custom_loss.backward_data(data, custom.gradients)]
    ours = custom_loss.result_metrics(ForwardBackwardOutput("T", outputs, server), custom)
    assert [call["call"] for call in theirs["calls"]] == ["forward", "forward_backward"]
    for call, sent in zip(theirs["calls"], passes, strict=True):
        assert (call["loss_fn"], call["config"]) == (custom_loss.SURROGATE, None)
        assert [
            {
                key: {
                    "dtype": tensor.dtype,
                    "values": tensor.tolist(),
                    "sparse_crow_indices": tensor.sparse_crow_indices,
                }
                for key, tensor in datum.loss_fn_inputs.items()
            }
            for datum in sent
        ] == call["inputs"]
    assert ours.metrics == theirs["metrics"]
