"""The chunks of a model input: text, images, audio."""

from __future__ import annotations

import base64
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tinsmith.errors import InvalidInputError
from tinsmith.types import DmelChunk, EncodedTextChunk, ImageAssetPointerChunk, ImageChunk, ModelInput
from tinsmith.wire.values.chunks import largest_token

DMEL = bytes([0, 2, 5, 3]) + bytes(15)
"""A container of dtype 0 with two dimensions, 5 and 3."""


def read(document: dict[str, Any]) -> Any:
    return ModelInput.from_builtins({"chunks": [document]}).chunks[0]


@pytest.mark.parametrize(
    ("document", "chunk"),
    [
        ({"tokens": [1, 2]}, EncodedTextChunk(tokens=[1, 2])),
        ({"tokens": []}, EncodedTextChunk(tokens=[])),
        ({"data": "eA==", "format": "png"}, ImageChunk(data=b"x", format="png")),
        (
            {"data": "eA==", "format": "png", "height": 2, "width": 3, "tokens": 4},
            ImageChunk(data=b"x", format="png", height=2, width=3, tokens=4),
        ),
        ({"location": "s3://x", "format": "jpeg"}, ImageAssetPointerChunk(location="s3://x", format="jpeg")),
        (
            {"location": "s3://x", "format": "jpeg", "tokens": 4},
            ImageAssetPointerChunk(location="s3://x", format="jpeg", tokens=4),
        ),
        ({"dmel": base64.b64encode(DMEL).decode()}, DmelChunk(dmel=DMEL)),
    ],
)
def test_a_chunk_without_type_is_known_by_its_keys(document: dict[str, Any], chunk: Any) -> None:
    assert read(document) == chunk
    assert read(document | {"type": None, "later": 1}) == chunk
    assert read(document | {"type": chunk.type}) == chunk


@pytest.mark.parametrize(
    "chunk",
    [
        EncodedTextChunk(tokens=np.array([1, 2])),
        ImageChunk(data=b"\x00\xff", format="jpeg", expected_tokens=9),
        ImageAssetPointerChunk(location="s3://x", format="png", expected_tokens=0),
        DmelChunk(dmel=DMEL),
    ],
)
def test_chunks_come_back_from_builtins_and_pickle(chunk: Any) -> None:
    assert read(chunk.to_builtins()) == chunk
    assert pickle.loads(pickle.dumps(chunk)) == chunk
    assert chunk.to_builtins()["type"] == chunk.type


@given(st.binary(max_size=64))
@settings(deadline=None, max_examples=50)
def test_media_travel_as_base64(data: bytes) -> None:
    chunk = ImageChunk(data=data, format="png")
    assert base64.b64decode(chunk.to_builtins()["data"]) == data
    assert read(chunk.to_builtins()) == chunk
    assert ImageChunk(data=chunk.to_builtins()["data"], format="png") == chunk
    assert ImageChunk(data=bytearray(data), format="png") == chunk  # type: ignore[arg-type]
    assert chunk.estimated_bytes == len(data)


@pytest.mark.parametrize("text", ["x", "=", "eA=", "e A==", "eA==\n", "é", "eA==eA=="])
@pytest.mark.parametrize("field", ["data", "dmel"])
def test_bad_base64_is_refused_by_name(text: str, field: str) -> None:
    with pytest.raises(InvalidInputError, match=f"{field}: not valid base64"):
        read({field: text, "format": "png"})


@pytest.mark.parametrize(
    ("build", "field"),
    [
        (lambda: ImageChunk(data=b"x", format="gif"), "format"),  # type: ignore[arg-type]
        (lambda: ImageChunk(data=b"x", format=["png"]), "format"),  # type: ignore[arg-type]
        (lambda: ImageChunk(data=5, format="png"), "data"),  # type: ignore[arg-type]
        (lambda: ImageChunk(data=None, format="png"), "data"),  # type: ignore[arg-type]
        (lambda: ImageChunk(data=b"x", format="png", expected_tokens=-1), "expected_tokens"),
        (lambda: ImageChunk(data=b"x", format="png", expected_tokens=True), "expected_tokens"),
        (lambda: ImageChunk(data=b"x", format="png", expected_tokens=1.0), "expected_tokens"),  # type: ignore[arg-type]
        (lambda: ImageChunk(data=b"x", format="png", type="dmel"), "type"),  # type: ignore[arg-type]
        (lambda: ImageAssetPointerChunk(location=5, format="png"), "location"),  # type: ignore[arg-type]
        (lambda: ImageAssetPointerChunk(location="x", format="bmp"), "format"),  # type: ignore[arg-type]
        (lambda: EncodedTextChunk(tokens=[1], type="image"), "type"),  # type: ignore[arg-type]
        (lambda: EncodedTextChunk(tokens=[-1]), "tokens"),
        (lambda: DmelChunk(dmel=[1]), "dmel"),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_chunk_names_its_field(build: Any, field: str) -> None:
    with pytest.raises(InvalidInputError, match=field) as caught:
        build()
    assert (caught.value.field or "").startswith(field)


@pytest.mark.parametrize(
    ("document", "field"),
    [
        ({"type": "image", "format": "png"}, "data"),
        ({"type": "image", "data": "eA=="}, "format"),
        ({"type": "encoded_text"}, "tokens"),
        ({"type": "image_asset_pointer", "format": "png"}, "location"),
        ({"type": "dmel"}, "dmel"),
        ({"type": "video", "data": ""}, "type"),
        ({"type": 5}, "type"),
        ({}, "type"),
        ({"tokens": {}}, "tokens"),
        ({"tokens": "12"}, "tokens"),
    ],
)
def test_a_chunk_that_cannot_be_read_names_what_is_wrong(document: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInputError, match=rf"chunks\[0\].*{field}"):
        read(document)


def test_an_images_length_is_what_it_is_expected_to_take() -> None:
    assert ImageChunk(data=b"x", format="png", expected_tokens=7).length == 7
    assert ImageChunk(data=b"x", format="png", tokens=6).length == 6
    assert ImageChunk(data=b"x", format="png", tokens=6, expected_tokens=7).length == 7
    assert ImageAssetPointerChunk(location="x", format="png", expected_tokens=0).length == 0


@pytest.mark.parametrize(
    "chunk", [ImageChunk(data=b"x", format="png"), ImageAssetPointerChunk(location="x", format="png")]
)
def test_an_images_length_may_be_unknown(chunk: Any) -> None:
    with pytest.raises(InvalidInputError, match="expected_tokens"):
        _ = chunk.length


@pytest.mark.parametrize(
    ("container", "length"),
    [
        (bytes([0, 2, 5, 3]), 5),
        (bytes([7, 1, 9]), 9),
        (bytes([254, 3, 1, 4]), 4),
        (bytes([0, 1, 0]), 0),
        (bytes([0, 1, 0xAC, 0x02]), 300),
        (bytes([0, 0x81, 0x00, 6]), 6),
    ],
)
def test_the_length_of_audio_is_its_first_dimension(container: bytes, length: int) -> None:
    assert DmelChunk(dmel=container).length == length
    assert ModelInput(chunks=[DmelChunk(dmel=container)]).length == length


@pytest.mark.parametrize(
    "container",
    [
        b"",
        bytes([8, 1, 5]),
        bytes([254]),
        bytes([254, 254]),
        bytes([0]),
        bytes([0, 0]),
        bytes([0, 1]),
        bytes([0, 1, 0x80]),
        bytes([0, 1]) + b"\xff" * 20,
    ],
    ids=bytes.hex,
)
def test_what_is_no_audio_container_has_no_length(container: bytes) -> None:
    with pytest.raises(InvalidInputError, match="dmel"):
        _ = DmelChunk(dmel=container).length


@given(st.binary(max_size=24))
@settings(deadline=None, max_examples=100)
def test_no_container_breaks_the_length(container: bytes) -> None:
    try:
        length = DmelChunk(dmel=container).length
    except InvalidInputError:
        return
    assert length >= 0


def test_byte_estimates() -> None:
    assert EncodedTextChunk(tokens=[1, 2, 3]).estimated_bytes == 12
    assert EncodedTextChunk(tokens=np.arange(3)).estimated_bytes == 12
    assert DmelChunk(dmel=DMEL).estimated_bytes == len(DMEL)
    assert ImageAssetPointerChunk(location="s3://x", format="png").estimated_bytes == 6


@pytest.mark.parametrize("length", [1, 3, 5000])
@pytest.mark.parametrize("make", [list, np.array])
def test_the_largest_token(length: int, make: Any) -> None:
    tokens = [(7 * place + 3) % 5003 for place in range(length)]
    assert largest_token(EncodedTextChunk(tokens=make(tokens))) == max(tokens)


def test_no_tokens_have_no_largest_one() -> None:
    assert largest_token(EncodedTextChunk(tokens=[])) == -1
