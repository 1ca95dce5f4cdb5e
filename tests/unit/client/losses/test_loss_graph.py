"""Losses that the server runs: what is traced, and what is refused."""

from __future__ import annotations

import functools
import math
import subprocess
import sys
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.fx

from tinsmith.client.losses.loss_graph import LossHandle, decode_argument, encode_graph, trace
from tinsmith.errors import InvalidInputError, TinkerError
from tinsmith.wire.codecs import json_codec
from tinsmith.wire.messages.training import CreateCustomLossRequest, CustomLossGraph

TENSOR = torch.ones(3)
MODULE = torch.nn.Linear(2, 2)


def clipped(logprobs: Any, sampled: Any, advantages: Any) -> Any:
    ratio = (logprobs - sampled).exp()
    bounded = torch.clamp(ratio, 0.8, max=math.inf)
    loss = -torch.minimum(ratio * advantages, bounded[..., :] * advantages)
    return loss.sum(), {"custom/ratio:mean": ratio.mean()}


RANKS: Any = {"logprobs": 1, "sampled": 1, "advantages": 1}


def test_a_loss_becomes_a_graph() -> None:
    traced = trace(lambda logprobs, beta: (beta * logprobs.sum(), {}), {"logprobs": 1, "beta": 0})
    assert traced.name == "<lambda>"
    assert [(item.name, item.rank) for item in traced.inputs] == [("logprobs", 1), ("beta", 0)]
    assert msgspec.to_builtins(traced.graph) == {
        "format": 1,
        "nodes": [
            {"op": "placeholder", "name": "logprobs", "target": "logprobs", "args": [], "kwargs": {}},
            {"op": "placeholder", "name": "beta", "target": "beta", "args": [], "kwargs": {}},
            {"op": "call_method", "name": "sum_1", "target": "sum", "args": [{"ref": "logprobs"}], "kwargs": {}},
            {
                "op": "call_function",
                "name": "mul",
                "target": "operator.mul",
                "args": [{"ref": "beta"}, {"ref": "sum_1"}],
                "kwargs": {},
            },
            {
                "op": "output",
                "name": "output",
                "target": "output",
                "args": [{"tuple": [{"ref": "mul"}, {"dict": {}}]}],
                "kwargs": {},
            },
        ],
    }


def run_graph(graph: CustomLossGraph, tensors: dict[str, torch.Tensor]) -> Any:
    """A plain interpreter, to show that what is sent holds all there is to know."""
    values: dict[str, Any] = {}
    for node in graph.nodes:
        args = decode_argument(node.args, values)
        kwargs = {key: decode_argument(value, values) for key, value in node.kwargs.items()}
        if node.op == "placeholder":
            values[node.name] = tensors[node.target]
        elif node.op == "call_method":
            values[node.name] = getattr(args[0], node.target)(*args[1:], **kwargs)
        elif node.op == "call_function":
            root = {"torch": torch, "operator": __import__("operator"), "math": math}[node.target.split(".")[0]]
            values[node.name] = functools.reduce(getattr, node.target.split(".")[1:], root)(*args, **kwargs)
        else:
            return args[0]
    raise AssertionError("no output")


def test_the_graph_that_is_sent_computes_the_loss() -> None:
    traced = trace(clipped, RANKS)
    request = CreateCustomLossRequest(
        session_id="s", custom_loss_seq_id=0, name=traced.name, inputs=traced.inputs, graph=traced.graph
    )
    received = json_codec.decode(json_codec.encode(request), CreateCustomLossRequest)
    torch.manual_seed(0)
    tensors = {name: -torch.rand(5) for name in RANKS}
    expected = clipped(**tensors)
    assert run_graph(received.graph, tensors) == expected
    assert traced.module(*tensors.values()) == expected


def test_a_loss_is_traced_wherever_the_call_is_made() -> None:
    with torch.no_grad(), torch.autocast("cpu"):
        assert trace(clipped, RANKS) == trace(clipped, RANKS)


def test_names_of_metrics_have_an_end() -> None:
    def named(length: int) -> Any:
        return loss_of(f"return logprobs.sum(), {{'custom/{'a' * length}:sum': logprobs.sum()}}")

    trace(named(64), {"logprobs": 1})
    with pytest.raises(InvalidInputError, match="must be named"):
        trace(named(65), {"logprobs": 1})


def test_the_key_does_not_depend_on_the_name() -> None:
    def handle(fn: Any, rank: Any = 1, session: str = "s") -> LossHandle:
        traced = trace(fn, {"logprobs": rank})
        return LossHandle(traced.name, tuple(traced.inputs), session, traced.module)

    def named(logprobs: Any) -> Any:
        return logprobs.sum(), {}

    same = handle(lambda logprobs: (logprobs.sum(), {}), session="t")
    assert handle(named).key == same.key
    assert len(same.key) == 64
    assert handle(named, 2).key != same.key
    assert handle(lambda logprobs: (logprobs.mean(), {})).key != same.key


def test_a_handle_compares_by_what_it_names() -> None:
    traced, again = trace(clipped, RANKS), trace(clipped, RANKS)
    handle = LossHandle(traced.name, tuple(traced.inputs), "s", traced.module, loss_id="l")
    assert handle.input_names == ("sampled", "advantages")
    assert LossHandle("clipped", tuple(again.inputs), session_id="s", graph=again.module, loss_id="l") == handle
    assert LossHandle("clipped", tuple(again.inputs), "s", again.module) != handle
    assert hash(handle) == hash(LossHandle("clipped", tuple(again.inputs), "s", again.module, "l"))
    assert "graph" not in repr(handle)
    assert trace(clipped, RANKS) == traced


def loss_of(body: str, parameters: str = "logprobs") -> Any:
    names = {"torch": torch, "math": math, "np": np, "TENSOR": TENSOR, "MODULE": MODULE, "__name__": "losses"}
    exec(f"def loss({parameters}):\n    {body}\n", names)
    return names["loss"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return (logprobs * TENSOR).sum(), {}", r"operator.mul gets a tensor of shape \(3,\) that is not a parameter"),
        ("return torch.dot(logprobs, TENSOR), {}", "torch.dot gets a tensor of shape"),
        ("return logprobs.sum() + torch.tensor(1.0), {}", "operator.add gets a tensor|add gets a tensor"),
        ("return MODULE(logprobs).sum(), {}", "calls the module Linear"),
        ("return logprobs.sum() if logprobs.sum() > 0 else 0, {}", "branches on the value of operator.gt"),
        ("return max(logprobs.sum(), 0), {}", "branches on the value of operator.lt|operator.gt"),
        ("return sum(x for x in logprobs), {}", "loops over logprobs"),
        ("return logprobs.sum() * len(logprobs), {}", "cannot be traced by torch.fx: 'len'"),
        ("return logprobs.sum() * float(logprobs.mean()), {}", "cannot be traced by torch.fx"),
        ("return logprobs.item(), {}", r"calls item\(\), which leaves torch"),
        ("return logprobs.sum(), {'custom/a:sum': logprobs.tolist()}", r"calls tolist\(\)"),
        ("return logprobs.no_such_thing(), {}", r"calls no_such_thing\(\), which is not a method of a tensor"),
        ("return logprobs.sum() * 1j, {}", "operator.mul gets a complex, which cannot be sent"),
        ("return logprobs.sum() * np.float32(2), {}", "operator.mul gets a float32, which cannot be sent"),
        ("return logprobs.index_select(0, range(2)).sum(), {}", "index_select gets a range"),
        ("return logprobs.apply_(lambda x: x).sum(), {}", "apply_ gets a function"),
        ("return torch.rand_like(logprobs, generator=torch.Generator()).sum(), {}", "Generator|_opaque_obj"),
        (
            "with torch.no_grad():\n        a = logprobs * 2\n    return (a * logprobs).sum(), {}",
            "operator.mul runs under",
        ),
        ("with torch.autocast('cpu'):\n        return (logprobs * 2).sum(), {}", "operator.mul runs under"),
        ("return torch.ones(2).sum(), {}", r"the result gets a tensor of shape \(\) that is not a parameter"),
        ("return 1.0, {}", "the loss must be computed from the parameters, got 1.0"),
        ("return logprobs.sum()", r"must return \(loss, metrics\)"),
        ("return logprobs.sum(), {}, 1", r"must return \(loss, metrics\)"),
        ("return logprobs.sum(), [1]", "metrics must be a dict"),
        ("return logprobs.sum(), {'a:sum': logprobs.sum()}", "metric 'a:sum' must be named custom/<name>:sum"),
        ("return logprobs.sum(), {'custom/A:sum': logprobs.sum()}", "in lower case"),
        ("return logprobs.sum(), {1: logprobs.sum()}", "metric 1 must be named"),
        ("return logprobs.sum(), {'custom/a:mean': 1.0}", "metric 'custom/a:mean' must be a tensor, got 1.0"),
    ],
)
def test_what_cannot_be_sent_is_refused_by_name(body: str, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message) as caught:
        trace(loss_of(body), {"logprobs": 1})
    assert str(caught.value).startswith("create_custom_loss: loss: ")


def test_a_loss_that_ignores_the_logprobs_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="does not depend on the logprobs"):
        trace(loss_of("return other.sum(), {}", "logprobs, other"), {"logprobs": 1, "other": 1})


def test_a_wrapped_function_is_refused_by_name() -> None:
    names = {"torch": torch, "__name__": "losses"}
    source = (
        "helper = lambda x: x * 2\ntorch.fx.wrap('helper')\ndef loss(logprobs):\n    return helper(logprobs).sum(), {}"
    )
    exec(source, names)
    with pytest.raises(InvalidInputError, match=r"calls losses.<lambda>; only functions of torch and math can be sent"):
        trace(names["loss"], {"logprobs": 1})  # type: ignore[arg-type]


class Callable:
    def __call__(self, logprobs: Any) -> Any:
        return logprobs.sum(), {}


@pytest.mark.parametrize(
    ("fn", "ranks", "message"),
    [
        (Callable(), {"logprobs": 1}, "must be a plain function, got Callable"),
        (functools.partial(clipped), RANKS, "must be a plain function, got partial"),
        (lambda p: p, {"p": 1}, "first parameter must be named logprobs"),
        (lambda: 0, {}, "first parameter must be named logprobs"),
        (lambda logprobs, *rest: 0, {"logprobs": 1}, r"parameter \*rest must be positional"),
        (lambda logprobs, *, beta: 0, {"logprobs": 1, "beta": 0}, "parameter beta must be positional"),
        (lambda logprobs, beta=1: 0, {"logprobs": 1, "beta": 0}, "parameter beta=1 has a default"),
        (lambda logprobs, ß: 0, {"logprobs": 1, "ß": 0}, "'ß' must consist of lower-case letters"),
        (lambda logprobs: 0, {}, r"input_ranks has \[\], the parameters are \['logprobs'\]"),
        (lambda logprobs: 0, {"logprobs": 1, "x": 1}, "input_ranks has"),
        (lambda logprobs: 0, {"logprobs": 0}, r"input_ranks\['logprobs'\] is 0; allowed are \(1, 2\)"),
        (lambda logprobs, beta: 0, {"logprobs": 1, "beta": 3}, r"is 3; allowed are \(0, 1, 2\)"),
    ],
)
def test_a_wrong_signature_is_explained(fn: Any, ranks: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        trace(fn, ranks)


def test_sixteen_parameters_are_allowed_and_no_more() -> None:
    names = ["logprobs", *(f"x{i}" for i in range(16))]
    body = "return logprobs.sum(), {}"
    assert len(trace(loss_of(body, ", ".join(names[:16])), dict.fromkeys(names[:16], 1)).inputs) == 16
    with pytest.raises(InvalidInputError, match="has 17 parameters; at most 16"):
        trace(loss_of(body, ", ".join(names)), dict.fromkeys(names, 1))


def test_errors_of_the_function_itself_pass_through() -> None:
    with pytest.raises(KeyError, match="mine"):
        trace(loss_of("raise KeyError('mine')"), {"logprobs": 1})


def test_a_graph_with_other_nodes_is_refused() -> None:
    module = torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.ReLU()))
    with pytest.raises(InvalidInputError, match="reads 0, which is not a parameter"):
        encode_graph(module)


def test_missing_torch_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(TinkerError, match=r"create_custom_loss needs the package torch.*pip install torch") as told:
        trace(clipped, RANKS)
    assert isinstance(told.value, ImportError)


def test_importing_the_modules_loads_no_torch() -> None:
    losses = ("custom_loss", "loss_graph", "regularizers")
    names = [*(f"client.losses.{name}" for name in losses), "text.tokenizer", "text.chat_template"]
    source = "import sys\n" + "".join(f"import tinsmith.{name}\n" for name in names)
    heavy = ("torch", "tokenizers", "jinja2", "huggingface_hub", "transformers")
    source += f"print([name for name in {heavy!r} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == "[]"
