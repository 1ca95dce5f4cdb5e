"""The trainer against float64 with autograd, one datum at a time; and what must be equal to the last bit."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from support.model_reference import Reference, randomized

from tinsmith.engine.lora import LoraAdapter
from tinsmith.engine.models.attention import PackedAttention
from tinsmith.engine.models.decoder import Decoder
from tinsmith.engine.models.load import load_model
from tinsmith.engine.models.tiny import FAMILIES
from tinsmith.engine.training import layers
from tinsmith.engine.training.layers import TrainingPass, recorded_bytes
from tinsmith.engine.training.losses import LOSSES
from tinsmith.engine.training.losses.base import Evaluation
from tinsmith.engine.training.row_ops import TorchRows
from tinsmith.engine.training.trainer import Trainer
from tinsmith.wire.messages.training import (
    ForwardBackwardInput,
    ForwardBackwardOutput,
    ForwardBackwardRequest,
    ForwardRequest,
)
from tinsmith.wire.rules.loss_rules import loss_options
from tinsmith.wire.values.inputs import Datum, ModelInput
from tinsmith.wire.values.tensors import TensorData, sparse_if_smaller, tensor_of

VOCAB = 264
ALL = {"train_attn": True, "train_mlp": True, "train_unembed": True}
SWITCHES = [
    ALL,
    {"train_attn": True, "train_mlp": False, "train_unembed": False},
    {"train_attn": False, "train_mlp": True, "train_unembed": False},
    {"train_attn": False, "train_mlp": False, "train_unembed": True},
    {"train_attn": True, "train_mlp": True, "train_unembed": False},
]


def request(data: list[Datum], loss_fn: Any = "cross_entropy", **config: float | str) -> ForwardBackwardRequest:
    work = ForwardBackwardInput(data=data, loss_fn=loss_fn, **({"loss_fn_config": config} if config else {}))
    return ForwardBackwardRequest(forward_backward_input=work, model_id="m", seq_id=1)


def make_data(
    lengths: list[int], loss_fn: str = "cross_entropy", seed: int = 0, targets: int | None = None
) -> list[Datum]:
    """Random datums; a third of the weights are 0. `targets` per position makes them [N, K]."""
    source = np.random.default_rng(seed)
    data = []
    for length in lengths:
        shape = (length,) if targets is None else (length, targets)
        inputs: dict[str, Any] = {"target_tokens": source.integers(0, VOCAB, shape)}
        if loss_fn == "cross_entropy":
            inputs["weights"] = (source.normal(size=shape) * (source.random(shape) > 0.33)).astype(np.float32)
        else:
            inputs["logprobs"] = (-5 + source.normal(size=shape)).astype(np.float32)
            inputs["advantages"] = (source.normal(size=shape) * (source.random(shape) > 0.33)).astype(np.float32)
        if loss_fn == "gspo":
            inputs["sequence_ratio_mask"] = np.ones(shape, np.float32)
        data.append(Datum(ModelInput.from_ints(source.integers(0, VOCAB, length)), inputs))
    return data


def expected(reference: Reference, work: ForwardBackwardInput) -> tuple[float, list[np.ndarray], dict[str, Any]]:
    """Loss, logprobs and gradients, datum by datum."""
    total = torch.zeros((), dtype=torch.float64)
    outputs = []
    for datum in work.data:
        inputs = {name: torch.from_numpy(np.array(value.to_numpy())) for name, value in datum.loss_fn_inputs.items()}
        targets = inputs.pop("target_tokens")
        everything = reference.logprobs(torch.tensor(datum.model_input.to_ints()))
        chosen = everything.gather(1, targets.view(len(targets), -1)).view(targets.shape)
        outputs.append(chosen.detach().numpy())
        doubles = {name: value.double() for name, value in inputs.items()}
        options = loss_options(work.loss_fn, work.loss_fn_config)
        if work.loss_fn == "cross_entropy":
            total = total - (doubles["weights"] * chosen).sum()
        else:
            total = total + LOSSES[work.loss_fn].per_token(chosen, doubles, options).loss_N.sum()
    return float(total.detach()), outputs, reference.gradients(total)


def check(made: Any, adapter: LoraAdapter, asked: ForwardBackwardRequest, trainer: Trainer) -> ForwardBackwardOutput:
    result = trainer.forward_backward(adapter, asked, backward=True)
    loss, outputs, gradients = expected(Reference.of(made.directory, adapter), asked.forward_backward_input)
    assert result.metrics["loss:sum"] == pytest.approx(loss, rel=1e-5, abs=1e-4)
    for found, wanted in zip(result.loss_fn_outputs, outputs, strict=True):
        assert found["logprobs"].array.dtype == np.float32
        np.testing.assert_allclose(found["logprobs"].to_numpy(), wanted, atol=2e-5)
    for name, gradient in adapter.gradients().items():
        wanted = gradients[name]
        assert (gradient - wanted).abs().max() <= 2e-5 * max(1.0, float(wanted.abs().max())), name
    return result


SPECIAL: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 5},
    "phi3": {"partial_rotary_factor": 0.5},
    "gemma2": {"sliding_window": 5},
    "gemma3": {"sliding_window": 5},
}
"""Settings with which a family computes more than without."""


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rank", [1, 4])
def test_gradients_equal_autograd_in_float64(family: str, rank: int, tiny: Callable[..., Any]) -> None:
    check_family(family, rank, tiny(family, **SPECIAL.get(family, {})))


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"smollm", "qwen2"}))
def test_heads_that_have_kernels_do_so_too(family: str, tiny: Callable[..., Any]) -> None:
    check_family(family, 2, tiny(family, head_dim=32, **SPECIAL.get(family, {})))


@pytest.mark.parametrize("family", FAMILIES)
def test_operations_of_torch_do_so_too(family: str, tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "row_ops", lambda device, dtype, activation: TorchRows(activation))
    check_family(family, 2, tiny(family, **SPECIAL.get(family, {})))


def check_family(family: str, rank: int, made: Any) -> None:
    adapter = randomized(LoraAdapter(made.decoder.config, rank, seed=rank, **ALL))
    check(made, adapter, request(make_data([9, 3, 17, 1, 6], seed=rank)), Trainer(made.decoder, micro_batch_tokens=16))


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_equal_those_of_peft_on_transformers(family: str, tiny: Callable[..., Any]) -> None:
    made = tiny(family, **SPECIAL.get(family, {}))
    adapter = randomized(LoraAdapter(made.decoder.config, 3, seed=0, **ALL))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import peft
        import transformers

        base = transformers.AutoModelForCausalLM.from_pretrained(
            made.directory, dtype=torch.float32, attn_implementation="eager"
        )
        modules = sorted({name.split(".")[-3] for name in adapter.parameters()})
        theirs = peft.get_peft_model(base, peft.LoraConfig(r=3, lora_alpha=adapter.alpha, target_modules=modules))
    leaves = {name.replace(".default", ""): leaf for name, leaf in theirs.named_parameters() if "lora_" in name}
    for name, parameter in adapter.parameters().items():
        leaves[name].data.copy_(parameter)
    (datum,) = data = make_data([40])
    Trainer(made.decoder).forward_backward(adapter, request(data), True)
    inputs = {name: torch.from_numpy(np.array(value.to_numpy())) for name, value in datum.loss_fn_inputs.items()}
    logprobs = torch.log_softmax(theirs(torch.tensor([datum.model_input.to_ints()])).logits[0], -1)
    chosen = logprobs.gather(1, inputs["target_tokens"][:, None])[:, 0]
    (-(inputs["weights"] * chosen).sum()).backward()
    for name, gradient in adapter.gradients().items():
        wanted = leaves[name].grad
        assert (gradient - wanted).abs().max() <= 1e-4 * max(1.0, float(wanted.abs().max())), name


@pytest.mark.parametrize("switches", SWITCHES, ids=lambda value: "+".join(name for name, on in value.items() if on))
def test_switches_train_what_they_say(switches: dict[str, bool], tiny: Callable[..., Any]) -> None:
    made = tiny()
    adapter = randomized(LoraAdapter(made.decoder.config, 3, seed=0, **switches))
    check(made, adapter, request(make_data([5, 8])), Trainer(made.decoder))


@pytest.mark.parametrize("loss_fn", ["importance_sampling", "ppo", "cispo", "dro", "gspo"])
def test_other_losses_reach_the_adapter(loss_fn: str, tiny: Callable[..., Any]) -> None:
    made = tiny()
    adapter = randomized(LoraAdapter(made.decoder.config, 2, seed=0, **ALL))
    config = {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0} if loss_fn in ("ppo", "gspo") else {}
    check(made, adapter, request(make_data([5, 8, 2], loss_fn), loss_fn, **config), Trainer(made.decoder, 8))


@pytest.mark.parametrize("is_sparse", [False, True])
def test_several_targets_per_position(is_sparse: bool, tiny: Callable[..., Any]) -> None:
    made = tiny()
    data = make_data([6, 4], targets=3)
    if is_sparse:
        data = [
            Datum(
                datum.model_input,
                {name: sparse_if_smaller(_thinned(value)) for name, value in datum.loss_fn_inputs.items()},
            )
            for datum in make_data([6, 4], targets=30)
        ]
        assert all(datum.loss_fn_inputs["weights"].is_sparse for datum in data)
    adapter = randomized(LoraAdapter(made.decoder.config, 2, seed=0, **ALL))
    result = check(made, adapter, request(data), Trainer(made.decoder))
    assert [list(output["logprobs"].to_numpy().shape) for output in result.loss_fn_outputs] == [
        [6, 30 if is_sparse else 3],
        [4, 30 if is_sparse else 3],
    ]


def _thinned(tensor: TensorData) -> TensorData:
    array = tensor.to_numpy().copy()
    array[:, 3:] = 0
    return tensor_of(array, "thinned")


def test_datums_of_different_layouts_in_one_request(tiny: Callable[..., Any]) -> None:
    made = tiny()
    data = [*make_data([4]), *make_data([5], targets=2), *make_data([3], targets=4), *make_data([6], seed=9)]
    adapter = randomized(LoraAdapter(made.decoder.config, 2, seed=0, **ALL))
    check(made, adapter, request(data), Trainer(made.decoder))


def test_random_shapes_ranks_and_switches(tiny: Callable[..., Any]) -> None:
    source = np.random.default_rng(5)
    for case in range(8):
        made = tiny(["llama", "qwen2", "qwen3"][case % 3])
        switches = SWITCHES[int(source.integers(len(SWITCHES)))]
        adapter = randomized(LoraAdapter(made.decoder.config, int(source.integers(1, 9)), seed=case, **switches))
        data = make_data([int(length) for length in source.integers(1, 30, int(source.integers(1, 7)))], seed=case)
        check(made, adapter, request(data), Trainer(made.decoder, int(source.integers(1, 64))))


@pytest.mark.parametrize("family", ["qwen3", "olmo2", "gemma2"])
def test_checkpointing_gives_the_same_bits(family: str, tiny: Callable[..., Any]) -> None:
    decoder = tiny(family).decoder
    data = request(make_data([20, 4]))
    kept, again = (randomized(LoraAdapter(decoder.config, 2, seed=0)) for _ in range(2))
    first = Trainer(decoder, 8, max_recorded_tokens=64).forward_backward(kept, data, True)
    second = Trainer(decoder, 8, max_recorded_tokens=1).forward_backward(again, data, True)
    assert first.loss_fn_outputs == second.loss_fn_outputs
    assert_same_bits(kept.gradients(), again.gradients())


@pytest.mark.parametrize("family", ["llama", "qwen3", "olmo2", "phi3", "gemma3"])
def test_what_a_pass_keeps_is_known_before(family: str, tiny: Callable[..., Any]) -> None:
    wide = {"sliding_window": 64} if family == "gemma3" else {}  # without masks, which only torch's attention has
    decoder = tiny(family, **wide).decoder
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    adapter = randomized(LoraAdapter(decoder.config, 4, seed=0))
    made = TrainingPass(decoder, adapter, [30, 34])
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        made.forward(torch.arange(64))
    for tape in made._tapes:
        assert not isinstance(tape, torch.Tensor)
        attended = tape.attended
        for value in (*(getattr(tape, slot) for slot in tape.__slots__), *attended.inputs, attended.memo):
            for tensor in value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else [value]:
                if isinstance(tensor, torch.Tensor):
                    note(tensor)
        note(attended.out_THC)
    told = 64 * recorded_bytes(decoder.config, 4, torch.float32)
    assert 0.8 * told <= sum(kept.values()) <= told


def assert_same_bits(first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> None:
    assert list(first) == list(second)
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


def test_the_same_request_gives_the_same_bits_and_chunks_of_logits_do_not_matter_much(
    tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tiny()
    data = request(make_data([11, 7, 5]))
    adapters = [randomized(LoraAdapter(made.decoder.config, 2, seed=0)) for _ in range(3)]
    results = [Trainer(made.decoder).forward_backward(adapter, data, True) for adapter in adapters[:2]]
    assert results[0].loss_fn_outputs == results[1].loss_fn_outputs
    assert results[0].metrics == results[1].metrics
    assert_same_bits(adapters[0].gradients(), adapters[1].gradients())
    monkeypatch.setattr("tinsmith.engine.training.unembedding.CHUNK_BYTES", 3 * 4 * VOCAB)
    check(made, adapters[2], data, Trainer(made.decoder))


def test_interleaved_adapters_get_what_each_alone_gets(tiny: Callable[..., Any]) -> None:
    decoder = tiny().decoder
    trainer = Trainer(decoder)
    makers = [
        lambda: randomized(LoraAdapter(decoder.config, 2, 0)),
        lambda: randomized(LoraAdapter(decoder.config, 5, 1)),
    ]
    requests = [request(make_data([6, 9], seed=1)), request(make_data([12], seed=2))]
    together = [make() for make in makers]
    for asked in requests:
        for adapter in together:
            trainer.forward_backward(adapter, asked, True)
    for make, adapter in zip(makers, together, strict=True):
        alone = make()
        for asked in requests:
            trainer.forward_backward(alone, asked, True)
        assert_same_bits(alone.gradients(), adapter.gradients())


def test_gradients_are_sums_and_accumulate(tiny: Callable[..., Any]) -> None:
    decoder = tiny().decoder
    data = make_data([6])
    once, four_times = (randomized(LoraAdapter(decoder.config, 2, 0)) for _ in range(2))
    Trainer(decoder).forward_backward(once, request(data), True)
    Trainer(decoder).forward_backward(four_times, request(data * 3), True)
    Trainer(decoder).forward_backward(four_times, request(data), True)
    for name, gradient in once.gradients().items():
        torch.testing.assert_close(four_times.gradients()[name], 4 * gradient, atol=1e-4, rtol=1e-4)
    once.zero_gradients()
    assert not any(gradient.any() for gradient in once.gradients().values())


def test_forward_leaves_no_trace(tiny: Callable[..., Any]) -> None:
    decoder = tiny().decoder
    adapter = randomized(LoraAdapter(decoder.config, 2, 0))
    before = {name: tensor.clone() for name, tensor in adapter.parameters().items()}
    data = make_data([6, 3])
    forward = Trainer(decoder).forward_backward(adapter, request(data), False)
    assert adapter.grads is None
    assert_same_bits(before, adapter.parameters())
    trained = Trainer(decoder).forward_backward(adapter, request(data), True)
    assert forward.loss_fn_outputs == trained.loss_fn_outputs
    assert forward.metrics == trained.metrics
    old = ForwardRequest(forward_input=request(data).forward_backward_input, model_id="m", seq_id=1)
    assert Trainer(decoder).forward_backward(adapter, old, False).loss_fn_outputs == forward.loss_fn_outputs


def test_the_base_gets_no_gradient_and_does_not_change(tiny: Callable[..., Any]) -> None:
    decoder = tiny().decoder
    before = [weight.clone() for weight in base_weights(decoder)]
    Trainer(decoder).forward_backward(randomized(LoraAdapter(decoder.config, 2, 0)), request(make_data([6])), True)
    for old, weight in zip(before, base_weights(decoder), strict=True):
        assert not weight.requires_grad
        assert weight.grad is None
        assert torch.equal(old, weight)


def base_weights(decoder: Decoder) -> list[torch.Tensor]:
    layers = [
        linear.weight_ED for layer in decoder.layers for linear in (layer.qkv, layer.output, layer.gate_up, layer.down)
    ]
    return [decoder.embedding_VD, decoder.unembedding.weight_ED, decoder.norm_D, *layers]


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_are_those_of_the_forward_pass_that_samplers_use(family: str, tiny: Callable[..., Any]) -> None:
    decoder = tiny(family).decoder
    adapter = randomized(LoraAdapter(decoder.config, 2, 0))
    (datum,) = make_data([30])
    result = Trainer(decoder).forward_backward(adapter, request([datum]), False)
    attention = PackedAttention(decoder.config, [30])
    with torch.no_grad():
        tokens = torch.tensor(datum.model_input.to_ints())
        hidden = decoder.hidden(tokens, attention.positions(decoder.device), attention, adapter)
        logprobs = torch.log_softmax(decoder.unembed(hidden, adapter), -1)
    targets = torch.from_numpy(np.array(datum.loss_fn_inputs["target_tokens"].to_numpy()))
    wanted = logprobs.gather(1, targets[:, None])[:, 0]
    np.testing.assert_allclose(result.loss_fn_outputs[0]["logprobs"].to_numpy(), wanted, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_training_in_bfloat16_stays_near(family: str, tiny: Callable[..., Any]) -> None:
    made = tiny(family)
    half = load_model(made.directory, dtype=torch.bfloat16, cache_dir=made.directory).decoder
    data, results, gradients = request(make_data([9, 14])), [], []
    for decoder in (made.decoder, half):
        adapter = randomized(LoraAdapter(decoder.config, 2, 0))
        outputs = Trainer(decoder).forward_backward(adapter, data, True).loss_fn_outputs
        results.append(np.concatenate([output["logprobs"].to_numpy() for output in outputs]))
        gradients.append(torch.cat([gradient.flatten() for gradient in adapter.gradients().values()]))
    assert np.abs(results[1] - results[0]).mean() <= 0.05
    assert torch.cosine_similarity(*gradients, dim=0) >= 0.99


class FailingLoss:
    """An uploaded loss that fails on its second datum."""

    def evaluate_steps(
        self, logprobs: Any, inputs: Any, *, with_gradient: bool = True, where: str = ""
    ) -> Generator[None, None, Evaluation]:
        yield
        if where == "data[1]":
            raise ValueError(where)
        return Evaluation(torch.ones_like(logprobs), {"loss:sum": logprobs.sum().double()})


def test_a_request_that_fails_half_way_leaves_the_gradients_alone(tiny: Callable[..., Any]) -> None:
    decoder = tiny().decoder
    adapter = randomized(LoraAdapter(decoder.config, 2, 0))
    data = make_data([6, 5])
    Trainer(decoder).forward_backward(adapter, request(data), True)
    before = {name: tensor.clone() for name, tensor in adapter.gradients().items()}
    with pytest.raises(ValueError, match=r"data\[1\]"):
        Trainer(decoder, 4).forward_backward(adapter, request(data, "custom", loss_id="x"), True, custom=FailingLoss())
    assert_same_bits(before, adapter.gradients())


def test_positions_without_gradient_are_not_unembedded_backward(
    tiny: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tinsmith.engine.training import unembedding

    decoder = tiny().decoder
    rows: list[int] = []
    original = unembedding.Unembedding._rows_backward

    def counted(self: Any, hidden_ND: torch.Tensor, *rest: Any) -> torch.Tensor:
        rows.append(len(hidden_ND))
        return original(self, hidden_ND, *rest)

    monkeypatch.setattr(unembedding.Unembedding, "_rows_backward", counted)
    data = make_data([10, 8])
    active = sum(int((datum.loss_fn_inputs["weights"].to_numpy() != 0).sum()) for datum in data)
    Trainer(decoder).forward_backward(LoraAdapter(decoder.config, 2, 0), request(data), True)
    assert sum(rows) == active < 18
