"""Passes whose loss cannot be computed are refused; the error names the place and what is allowed."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinsmith.errors import InvalidInputError, WireError
from tinsmith.wire.codecs import json_codec
from tinsmith.wire.codecs.proto_training import decode_request, encode_request
from tinsmith.wire.losses import COMPUTED, LIST_DTYPES, LOSSES, LossFnType
from tinsmith.wire.messages.training import (
    CustomLossInput,
    ForwardBackwardInput,
    ForwardBackwardRequest,
    ForwardRequest,
)
from tinsmith.wire.rules.loss_rules import check_loss, loss_options
from tinsmith.wire.values.chunks import DmelChunk, EncodedTextChunk, ImageChunk
from tinsmith.wire.values.inputs import Datum, ModelInput
from tinsmith.wire.values.tensors import TensorData

VOCABULARY = 50
CONTEXT = 8
LENGTH = 4


def floats(*values: float) -> np.ndarray[Any, Any]:
    return np.array(values, np.float32)


GOOD: dict[str, dict[str, Any]] = {
    "cross_entropy": {"target_tokens": [1, 2, 3, 49], "weights": [0.0, 1.0, -2.0, 0.5]},
    "importance_sampling": {"target_tokens": [1, 2, 3, 4], "logprobs": [-1.0] * 4, "advantages": [0.5] * 4},
}
for _name in ("ppo", "cispo", "dro"):
    GOOD[_name] = GOOD["importance_sampling"]
GOOD["gspo"] = GOOD["importance_sampling"] | {"sequence_ratio_mask": [0.0, 0.0, 1.0, 1.0]}
GOOD["custom"] = {"target_tokens": [1, 2, 3, 4], "advantages": [0.5] * 4}


def request(
    loss_fn: str = "cross_entropy",
    config: dict[str, float | str] | None = None,
    inputs: dict[str, Any] | None = None,
    drop: str | None = None,
    model_input: ModelInput | None = None,
    **changes: Any,
) -> ForwardBackwardRequest:
    """A good request of two datums; the changes go into the second."""
    good = GOOD[loss_fn]
    bad = (inputs if inputs is not None else good) | changes
    bad = {key: value for key, value in bad.items() if key != drop}
    tokens = ModelInput.from_ints([5, 6, 7, 8])
    data = [Datum(tokens, good), Datum(tokens if model_input is None else model_input, bad)]
    work = ForwardBackwardInput(data=data, loss_fn=loss_fn, loss_fn_config=config or {})  # type: ignore[arg-type]
    return ForwardBackwardRequest(forward_backward_input=work, model_id="m")


def check(request: ForwardBackwardRequest | ForwardRequest, **options: Any) -> None:
    check_loss(request, vocab_size=VOCABULARY, max_context_length=CONTEXT, **options)


def refusal(request: ForwardBackwardRequest, **options: Any) -> InvalidInputError:
    with pytest.raises(InvalidInputError) as caught:
        check(request, **options)
    return caught.value


@pytest.mark.parametrize("loss_fn", sorted(GOOD))
def test_good_requests_pass_as_built_and_as_decoded(loss_fn: str) -> None:
    config: dict[str, float | str] = {"loss_id": "x"} if loss_fn == "custom" else {}
    check(request(loss_fn, config))
    check(decode_request(encode_request(request(loss_fn, config))))


def test_forward_requests_of_old_clients_are_checked_too() -> None:
    work = request(drop="weights").forward_backward_input
    with pytest.raises(InvalidInputError, match="'weights'"):
        check(ForwardRequest(forward_input=work, model_id="m"))


@pytest.mark.parametrize("loss_fn", sorted(set(GOOD) - {"custom"}))
def test_each_required_input_is_demanded_by_name(loss_fn: str) -> None:
    for name in ("target_tokens", *LOSSES[loss_fn].required):
        error = refusal(request(loss_fn, drop=name))
        assert error.field == f"data[1].loss_fn_inputs[{name!r}]"
        assert f"is missing; {loss_fn} needs it" in str(error)


@pytest.mark.parametrize("loss_fn", sorted(set(GOOD) - {"custom"}))
def test_each_input_must_have_the_shape_of_the_targets(loss_fn: str) -> None:
    for name in (*LOSSES[loss_fn].required, *LOSSES[loss_fn].optional):
        error = refusal(request(loss_fn, **{name: np.ones((LENGTH, 1), np.float32)}))
        assert str(error).startswith(f"data[1].loss_fn_inputs[{name!r}]: has shape [4, 1], target_tokens has [4]")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("loss_fn", sorted(set(GOOD) - {"custom"}))
def test_numbers_that_are_not_finite_are_refused(loss_fn: str, value: float) -> None:
    for name in (*LOSSES[loss_fn].required, *LOSSES[loss_fn].optional):
        error = refusal(request(loss_fn, **{name: floats(1, 1, value, 1)}))
        assert str(error) == f"data[1].loss_fn_inputs[{name!r}][2]: is {value}; only finite numbers are allowed"


@pytest.mark.parametrize("name", sorted({*LOSSES["ppo"].optional, "weights"}))
def test_optional_inputs_of_the_reinforcement_losses_pass(name: str) -> None:
    check(request("ppo", **{name: [1.0] * LENGTH}))


def test_integers_are_numbers_too() -> None:
    check(request(weights=np.array([0, 1, 1, 0])))


@pytest.mark.parametrize(
    ("name", "text"),
    [("advantages", "cross_entropy has no such input (its inputs: target_tokens, weights)"), ("mask", "into weights")],
)
def test_inputs_that_the_loss_does_not_read_are_refused(name: str, text: str) -> None:
    assert text in str(refusal(request(**{name: floats(1, 1, 1, 1)})))


@pytest.mark.parametrize("token", [VOCABULARY, 2**31 - 1])
def test_targets_beyond_the_vocabulary_are_refused(token: int) -> None:
    error = refusal(request(target_tokens=[1, 2, token, 3]))
    assert str(error) == (
        f"data[1].loss_fn_inputs['target_tokens'][2]: {token} is not a token of this model (allowed: 0 to 49)"
    )


@pytest.mark.parametrize("tokens", [[1, 50, 1, 1], np.array([1, 50, 1, 1], np.int32), np.array([1, 50, 1, 1])])
def test_input_tokens_beyond_the_vocabulary_are_refused(tokens: Any) -> None:
    chunks = [EncodedTextChunk(tokens=[]), EncodedTextChunk(tokens=tokens)]
    error = refusal(request(model_input=ModelInput(chunks=chunks)))
    assert error.field == "data[1].model_input.chunks[1].tokens[1]"


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32, np.int64])
def test_negative_ids_are_refused_even_where_nothing_checked_them_before(dtype: Any) -> None:
    chunk = EncodedTextChunk(tokens=[1, 2, 3, 4])
    object.__setattr__(chunk, "tokens", np.array([1, 2, -3, 4], dtype))
    assert "[2]: -3 is not a token" in str(refusal(request(model_input=ModelInput(chunks=[chunk]))))


def test_targets_are_int64() -> None:
    good = request()
    tensor = TensorData([1.0] * 4, "float32")
    good.forward_backward_input.data[1].loss_fn_inputs["target_tokens"] = tensor
    assert "token ids must be int64, got float32" in str(refusal(good))


def test_too_long_and_empty_inputs_are_refused() -> None:
    long = {"target_tokens": [1] * 9, "weights": [1.0] * 9}
    assert "has 9 tokens; this model reads at most 8" in str(
        refusal(request(inputs=long, model_input=ModelInput.from_ints([1] * 9)))
    )
    empty = {"target_tokens": TensorData([], "int64"), "weights": TensorData([], "float32")}
    assert "data[1].model_input: is empty" in str(refusal(request(inputs=empty, model_input=ModelInput.empty())))
    work = ForwardBackwardInput(data=[], loss_fn="cross_entropy")
    nothing = ForwardBackwardRequest(forward_backward_input=work, model_id="m")
    assert "data: is empty" in str(refusal(nothing))


@pytest.mark.parametrize("expected_tokens", [None, 3])
def test_images_are_refused_by_every_model(expected_tokens: int | None) -> None:
    image = ImageChunk(data=b"x", format="png", expected_tokens=expected_tokens)
    chunks = [EncodedTextChunk(tokens=[1]), image]
    assert "is of type image, which this model does not read" in str(
        refusal(request(model_input=ModelInput(chunks=chunks)))
    )


def test_audio_is_refused_by_every_model() -> None:
    chunks = [DmelChunk(dmel=bytes([0, 1, 4]))]
    assert "is of type dmel" in str(refusal(request(model_input=ModelInput(chunks=chunks))))


def test_options_have_defaults_and_ranges() -> None:
    assert loss_options("ppo", None) == {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
    assert loss_options("ppo", {"clip_low_threshold": 0.5}) == {"clip_low_threshold": 0.5, "clip_high_threshold": 1.2}
    assert loss_options("cispo", {}) == {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}
    assert loss_options("gspo", {}) == {"clip_low_threshold": 1 - 3e-4, "clip_high_threshold": 1 + 4e-4}
    assert loss_options("dro", {}) == {"beta": 0.05}
    assert loss_options("cross_entropy", {}) == {}


@pytest.mark.parametrize(
    ("loss_fn", "config", "text"),
    [
        ("ppo", {"epsilon": 0.2}, "['epsilon']: ppo has no such option; its options are clip_low_threshold, clip_"),
        ("cross_entropy", {"beta": 1.0}, "cross_entropy has no such option; it has none"),
        ("dro", {"beta": -1.0}, "['beta']: -1.0 is not allowed; beta must be a finite number of 0 or more"),
        ("dro", {"beta": float("nan")}, "nan is not allowed"),
        ("dro", {"beta": "much"}, "'much' is not allowed"),
        ("ppo", {"clip_low_threshold": 1.5}, "clip_low_threshold 1.5 must not be above clip_high_threshold 1.2"),
        ("custom", {}, "custom needs the id of an uploaded loss, got None"),
        ("custom", {"loss_id": 3.0}, "got 3.0"),
        ("custom", {"loss_id": "x", "beta": 1.0}, "custom has no such option"),
        ("stable_reinforce", {}, "stable_reinforce is not available on this server: its formula is not public"),
        ("nonsense", {}, "'nonsense' is not a loss (allowed: cross_entropy"),
    ],
)
def test_options_that_are_refused(loss_fn: str, config: dict[str, float | str], text: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        loss_options(loss_fn, config)
    assert text in str(caught.value)


def test_a_wrong_name_of_a_loss_offers_only_losses_that_are_computed() -> None:
    wrong: Any = "stable_reinforcee"
    body = encode_request(request()).replace(b"cross_entropy", b"cross_entropi")  # of the same length
    with pytest.raises(InvalidInputError) as by_options:
        loss_options(wrong, {})
    with pytest.raises(InvalidInputError) as built:
        ForwardBackwardInput(data=request().forward_backward_input.data, loss_fn=wrong)
    with pytest.raises(WireError) as received:
        json_codec.decode(b'{"data": [], "loss_fn": "stable_reinforcee"}', ForwardBackwardInput)
    with pytest.raises(WireError) as in_protobuf:
        decode_request(body)
    for caught in (by_options, built, received, in_protobuf):
        text = str(caught.value)
        offered = text.partition("(allowed: ")[2].rstrip(")").split(", ")
        assert set(offered) == set(COMPUTED) | {"custom"}, text


def test_the_request_check_looks_at_the_options() -> None:
    assert "no such option" in str(refusal(request(config={"beta": 1.0})))
    refused = request().forward_backward_input
    work = ForwardBackwardInput(data=refused.data, loss_fn="stable_reinforce")
    assert "not public" in str(refusal(ForwardBackwardRequest(forward_backward_input=work, model_id="m")))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"clip_low_threshold": [0.5, -1.0, 0.5, 0.5]}, "clip_low_threshold'][1]: the thresholds are -1 and 1.2"),
        (
            {"clip_low_threshold": [0.5, 0.5, 0.5, 1.5]},
            "[3]: the thresholds are 1.5 and 1.2; they must satisfy 0 <= low <= high",
        ),
        ({"clip_high_threshold": [0.7, 2.0, 2.0, 2.0]}, "clip_high_threshold'][0]: the thresholds are 0.8 and 0.7"),
    ],
)
def test_thresholds_per_token_are_compared(changes: dict[str, Any], text: str) -> None:
    assert text in str(refusal(request("ppo", **changes)))


def test_a_ratio_mask_marks_something() -> None:
    assert "is 0 for all tokens" in str(refusal(request("gspo", sequence_ratio_mask=[0.0] * 4)))


TARGETS_NK = np.array([[1, 2, 0], [0, 0, 0], [4, 0, 0], [49, 5, 6]])
WEIGHTS_NK = np.array([[0.5, 0, 0], [1, 0, 0], [0, 0, 0], [0, 0.1, 0.2]], np.float32)


def csr(dense: np.ndarray[Any, Any]) -> TensorData:
    rows, columns = np.nonzero(dense)
    crow = np.concatenate(([0], np.cumsum(np.bincount(rows, minlength=len(dense))))).tolist()
    dtype: Any = "int64" if dense.dtype.kind == "i" else "float32"
    return TensorData(dense[rows, columns], dtype, dense.shape, crow, columns.tolist())


@pytest.mark.parametrize("targets", [TARGETS_NK, csr(TARGETS_NK)], ids=["dense", "csr"])
@pytest.mark.parametrize("weights", [WEIGHTS_NK, csr(WEIGHTS_NK)], ids=["dense", "csr"])
def test_several_targets_per_position(targets: Any, weights: Any) -> None:
    check(request(target_tokens=targets, weights=weights))
    check(decode_request(encode_request(request(target_tokens=targets, weights=weights))))
    assert "has shape [4], target_tokens has [4, 3]" in str(refusal(request(target_tokens=targets)))
    text = str(refusal(request("ppo", target_tokens=targets)))
    assert "has shape [4, 3]; ppo needs [N]" in text


def test_errors_in_csr_name_the_cell() -> None:
    targets, weights = TARGETS_NK.copy(), WEIGHTS_NK.copy()
    targets[3, 1] = 50
    error = refusal(request(target_tokens=csr(targets), weights=weights))
    assert error.field == "data[1].loss_fn_inputs['target_tokens'][3][1]"
    weights[3, 2] = np.nan
    error = refusal(request(target_tokens=TARGETS_NK, weights=csr(weights)))
    assert error.field == "data[1].loss_fn_inputs['weights'][3][2]"


def test_a_few_bytes_cannot_ask_for_a_huge_tensor() -> None:
    targets = TensorData([], "int64", [4, 2**40], [0] * 5, [])
    weights = TensorData([], "float32", [4, 2**40], [0] * 5, [])
    assert "1 to 50 (the size of the vocabulary) are allowed" in str(
        refusal(request(target_tokens=targets, weights=weights))
    )
    targets = TensorData([], "int64", [4, 2**25], [0] * 5, [])
    weights = TensorData([], "float32", [4, 2**25], [0] * 5, [])
    big = request(target_tokens=targets, weights=weights)
    with pytest.raises(InvalidInputError, match="134217728 cells together"):
        check_loss(big, vocab_size=2**26, max_context_length=8)


def test_nor_can_the_inputs_of_an_uploaded_loss_together() -> None:
    """Each is small enough, and all of them would take the engine's memory."""
    declared = [CustomLossInput(name="logprobs", rank=1), *(CustomLossInput(name=name, rank=2) for name in "ab")]
    large = {name: TensorData([], "float32", [2, 2**23], [0] * 3, []) for name in "ab"}
    one = request("custom", {"loss_id": "x"}, **large)
    for count, is_too_much in ((2, False), (6, True)):
        data = [one.forward_backward_input.data[1]] * count
        work = one.forward_backward_input.model_copy(update={"data": data})
        several = one.model_copy(update={"forward_backward_input": work})
        if is_too_much:
            with pytest.raises(InvalidInputError, match="CSR inputs have 201326592 cells together"):
                check(several, custom_inputs=declared)
        else:
            check(several, custom_inputs=declared)


def test_declared_inputs_of_an_uploaded_loss_are_demanded() -> None:
    declared = [CustomLossInput(name="logprobs", rank=1), CustomLossInput(name="advantages", rank=1)]
    config: dict[str, float | str] = {"loss_id": "x"}
    check(request("custom", config), custom_inputs=declared)
    check(request("custom", config, extra=floats(1, 2)), custom_inputs=declared)
    assert "'advantages']: is missing" in str(
        refusal(request("custom", config, drop="advantages"), custom_inputs=declared)
    )
    text = str(refusal(request("custom", config, advantages=np.ones((4, 2), np.float32)), custom_inputs=declared))
    assert "has 2 dimensions; the uploaded loss declares rank 1" in text
    assert "the uploaded loss declares rank 1" in str(
        refusal(request("custom", config, target_tokens=TARGETS_NK), custom_inputs=declared)
    )
    assert "only finite" in str(refusal(request("custom", config, extra=floats(np.nan))))


@given(
    tokens=st.lists(st.integers(0, 60), min_size=1, max_size=10),
    weights=st.lists(st.floats(width=32), min_size=1, max_size=10),
)
def test_exactly_the_good_ones_pass(tokens: list[int], weights: list[float]) -> None:
    inputs = {"target_tokens": TensorData(tokens, "int64"), "weights": TensorData(weights, "float32")}
    datum = Datum(ModelInput.from_ints([1]), {"x": np.zeros(1, np.float32)})
    object.__setattr__(datum, "model_input", ModelInput.from_ints([1] * len(tokens)))
    object.__setattr__(datum, "loss_fn_inputs", inputs)
    work = ForwardBackwardInput(data=[datum], loss_fn="cross_entropy")
    is_good = (
        len(tokens) == len(weights) and len(tokens) <= CONTEXT and max(tokens) < 50 and bool(np.isfinite(weights).all())
    )
    try:
        check(ForwardBackwardRequest(forward_backward_input=work, model_id="m"))
    except InvalidInputError:
        assert not is_good
    else:
        assert is_good


def test_the_type_of_loss_fn_has_the_names_of_the_table() -> None:
    assert list(get_args(LossFnType)) == list(LOSSES)


def test_every_input_of_a_loss_has_a_dtype() -> None:
    assert set(LIST_DTYPES) == {
        *("target_tokens", "weights", "advantages", "logprobs"),
        *("clip_low_threshold", "clip_high_threshold", "sequence_ratio_mask"),
    }
    assert {name for name, dtype in LIST_DTYPES.items() if dtype == "int64"} == {"target_tokens"}
