"""Graphs that no client would make: refused by name, before they cost anything."""

from __future__ import annotations

import resource
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tinsmith.engine.training.custom_loss import checks, interpreter, operations
from tinsmith.engine.training.custom_loss.interpreter import LossProgram
from tinsmith.errors import InvalidInputError, TinkerError
from tinsmith.wire.messages.training import CreateCustomLossRequest, CustomLossGraph, CustomLossInput, CustomLossNode

P = {"ref": "logprobs"}


def node(op: str, name: str, target: str, /, *args: Any, **kwargs: Any) -> CustomLossNode:
    return CustomLossNode(op=op, name=name, target=target, args=list(args), kwargs=kwargs)  # type: ignore[arg-type]


def call(name: str, target: str, /, *args: Any, **kwargs: Any) -> CustomLossNode:
    return node("call_function", name, target, *args, **kwargs)


def method(name: str, target: str, /, *args: Any, **kwargs: Any) -> CustomLossNode:
    return node("call_method", name, target, *args, **kwargs)


INPUT = node("placeholder", "logprobs", "logprobs")
OUTPUT = node("output", "output", "output", {"tuple": [{"ref": "loss"}, {"dict": {}}]})
LOSS = method("loss", "sum", P)


def uploaded(*nodes: CustomLossNode, inputs: Any = (("logprobs", 1),), whole: bool = False) -> LossProgram:
    """The nodes between input, loss and output; `whole` if they are all there is."""
    listed = list(nodes) if whole else [INPUT, *nodes, LOSS, OUTPUT]
    request = CreateCustomLossRequest(
        session_id="s",
        custom_loss_seq_id=0,
        name="attack",
        inputs=[CustomLossInput(name=name, rank=rank) for name, rank in inputs],
        graph=CustomLossGraph(nodes=listed),
    )
    return LossProgram(request)


def run(*nodes: CustomLossNode, size: int = 8) -> Any:
    return uploaded(*nodes).evaluate(torch.full((size,), -1.0), {})


def test_the_frame_of_these_tests_is_a_good_graph() -> None:
    assert float(run().metrics["loss:sum"]) == -8.0


@pytest.mark.parametrize(
    "target",
    [
        "eval", "exec", "open", "__import__", "builtins.eval", "os.system", "subprocess.run", "importlib.import_module",
        "torch.load", "torch.save", "torch.hub.load", "torch.ops.aten.add", "torch.utils.cpp_extension.load",
        "torch.serialization.load", "torch.classes.load_library", "torch.ops.load_library", "torch.jit.load",
        "torch.from_file", "torch.empty", "torch.empty_like", "torch.rand", "torch.randn_like", "torch.manual_seed",
        "torch.set_num_threads", "torch.set_default_dtype", "torch.autograd.backward", "torch.as_strided",
        "torch.einsum",
        "torch.Tensor.set_", "torch.Tensor.backward", "torch.Tensor.__reduce__", "torch.Tensor.__getattribute__",
        "operator.attrgetter", "operator.methodcaller", "operator.setitem", "operator.iadd", "operator.call",
        "operator.concat", "operator.lshift", "math.factorial", "math.comb", "math.perm", "setattr", "delattr",
        "getattr.__class__", "torch..exp", "torch.exp ", "", "torch", "torch.add.__globals__",
        "torch.nn.functional.sys",
    ],
)  # fmt: skip
def test_functions_beside_the_list_are_refused(target: str) -> None:
    with pytest.raises(InvalidInputError, match="is not a function that a loss may call"):
        uploaded(call("x", target, P))


@pytest.mark.parametrize(
    "target",
    [
        "item", "tolist", "numpy", "backward", "add_", "zero_", "set_", "resize_", "requires_grad_", "register_hook",
        "share_memory_", "storage", "untyped_storage", "data_ptr", "apply_", "map_", "__reduce_ex__", "__class__",
        "__setstate__", "__getattribute__", "cuda", "cpu", "new_empty", "new_tensor", "as_strided", "unfold",
        "bernoulli",
        "random_", "copy_", "put_", "index_put_", "retain_grad", "module_load", "format", "join", "", "sum ",
    ],
)  # fmt: skip
def test_methods_beside_the_list_are_refused(target: str) -> None:
    with pytest.raises(InvalidInputError, match="is not a method that a loss may call"):
        uploaded(method("x", target, P))


@pytest.mark.parametrize("attribute", ["__class__", "data", "grad", "grad_fn", "__dict__", "is_leaf", 3, None, P])
def test_attributes_beside_the_list_are_refused(attribute: Any) -> None:
    with pytest.raises(InvalidInputError, match="reads an attribute"):
        uploaded(call("x", "getattr", P, attribute))
    with pytest.raises(InvalidInputError, match="reads an attribute"):
        uploaded(call("x", "getattr", P, "shape", None))


def test_attributes_are_those_of_tensors_and_results() -> None:
    shape = call("s", "getattr", P, "shape")
    with pytest.raises(InvalidInputError, match="reads 'T' of Size"):
        run(shape, call("x", "getattr", {"ref": "s"}, "T"))
    with pytest.raises(InvalidInputError, match="reads 'values' of a tensor"):
        run(call("x", "getattr", P, "values"))
    with pytest.raises(InvalidInputError, match="reads 'values' of Size"):
        run(shape, call("x", "getattr", {"ref": "s"}, "values"))
    with pytest.raises(InvalidInputError, match="reads 'values' of list"):
        run(call("x", "getattr", [P], "values"))


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"out": P}, "'out' is not allowed"),
        ({"generator": None}, "'generator' is not allowed"),
        ({"pin_memory": True}, "'pin_memory' is not allowed"),
        ({"__class__": 1}, "'__class__' is not allowed"),
        ({"inplace": True}, "'inplace' may not be set"),
        ({"inplace": P}, "'inplace' may not be set"),
        ({"requires_grad": True}, "'requires_grad' may not be set"),
        ({"layout": {"layout": "sparse_coo"}}, "'layout' may not be set"),
        ({"dtype": {"dtype": "complex64"}}, "is not a valid argument"),
        ({"dtype": {"dtype": "nn"}}, "is not a valid argument"),
        ({"dim": "os"}, "the string 'os' is not an argument"),
        ({"device": {"device": "../../etc"}}, "is not a valid argument"),
    ],
)
def test_named_arguments_beside_the_list_are_refused(kwargs: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidInputError, match=text):
        uploaded(call("x", "torch.nn.functional.relu", P, **kwargs))


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        ({"ref": "later"}, "refers to a later node"),
        ({"ref": "x"}, "refers to a later node"),
        ({"ref": ["logprobs"]}, "is not a valid argument"),
        ({"ref": "logprobs", "tuple": []}, "exactly one key"),
        ({}, "exactly one key"),
        ({"code": "import os"}, "is not a valid argument"),
        ({"slice": [1, 2]}, "is not a valid argument"),
        ({"ellipsis": 1}, "is not a valid argument"),
        ({"float": "1e999"}, "is not a valid argument"),
        ({"dict": {"__class__": 1}}, "must be named custom/"),
        ({"memory_format": "channels_last"}, "is not a valid argument"),
        (deep(7), "6 deep"),
        (deep(12), "6 deep"),
        (deep(900), "nested too deeply"),
        ([0] * 300, "may contain at most 256 values"),
        (2**60, "integer that is too large"),
        (10**4000, "integer that is too large"),
        (b"bytes", "of type bytes"),
        ("x" * 10**5, "is not an argument"),
        ("x" * 10**6, "more than 524288 characters"),
    ],
)
def test_arguments_of_other_forms_are_refused(argument: Any, text: str) -> None:
    with pytest.raises(InvalidInputError, match=text) as caught:
        uploaded(call("x", "torch.exp", argument), call("later", "torch.exp", P))
    assert len(str(caught.value)) < 2100


@pytest.mark.parametrize(
    ("nodes", "text"),
    [
        ([], "has 0 nodes"),
        ([INPUT, LOSS], "one output, its last node"),
        ([INPUT, LOSS, OUTPUT, OUTPUT], "one output, its last node"),
        ([INPUT, LOSS, LOSS, OUTPUT], "the name 'loss' is already taken"),
        ([INPUT, INPUT, LOSS, OUTPUT], "is already taken"),
        ([INPUT, node("placeholder", "b", "b"), LOSS, OUTPUT], "placeholders must be the inputs"),
        ([call("loss", "torch.exp", 1.0), OUTPUT], "placeholders must be the inputs"),
        ([INPUT, node("get_attr", "w", "weight"), LOSS, OUTPUT], "reads something that is not an input"),
        ([INPUT, node("call_module", "w", "linear", P), LOSS, OUTPUT], "reads something that is not an input"),
        ([node("placeholder", "logprobs", "logprobs", 1.0), LOSS, OUTPUT], "may not have a default"),
        ([INPUT, call("loss", "operator.add", 1, 2), OUTPUT], "does not depend on the logprobs"),
        ([INPUT, LOSS, node("output", "output", "output", {"ref": "loss"})], "must be .loss, metrics."),
        ([INPUT, LOSS, node("output", "output", "output", {"tuple": [1.0, {"dict": {}}]})], "must be .loss, metrics."),
        (
            [INPUT, LOSS, node("output", "o", "output", {"tuple": [{"ref": "loss"}, {"dict": {"custom/a:sum": 1.0}}]})],
            "must be the result of a node",
        ),
    ],
)
def test_graphs_of_other_forms_are_refused(nodes: list[CustomLossNode], text: str) -> None:
    with pytest.raises(InvalidInputError, match=text):
        uploaded(*nodes, whole=True)


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        ((), "first input must be logprobs"),
        ((("advantages", 1),), "first input must be logprobs"),
        ((("logprobs", 0),), "first input must be logprobs"),
        ((("logprobs", 1), ("logprobs", 1)), "inputs with different names"),
        (tuple([("logprobs", 1)] + [(f"a{i}", 1) for i in range(20)]), "at most 16 inputs with different names"),
        ((("logprobs", 1), ("__class__", 1), ("A", 1)), "lower-case letters"),
    ],
)
def test_inputs_of_other_forms_are_refused(inputs: Any, text: str) -> None:
    with pytest.raises(InvalidInputError, match=text):
        uploaded(inputs=inputs)


def test_too_many_nodes_are_refused() -> None:
    steps = [call(f"n{i}", "torch.exp", P) for i in range(checks.MAX_NODES)]
    with pytest.raises(InvalidInputError, match="1 to 2000 are allowed"):
        uploaded(*steps)


def doubling(target: str, start: Any, times: int = 60) -> list[CustomLossNode]:
    nodes, last = [], start
    for i in range(times):
        nodes.append(call(f"n{i}", target, *([[last, last]] if target == "torch.cat" else [last, last])))
        last = {"ref": f"n{i}"}
    return nodes


HUGE: list[tuple[str, list[CustomLossNode]]] = [
    ("expand", [method("x", "expand", P, 2**30, 8)]),
    ("repeat", [method("x", "repeat", P, 2**40)]),
    ("new_zeros", [method("x", "new_zeros", P, 2**45)]),
    ("new_full", [method("x", "new_full", P, [2**20, 2**20], 1.0)]),
    ("tile", [call("x", "torch.tile", P, [2**40])]),
    ("pad", [call("x", "torch.nn.functional.pad", P, [0, 2**45])]),
    ("one_hot", [method("i", "long", P), call("j", "torch.abs", {"ref": "i"}),
                 call("x", "torch.nn.functional.one_hot", {"ref": "j"}, 2**50)]),
    ("cat", doubling("torch.cat", P)),
    ("outer", [method("a", "repeat", P, 2**15), call("x", "torch.outer", {"ref": "a"}, {"ref": "a"})]),
    ("diag", [method("a", "repeat", P, 2**15), call("x", "torch.diag", {"ref": "a"})]),
    ("broadcast", [method("a", "repeat", P, 2**15), method("b", "unsqueeze", {"ref": "a"}, 1),
                   call("x", "operator.mul", {"ref": "a"}, {"ref": "b"})]),
    ("masked_select", [method("a", "repeat", P, 2**15), method("b", "unsqueeze", {"ref": "a"}, 1),
                       call("m", "operator.lt", {"ref": "b"}, 0),
                       call("x", "torch.masked_select", {"ref": "a"}, {"ref": "m"})]),
    ("sum of many", [n for i in range(100) for n in [method(f"x{i}", "repeat", P, 2**21)]]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "nodes"), HUGE, ids=[name for name, _ in HUGE])
def test_results_that_are_too_large_are_refused_before_they_are_made(name: str, nodes: list[CustomLossNode]) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InvalidInputError, match=r"cells, .* with the earlier ones|too large|overflow|invalid"):
        run(*nodes)
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 2 * interpreter.MAX_RUN_CELLS * 4 / 1024


def test_products_are_bounded() -> None:
    wide = [method("a", "repeat", P, 2**12, 2**9), method("b", "t", {"ref": "a"})]
    with pytest.raises(InvalidInputError, match="would take 68719476736 multiplications"):
        run(*wide, call("x", "torch.matmul", {"ref": "a"}, {"ref": "b"}))
    with pytest.raises(InvalidInputError, match="multiplications"):
        run(*wide, call("x", "operator.matmul", {"ref": "a"}, {"ref": "b"}))
    with pytest.raises(InvalidInputError, match="takes two tensors as positional arguments"):
        run(*wide, call("x", "torch.matmul", input={"ref": "a"}, other={"ref": "b"}))


@pytest.mark.parametrize(
    ("nodes", "text"),
    [
        ([call("x", "operator.mul", [1, 2], 10**9)], "takes tensors and numbers, got list"),
        ([call("x", "operator.mul", {"tuple": [1]}, 10**9)], "got tuple"),
        ([call("x", "operator.mod", "sum", 1)], "got str"),
        ([call("x", "operator.add", "sum", "sum")], "got str"),
        ([call("x", "operator.pow", 9, 10**9)], "too large for an integer"),
        (doubling("operator.mul", 10**9), "an integer that is too large"),
        ([call("x", "math.exp", 1e9)], "range"),
        ([call("x", "math.exp", P)], "takes numbers, got a tensor"),
        ([call("x", "operator.getitem", "sum", 0)], "only tensors and tuples have items"),
        ([call("x", "operator.getitem", [1, 2], 0)], "only tensors and tuples have items"),
        ([method("x", "sum", "sum")], "is a tensor method, called on str"),
        ([method("x", "sum")], "is a tensor method, called on nothing"),
        ([call("x", "torch.Tensor.sum", 1)], "is a tensor method, called on int"),
        ([call("x", "torch.exp", P, P, P)], "argument|expected|given"),
        ([call("x", "torch.exp")], "argument"),
        ([call("x", "torch.masked_select")], "index|argument"),
        ([call("x", "torch.reshape", P, [-5, 3])], "shape|dimension"),
        ([method("x", "to", P, "sum")], "device|Expected"),
        ([call("x", "torch.gather", P, 0, {"ref": "i"})], "out of bounds"),
        ([call("x", "operator.getitem", P, {"tuple": [{"ref": "m"}, {"ref": "i"}]})], "the only tensor of an index"),
    ],
)
def test_values_of_other_kinds_are_refused_when_it_runs(nodes: list[CustomLossNode], text: str) -> None:
    indices = [
        method("big", "mul", P, -1000.0),
        method("i", "long", {"ref": "big"}),
        call("m", "operator.lt", P, 0),
    ]
    with pytest.raises(InvalidInputError, match=text):
        run(*indices, *nodes)


def test_inputs_are_never_written_to() -> None:
    logprobs = torch.full((8,), -1.0)
    nodes = [method("a", "detach", P), method("b", "contiguous", {"ref": "a"}), call("c", "torch.relu", {"ref": "b"})]
    uploaded(*nodes).evaluate(logprobs, {})
    assert torch.equal(logprobs, torch.full((8,), -1.0))
    writing = [name for name in operations.METHODS if name.endswith("_")]
    writing += [name for name in operations.FUNCTIONS if name.endswith("_") and not name.startswith("operator.")]
    assert writing == []


_LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 9),
    st.floats(-3, 3),
    st.sampled_from([P, {"ref": "logprobs"}, {"ellipsis": True}, {"float": "inf"}, {"dtype": "float64"}, "sum"]),
)
_ARGUMENTS = st.recursive(
    _LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(lambda v: {"tuple": v}),
    max_leaves=4,
)


@settings(max_examples=400, deadline=None)
@given(
    target=st.sampled_from(sorted(operations.FUNCTIONS)),
    args=st.lists(_ARGUMENTS, max_size=3),
    key=st.sampled_from(sorted(operations.KEYWORDS)),
    value=_ARGUMENTS,
    has_keyword=st.booleans(),
)
def test_any_arguments_to_any_operation_end_in_a_result_or_a_refusal(
    target: str, args: list[Any], key: str, value: Any, has_keyword: bool
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch has opinions on odd arguments
        try:
            result = run(call("x", target, *args, **({key: value} if has_keyword else {})))
        except TinkerError:
            return
    assert float(result.metrics["loss:sum"]) == -8.0
