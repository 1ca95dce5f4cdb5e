"""Plain JSON values for any wire type, drawn by hypothesis from the type's own declaration."""

from __future__ import annotations

import base64
from datetime import UTC, datetime
from typing import Any

import msgspec
from hypothesis import strategies as st

from tinsmith.wire.limits import JsonList, JsonObject
from tinsmith.wire.message import Message, is_given
from tinsmith.wire.values.inputs import Datum, ModelInput
from tinsmith.wire.values.tensors import TensorData

Line = tuple[int, int]
NEVER: Line = (999, 0)
"""When the official client gets a field that only tinsmith has."""

LITERALS_SINCE: dict[str, Line] = {
    "cispo": (0, 6),
    "dro": (0, 6),
    "external": (0, 28),
    "gspo": (0, 34),
    "stable_reinforce": (0, 35),
    "custom": (0, 36),
}
INT64 = st.integers(-(2**63), 2**63 - 1)
TOKENS = st.integers(0, 2**31 - 1)
FLOAT32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
JSON = st.recursive(
    st.none() | st.booleans() | INT64 | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=4,
)


def field_versions(cls: type[Message]) -> dict[str, Line]:
    """The first release of each field that is marked with `since`; no release has the extensions."""
    versions: dict[str, Line] = {}
    for info in msgspec.inspect.type_info(cls).fields:  # type: ignore[attr-defined]
        extra = getattr(info.type, "extra", None) or {}
        if "since" in extra:
            major, minor = extra["since"].split(".")
            versions[info.name] = int(major), int(minor)
        elif "extension" in extra:
            versions[info.name] = NEVER
    return versions


def values_of(
    cls: type[Message], line: Line, official: dict[str, dict[str, Any]] | None = None
) -> st.SearchStrategy[dict[str, Any]]:
    """Values of a message's fields as a release of that line knows them; optional ones come and go."""
    special = SPECIAL.get(cls.__name__)
    if special is not None:
        return special(line)
    info = msgspec.inspect.type_info(cls)
    versions = field_versions(cls)
    always, sometimes = {}, {}
    for field in info.fields:  # type: ignore[attr-defined]
        if versions.get(field.name, (0, 0)) > line:
            continue
        strategy = _value(field.type, line)
        theirs = (official or {}).get(field.encode_name)
        if theirs is not None and not theirs["nullable"]:
            strategy = strategy.filter(lambda value: value is not None)
        is_required = field.required or (theirs is not None and theirs["required"])
        (always if is_required else sometimes)[field.encode_name] = strategy
    fixed = st.fixed_dictionaries(always, optional=sometimes)
    if info.tag_field is None:  # type: ignore[attr-defined]
        return fixed
    return fixed.map(lambda values: {info.tag_field: info.tag, **values})  # type: ignore[attr-defined]


def _value(info: Any, line: Line) -> st.SearchStrategy[Any]:
    match info:
        case msgspec.inspect.Metadata():
            return _value(info.type, line)
        case msgspec.inspect.UnionType():
            return st.one_of([_value(member, line) for member in info.types])
        case msgspec.inspect.NoneType():
            return st.none()
        case msgspec.inspect.BoolType():
            return st.booleans()
        case msgspec.inspect.IntType():
            low = info.ge if info.ge is not None else -(2**63)
            return st.integers(low, info.le if info.le is not None else 2**63 - 1)
        case msgspec.inspect.FloatType():
            high = info.lt
            return st.floats(info.ge, high, exclude_max=high is not None, allow_nan=False, allow_infinity=False)
        case msgspec.inspect.StrType():
            return TEXT if not info.min_length else TEXT.filter(bool)
        case msgspec.inspect.LiteralType():
            return st.sampled_from([v for v in info.values if LITERALS_SINCE.get(str(v), (0, 0)) <= line])
        case msgspec.inspect.EnumType():
            return st.sampled_from([member.value for member in info.cls])
        case msgspec.inspect.DateTimeType():
            return st.datetimes(datetime(1990, 1, 1), datetime(2090, 1, 1)).map(
                lambda moment: moment.replace(tzinfo=UTC).isoformat()
            )
        case msgspec.inspect.ListType():
            most = min(3, info.max_length or 3)
            return st.lists(_value(info.item_type, line), min_size=info.min_length or 0, max_size=most)
        case msgspec.inspect.DictType():
            return st.dictionaries(TEXT, _value(info.value_type, line), max_size=3)
        case msgspec.inspect.StructType():
            return values_of(info.cls, line)
        case msgspec.inspect.AnyType():
            return JSON
        case msgspec.inspect.CustomType():
            return CUSTOM[info.cls](line)
    raise NotImplementedError(info)


@st.composite
def tensors(draw: st.DrawFn, line: Line, rows: int | None = None, dtype: str | None = None) -> dict[str, Any]:
    """A tensor object; dense of one or two dimensions, or CSR where the release has it."""
    dtype = dtype or draw(st.sampled_from(["int64", "float32"]))
    rows = draw(st.integers(0, 4)) if rows is None else rows
    cells = TOKENS if dtype == "int64" else FLOAT32
    kind = draw(
        st.sampled_from(["flat", "shaped", "matrix", "csr"] if line >= (0, 18) else ["flat", "shaped", "matrix"])
    )
    if kind in ("flat", "shaped"):
        tensor: dict[str, Any] = {"data": draw(st.lists(cells, min_size=rows, max_size=rows)), "dtype": dtype}
        return tensor | ({"shape": [rows]} if kind == "shaped" else {})
    columns = draw(st.integers(1, 3))
    if kind == "matrix":
        data = draw(st.lists(cells, min_size=rows * columns, max_size=rows * columns))
        return {"data": data, "dtype": dtype, "shape": [rows, columns]}
    counts = draw(st.lists(st.integers(0, columns), min_size=rows, max_size=rows))
    listed = [sorted(draw(st.permutations(range(columns)))[:count]) for count in counts]
    return {
        "data": draw(st.lists(cells, min_size=sum(counts), max_size=sum(counts))),
        "dtype": dtype,
        "shape": [rows, columns],
        "sparse_crow_indices": [sum(counts[:i]) for i in range(rows + 1)],
        "sparse_col_indices": [column for row in listed for column in row],
    }


@st.composite
def chunks(draw: st.DrawFn, line: Line, binary: bool = False) -> dict[str, Any]:
    """A chunk object as the release's JSON has it."""
    kinds = ["text", "text", "image"] + ([] if binary else ["pointer"]) + (["dmel"] if line >= (0, 23) else [])
    kind = draw(st.sampled_from(kinds))
    if kind == "text":
        return {"tokens": draw(st.lists(TOKENS, max_size=5)), "type": "encoded_text"}
    if kind == "dmel":
        return {"dmel": base64.b64encode(draw(st.binary(max_size=8))).decode(), "type": "dmel"}
    sizes = st.integers(0, 2**20)
    common: dict[str, Any] = {"format": draw(st.sampled_from(["png", "jpeg"]))}
    if line < (0, 6):
        common |= {"height": draw(sizes), "width": draw(sizes), "tokens": draw(sizes)}
    elif draw(st.booleans()):
        common["expected_tokens"] = draw(sizes)
    if kind == "image":
        return common | {"data": base64.b64encode(draw(st.binary(max_size=8))).decode(), "type": "image"}
    return common | {"location": draw(TEXT), "type": "image_asset_pointer"}


def model_inputs(line: Line, binary: bool = False) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({"chunks": st.lists(chunks(line, binary), max_size=3)})


@st.composite
def datums(draw: st.DrawFn, line: Line, binary: bool = False) -> dict[str, Any]:
    """A datum object whose per-token inputs have the length of its input."""
    if draw(st.booleans()):
        model_input = draw(model_inputs(line, binary))
        return {"model_input": model_input, "loss_fn_inputs": {"other": draw(tensors(line))}}
    tokens = draw(st.lists(TOKENS, max_size=5))
    inputs = {
        "target_tokens": draw(tensors(line, len(tokens), "int64")),
        "weights": draw(tensors(line, len(tokens), "float32")),
    }
    return {
        "model_input": {"chunks": [{"tokens": tokens, "type": "encoded_text"}]},
        "loss_fn_inputs": {key: inputs[key] for key in draw(st.permutations(sorted(inputs)))},
    }


def _optim_step(line: Line) -> st.SearchStrategy[dict[str, Any]]:
    from tinsmith.wire.messages.training import AdamParams, DimuonParams

    base = {"model_id": TEXT, "adam_params": values_of(AdamParams, line)}
    adam = st.fixed_dictionaries(base, optional={"seq_id": st.integers(0, 2**63 - 1) | st.none()})
    if line < (0, 30):
        return adam
    only_0_30 = {"damping": st.floats(1e-6, 1), "rank_lr_correction_exponent": st.floats(0, 1)}
    params = st.tuples(values_of(DimuonParams, line), st.fixed_dictionaries(only_0_30 if line == (0, 30) else {})).map(
        lambda pair: {k: v for k, v in pair[0].items() if k not in only_0_30} | pair[1]
    )
    return adam | st.fixed_dictionaries({"model_id": TEXT, "optimizer_params": params})


def _stop(line: Line) -> st.SearchStrategy[Any]:
    return st.none() | TEXT | st.lists(TEXT, max_size=3) | st.lists(TOKENS, max_size=3)


def _sampling_params(line: Line) -> st.SearchStrategy[dict[str, Any]]:
    floats = st.floats(0, 10, allow_nan=False)
    return st.fixed_dictionaries(
        {},
        optional={
            "max_tokens": st.none() | st.integers(0, 2**40),
            "seed": st.none() | INT64,
            "stop": _stop(line),
            "temperature": floats,
            "top_k": st.integers(-1, 100),
            "top_p": floats,
        },
    )


def _loss_input(line: Line) -> st.SearchStrategy[dict[str, Any]]:
    losses = ["cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo", "stable_reinforce", "custom"]
    known = [loss for loss in losses if LITERALS_SINCE.get(loss, (0, 0)) <= line]
    value = st.floats(allow_nan=False, allow_infinity=False)
    config = st.dictionaries(TEXT, value | TEXT if line >= (0, 27) else value, max_size=3)
    return st.fixed_dictionaries(
        {
            "data": st.lists(datums(line, binary=line >= (0, 25)), min_size=1, max_size=2),
            "loss_fn": st.sampled_from(known),
        },
        optional={"loss_fn_config": st.none() | config},
    )


def _forward_backward(line: Line) -> st.SearchStrategy[dict[str, Any]]:
    fixed = {"forward_backward_input": _loss_input(line), "model_id": TEXT}
    return st.fixed_dictionaries(fixed, optional={"seq_id": st.none() | st.integers(0, 2**31 - 1)})


def _queue_states(line: Line) -> st.SearchStrategy[dict[str, Any]]:
    states = st.sampled_from(["active", "paused_capacity", "paused_rate_limit"])
    return st.fixed_dictionaries({"request_id": TEXT, "queue_state": states}, optional={"queue_state_reason": TEXT})


def _with_optimizer(name: str) -> Any:
    def values(line: Line) -> st.SearchStrategy[dict[str, Any]]:
        from tinsmith import types

        special = SPECIAL.pop(name)
        try:
            base = values_of(getattr(types, name), line)
        finally:
            SPECIAL[name] = special
        config = st.sampled_from([{"type": "adamw"}, {"type": "dimuon", "version": 1}])
        known = st.fixed_dictionaries({}, optional={"optimizer_config": config} if line >= (0, 30) else {})
        return st.tuples(base, known).map(
            lambda pair: {k: v for k, v in pair[0].items() if k != "optimizer_config"} | pair[1]
        )

    return values


SPECIAL: dict[str, Any] = {
    "OptimStepRequest": _optim_step,
    "SamplingParams": _sampling_params,
    "ForwardBackwardInput": _loss_input,
    "ForwardBackwardRequest": _forward_backward,
    "TryAgainResponse": _queue_states,
    "GetInfoResponse": _with_optimizer("GetInfoResponse"),
    "WeightsInfoResponse": _with_optimizer("WeightsInfoResponse"),
}
"""Messages whose fields depend on each other, or whose declaration is wider than the protocol."""

CUSTOM: dict[Any, Any] = {
    ModelInput: model_inputs,
    Datum: datums,
    TensorData: tensors,
    JsonObject: lambda _: st.dictionaries(TEXT, JSON, max_size=3),
    JsonList: lambda _: st.lists(JSON, max_size=3),
}


def plain(value: Any) -> Any:
    """One of our values as plain JSON values, not-given fields read as None."""
    if isinstance(value, Message):
        versions = field_versions(type(value))
        fields = {
            wire: plain(getattr(value, name))
            for wire, name in zip(value.__struct_encode_fields__, value.__struct_fields__, strict=True)
            if versions.get(name) != NEVER or is_given(value, name)
        }
        config = value.__struct_config__
        if config.tag_field is not None:
            fields[config.tag_field] = config.tag
        return fields
    if hasattr(value, "to_builtins"):
        return plain(value.to_builtins())
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, datetime):
        return value.isoformat()
    return value


def as_binary(read: Any) -> Any:
    """What an official forward_backward request reads, less what protobuf cannot tell apart: 0 and {} from absent."""
    work = read["forward_backward_input"]
    work["loss_fn_config"] = work["loss_fn_config"] or None
    return read | {"seq_id": read["seq_id"] or None}


def assert_same(ours: Any, theirs: Any, where: str = "") -> None:
    """Every value that the official object has, ours has too; absent and null read alike on both sides."""
    if isinstance(theirs, dict):
        assert isinstance(ours, dict), f"{where}: {ours!r} for {theirs!r}"
        for key, value in theirs.items():
            if value is not None or ours.get(key) is not None:
                assert_same(ours.get(key), value, f"{where}.{key}")
    elif isinstance(theirs, list):
        assert isinstance(ours, list), f"{where}: {ours!r} for {theirs!r}"
        assert len(ours) == len(theirs), f"{where}: {ours!r} for {theirs!r}"
        for i, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            assert_same(mine, other, f"{where}[{i}]")
    else:
        assert ours == theirs, f"{where}: ours {ours!r}, official {theirs!r}"
