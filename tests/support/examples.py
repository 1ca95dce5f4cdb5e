"""Example values of wire types, found by walking the route table's annotations."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from tinsmith.wire.limits import JsonList, JsonObject
from tinsmith.wire.message import Message
from tinsmith.wire.messages.sampling import SampledSequence, SampleResponse
from tinsmith.wire.messages.training import AdamParams, ForwardBackwardOutput, OptimStepRequest
from tinsmith.wire.routes.table import ROUTES
from tinsmith.wire.values.inputs import Datum, ModelInput
from tinsmith.wire.values.tensors import TensorData

MOMENT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)

PLAIN: Mapping[Any, Any] = {
    str: "text",
    int: 3,
    float: 0.5,
    bool: True,
    Any: {"free": ["form", 1, None]},
    datetime: MOMENT,
    type(None): None,
}


def array_backed() -> dict[Any, Any]:
    """Examples of the types that are not messages; made anew for each call."""
    weights = TensorData([0.5, 1.0], "float32")
    targets = TensorData([2, 3], "int64")
    datum = Datum(ModelInput.from_ints([1, 2]), {"target_tokens": targets, "weights": weights})
    rows = [None, [(1, -0.5), (2, -1.0)]]
    sequence = SampledSequence("stop", tokens=[4, 5], logprobs=[-0.5, -1.0], _topk_logprobs_list=rows)
    return {
        TensorData: weights,
        ModelInput: ModelInput.from_ints([1, 2]),
        Datum: datum,
        SampledSequence: sequence,
        SampleResponse: SampleResponse([sequence], _prompt_logprobs_list=[None, -2.0], _topk_prompt_logprobs_list=rows),
        JsonObject: {"free": ["form", 1, None]},
        JsonList: ["free", [1, None]],
        ForwardBackwardOutput: ForwardBackwardOutput("ArrayRecord", [{"logprobs": weights}], {"loss:sum": 1.5}),
    }


def example(annotation: Any, *, full: bool = False) -> Any:
    """A valid value; with `full` every optional field is set."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation in PLAIN:
        return PLAIN[annotation]
    if origin is Annotated:
        value = example(arguments[0], full=full)
        least = max((meta.min_length or 0 for meta in arguments[1:] if isinstance(meta, msgspec.Meta)), default=0)
        inner = get_args(arguments[0])
        return value if not least or value else [example(inner[0], full=full)] * least
    if origin is Literal:
        return arguments[0]
    if origin in (Union, types.UnionType):
        return example(next(item for item in arguments if item is not type(None)), full=full)
    if origin is list:
        return [example(arguments[0], full=full)] if full else []
    if origin is dict:
        key = "key" if example(arguments[0]) == PLAIN[str] else example(arguments[0])
        return {key: example(arguments[1], full=full)} if full else {}
    if issubclass(annotation, Message):
        return message(annotation, full=full)
    return array_backed()[annotation]


def message(cls: type[Message], *, full: bool = False) -> Any:
    hints = get_type_hints(cls, include_extras=True)
    if cls is OptimStepRequest:
        return cls(model_id="text", adam_params=AdamParams(), **({"seq_id": 3} if full else {}))
    values = {
        spec.encode_name: example(hints[spec.name], full=full)
        for spec in msgspec.structs.fields(cls)
        if (full or spec.required) and hints[spec.name] is not Any and not is_reported_optimizer(spec.name, hints)
    }
    return cls(**values)


def is_reported_optimizer(name: str, hints: Mapping[str, Any]) -> bool:
    return name == "optimizer_config" and get_args(hints[name])[:1] == (Any,)


def requests() -> list[type[Any]]:
    """Every type that a server reads from a body."""
    return list(dict.fromkeys(route.request for route in ROUTES if route.request is not None))


def answers() -> list[type[Any]]:
    """Every type that a client reads from a body."""
    both = (kind for route in ROUTES for kind in (route.response, route.result) if kind is not None)
    return list(dict.fromkeys(both))


def messages() -> list[type[Message]]:
    """Every message class that the route table reaches."""
    queries = [route.query for route in ROUTES if route.query is not None]
    found: dict[type[Message], None] = {}
    for annotation in [*requests(), *answers(), *queries]:
        found |= dict.fromkeys(_reached(annotation, found))
    return list(found)


def _reached(annotation: Any, seen: Mapping[type[Message], None]) -> Iterator[type[Message]]:
    if isinstance(annotation, type) and issubclass(annotation, Message):
        if annotation not in seen:
            yield annotation
            for hint in get_type_hints(annotation, include_extras=True).values():
                yield from _reached(hint, {**seen, annotation: None})
        return
    for argument in get_args(annotation):
        yield from _reached(argument, seen)
