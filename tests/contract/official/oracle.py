"""Answers questions about one release of the official SDK, from inside its own environment.

Run as `python oracle.py` with PYTHONPATH naming the release's folder; one JSON request per line in, one JSON answer per
line out: {"ok": ...} or {"error": text}. Nothing here imports tinsmith.
"""

from __future__ import annotations

import ast
import asyncio
import base64
import dataclasses
import importlib
import inspect
import json
import os
import pathlib
import pkgutil
import re
import types
import typing
from typing import Any

os.environ["TINKER_TELEMETRY"] = "0"

import numpy as np
import pydantic
import tinker
import tinker.types
from questions import answer_all

VERSION = tuple(int(part) for part in tinker.__version__.split("."))
SENDS_ONLY_SET_FIELDS = VERSION < (0, 18)


def wire_types() -> dict[str, type]:
    """Every class of the release's types package that has fields."""
    found = {}
    for info in pkgutil.walk_packages(tinker.types.__path__, "tinker.types."):
        for name, value in vars(importlib.import_module(info.name)).items():
            if not inspect.isclass(value) or not value.__module__.startswith("tinker") or name.startswith("_"):
                continue
            if issubclass(value, pydantic.BaseModel) or dataclasses.is_dataclass(value):
                found[name] = value
    return found


TYPES = wire_types()


def describe(_: dict[str, Any]) -> dict[str, Any]:
    return {
        "version": tinker.__version__,
        "types": {name: fields_of(cls) for name, cls in TYPES.items()},
        "public_types": sorted(name for name in dir(tinker.types) if name[0].isupper()),
        "public_names": list(getattr(tinker, "__all__", [])),
        "routes": sorted(routes()),
        "paths": sorted(paths()),
        "protobuf": protobuf_table(),
    }


def fields_of(cls: type) -> dict[str, dict[str, Any]]:
    if dataclasses.is_dataclass(cls):
        return {
            spec.name: {
                "required": spec.default is spec.default_factory is dataclasses.MISSING,
                "nullable": "Optional" in str(spec.type),
                "default": None,
            }
            for spec in dataclasses.fields(cls)
            if not spec.name.startswith("_")
        }
    fields = {}
    for name, info in cls.model_fields.items():
        nullable = type(None) in typing.get_args(info.annotation)
        fields[name] = {"required": info.is_required(), "nullable": nullable, "default": plain_default(info)}
    return fields


def plain_default(info: Any) -> Any:
    if info.is_required():
        return None
    default = info.get_default(call_default_factory=True)
    return default.model_dump(mode="json") if isinstance(default, pydantic.BaseModel) else default


def routes() -> set[tuple[str, str]]:
    """(METHOD, path with {} for each parameter) of every call in the release's source that names an API path."""
    found = set()
    root = pathlib.Path(tinker.__file__).parent
    for path in root.rglob("*.py"):
        if path.name.endswith("_test.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or not node.args:
                continue
            method = re.fullmatch(r"_?(get|post|put|delete)", node.func.attr)
            if method is None:
                continue
            for argument in node.args[:1]:
                text = text_of(argument)
                if "/api/v1/" in text:
                    found.add((method[1].upper(), text[text.index("/api/v1/") :]))
    return found


def paths() -> set[str]:
    """Every API path that the release's source names, be it in a call or not."""
    found = set()
    for path in pathlib.Path(tinker.__file__).parent.rglob("*.py"):
        if path.name.endswith("_test.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            text = text_of(node) if isinstance(node, ast.expr) else ""
            # A piece of a longer text ends in a slash.
            if text.startswith(("/api/v1/", "{}/api/v1/")) and " " not in text and not text.endswith("/"):
                found.add(text[text.index("/api/v1/") :])
    return found


def text_of(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return ""


def protobuf_module() -> Any:
    try:
        return importlib.import_module("tinker.proto.tinker_public_pb2")
    except ImportError:
        return None


def protobuf_table() -> dict[str, dict[str, list[Any]]]:
    module = protobuf_module()
    if module is None:
        return {}
    table: dict[str, dict[str, list[Any]]] = {}

    def add(message: Any) -> None:
        if message.GetOptions().map_entry:
            return
        table[message.name] = {field.name: [field.number, field.type, field.has_presence] for field in message.fields}
        for nested in message.nested_types:
            add(nested)

    for message in module.DESCRIPTOR.message_types_by_name.values():
        add(message)
    for enum in module.DESCRIPTOR.enum_types_by_name.values():
        table[enum.name] = {value.name: [value.number, "enum", False] for value in enum.values}
    return table


def build(name: str, values: Any) -> Any:
    """An object of the release from plain values, the way a program would make it."""
    cls = TYPES[name]
    if issubclass(cls, pydantic.BaseModel):
        return cls.model_validate(values)
    values = dict(values)
    if name == "TensorData":
        return cls(**values)
    if name == "Datum":
        values["model_input"] = build("ModelInput", values["model_input"])
        inputs = values.get("loss_fn_inputs") or {}
        values["loss_fn_inputs"] = {key: build("TensorData", tensor) for key, tensor in inputs.items()}
        spans = {}
        for key in ("model_input_spans", "loss_fn_input_spans"):
            if values.get(key) is not None:
                spans[key] = [span_of(span) for span in values[key]]
        return cls(**(values | spans))
    if name == "ForwardBackwardInput":
        values["data"] = [build("Datum", datum) for datum in values["data"]]
    for key in ("forward_backward_input", "forward_input"):
        if key in values:
            values[key] = build("ForwardBackwardInput", values[key])
    return cls(**values)


def span_of(values: dict[str, Any]) -> Any:
    values = dict(values)
    return TYPES["PromptProvenanceSpan" if values.pop("kind") == "prompt" else "SampledProvenanceSpan"](**values)


def plain(value: Any) -> Any:
    """An object of the release as plain JSON values, defaults filled in."""
    if isinstance(value, pydantic.BaseModel):
        return {key: plain(getattr(value, key)) for key in type(value).model_fields} | {
            key: plain(item) for key, item in (value.model_extra or {}).items()
        }
    if type(value).__name__ == "TensorData":
        names = ("dtype", "shape", "sparse_crow_indices", "sparse_col_indices")
        return {"data": plain(value.data)} | {name: plain(getattr(value, name, None)) for name in names}
    if type(value).__name__ in ("SampledSequence", "SampleResponse"):
        kept = {
            "SampledSequence": ("stop_reason", "tokens", "logprobs", "topk_logprobs"),
            "SampleResponse": (
                "sequences",
                "prompt_logprobs",
                "topk_prompt_logprobs",
                "prompt_cache_hit_tokens",
                "target_prompt_logprobs",
                "prompt_alt_tokens",
            ),
        }[type(value).__name__]
        return {name: plain(getattr(value, name, None)) for name in kept}
    if dataclasses.is_dataclass(value):
        return {spec.name: plain(getattr(value, spec.name)) for spec in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (np.ndarray, np.generic)):
        return plain(value.tolist())
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, float) and value != value:
        return "nan"
    if hasattr(value, "isoformat"):
        return value.isoformat()
    return value


def read(question: dict[str, Any]) -> Any:
    """Does the release accept this JSON body as that type, and what does it read?"""
    cls = TYPES[question["type"]]
    body = question["body"]
    if issubclass(cls, pydantic.BaseModel):
        return plain(cls.model_validate_json(body))
    return plain(build(question["type"], json.loads(body)))


RESOURCES = {
    "CreateModelRequest": ("models", "create"),
    "GetInfoRequest": ("models", "get_info"),
    "UnloadModelRequest": ("models", "unload"),
    "CopyWeightsRequest": ("models", "copy_weights"),
    "ForwardRequest": ("training", "forward"),
    "ForwardBackwardRequest": ("training", "forward_backward"),
    "OptimStepRequest": ("training", "optim_step"),
    "SampleRequest": ("sampling", "asample"),
    "SaveWeightsRequest": ("weights", "save"),
    "LoadWeightsRequest": ("weights", "load"),
    "SaveWeightsForSamplerRequest": ("weights", "save_for_sampler"),
    "SaveWeightsExternalRequest": ("weights", "save_external"),
    "CreateSessionRequest": ("service", "create_session"),
    "CreateSamplingSessionRequest": ("service", "create_sampling_session"),
    "JoinSamplingSessionRequest": ("service", "join_sampling_session"),
    "CreateCustomLossRequest": ("service", "create_custom_loss"),
    "ClientConfigRequest": ("service", "client_config"),
    "FutureRetrieveRequest": ("futures", "retrieve"),
    "FuturesRetrieveRequest": ("futures", "retrieve_multi"),
}


class RecordingClient:
    """Stands where a resource expects its HTTP client; keeps what would be sent."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.sent: list[dict[str, Any]] = []
        self._client_config = types.SimpleNamespace(**config)

    async def post(self, path: str, *, body: Any = None, options: Any = None, **_: Any) -> Any:
        headers = dict((options or {}).get("headers") or {})
        if isinstance(body, (bytes, bytearray)):
            sent = {"encoding": "binary", "body": base64.b64encode(body).decode()}
        else:
            sent = {"encoding": "json", "body": json.dumps(body)}
        self.sent.append(sent | {"path": path, "headers": {str(key): str(value) for key, value in headers.items()}})

    get = patch = put = delete = get_api_list = post


def encode(question: dict[str, Any]) -> Any:
    """What the release sends for a request: through its own resource where it has one, else as its models dump."""
    request = build(question["type"], question["values"])
    resource = RESOURCES.get(question["type"])
    known = None
    if resource is not None:
        module = importlib.import_module(f"tinker.resources.{resource[0]}")
        cls = next(
            value
            for name, value in vars(module).items()
            if re.fullmatch(rf"Async\w*{resource[0].rstrip('s')}\w*Resource", name, re.IGNORECASE)
        )
        flags = {"proto_compress_fwdbwd": False, "proto_write_fwdbwd": False, "fwd_via_fwdbwd": False}
        client = RecordingClient(flags | question.get("config", {}))
        try:
            asyncio.run(getattr(cls(client), resource[1])(request=request, **question.get("arguments", {})))
        except AttributeError:  # some resources read the answer, and there is none
            if not client.sent:
                raise
        known = client.sent[0]
    if known is None:
        kwargs = {"exclude_unset": True} if SENDS_ONLY_SET_FIELDS else {"exclude_none": True}
        known = {"encoding": "json", "body": json.dumps(request.model_dump(mode="json", **kwargs)), "path": None}
    return known | {"read": plain(request)}


def dump(question: dict[str, Any]) -> Any:
    """An answer as a server built on the release's models would write it."""
    value = build(question["type"], question["values"])
    return {"body": json.dumps(value.model_dump(mode="json")), "read": plain(value)}


def parse_protobuf(question: dict[str, Any]) -> Any:
    """A binary body as the release's descriptor reads it; unknown fields are an error."""
    from google.protobuf.json_format import MessageToDict
    from google.protobuf.unknown_fields import UnknownFieldSet

    message = getattr(protobuf_module(), question["message"])()
    message.ParseFromString(base64.b64decode(question["body"]))
    unknown: list[str] = []

    def look(value: Any) -> None:
        if len(UnknownFieldSet(value)):
            unknown.append(value.DESCRIPTOR.name)
        for field, item in value.ListFields():
            if field.message_type is None:
                continue
            if field.message_type.GetOptions().map_entry:
                if field.message_type.fields_by_name["value"].message_type is not None:
                    for entry in item.values():
                        look(entry)
            elif field.is_repeated if hasattr(field, "is_repeated") else field.label == field.LABEL_REPEATED:
                for entry in item:
                    look(entry)
            else:
                look(item)

    look(message)
    if unknown:
        raise ValueError(f"unknown fields in {unknown}")
    return MessageToDict(message, preserving_proto_field_name=True)


def make_protobuf(question: dict[str, Any]) -> str:
    """A binary body from the descriptor."""
    from google.protobuf.json_format import ParseDict

    message = ParseDict(question["values"], getattr(protobuf_module(), question["message"])())
    return base64.b64encode(message.SerializeToString()).decode()


def read_result(question: dict[str, Any]) -> Any:
    """A binary result as the release hands it to a program."""
    from tinker.proto import response_conv

    decode = {
        "ForwardBackwardOutput": response_conv.deserialize_forward_backward_output,
        "SampleResponse": response_conv.deserialize_sample_response,
    }[question["message"]]
    return plain(decode(base64.b64decode(question["body"])))


def combine(question: dict[str, Any]) -> Any:
    """What the release makes of the metrics of several chunks."""
    from tinker.lib.chunked_fwdbwd_helpers import combine_fwd_bwd_output_results

    results = [
        tinker.types.ForwardBackwardOutput(
            loss_fn_output_type="T", loss_fn_outputs=[{}] * part["count"], metrics=part["metrics"]
        )
        for part in question["parts"]
    ]
    return plain(combine_fwd_bwd_output_results(results).metrics)


def chunk(question: dict[str, Any]) -> Any:
    """How the release splits data: the number of datums in each request."""
    from tinker.lib.public_interfaces.training_client import TrainingClient

    data = [build("Datum", datum) for datum in question["data"]]
    config = types.SimpleNamespace(
        fwdbwd_max_chunk_len=question["max_datums"], fwdbwd_max_chunk_bytes_count=question["max_bytes"]
    )
    holder = types.SimpleNamespace(_client_config=config, estimate_bytes_count_in_model_input=None)
    client = types.SimpleNamespace(holder=holder)
    return [len(part) for part, _ in TrainingClient._chunked_requests_generator(client, data)]


def parse_path(question: dict[str, Any]) -> Any:
    return plain(tinker.types.ParsedCheckpointTinkerPath.from_tinker_path(question["path"]))


COMMANDS = {
    function.__name__: function
    for function in (
        describe,
        read,
        encode,
        dump,
        parse_protobuf,
        make_protobuf,
        read_result,
        combine,
        chunk,
        parse_path,
    )
}


if __name__ == "__main__":
    answer_all(COMMANDS)
