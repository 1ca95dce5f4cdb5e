"""What a model reads: ModelInput, Datum and the provenance of its tokens.

Owns: the checks on user data, each error naming the key and the position.
Does not know: any vocabulary or model (the server checks ids against those).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeAlias, get_args

import numpy as np

from tinsmith.errors import InvalidInputError, UnknownFieldError, UnknownLossInputError
from tinsmith.wire.chunks import EncodedTextChunk, ModelInputChunk, chunk_from_builtins
from tinsmith.wire.frozen import Frozen
from tinsmith.wire.model_methods import ModelField, ModelMethods, check_options
from tinsmith.wire.numbers import Array, check_ids, is_torch_tensor, packed_ids, torch_to_numpy
from tinsmith.wire.tensors import (
    NUMPY_DTYPES,
    TensorData,
    TensorDtype,
    sparse_if_smaller,
    tensor_of,
    tensors_from_builtins,
)

LossFnInputs: TypeAlias = dict[str, TensorData]

_CHUNKS = get_args(ModelInputChunk)

LIST_DTYPES: Mapping[str, TensorDtype] = {
    "target_tokens": "int64",
    "weights": "float32",
    "advantages": "float32",
    "logprobs": "float32",
    "clip_low_threshold": "float32",
    "clip_high_threshold": "float32",
    "sequence_ratio_mask": "float32",
}
"""The dtype of a plain list, by its key; each of these has one entry (or row) per input token."""

SPARSE_KEYS = frozenset({"target_tokens", "weights"})
"""2-D torch tensors under these keys travel as CSR where that is smaller."""


class ModelInput(ModelMethods, Frozen):
    """The model's input: chunks one after another."""

    __slots__ = ("chunks",)
    chunks: list[ModelInputChunk]

    def __init__(self, *, chunks: Sequence[ModelInputChunk]) -> None:
        if not isinstance(chunks, (list, tuple)):
            raise InvalidInputError(f"chunks: expected a list, got {type(chunks).__name__}", field="chunks")
        self._init(chunks=[_chunk(chunk, i) for i, chunk in enumerate(chunks)])

    @classmethod
    def from_ints(cls, tokens: Sequence[int] | Array) -> Self:
        """A text input from any sequence of token ids."""
        return cls(chunks=[EncodedTextChunk(tokens=tokens)])

    @classmethod
    def empty(cls) -> Self:
        return cls(chunks=[])

    def append(self, chunk: ModelInputChunk) -> Self:
        """A new input with one more chunk."""
        return type(self)(chunks=[*self.chunks, chunk])

    def append_int(self, token: int) -> Self:
        """A new input with one more token."""
        return self.append(EncodedTextChunk(tokens=[token]))

    def to_ints(self) -> list[int]:
        """All token ids; only for inputs that are text throughout."""
        ints: list[int] = []
        for i, chunk in enumerate(self.chunks):
            if not isinstance(chunk, EncodedTextChunk):
                raise InvalidInputError(f"chunks[{i}] is {chunk.type}; only text has token ids", field=f"chunks[{i}]")
            ints.extend(chunk.to_ints())
        return ints

    @property
    def length(self) -> int:
        """Number of tokens; an image counts its expected_tokens."""
        return sum(chunk.length for chunk in self.chunks)

    @property
    def estimated_bytes(self) -> int:
        return sum(chunk.estimated_bytes for chunk in self.chunks)

    def to_builtins(self) -> dict[str, Any]:
        return {"chunks": [chunk.to_builtins() for chunk in self.chunks]}

    @classmethod
    def from_builtins(cls, value: Any) -> Self:
        if (type(value) is not dict and not isinstance(value, Mapping)) or not isinstance(value.get("chunks"), list):
            raise InvalidInputError("expected a model input: an object with a list of chunks", field="chunks")
        return cls(chunks=value["chunks"])

    @classmethod
    def model_validate(cls, value: Any, **options: Any) -> Self:
        check_options("model_validate", options)
        return value if isinstance(value, cls) else cls.from_builtins(value)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        for name in update or ():
            if name != "chunks":
                raise UnknownFieldError(f"ModelInput has no field {name!r}; it has: chunks", field=name)
        return (copy.deepcopy(self) if deep else self).replace(**(update or {}))

    @classmethod
    def _fields_of_model(cls) -> dict[str, ModelField]:
        return {"chunks": ModelField(list[ModelInputChunk])}

    def _values_of_model(self) -> Iterator[tuple[str, Any]]:
        yield "chunks", self.chunks


@dataclass(frozen=True, slots=True, kw_only=True)
class _ProvenanceSpan:
    sequence_id: str
    offset: int = 0
    length: int

    def __post_init__(self) -> None:
        if not isinstance(self.sequence_id, str) or not self.sequence_id:
            raise InvalidInputError(
                f"{type(self).__name__}.sequence_id must be a text that is not empty, got {self.sequence_id!r}",
                field="sequence_id",
            )
        for name in ("offset", "length"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise InvalidInputError(f"{type(self).__name__}.{name} must be 0 or more, got {value!r}", field=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptProvenanceSpan(_ProvenanceSpan):
    """These tokens are `length` tokens of the prompt that led to the named sequence, from `offset` on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledProvenanceSpan(_ProvenanceSpan):
    """These tokens are `length` sampled tokens of the named sequence, from `offset` on."""


ProvenanceSpan: TypeAlias = PromptProvenanceSpan | SampledProvenanceSpan
ProvenanceSpans: TypeAlias = list[ProvenanceSpan]


class Datum(Frozen):
    """One training example: an input and what the loss reads beside it."""

    __slots__ = ("loss_fn_input_spans", "loss_fn_inputs", "model_input", "model_input_spans")
    model_input: ModelInput
    loss_fn_inputs: LossFnInputs
    model_input_spans: ProvenanceSpans | None
    loss_fn_input_spans: ProvenanceSpans | None

    def __init__(
        self,
        model_input: ModelInput,
        loss_fn_inputs: Any = {},  # noqa: B006 - tensors by name; read, never kept
        model_input_spans: ProvenanceSpans | None = None,
        loss_fn_input_spans: ProvenanceSpans | None = None,
    ) -> None:
        if not isinstance(model_input, ModelInput):
            raise InvalidInputError(
                f"model_input: expected a ModelInput, got {type(model_input).__name__}; "
                "ModelInput.from_ints(tokens) makes one",
                field="model_input",
            )
        if not isinstance(loss_fn_inputs, Mapping):
            kind = type(loss_fn_inputs).__name__
            raise InvalidInputError(f"loss_fn_inputs: expected tensors by name, got {kind}", field="loss_fn_inputs")
        inputs = {key: _loss_input(key, value) for key, value in loss_fn_inputs.items()}
        _check_lengths(inputs, model_input)
        if (model_input_spans is None) != (loss_fn_input_spans is None):
            raise InvalidInputError("model_input_spans and loss_fn_input_spans come together: set both or neither")
        if model_input_spans is not None and loss_fn_input_spans is not None:
            _check_spans(model_input, inputs, model_input_spans, loss_fn_input_spans)
        self._init(
            model_input=model_input,
            loss_fn_inputs=inputs,
            model_input_spans=model_input_spans,
            loss_fn_input_spans=loss_fn_input_spans,
        )

    def with_provenance(self, model_input: ProvenanceSpans, loss_fn_inputs: ProvenanceSpans) -> Self:
        """A copy that says where its tokens came from; the spans must cover input and target_tokens exactly."""
        return self.replace(model_input_spans=list(model_input), loss_fn_input_spans=list(loss_fn_inputs))

    @property
    def estimated_bytes(self) -> int:
        """What the datum takes on the binary wire, without framing."""
        return self.model_input.estimated_bytes + sum(tensor.nbytes for tensor in self.loss_fn_inputs.values())

    def to_builtins(self) -> dict[str, Any]:
        if self.model_input_spans is not None:
            raise InvalidInputError("provenance spans travel on the binary wire only", field="model_input_spans")
        inputs = {}
        for key, tensor in self.loss_fn_inputs.items():
            try:
                inputs[key] = tensor.to_builtins()
            except InvalidInputError as error:
                raise InvalidInputError(f"loss_fn_inputs[{key!r}].{error}", field=f"loss_fn_inputs[{key!r}]") from None
        return {"model_input": self.model_input.to_builtins(), "loss_fn_inputs": inputs}

    @classmethod
    def from_builtins(cls, value: Any) -> Self:
        if not isinstance(value, Mapping):
            raise InvalidInputError(f"expected a datum object, got {type(value).__name__}")
        tensors = value.get("loss_fn_inputs") or {}
        if not isinstance(tensors, Mapping):
            raise InvalidInputError("loss_fn_inputs: expected an object of tensors", field="loss_fn_inputs")
        inputs = tensors_from_builtins(tensors, "loss_fn_inputs")
        try:
            model_input = ModelInput.from_builtins(value.get("model_input"))
        except InvalidInputError as error:
            raise InvalidInputError(f"model_input: {error}", field="model_input") from None
        return cls(model_input, inputs)


_CHUNKS = get_args(ModelInputChunk)


def datum_of(chunks: list[ModelInputChunk], inputs: LossFnInputs) -> Datum:
    """A datum of parts that are known to be right (decoders): no checks."""
    model_input = ModelInput.__new__(ModelInput)
    model_input._init(chunks=chunks)
    datum = Datum.__new__(Datum)
    datum._init(model_input=model_input, loss_fn_inputs=inputs, model_input_spans=None, loss_fn_input_spans=None)
    return datum


def _chunk(chunk: Any, index: int) -> ModelInputChunk:
    if isinstance(chunk, _CHUNKS):
        return chunk  # type: ignore[no-any-return]
    try:
        return chunk_from_builtins(chunk)
    except InvalidInputError as error:
        raise InvalidInputError(f"chunks[{index}]: {error}", field=f"chunks[{index}]") from None


def _loss_input(key: str, value: Any) -> TensorData:
    where = f"loss_fn_inputs[{key!r}]"
    if not isinstance(key, str):
        raise InvalidInputError(f"{where}: the name of an input is a text", field="loss_fn_inputs")
    if key == "target_tokens" and (ids := packed_ids(value)) is not None:
        return TensorData.of_array(ids.astype(NUMPY_DTYPES["int64"]), "int64", [ids.size])
    tensor = _tensor(key, value, where)
    if key == "target_tokens":
        if tensor.dtype != "int64":
            raise InvalidInputError(f"{where}: token ids are integers, got {tensor.dtype}", field=where)
        check_ids(tensor.array, where)
    return tensor


def _tensor(key: str, value: Any, where: str) -> TensorData:
    if type(value) is list and key in LIST_DTYPES:
        return tensor_of(value, where, LIST_DTYPES[key])
    if isinstance(value, TensorData):
        return value
    if is_torch_tensor(value):
        tensor = tensor_of(torch_to_numpy(value, where), where)
        return sparse_if_smaller(tensor) if key in SPARSE_KEYS else tensor
    if isinstance(value, np.ndarray):
        return tensor_of(value, where)
    if key not in LIST_DTYPES:
        raise UnknownLossInputError(
            f"{where}: no dtype is defined for a plain list under this key (known: {', '.join(LIST_DTYPES)}); "
            "pass a numpy array, a torch tensor or TensorData",
            field=where,
        )
    if not isinstance(value, (list, tuple)):
        kind = type(value).__name__
        raise InvalidInputError(f"{where}: expected a list, array, tensor or TensorData, got {kind}", field=where)
    return tensor_of(value, where, LIST_DTYPES[key])


def _known_length(model_input: ModelInput) -> int | None:
    try:
        return model_input.length
    except InvalidInputError:  # an image of unknown size: the server knows its length, we do not
        return None


def _check_lengths(inputs: LossFnInputs, model_input: ModelInput) -> None:
    per_token = {key: tensor for key, tensor in inputs.items() if key in LIST_DTYPES}
    expected = _known_length(model_input) if per_token else None
    if expected is None:
        return
    for key, tensor in per_token.items():
        if len(tensor) != expected:
            where = f"loss_fn_inputs[{key!r}]"
            raise InvalidInputError(
                f"{where}: has {len(tensor)} entries, but the model input has {expected} tokens; "
                "each input token needs exactly one",
                field=where,
            )


def _check_spans(
    model_input: ModelInput, inputs: LossFnInputs, input_spans: ProvenanceSpans, loss_spans: ProvenanceSpans
) -> None:
    """Spans cover input and targets exactly."""
    expected = _known_length(model_input)
    if expected is not None:
        _check_tiling("model_input", input_spans, expected)
    if "target_tokens" in inputs:
        _check_tiling("loss_fn_inputs", loss_spans, len(inputs["target_tokens"]))


def _check_tiling(name: str, spans: Iterable[ProvenanceSpan], expected: int) -> None:
    covered = sum(span.length for span in spans)
    if covered != expected:
        raise InvalidInputError(f"{name}: the spans cover {covered} positions of {expected}", field=name)
