"""Our tables contain everything that each official release has, and every note of a release is correct."""

from __future__ import annotations

import re

import msgspec
import pytest
from support.official import Official
from support.official_values import field_versions
from support.releases import uses

from tinsmith import types
from tinsmith.wire.message import Message
from tinsmith.wire.routes.table import ROUTES

RENAMED = {"TopkPromptLogprobs": "TopkLogprobs"}
"""Official name in some release: the name it has today."""

ALWAYS_THE_SAME = {"SampleResponse.type"}
"""Fields that hold one literal and are written by our encoder, not kept."""

NOT_ON_THE_WIRE = {
    "BaseModel": "base class",
    "StrictBase": "base class",
    "OptimParamsBase": "base class of optimizers that a newer release may bring",
    "OptimizerConfigBase": "base class of optimizers that a newer release may bring",
    "PropertyInfo": "annotation helper",
}

FIELDS_ELSEWHERE = {
    ("ForwardBackwardRequest", "forward_only"): "an argument beside the request object, a field of its protobuf form",
    ("TryAgainResponse", "queue_state_reason"): "read from the answer without a declared field",
    ("ClientConfigResponse", "proto_write_fwdbwd"): "between 0.19 and 0.24",
    ("ClientConfigResponse", "fwd_via_fwdbwd"): "between 0.23 and 0.24",
    ("DimuonParams", "damping"): "0.30 only",
    ("DimuonParams", "rank_lr_correction_exponent"): "0.30 only",
    ("OptimStepRequest", "adam_params"): "an input alias of optim_params since 0.30",
    ("OptimStepRequest", "optimizer_params"): "an input alias of optim_params since 0.30",
}
"""Fields of ours that a release lacks as a declared field although its wire has them, with the reason."""


def test_every_route_of_the_release_is_in_our_table(official: Official) -> None:
    ours = {(route.method, _pattern(route.path)) for route in ROUTES if uses(official.release, route)}
    theirs = {(method, path) for method, path in official.description["routes"]}
    assert theirs - ours == set()
    assert set(official.description["paths"]) - {path for _, path in ours} == set()


def test_no_route_is_dated_to_a_release_that_lacks_it(official: Official) -> None:
    known = set(official.description["paths"])
    dated = {_pattern(route.path) for route in ROUTES if uses(official.release, route)}
    assert dated - known == set()


def test_every_type_and_field_of_the_release_is_ours(official: Official) -> None:
    missing = []
    for name in official.description["types"]:
        if name in NOT_ON_THE_WIRE:
            continue
        ours = getattr(types, RENAMED.get(name, name), None)
        if ours is None:
            missing.append(name)
            continue
        missing += [f"{name}.{field}" for field in official.fields(name) if not _has_field(ours, field)]
    assert set(missing) - ALWAYS_THE_SAME == set()


def test_every_public_type_name_exists(official: Official) -> None:
    public = {RENAMED.get(name, name) for name in official.description["public_types"]}
    assert public - set(types.__all__) - {"FutureRetrieveResponse"} == set()


def test_fields_are_dated_as_the_release_has_them(official: Official) -> None:
    wrong = []
    for name in official.description["types"]:
        ours = getattr(types, RENAMED.get(name, name), None)
        if not isinstance(ours, type) or not issubclass(ours, Message):
            continue
        versions = field_versions(ours)
        theirs = official.fields(name)
        for field in ours.__struct_fields__:
            is_dated_later = versions.get(field, (0, 0)) > official.line
            if field in theirs and is_dated_later:
                wrong.append(f"{name}.{field} is in {official.release} but dated {versions[field]}")
            if field not in theirs and not is_dated_later and not _is_request_free(name, field):
                wrong.append(f"{name}.{field} is not in {official.release} and carries no later date")
    assert wrong == []


def test_defaults_are_those_of_the_release(newest: Official) -> None:
    differing = []
    for name in newest.description["types"]:
        ours = getattr(types, name, None)
        if not isinstance(ours, type) or not issubclass(ours, Message):
            continue
        defaults = {spec.name: spec for spec in _fields(ours)}
        for field, theirs in newest.fields(name).items():
            if theirs["required"] or field not in defaults or defaults[field].required:
                continue
            value = _default(defaults[field])
            if value != theirs["default"]:
                differing.append(f"{name}.{field}: ours {value!r}, official {theirs['default']!r}")
    assert differing == []


def test_every_message_of_the_route_table_is_compared_or_listed(newest: Official) -> None:
    """Bodies that the official client writes as plain dictionaries have no type to compare with."""
    untyped = {
        "AccessQuery",
        "ApiKeyResponse",
        "AssignProjectRequest",
        "AuditLogQuery",
        "AuthTokenRequest",
        "CancelFutureRequest",
        "CheckpointArchiveUrlResponse",
        "FinishSessionRequest",
        "ListCheckpointsQuery",
        "ListSessionsQuery",
        "ListTrainingRunsQuery",
        "SetTtlRequest",
        "TraceExportResponse",
        "WeightsInfoRequest",
    }
    named = {
        cls.__name__
        for route in ROUTES
        if uses(newest.release, route) or route.name == "get_checkpoint_archive"
        for cls in (route.request, route.query, route.response, route.result)
        if cls is not None
    }
    assert {name for name in named if not newest.has_type(name)} == untyped


@pytest.mark.parametrize("name", ["ForwardBackwardOutput", "SampleResponse", "SampledSequence", "Datum", "TensorData"])
def test_numpy_backed_types_have_the_official_attributes(newest: Official, name: str) -> None:
    ours = getattr(types, name)
    assert [field for field in newest.fields(name) if not hasattr(ours, field)] == []


def _pattern(path: str) -> str:
    return re.sub(r"{\w+}", "{}", path)


def _has_field(cls: type, name: str) -> bool:
    return name in getattr(cls, "__struct_encode_fields__", ()) or hasattr(cls, name)


def _is_request_free(name: str, field: str) -> bool:
    return (name, field) in FIELDS_ELSEWHERE or name.endswith("Response")


def _fields(cls: type[Message]) -> tuple[msgspec.structs.FieldInfo, ...]:
    return msgspec.structs.fields(cls)


def _default(spec: msgspec.structs.FieldInfo) -> object:
    from tinsmith.wire.message import NOT_GIVEN

    value = spec.default_factory() if spec.default_factory is not msgspec.NODEFAULT else spec.default
    if value is NOT_GIVEN:
        return None
    return msgspec.to_builtins(value)
