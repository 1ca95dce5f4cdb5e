"""ForwardBackwardRequest as protobuf.

Nearly all datums are text with dense tensors of one dimension; these are read by `_plain_datum` in one pass, without
an object per field. Everything else, and everything that is wrong, is read again field by field, which names errors.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import numpy as np

from tinsmith.errors import InvalidInputError, WireError
from tinsmith.wire.codecs.protobuf import (
    BYTES,
    MAX_ITEMS,
    Field,
    MessageWriter,
    add_tensor,
    as_array,
    as_bytes,
    as_double,
    as_int,
    as_text,
    check_count,
    first_blob,
    plain_tensor,
    read_entry,
    read_fields,
    read_tensor,
    read_varint,
)
from tinsmith.wire.limits import MAX_CHUNKS, MAX_LOSS_INPUTS, MAX_NAME, MAX_SPANS
from tinsmith.wire.losses import LIST_DTYPES, LOSSES, OFFERED, LossFnType
from tinsmith.wire.message import NOT_GIVEN
from tinsmith.wire.messages.training import (
    ForwardBackwardInput,
    ForwardBackwardRequest,
)
from tinsmith.wire.values.chunks import (
    DmelChunk,
    EncodedTextChunk,
    ImageAssetPointerChunk,
    ImageChunk,
    ImageDimensions,
    ModelInputChunk,
    text_of,
    token_bytes,
)
from tinsmith.wire.values.inputs import (
    Datum,
    ModelInput,
    PromptProvenanceSpan,
    ProvenanceSpan,
    ProvenanceSpans,
    SampledProvenanceSpan,
    datum_of,
)
from tinsmith.wire.values.numbers import Array, are_ids
from tinsmith.wire.values.tensors import TensorData

_INT32 = np.dtype("<i4")
_MAX_INT32 = 2**31 - 1
_FIRST, _SECOND = 1 << 3 | BYTES, 2 << 3 | BYTES
"""The tags of fields 1 and 2 if they hold bytes."""


def encode_request(request: ForwardBackwardRequest) -> bytes:
    """Return the body of POST forward_backward."""
    return request_message(request).encode()


def request_message(request: ForwardBackwardRequest) -> MessageWriter:
    """Return a request to which a seq_id can still be added: the client takes one only after the rest is checked."""
    work = request.forward_backward_input
    message = MessageWriter()
    message.text(1, request.model_id)
    if request.seq_id:
        add_seq_id(message, request.seq_id)
    for i, datum in enumerate(work.data):
        try:
            message.message(3, _datum_message(datum))
        except InvalidInputError as error:
            raise InvalidInputError(f"data[{i}]: {error}", field=f"data[{i}]") from None
    message.text(4, work.loss_fn)
    for name, value in (work.loss_fn_config or {}).items():
        _write_config(message, name, value)
    if request.forward_only:
        message.number(6, 1)
    return message


def add_seq_id(message: MessageWriter, seq_id: int) -> None:
    """Add the seq_id; the order of fields in a message is free."""
    if not 0 < seq_id <= _MAX_INT32:
        raise InvalidInputError(f"seq_id: {seq_id} is not allowed; it must be 1 to {_MAX_INT32}", field="seq_id")
    message.number(2, seq_id)


def decode_request(body: bytes | memoryview, max_datums: int = MAX_ITEMS) -> ForwardBackwardRequest:
    """Read the request in a body; token and tensor data are views of it."""
    model_id, seq_id, loss_fn, forward_only = "", 0, "", False
    data: list[Datum] = []
    numbers: dict[str, float | str] = {}
    values: dict[str, float | str] = {}
    for number, kind, value in read_fields(memoryview(body), "ForwardBackwardRequest"):
        if number == 1:
            model_id = as_text(value, kind, "model_id")
        elif number == 2:
            seq_id = as_int(value, kind, "seq_id", 32)
        elif number == 3:
            check_count(len(data) + 1, max_datums, "data")
            data.append(_read_datum(as_bytes(value, kind, "data"), f"data[{len(data)}]"))
        elif number == 4:
            loss_fn = as_text(value, kind, "loss_fn")
        elif number == 5:
            check_count(len(numbers) + 1, MAX_LOSS_INPUTS, "loss_fn_config")
            key, inner_kind, inner = read_entry(value, kind, "loss_fn_config")
            numbers[key] = 0.0 if inner_kind is None else as_double(inner, inner_kind, f"loss_fn_config[{key!r}]")
        elif number == 6:
            forward_only = bool(as_int(value, kind, "forward_only"))
        elif number == 7:
            check_count(len(values) + 1, MAX_LOSS_INPUTS, "loss_fn_config_v2")
            key, inner_kind, inner = read_entry(value, kind, "loss_fn_config_v2")
            values[key] = _read_config_value(key, inner_kind, inner)
    if loss_fn not in LOSSES:
        known = ", ".join(OFFERED)
        raise WireError(f"loss_fn: {loss_fn!r} is not a loss (allowed: {known})", field="loss_fn")
    try:
        return ForwardBackwardRequest(
            forward_backward_input=ForwardBackwardInput(
                data=data, loss_fn=cast(LossFnType, loss_fn), loss_fn_config=(numbers | values) or NOT_GIVEN
            ),
            model_id=model_id,
            seq_id=seq_id or NOT_GIVEN,
            forward_only=True if forward_only else NOT_GIVEN,
        )
    except InvalidInputError as error:
        raise WireError(str(error), field=error.field) from None


def _datum_message(datum: Datum) -> MessageWriter:
    message = MessageWriter()
    for i, chunk in enumerate(datum.model_input.chunks):
        message.message(1, _chunk_message(chunk, i))
    for key, tensor in datum.loss_fn_inputs.items():
        add_tensor(message, 2, key, tensor)
    for span in datum.model_input_spans or ():
        message.message(3, _span_message(span))
    for span in datum.loss_fn_input_spans or ():
        message.message(4, _span_message(span))
    return message


def _chunk_message(chunk: ModelInputChunk, index: int) -> MessageWriter:
    inner, message = MessageWriter(), MessageWriter()
    if isinstance(chunk, EncodedTextChunk):
        inner.blob(1, token_bytes(chunk))
        message.message(1, inner)
    elif isinstance(chunk, ImageChunk):
        inner.blob(1, chunk.data)
        inner.text(2, chunk.format)
        expected = chunk.expected_tokens if chunk.expected_tokens is not None else chunk.tokens
        if expected is not None:
            inner.number(3, expected)
        if chunk.override_dimensions is not None:
            dimensions = MessageWriter()
            dimensions.number(1, chunk.override_dimensions.width)
            dimensions.number(2, chunk.override_dimensions.height)
            inner.message(4, dimensions)
        message.message(2, inner)
    elif isinstance(chunk, DmelChunk):
        inner.blob(1, chunk.dmel)
        message.message(3, inner)
    else:
        assert isinstance(chunk, ImageAssetPointerChunk)
        raise InvalidInputError(
            f"chunks[{index}]: an image_asset_pointer cannot be sent as protobuf; "
            "load the image and send an ImageChunk",
            field=f"chunks[{index}]",
        )
    return message


def _span_message(span: ProvenanceSpan) -> MessageWriter:
    inner, message = MessageWriter(), MessageWriter()
    inner.text(1, span.sequence_id)
    if span.offset:
        inner.number(2, span.offset)
    if span.length:
        inner.number(3, span.length)
    message.message(1 if isinstance(span, PromptProvenanceSpan) else 2, inner)
    return message


def _write_config(message: MessageWriter, name: str, value: float | str) -> None:
    """Write a number into both maps, because older servers know only the first; a string into the second."""
    typed = MessageWriter()
    if isinstance(value, str):
        typed.text(2, value)
    else:
        typed.double(1, value)
        entry = MessageWriter()
        entry.text(1, name)
        entry.double(2, value)
        message.message(5, entry)
    message.entry(7, name, typed)


def _read_config_value(key: str, kind: int | None, value: Any) -> float | str:
    where = f"loss_fn_config_v2[{key!r}]"
    result: float | str | None = None
    if kind is not None:
        for number, inner_kind, inner in read_fields(as_bytes(value, kind, where), where):
            if number == 1:
                result = as_double(inner, inner_kind, where)
            elif number == 2:
                result = as_text(inner, inner_kind, where)
    if result is None:
        raise WireError(f"{where}: must be a number or a string", field=where)
    return result


def _plain_datum(data: memoryview) -> Datum | None:
    """Read a valid datum of text and one-dimensional tensors; None for any other, which is then read field by field."""
    chunks: list[ModelInputChunk] = []
    inputs: dict[str, TensorData] = {}
    position, end, length = 0, len(data), 0
    try:
        while position < end:
            tag = data[position]
            size, start = read_varint(data, position + 1, "")
            position = start + size
            part = data[start:position]
            if len(chunks) > MAX_CHUNKS or len(inputs) > MAX_LOSS_INPUTS:
                return None
            if tag == _FIRST and position <= end:
                tokens = _plain_text(part)
                if tokens is None:
                    return None
                chunks.append(text_of(tokens))
                length += tokens.size
            elif tag == _SECOND and position <= end:
                key_start, key_end = first_blob(part)
                if not key_start or key_end - key_start > MAX_NAME or part[key_end] != _SECOND:
                    return None
                size, start = read_varint(part, key_end + 1, "")
                tensor = plain_tensor(part[start:]) if start + size == len(part) else None
                if tensor is None:
                    return None
                inputs[str(part[key_start:key_end], "utf-8")] = tensor
            else:
                return None
    except (WireError, IndexError, UnicodeDecodeError):
        return None
    if any(tensor.array.size != length for key, tensor in inputs.items() if key in LIST_DTYPES):
        return None
    targets = inputs.get("target_tokens")
    if targets is not None and (targets.dtype != "int64" or not are_ids(targets.array)):
        return None
    return datum_of(chunks, inputs)


def _plain_text(data: memoryview) -> Array | None:
    """Return the tokens of a text chunk in the usual encoding; None for any other."""
    start, end = first_blob(data)
    if not start or end != len(data):
        return None
    text = data[start:end]
    start, end = first_blob(text)
    if not start or end != len(text) or (end - start) % _INT32.itemsize:
        return None
    tokens = np.frombuffer(text[start:end], _INT32)
    return tokens if are_ids(tokens) else None


def _read_datum(data: memoryview, where: str) -> Datum:
    plain = _plain_datum(data)
    if plain is not None:
        return plain
    chunks: list[ModelInputChunk] = []
    inputs: dict[str, TensorData] = {}
    input_spans: ProvenanceSpans = []
    loss_spans: ProvenanceSpans = []
    for number, kind, value in read_fields(data, where):
        if number == 1:
            check_count(len(chunks) + 1, MAX_CHUNKS, f"{where}.model_input.chunks")
            chunks.append(_read_chunk(as_bytes(value, kind, where), f"{where}.model_input.chunks[{len(chunks)}]"))
        elif number == 2:
            check_count(len(inputs) + 1, MAX_LOSS_INPUTS, f"{where}.loss_fn_inputs")
            key, inner_kind, inner = read_entry(value, kind, f"{where}.loss_fn_inputs")
            inside = f"{where}.loss_fn_inputs[{key!r}]"
            inputs[key] = read_tensor(as_bytes(inner, 2 if inner_kind is None else inner_kind, inside), inside)
        elif number == 3:
            check_count(len(input_spans) + 1, MAX_SPANS, f"{where}.model_input_spans")
            input_spans.append(_read_span(as_bytes(value, kind, where), f"{where}.model_input_spans"))
        elif number == 4:
            check_count(len(loss_spans) + 1, MAX_SPANS, f"{where}.loss_fn_input_spans")
            loss_spans.append(_read_span(as_bytes(value, kind, where), f"{where}.loss_fn_input_spans"))
    has_spans = bool(input_spans or loss_spans)
    try:
        return Datum(
            ModelInput(chunks=chunks), inputs, input_spans if has_spans else None, loss_spans if has_spans else None
        )
    except InvalidInputError as error:
        raise WireError(f"{where}: {error}", field=f"{where}.{error.field}" if error.field else where) from None


def _read_chunk(data: memoryview, where: str) -> ModelInputChunk:
    chunk: ModelInputChunk | None = None
    for number, kind, value in read_fields(data, where):
        if number not in (1, 2, 3):
            continue
        inner = read_fields(as_bytes(value, kind, where), where)
        try:
            chunk = (_read_text, _read_image, _read_dmel)[number - 1](inner, where)
        except InvalidInputError as error:
            raise WireError(f"{where}: {error}", field=where) from None
    if chunk is None:
        raise WireError(f"{where}: the kind of the chunk is unknown (allowed: encoded_text, image, dmel)", field=where)
    return chunk


def _read_text(fields: Iterator[Field], where: str) -> EncodedTextChunk:
    tokens: Array = np.empty(0, _INT32)
    for number, kind, value in fields:
        if number == 1:
            tokens = as_array(value, kind, f"{where}.tokens", _INT32)
    try:
        return EncodedTextChunk(tokens=tokens)
    except InvalidInputError as error:
        raise WireError(f"{where}: {error}", field=where) from None


def _read_image(fields: Iterator[Field], where: str) -> ImageChunk:
    data, image_format, expected, dimensions = b"", "", None, None
    for number, kind, value in fields:
        if number == 1:
            data = bytes(as_bytes(value, kind, where))
        elif number == 2:
            image_format = as_text(value, kind, where)
        elif number == 3:
            expected = as_int(value, kind, f"{where}.expected_tokens", 32)
        elif number == 4:
            inner = read_fields(as_bytes(value, kind, where), where)
            sizes = {n: as_int(v, k, where) for n, k, v in inner if n in (1, 2)}
            if any(not 0 <= size < 2**32 for size in sizes.values()):
                raise WireError(
                    f"{where}.override_dimensions: {sizes} does not fit", field=f"{where}.override_dimensions"
                )
            dimensions = ImageDimensions(width=sizes.get(1, 0), height=sizes.get(2, 0))
    return ImageChunk(data=data, format=image_format, expected_tokens=expected, override_dimensions=dimensions)  # type: ignore[arg-type]


def _read_dmel(fields: Iterator[Field], where: str) -> DmelChunk:
    data = b""
    for number, kind, value in fields:
        if number == 1:
            data = bytes(as_bytes(value, kind, where))
    return DmelChunk(dmel=data)


def _read_span(data: memoryview, where: str) -> ProvenanceSpan:
    for number, kind, value in read_fields(data, where):
        if number in (1, 2):
            sequence_id, offset, length = "", 0, 0
            for inner_number, inner_kind, inner in read_fields(as_bytes(value, kind, where), where):
                if inner_number == 1:
                    sequence_id = as_text(inner, inner_kind, where)
                elif inner_number == 2:
                    offset = as_int(inner, inner_kind, where)
                elif inner_number == 3:
                    length = as_int(inner, inner_kind, where)
            span_type = PromptProvenanceSpan if number == 1 else SampledProvenanceSpan
            try:
                return span_type(sequence_id=sequence_id, offset=offset, length=length)
            except InvalidInputError as error:
                raise WireError(f"{where}: {error}", field=where) from None
    raise WireError(f"{where}: the kind of the span is unknown", field=where)
