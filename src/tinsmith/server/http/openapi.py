"""The OpenAPI description, generated from the route tables."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import msgspec

from tinsmith.server.call import JSON, PROTOBUF
from tinsmith.version import PROTOCOL_VERSION
from tinsmith.wire.limits import JsonList, JsonObject
from tinsmith.wire.messages.sampling import SampleResponse
from tinsmith.wire.messages.training import ForwardBackwardOutput
from tinsmith.wire.routes.own import MSGPACK_TYPE
from tinsmith.wire.routes.served import SERVED_ROUTES
from tinsmith.wire.routes.table import Dialect, Encoding, Route
from tinsmith.wire.values.chunks import EncodedTextChunk
from tinsmith.wire.values.inputs import Datum, ModelInput
from tinsmith.wire.values.tensors import TensorData

REF = "#/components/schemas/{name}"
CONTENT_TYPES: dict[Encoding, str] = {
    "json": JSON,
    "protobuf": PROTOBUF,
    "msgpack": MSGPACK_TYPE,
    "bytes": "application/octet-stream",
    "multipart": "multipart/form-data",
}

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
    JsonObject: {"type": "object"},
    JsonList: {"type": "array"},
}
"""Schemas of the types that are held as arrays, and of free-form objects."""


@lru_cache(maxsize=1)
def openapi() -> bytes:
    """Return the document as JSON."""
    routes = SERVED_ROUTES
    types = [kind for route in routes for kind in (route.request, route.query, route.response) if kind is not None]
    _, components = msgspec.json.schema_components(dict.fromkeys(types), schema_hook=_schema, ref_template=REF)
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, components)
    document = {
        "openapi": "3.1.0",
        "info": {"title": "tinsmith", "version": PROTOCOL_VERSION},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "apiKey", "in": "header", "name": "x-api-key"}},
        },
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
        "security": _security(route),
        "x-max-body-bytes": route.door.body.max_bytes,
        "responses": {
            "200": {"description": "OK", **_content(route.response)},
            "default": {"description": "Error", "content": {"application/json": {"schema": _ERRORS[route.dialect]}}},
        },
    }
    if route.request is not None:
        operation["requestBody"] = {"required": True, **_content(route.request)}
    elif route.body_encodings != ("json",):
        content: dict[str, Any] = {CONTENT_TYPES[encoding]: {} for encoding in route.body_encodings}
        operation["requestBody"] = {"required": True, "content": content}
    if route.query is not None:
        query = components[route.query.__name__]
        operation["parameters"] += [
            {"name": name, "in": "query", "required": name in query.get("required", ()), "schema": schema}
            for name, schema in query["properties"].items()
        ]
    return operation


def _security(route: Route) -> list[dict[str, list[str]]]:
    """Return the alternatives: a key with one of the scopes; an empty one if no key is needed."""
    if route.door.open_to == "everybody":
        return []
    alternatives = [{"key": [str(scope)]} for scope in sorted(route.door.scopes)]
    return [{}, *alternatives] if route.door.open_to == "machine" else alternatives


_ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["detail", "code"],
    "properties": {"detail": {"type": "string"}, "code": {"type": "string"}, "field": {"type": "string"}},
}
_ERRORS: dict[Dialect, dict[str, Any]] = {
    "tinker": _ERROR,
    "openai": {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type", "param", "code"],
                "properties": {
                    "message": {"type": "string"},
                    "type": {"type": "string"},
                    "param": {"type": ["string", "null"]},
                    "code": {"type": ["string", "null"]},
                },
            }
        },
    },
    "anthropic": {
        "type": "object",
        "required": ["type", "error"],
        "properties": {
            "type": {"const": "error"},
            "error": {
                "type": "object",
                "required": ["type", "message"],
                "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
            },
            "request_id": {"type": ["string", "null"]},
        },
    },
}


def _content(kind: type[Any] | None) -> dict[str, Any]:
    if kind is None:
        return {}
    return {"content": {"application/json": {"schema": {"$ref": REF.format(name=kind.__name__)}}}}
