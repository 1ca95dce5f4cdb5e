"""Describes what a program can see of a package that offers the Tinker API: names, parameters, members, modules.

Run as `python surface.py tinker`, or with the name of any package that stands in for it; prints one JSON object, with
`--modules` the package's module files, too. `--try` prints what each of EXPRESSIONS gives instead, `--auth` what the
package says of the credentials in each environment of a JSON list on stdin.
Two packages whose descriptions are equal look the same to `inspect`. Nothing here imports tinsmith.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import json
import os
import pathlib
import re
import sys
import types as python_types
import typing
import warnings
from typing import Any

os.environ["TINKER_TELEMETRY"] = "0"

NAME = sys.argv[1]
package = importlib.import_module(NAME)
types = importlib.import_module(f"{NAME}.types")

CLIENTS = {
    "AdminClient": NAME,
    "APIFuture": NAME,
    "LossHandle": NAME,
    "RestClient": NAME,
    "RetryConfig": f"{NAME}.lib.retry_handler",
    "SamplingClient": NAME,
    "ServiceClient": NAME,
    "TrainingClient": NAME,
}
"""Classes whose members are all described, and where programs get them."""

PYDANTIC = ("model_copy", "model_dump", "model_dump_json", "model_validate", "model_validate_json")
"""Of what pydantic gives its models, the methods that programs call on wire types."""

NOT_DESCRIBED = ("cli", "proto", "resources")
"""Parts of the official package that no program imports."""

EXPRESSIONS = """
t.TensorData([1, 2], "int64").tolist()
t.TensorData(data=[1.0, 2.0], dtype="float32").data
t.TensorData(data=[1, 2, 3, 4], dtype="int64", shape=[2, 2]).tolist()
t.TensorData(data=np.array([1.5, 2.5], np.float32), dtype="float32").tolist()
t.TensorData(data=np.array([1, 2])).dtype
t.TensorData(data=torch.tensor([1, 2]), dtype="int64").tolist()
t.TensorData(data=[1], dtype="int8")
t.TensorData()
SPARSE.tolist()
SPARSE.tolist(5)
SPARSE.to_numpy(5)
SPARSE.to_torch(5)
t.TensorData.from_numpy(np.array([[1, 2]])).shape
t.TensorData.from_numpy(np.array([0.5])).dtype
t.TensorData.from_torch(torch.tensor([0.5], dtype=torch.bfloat16)).data
t.TensorData.from_torch(torch.tensor([[1, 2], [3, 4]])).to_torch()
t.TensorData.from_torch_sparse(torch.eye(64)).to_torch().sum()
t.TensorData([1, 2], "int64") == t.TensorData([1, 2], "int64")
t.ModelInput.from_ints([1, 2]).to_ints()
t.ModelInput.from_ints((1, 2)).to_ints()
t.ModelInput.from_ints(range(3)).to_ints()
t.ModelInput.from_ints(np.array([1, 2])).to_ints()
t.ModelInput.empty().length
t.ModelInput.empty().append_int(3).append(t.EncodedTextChunk(tokens=[4])).to_ints()
t.ModelInput(chunks=[{"type": "encoded_text", "tokens": [1, 2]}]).to_ints()
t.ModelInput(chunks=[t.ImageChunk(data=b"x", format="png")]).length
t.ModelInput([t.EncodedTextChunk(tokens=[1])])
t.ModelInput(chunks=[], extra=1)
t.ModelInput.from_ints([1]) == t.ModelInput.from_ints([1])
t.EncodedTextChunk(tokens=[1, 2], type="encoded_text").tokens
t.EncodedTextChunk(tokens=[1, 2]).tokens[:-1] + [3]
t.EncodedTextChunk([1])
t.EncodedTextChunk(tokens=["a"])
t.EncodedTextChunk(tokens=[1], extra=2)
t.ImageChunk(data=b"x", format="png", expected_tokens=4).length
t.ImageChunk(data="eA==", format="jpeg").data
t.ImageChunk(data=b"x", format="gif")
t.ImageAssetPointerChunk(format="png", location="gs://x", expected_tokens=4).length
t.DmelChunk(dmel=b"ab").dmel
t.Datum(t.ModelInput.from_ints([1, 2])).loss_fn_inputs
t.Datum(t.ModelInput.from_ints([1, 2]), {"weights": [0.0, 1.0]}).loss_fn_inputs["weights"].tolist()
datum({"target_tokens": [1]}).loss_fn_inputs["target_tokens"].dtype
datum({"weights": np.array([0.5])}).loss_fn_inputs["weights"].tolist()
datum({"weights": torch.tensor([0.5])}).loss_fn_inputs["weights"].tolist()
datum({"mine": t.TensorData([1], "int64")}).loss_fn_inputs["mine"].tolist()
datum({"mine": [1]})
datum({"target_tokens": [1]}).with_provenance([span("Prompt")], [span("Sampled")]).model_input_spans[0].length
t.AdamParams().model_dump()
t.AdamParams(learning_rate=1e-4, beta1=0.8, beta2=0.9, eps=1e-8, weight_decay=0.1, grad_clip_norm=1.0).model_dump()
t.AdamParams(1e-4)
t.AdamParams(learning_rate="0.1").learning_rate
t.AdamParams(lr=1e-4)
setattr(t.AdamParams(), "beta1", 0.5)
t.AdamParams() == t.AdamParams()
hash(t.AdamParams()) == hash(t.AdamParams())
t.DimuonParams(learning_rate=0.1, type="dimuon").type
t.AdamOptimizerConfig(type="adamw").type
t.LoraConfig(rank=8).model_dump()
t.SamplingParams().model_dump()
t.SamplingParams(max_tokens=8, seed=1, stop=["a"], temperature=0, top_k=5, top_p=0.9).model_dump()
t.SamplingParams(stop="a").stop
t.SamplingParams(stop=[1, 2]).stop
t.SamplingParams(max_token=8).max_tokens
t.SampledSequence("stop", "id", np.array([1, 2], np.int32), np.array([-0.5, -1.0], np.float32)).tokens
t.SampledSequence(stop_reason="stop", sequence_id="id", logprobs_np=np.array([-0.5], np.float32)).logprobs
t.SampledSequence(stop_reason="length", sequence_id="id", _tokens_list=[1, 2], _logprobs_list=[-0.5, -1.0]).logprobs
t.SampledSequence(stop_reason="length", sequence_id="id").tokens
t.SampledSequence(stop_reason="stop", tokens=[1], logprobs=[-0.5]).tokens
t.SampleResponse([t.SampledSequence("stop", "id", np.array([1], np.int32))]).sequences[0].tokens
t.SampleResponse(sequences=[], prompt_logprobs_np=np.array([np.nan, -0.5], np.float32)).prompt_logprobs
t.SampleResponse(sequences=[], _prompt_logprobs_list=[None, -0.5]).prompt_logprobs
t.SampleResponse(sequences=[], _topk_prompt_logprobs_list=[None, [(1, -0.5)]]).topk_prompt_logprobs
t.ForwardBackwardOutput("T", [], {"loss:sum": 1.0}).metrics
t.ForwardBackwardOutput(loss_fn_output_type="T", loss_fn_outputs=[{"a": SPARSE}]).loss_fn_outputs[0]["a"].data
t.ForwardBackwardOutput(loss_fn_output_type="T", loss_fn_outputs=[]).metrics
t.ForwardBackwardInput([], "ppo", {"clip_low_threshold": 0.8}).loss_fn_config
t.ForwardBackwardRequest(t.ForwardBackwardInput([], "cross_entropy"), "m", 3).seq_id
t.ForwardRequest(t.ForwardBackwardInput([], "cross_entropy"), "m").model_id
t.PromptProvenanceSpan("s", 1, 2).offset
checkpoint().time.year
checkpoint(new=1).public
t.ParsedCheckpointTinkerPath.from_tinker_path("tinker://run/weights/0001").model_dump()
t.ParsedCheckpointTinkerPath.from_tinker_path("run/weights/0001")
t.OptimStepRequest(optim_params=t.AdamParams(), model_id="m").optim_params.beta1
t.RequestErrorCategory("user").name
tinker.RequestFailedError("m", request_id="r", category=t.RequestErrorCategory.User).category
tinker.APIError("m", None, body={"a": 1}).body
tinker.APIConnectionError(request=None).message
tinker.Timeout(5.0, connect=1.0).as_dict()
tinker.RequestOptions(max_retries=1)
t.SamplingParams(max_tokens=3).model_dump(exclude_none=True)
t.SamplingParams(max_tokens=3).model_dump_json()
t.AdamParams().model_copy(update={"beta1": 0.5}).beta1
t.AdamParams.model_validate({"learning_rate": 0.5}).learning_rate
t.AdamParams.model_validate({"lr": 0.5}).learning_rate
t.AdamParams.model_validate_json('{"learning_rate": 0.5}').learning_rate
t.AdamParams(beta1=0.5).model_dump(exclude_defaults=True)
t.AdamParams(beta1=0.5).model_dump(exclude_unset=True)
t.AdamParams(beta1=0.5).model_dump(include={"beta1"})
t.AdamParams(beta1=0.5).model_fields_set
list(t.AdamParams.model_fields)
t.ModelInput.from_ints([1]).model_dump()
t.ModelInput.model_validate({"chunks": [{"type": "encoded_text", "tokens": [1]}]}).to_ints()
t.EncodedTextChunk(tokens=[1]).model_copy(update={"tokens": [2]}).tokens
t.ImageChunk(data=b"x", format="png").model_dump()
t.ImageChunk(data=b"x", format="png").model_dump_json()
t.ImageChunk(data=b"x", format="png").model_copy(update={"expected_tokens": 5}).length
MIXED.model_dump()
MIXED.model_dump(mode="json")
MIXED.model_dump_json()
MIXED.model_dump_json(indent=2)
MIXED.model_dump_json(exclude_none=True)
MIXED.model_dump(exclude_unset=True)
MIXED.model_dump(exclude_defaults=True)
MIXED.model_dump(include={"chunks": {0: {"tokens"}}})
MIXED.model_dump(include={"chunks": {-1}})
MIXED.model_dump(include={"chunks": {0: {"tokens"}, "__all__": {"type"}}})
MIXED.model_dump(include={"chunks": {"tokens"}})
MIXED.model_dump(exclude={"chunks": {"__all__": {"type"}}})
MIXED.model_dump(exclude={"chunks": {0: True}})
MIXED.model_dump(exclude={"chunks": ...})
MIXED.model_dump(include={"chunks": {0, 1}}, exclude={"chunks": {1: {"data"}}})
MIXED.model_dump(include=set())
MIXED.model_dump(include={"chunks": 5})
MIXED.model_dump(excluding={"chunks"})
MIXED.model_copy(deep=True) == MIXED
MIXED.model_copy(update={"chunks": []}).length
t.ModelInput.model_validate_json(MIXED.model_dump_json()) == MIXED
t.ModelInput.model_validate(MIXED) == MIXED
t.ModelInput.model_validate([1])
t.ModelInput.model_validate_json("{")
list(t.ModelInput.model_fields)
list(t.ImageAssetPointerChunk.model_fields)[-1]
t.ImageChunk.model_validate({"data": "eA==", "format": "png"}).data
t.ImageChunk.model_validate({"format": "png"})
t.ImageChunk.model_validate({"data": "eA==", "format": "png", "type": "dmel"})
t.DmelChunk.model_validate_json('{"dmel": "YWI="}').dmel
t.EncodedTextChunk.model_validate_json('{"tokens": [1, 2]}').tokens
request().model_dump()["prompt"]
request().model_dump(exclude_unset=True)
request().model_dump(exclude_defaults=True)
request().model_dump(include={"sampling_params": {"max_tokens"}, "num_samples": True})
request().model_dump_json(include={"sampling_params"}, exclude={"sampling_params": {"seed", "stop"}})
t.SamplingParams(max_tokens=3, stop=None).model_dump(exclude_unset=True)
t.SamplingParams(max_tokens=3, stop=None).model_dump(exclude_defaults=True)
t.SamplingParams(max_tokens=3).model_dump(exclude={"max_tokens", "nothing"}, exclude_none=True)
t.AdamParams(beta1=0.9).model_dump(exclude_unset=True)
t.AdamOptimizerConfig().model_dump(exclude_defaults=True)
t.AdamOptimizerConfig().model_dump_json()
t.AdamParams.model_fields["beta1"].default
t.AdamParams.model_fields["beta1"].annotation
t.AdamParams.model_fields["beta1"].is_required()
t.LoraConfig.model_fields["rank"].is_required()
list(t.AdamOptimizerConfig.model_fields)
t.AdamParams.model_validate_json("[1]")
t.SaveWeightsResponse(path="tinker://run:train:0/weights/a b").get_console_url()
t.SaveWeightsForSamplerResponse(path="tinker://run/sampler_weights/a").get_console_url()
t.SaveWeightsForSamplerResponse(path="tinker://run/sampler_weights/a b").get_playground_url()
t.SaveWeightsResponse(path="run/weights/a").get_console_url()
t.TensorData(data=torch.tensor([[1, 2]]), dtype="int64").tolist()
t.TensorData(data=torch.tensor([1, 2]), dtype="float32").data
t.TensorData([1, 2], "int64").tolist(pad_value=5)
checkpoint().model_dump(mode="json")
checkpoint().model_dump_json()
dataclasses.replace(datum({}), loss_fn_inputs={"weights": [1.0]}).loss_fn_inputs["weights"].tolist()
dataclasses.replace(t.EncodedTextChunk(tokens=[1]), tokens=[2]).tokens
[field.name for field in dataclasses.fields(t.SampleResponse)][0]
tinker.types.image_chunk.ImageChunk is t.ImageChunk
tinker.lib.public_interfaces.APIFuture is tinker.APIFuture
tinker._exceptions.APIError is tinker.APIError
datum({}, extra=1).model_input
t.Datum(loss_fn_inputs={})
"""
"""What programs write; each is evaluated with the names of `attempt`."""


def describe() -> dict[str, Any]:
    return {
        "names": {name: entry(getattr(package, name)) for name in package.__all__},
        "types": {name: type_entry(getattr(types, name)) for name in public_types()},
        "auth": functions(importlib.import_module(f"{NAME}.auth")),
        "members": {name: members(getattr(importlib.import_module(home), name)) for name, home in CLIENTS.items()},
        "modules": modules() if "--modules" in sys.argv else {},
    }


def public_types() -> list[str]:
    """The names that `types` is there for, without what its own module happens to import."""
    return sorted(
        name
        for name in dir(types)
        if name[0].isupper() and not isinstance(getattr(types, name), python_types.ModuleType)
    )


def entry(value: Any) -> dict[str, Any]:
    """What a public name is. Errors: how they are made and what they descend from."""
    if isinstance(value, python_types.ModuleType):
        return {"kind": "module"}
    if inspect.isclass(value):
        if hasattr(value, "__total__"):
            return {"kind": "typed dict", "values": sorted(value.__annotations__)}
        if issubclass(value, BaseException):
            return {"kind": "class", "ancestors": ancestors(value), "parameters": parameters(value)}
        return {"kind": "class", "parameters": parameters(value)} if value.__name__ == "Timeout" else {"kind": "class"}
    if typing.get_origin(value) is typing.Literal:
        return {"kind": "alias", "values": sorted(map(str, typing.get_args(value)))}
    if isinstance(value, str):
        return {"kind": "text"}
    return {"kind": "alias"}


def ancestors(cls: type) -> list[str]:
    return [base.__name__ for base in cls.__mro__[1:] if base is not object]


def type_entry(value: Any) -> dict[str, Any]:
    """A wire type: its constructor and its members that are no fields."""
    found = entry(value)
    if found["kind"] != "class" or value is str:
        return found | {"kind": "alias"}
    if issubclass(value, str):
        return {"kind": "enum", "values": {member.name: member.value for member in value}}
    found["parameters"] = parameters(value) + tag_parameter(value)
    fields = {name for name, *_ in found["parameters"]}
    found["members"] = {
        name: member
        for name, member in members(value).items()
        if name not in fields and not name.startswith("__") and not is_inherited(value, name)
    }
    found["pydantic"] = [name for name in PYDANTIC if hasattr(value, name)]
    found["is_dataclass"] = dataclasses.is_dataclass(value)
    return found


def tag_parameter(cls: type) -> list[list[Any]]:
    """The parameter that a member of a tagged union takes although its signature does not show it."""
    config = getattr(cls, "__struct_config__", None)
    return [[config.tag_field, "KEYWORD_ONLY", config.tag]] if config is not None and config.tag is not None else []


def is_inherited(cls: type, name: str) -> bool:
    """From a base that all messages share, pydantic's or the package's own."""
    return name.startswith("model_") or any(
        name in vars(base) for base in cls.__mro__[1:] if base.__name__ in ("BaseModel", "Message", "Frozen", "Struct")
    )


def members(cls: type) -> dict[str, Any]:
    """Public methods, properties and attributes, with the parameters of what can be called."""
    found: dict[str, Any] = {}
    for name in dir(cls):
        if name.startswith("_") and name not in ("__init__", "__enter__", "__exit__", "__aenter__", "__aexit__"):
            continue
        static = inspect.getattr_static(cls, name)
        if isinstance(static, (property, functools.cached_property, python_types.MemberDescriptorType)):
            found[name] = {"kind": "property"}
        elif isinstance(static, (staticmethod, classmethod)):
            found[name] = {"kind": type(static).__name__, **callable_entry(getattr(cls, name))}
        elif callable(static) and not inspect.isclass(static):
            found[name] = {"kind": "method", **callable_entry(static, skip=1)}
        else:
            found[name] = {"kind": "property"}
    return found


def functions(module: python_types.ModuleType) -> dict[str, Any]:
    return {
        name: {"kind": "function", **callable_entry(value)}
        for name, value in vars(module).items()
        if inspect.isfunction(value) and not name.startswith("_") and value.__module__ == module.__name__
    }


def callable_entry(value: Any, skip: int = 0) -> dict[str, Any]:
    return {"is_async": inspect.iscoroutinefunction(value), "parameters": parameters(value)[skip:]}


def parameters(value: Any) -> list[list[Any]]:
    """[name, kind, default] of each parameter; the default of one that must be given is "required"."""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return []
    return [
        [item.name, item.kind.name, default_of(value, item) if item.default is not item.empty else "required"]
        for item in signature.parameters.values()
    ]


def default_of(owner: Any, parameter: inspect.Parameter) -> Any:
    """A default as plain values; what a factory makes counts as the default."""
    default = parameter.default
    if "factory" in repr(default) or type(default).__name__ == "Factory":
        fields = {spec.name: spec for spec in dataclasses.fields(owner)} if dataclasses.is_dataclass(owner) else {}
        if parameter.name in fields:
            return plain(fields[parameter.name].default_factory())
        if hasattr(owner, "model_fields"):
            return plain(owner.model_fields[parameter.name].get_default(call_default_factory=True))
        return plain(getattr(default, "factory", lambda: default)())
    return plain(default)


def plain(value: Any) -> Any:
    """Enough of a value to compare it with another package's; "not given" is None, a class its name."""
    if type(value).__name__ in ("UnsetType", "NoneType", "object"):
        return None
    if isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, bytes):
        return value.hex()
    if inspect.isclass(value):
        return value.__name__
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, set):
        return sorted(map(plain, value))
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if hasattr(value, "model_dump"):
        return {type(value).__name__: plain(value.model_dump())}
    return type(value).__name__


def modules() -> dict[str, list[str]]:
    """Every module that is neither private nor a test, relative to the package, with the public names it defines."""
    root = pathlib.Path(package.__file__).parent
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        if not parts or parts[0] in NOT_DESCRIBED or parts[-1].endswith("_test"):
            continue
        if any(part.startswith("_") for part in parts) and parts not in (("_exceptions",), ("_version",)):
            continue
        found[".".join(parts)] = defined(importlib.import_module(".".join((NAME, *parts))), path.read_text())
    return found


def defined(module: python_types.ModuleType, source: str) -> list[str]:
    """The public classes, functions and aliases that a module is the home of (not what it imports)."""
    listed = getattr(module, "__all__", None)
    if listed is not None and not re.search(r"^(class|def) ", source, re.MULTILINE):
        return sorted(listed)
    homes = set(re.findall(r"^(?:class|def|async def) ([A-Za-z]\w*)|^([A-Z][a-z]\w*)\b[^=\n(]*=", source, re.MULTILINE))
    return sorted({name for pair in homes for name in pair if name and hasattr(module, name)})


def attempt(expression: str) -> dict[str, Any]:
    """What an expression gives: {"ok": plain value} or {"raises": "ValueError" | "TypeError" | ...}."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return {"ok": plain(eval(expression, names_for_expressions()))}
    except Exception as error:  # every failure is an answer: the test that asked decides
        kinds = (KeyError, AttributeError, ValueError, TypeError)
        return {"raises": next((kind.__name__ for kind in kinds if isinstance(error, kind)), type(error).__name__)}


@functools.cache
def names_for_expressions() -> dict[str, Any]:
    import numpy
    import torch

    sparse = {"shape": [1, 2], "sparse_crow_indices": [0, 1], "sparse_col_indices": [1]}
    image = types.ImageChunk(data=b"x", format="png")
    mixed = types.ModelInput(chunks=[types.EncodedTextChunk(tokens=[1, 2]), image])
    moment = {"checkpoint_type": "training", "time": "2026-01-01T00:00:00Z"}
    return {
        "tinker": package,
        "t": types,
        "np": numpy,
        "torch": torch,
        "dataclasses": dataclasses,
        "MIXED": mixed,
        "request": lambda: types.SampleRequest(prompt=mixed, sampling_params=types.SamplingParams(max_tokens=2)),
        "SPARSE": types.TensorData(data=[7], dtype="int64", **sparse),
        "datum": lambda inputs, **more: types.Datum(types.ModelInput.from_ints([1]), inputs, **more),
        "span": lambda kind: getattr(types, f"{kind}ProvenanceSpan")(sequence_id="s", length=1),
        "checkpoint": lambda **more: types.Checkpoint(checkpoint_id="c", tinker_path="t", **moment, **more),
    }


def credentials(environments: list[dict[str, str]]) -> list[list[Any]]:
    """What `auth` says in each of some environments."""
    auth = importlib.import_module(f"{NAME}.auth")
    answers = []
    for environment in environments:
        os.environ.update(environment)
        answers.append([auth.get_tinker_token(), auth.tinker_has_credentials()])
        for name in environment:
            del os.environ[name]
    return answers


def main() -> None:
    answer: Any
    if "--try" in sys.argv:
        answer = {text: attempt(text) for text in EXPRESSIONS.strip().splitlines()}
    elif "--auth" in sys.argv:
        answer = credentials(json.load(sys.stdin))
    else:
        answer = describe()
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
