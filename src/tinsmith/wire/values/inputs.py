"""What a model reads: ModelInput, Datum and the provenance of its tokens.

User data is checked here as soon as it is given, and every error names the key and the position. Whether ids are in the
vocabulary is checked by the server, which knows the model.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeAlias, get_args

import numpy as np

from tinsmith.errors import InvalidInputError, UnknownFieldError, UnknownLossInputError
from tinsmith.wire.limits import MAX_CHUNKS, MAX_LOSS_INPUTS, MAX_NAME, MAX_SEQUENCE_ID, MAX_SPANS, check_size
from tinsmith.wire.losses import LIST_DTYPES
from tinsmith.wire.model_methods import ModelField, ModelMethods, check_options
from tinsmith.wire.values.chunks import EncodedTextChunk, ModelInputChunk, chunk_from_builtins
from tinsmith.wire.values.frozen import Frozen
from tinsmith.wire.values.numbers import Array, check_ids, is_torch_tensor, packed_ids, torch_to_numpy
from tinsmith.wire.values.tensors import (
    NUMPY_DTYPES,
    TensorData,
    sparse_if_smaller,
    tensor_of,
    tensors_from_builtins,
)

LossFnInputs: TypeAlias = dict[str, TensorData]

SPARSE_KEYS = frozenset({"target_tokens", "weights"})
"""2-D torch tensors under these keys are sent as CSR if that is smaller."""


class ModelInput(ModelMethods, Frozen):
    """The input of a model: a list of chunks."""

    __slots__ = ("chunks",)
    chunks: list[ModelInputChunk]

    def __init__(self, *, chunks: Sequence[ModelInputChunk]) -> None:
        if not isinstance(chunks, (list, tuple)):
            raise InvalidInputError(f"chunks: expected a list, got {type(chunks).__name__}", field="chunks")
        check_size(len(chunks), MAX_CHUNKS, "chunks", "chunks")
        self._init(chunks=[_chunk(chunk, i) for i, chunk in enumerate(chunks)])

    @classmethod
    def from_ints(cls, tokens: Sequence[int] | Array) -> Self:
        """Make a text input from a sequence of token ids."""
        return cls(chunks=[EncodedTextChunk(tokens=tokens)])

    @classmethod
    def empty(cls) -> Self:
        return cls(chunks=[])

    def append(self, chunk: ModelInputChunk) -> Self:
        """Return a new input with one more chunk."""
        return type(self)(chunks=[*self.chunks, chunk])

    def append_int(self, token: int) -> Self:
        """Return a new input with one more token."""
        return self.append(EncodedTextChunk(tokens=[token]))

    def to_ints(self) -> list[int]:
        """Return all token ids; the input must hold nothing but text."""
        ints: list[int] = []
        for i, chunk in enumerate(self.chunks):
            if not isinstance(chunk, EncodedTextChunk):
                raise InvalidInputError(
                    f"chunks[{i}]: is of type {chunk.type}; only encoded_text has token ids", field=f"chunks[{i}]"
                )
            ints.extend(chunk.to_ints())
        return ints

    @property
    def length(self) -> int:
        """The number of tokens; an image counts as its expected_tokens."""
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
                f"{type(self).__name__}.sequence_id must be a non-empty string, got {self.sequence_id!r}",
                field="sequence_id",
            )
        check_size(len(self.sequence_id), MAX_SEQUENCE_ID, "sequence_id", "characters")
        for name in ("offset", "length"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise InvalidInputError(f"{type(self).__name__}.{name} must be 0 or more, got {value!r}", field=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptProvenanceSpan(_ProvenanceSpan):
    """Says that these are `length` tokens, starting at `offset`, of the prompt of the named sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledProvenanceSpan(_ProvenanceSpan):
    """Says that these are `length` sampled tokens, starting at `offset`, of the named sequence."""


ProvenanceSpan: TypeAlias = PromptProvenanceSpan | SampledProvenanceSpan
ProvenanceSpans: TypeAlias = list[ProvenanceSpan]


class Datum(Frozen):
    """One training example: the model's input, and the tensors that the loss reads."""

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
                "make one with ModelInput.from_ints(tokens)",
                field="model_input",
            )
        if not isinstance(loss_fn_inputs, Mapping):
            kind = type(loss_fn_inputs).__name__
            raise InvalidInputError(
                f"loss_fn_inputs: expected a mapping of names to tensors, got {kind}", field="loss_fn_inputs"
            )
        check_size(len(loss_fn_inputs), MAX_LOSS_INPUTS, "loss_fn_inputs", "tensors")
        inputs = {key: _loss_input(key, value) for key, value in loss_fn_inputs.items()}
        _check_lengths(inputs, model_input)
        if (model_input_spans is None) != (loss_fn_input_spans is None):
            raise InvalidInputError("model_input_spans and loss_fn_input_spans: set both or neither")
        if model_input_spans is not None and loss_fn_input_spans is not None:
            check_size(len(model_input_spans), MAX_SPANS, "model_input_spans", "spans")
            check_size(len(loss_fn_input_spans), MAX_SPANS, "loss_fn_input_spans", "spans")
            _check_spans(model_input, inputs, model_input_spans, loss_fn_input_spans)
        self._init(
            model_input=model_input,
            loss_fn_inputs=inputs,
            model_input_spans=model_input_spans,
            loss_fn_input_spans=loss_fn_input_spans,
        )

    def with_provenance(self, model_input: ProvenanceSpans, loss_fn_inputs: ProvenanceSpans) -> Self:
        """Return a copy that says where its tokens came from; the spans must cover input and target_tokens exactly."""
        return self.replace(model_input_spans=list(model_input), loss_fn_input_spans=list(loss_fn_inputs))

    @property
    def estimated_bytes(self) -> int:
        """Its size in protobuf, without framing."""
        return self.model_input.estimated_bytes + sum(tensor.nbytes for tensor in self.loss_fn_inputs.values())

    def to_builtins(self) -> dict[str, Any]:
        if self.model_input_spans is not None:
            raise InvalidInputError(
                "model_input_spans: provenance spans cannot be sent as JSON, only as protobuf",
                field="model_input_spans",
            )
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
        check_size(len(tensors), MAX_LOSS_INPUTS, "loss_fn_inputs", "tensors")
        inputs = tensors_from_builtins(tensors, "loss_fn_inputs")
        try:
            model_input = ModelInput.from_builtins(value.get("model_input"))
        except InvalidInputError as error:
            raise InvalidInputError(f"model_input: {error}", field="model_input") from None
        return cls(model_input, inputs)


_CHUNKS = get_args(ModelInputChunk)


def datum_of(chunks: list[ModelInputChunk], inputs: LossFnInputs) -> Datum:
    """Make a datum from parts that are already checked (decoders)."""
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
        raise InvalidInputError(f"{where}: the name of an input must be a string", field="loss_fn_inputs")
    check_size(len(key), MAX_NAME, "loss_fn_inputs", "characters in a name")
    if key == "target_tokens" and (ids := packed_ids(value)) is not None:
        return TensorData.of_array(ids.astype(NUMPY_DTYPES["int64"]), "int64", [ids.size])
    tensor = _tensor(key, value, where)
    if key == "target_tokens":
        if tensor.dtype != "int64":
            raise InvalidInputError(f"{where}: token ids must be int64, got {tensor.dtype}", field=where)
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
            f"{where}: a plain list has no dtype under this key (it has one under: {', '.join(LIST_DTYPES)}); "
            "pass a numpy array, a torch tensor or TensorData",
            field=where,
        )
    if not isinstance(value, (list, tuple)):
        kind = type(value).__name__
        raise InvalidInputError(
            f"{where}: expected a list, a numpy array, a torch tensor or TensorData, got {kind}", field=where
        )
    return tensor_of(value, where, LIST_DTYPES[key])


def _known_length(model_input: ModelInput) -> int | None:
    try:
        return model_input.length
    except InvalidInputError:  # an image without expected_tokens: only the server knows its length
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
                "there must be one entry per token",
                field=where,
            )


def _check_spans(
    model_input: ModelInput, inputs: LossFnInputs, input_spans: ProvenanceSpans, loss_spans: ProvenanceSpans
) -> None:
    """Refuse spans that do not cover input and targets exactly."""
    expected = _known_length(model_input)
    if expected is not None:
        _check_tiling("model_input", input_spans, expected)
    if "target_tokens" in inputs:
        _check_tiling("loss_fn_inputs", loss_spans, len(inputs["target_tokens"]))


def _check_tiling(name: str, spans: Iterable[ProvenanceSpan], expected: int) -> None:
    covered = sum(span.length for span in spans)
    if covered != expected:
        raise InvalidInputError(f"{name}: the spans cover {covered} positions, but there are {expected}", field=name)
