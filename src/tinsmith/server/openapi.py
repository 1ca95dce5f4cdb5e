"""The OpenAPI description, made from the route table. Nothing in it is written by hand."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import msgspec

from tinsmith.version import PROTOCOL_VERSION
from tinsmith.wire.chunks import EncodedTextChunk
from tinsmith.wire.inputs import Datum, ModelInput
from tinsmith.wire.routes import ROUTES, Route
from tinsmith.wire.sampling import SampleResponse
from tinsmith.wire.tensors import TensorData
from tinsmith.wire.training import ForwardBackwardOutput

REF = "#/components/schemas/{name}"

_INTS: dict[str, Any] = {"type": "array", "items": {"type": "integer"}}
_TENSOR: dict[str, Any] = {
    "type": "object",
    "required": ["data", "dtype"],
    "properties": {
        "data": {"type": "array", "items": {"type": "number"}},
        "dtype": {"enum": ["int64", "float32"]},
        "shape": _INTS,
        "sparse_crow_indices": _INTS,
        "sparse_col_indices": _INTS,
    },
}
_CHUNK: dict[str, Any] = {
    "type": "object",
    "required": ["tokens"],
    "properties": {"type": {"const": "encoded_text"}, "tokens": _INTS},
}
_INPUT: dict[str, Any] = {
    "type": "object",
    "required": ["chunks"],
    "properties": {"chunks": {"type": "array", "items": _CHUNK}},
}
SCHEMAS: dict[Any, dict[str, Any]] = {
    TensorData: _TENSOR,
    EncodedTextChunk: _CHUNK,
    ModelInput: _INPUT,
    Datum: {
        "type": "object",
        "required": ["model_input", "loss_fn_inputs"],
        "properties": {
            "model_input": _INPUT,
            "loss_fn_inputs": {"type": "object", "additionalProperties": _TENSOR},
        },
    },
    ForwardBackwardOutput: {"type": "object"},
    SampleResponse: {"type": "object"},
}
"""Of the types that are held as arrays."""


@lru_cache(maxsize=1)
def openapi() -> bytes:
    """The document as JSON."""
    types = [kind for route in ROUTES for kind in (route.request, route.query, route.response) if kind is not None]
    _, components = msgspec.json.schema_components(dict.fromkeys(types), schema_hook=_schema, ref_template=REF)
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, components)
    document = {
        "openapi": "3.1.0",
        "info": {"title": "tinsmith", "version": PROTOCOL_VERSION},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "apiKey", "in": "header", "name": "x-api-key"}},
        },
        "security": [{"key": []}],
    }
    return msgspec.json.encode(document)


def _schema(type_: Any) -> dict[str, Any]:
    if type_ in SCHEMAS:
        return SCHEMAS[type_]
    raise NotImplementedError(f"{type_!r} has no schema")


def _operation(route: Route, components: dict[str, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": route.name,
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in route.parameters
        ],
        "responses": {
            "200": {"description": "OK", **_content(route.response)},
            "default": {"description": "What is wrong", "content": {"application/json": {"schema": _ERROR}}},
        },
    }
    if route.request is not None:
        operation["requestBody"] = {"required": True, **_content(route.request)}
    if route.query is not None:
        query = components[route.query.__name__]
        operation["parameters"] += [
            {"name": name, "in": "query", "required": name in query.get("required", ()), "schema": schema}
            for name, schema in query["properties"].items()
        ]
    return operation


_ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["detail", "code"],
    "properties": {"detail": {"type": "string"}, "code": {"type": "string"}, "field": {"type": "string"}},
}


def _content(kind: type[Any] | None) -> dict[str, Any]:
    if kind is None:
        return {}
    return {"content": {"application/json": {"schema": {"$ref": REF.format(name=kind.__name__)}}}}
