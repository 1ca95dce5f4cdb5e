"""Training through transformers: gradients are PEFT's, and the same request gives the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.general_models import KINDS, VOCAB, adapter_of, load_general, make_general, quiet, theirs

from tinsmith.engine.checkpoints.format import CheckpointInfo, write_checkpoint
from tinsmith.engine.general.model import GeneralModel
from tinsmith.engine.general.training import ONE_DATUM, GeneralTraining
from tinsmith.engine.lora import LoraAdapter
from tinsmith.engine.training.losses import LOSSES
from tinsmith.engine.training.trainer import Trainer
from tinsmith.wire.messages.training import ForwardBackwardInput, ForwardBackwardRequest
from tinsmith.wire.rules.loss_rules import loss_options
from tinsmith.wire.values.inputs import Datum, ModelInput


def request(data: list[Datum], loss_fn: Any = "cross_entropy", **config: float) -> ForwardBackwardRequest:
    work = ForwardBackwardInput(data=data, loss_fn=loss_fn, **({"loss_fn_config": config} if config else {}))
    return ForwardBackwardRequest(forward_backward_input=work, model_id="m", seq_id=1)


def make_data(lengths: list[int], loss_fn: str = "cross_entropy", seed: int = 0) -> list[Datum]:
    source, data = np.random.default_rng(seed), []
    for length in lengths:
        inputs: dict[str, Any] = {"target_tokens": source.integers(0, VOCAB, length)}
        if loss_fn == "cross_entropy":
            inputs["weights"] = source.random(length).astype(np.float32)
        else:
            inputs["logprobs"] = (-5 + source.normal(size=length)).astype(np.float32)
            inputs["advantages"] = source.normal(size=length).astype(np.float32)
        if loss_fn == "gspo":
            inputs["sequence_ratio_mask"] = np.ones(length, np.float32)
        data.append(Datum(ModelInput.from_ints(source.integers(0, VOCAB, length)), inputs))
    return data


def saved(adapter: LoraAdapter, directory: Path) -> Path:
    info = CheckpointInfo(
        base_model="base",
        rank=adapter.rank,
        alpha=adapter.alpha,
        train_attn=adapter.train_attn,
        train_mlp=adapter.train_mlp,
        train_unembed=adapter.train_unembed,
    )
    write_checkpoint(directory, info, adapter.parameters())
    return directory


def in_peft(base: Path, adapter: LoraAdapter, directory: Path) -> Any:
    """The model with the adapter as PEFT loads it from our checkpoint; nothing is missing or left over."""
    with quiet():
        import peft

        config = peft.PeftConfig.from_pretrained(saved(adapter, directory))
        config.inference_mode = False
        model = peft.get_peft_model(theirs(base), config)
        report = peft.set_peft_model_state_dict(model, peft.load_peft_weights(directory))
    assert report.unexpected_keys == []
    assert [key for key in report.missing_keys if "lora" in key] == []
    trained = {name for name, value in model.named_parameters() if value.requires_grad}
    assert {name.replace(".default", "") for name in trained} == set(adapter.parameters())
    return model


def peft_gradients(model: Any, work: ForwardBackwardInput) -> tuple[float, list[np.ndarray], dict[str, torch.Tensor]]:
    total, outputs = torch.zeros(()), []
    options = loss_options(work.loss_fn, work.loss_fn_config)
    for datum in work.data:
        inputs = {name: torch.from_numpy(np.array(value.to_numpy())) for name, value in datum.loss_fn_inputs.items()}
        targets = inputs.pop("target_tokens")
        logits = model(input_ids=torch.tensor([datum.model_input.to_ints()])).logits[0].float()
        logprobs = logits.log_softmax(1).gather(1, targets.unsqueeze(1)).squeeze(1)
        outputs.append(logprobs.detach().numpy())
        total = total + LOSSES[work.loss_fn].per_token(logprobs, inputs, options).loss_N.sum()
    total.backward()
    found = {name.replace(".default", ""): value.grad for name, value in model.named_parameters()}
    return float(total.detach()), outputs, {name: value for name, value in found.items() if value is not None}


def trainer(model: GeneralModel) -> Trainer:
    return Trainer(GeneralTraining(model), ONE_DATUM)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_peft(tmp_path: Path, kind: str) -> None:
    directory = make_general(tmp_path / "base", kind)
    model = load_general(directory)
    adapter = adapter_of(model)
    asked = request(make_data([9, 1, 17]))
    result = trainer(model).forward_backward(adapter, asked, backward=True)
    loss, outputs, gradients = peft_gradients(
        in_peft(directory, adapter, tmp_path / "adapter"), asked.forward_backward_input
    )
    assert result.metrics["loss:sum"] == pytest.approx(loss, rel=1e-5, abs=1e-4)
    for found, wanted in zip(result.loss_fn_outputs, outputs, strict=True):
        np.testing.assert_allclose(found["logprobs"].to_numpy(), wanted, atol=5e-5)
    for name, gradient in adapter.gradients().items():
        limit = 1e-4 * max(1.0, float(gradients[name].abs().max()))
        assert (gradient - gradients[name]).abs().max() <= limit, name
        assert gradient.any() == gradients[name].any(), name


@pytest.mark.parametrize("loss_fn", ["importance_sampling", "ppo", "cispo", "dro", "gspo"])
@pytest.mark.parametrize("kind", ["gpt2", "gptj"])
def test_other_losses_reach_the_adapter(tmp_path: Path, kind: str, loss_fn: str) -> None:
    directory = make_general(tmp_path / "base", kind)
    model = load_general(directory)
    adapter = adapter_of(model)
    config = {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0} if loss_fn in ("ppo", "gspo") else {}
    asked = request(make_data([5, 8, 2], loss_fn), loss_fn, **config)
    result = trainer(model).forward_backward(adapter, asked, backward=True)
    loss, _, gradients = peft_gradients(in_peft(directory, adapter, tmp_path / "adapter"), asked.forward_backward_input)
    assert result.metrics["loss:sum"] == pytest.approx(loss, rel=1e-4, abs=1e-4)
    for name, gradient in adapter.gradients().items():
        limit = 2e-4 * max(1.0, float(gradients[name].abs().max()))
        assert (gradient - gradients[name]).abs().max() <= limit, name


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_request_gives_the_same_bits(tmp_path: Path, kind: str) -> None:
    model = load_general(make_general(tmp_path / kind, kind))
    asked = request(make_data([9, 30, 4, 12]))
    first, second = adapter_of(model), adapter_of(model)
    results = [trainer(model).forward_backward(adapter, asked, backward=True) for adapter in (first, second)]
    assert results[0] == results[1]
    for name, gradient in first.gradients().items():
        assert torch.equal(gradient, second.gradients()[name]), name


@pytest.mark.parametrize("kind", ["gpt2", "cohere"])
def test_datums_beside_each_other_change_no_bit_and_a_pass_changes_no_weight(tmp_path: Path, kind: str) -> None:
    model = load_general(make_general(tmp_path / kind, kind))
    adapter = adapter_of(model)
    data = make_data([9, 30, 4])
    before = {name: value.clone() for name, value in model._model.state_dict().items()}
    together = trainer(model).forward_backward(adapter, request(data), backward=True).loss_fn_outputs
    alone = [trainer(model).forward_backward(adapter, request([d]), backward=False).loss_fn_outputs[0] for d in data]
    assert together == alone
    assert all(torch.equal(value, before[name]) for name, value in model._model.state_dict().items())
    assert all(value.grad is None for value in model._model.parameters())


def test_a_pass_that_is_dropped_leaves_no_trace(tmp_path: Path) -> None:
    model = load_general(make_general(tmp_path / "gpt2", "gpt2"))
    adapter = adapter_of(model)
    steps = trainer(model).steps(adapter, request(make_data([9, 8, 7])), backward=True)
    for _ in range(4):
        next(steps)
    steps.close()
    assert adapter.grads is None
    assert model._active is None
    trainer(model).forward_backward(adapter, request(make_data([9, 8, 7])), backward=True)
    assert any(gradient.any() for gradient in adapter.gradients().values())


def test_switches_train_what_they_say(tmp_path: Path) -> None:
    directory = make_general(tmp_path / "base", "gpt2")
    model = load_general(directory)
    for number, switches in enumerate([(True, False, False), (False, True, False), (False, False, True)]):
        adapter = LoraAdapter(model.modules, 2, 1, *switches)
        names = "".join(adapter.parameters())
        assert (".attn." in names, ".mlp." in names, "lm_head" in names) == switches
        trainer(model).forward_backward(adapter, request(make_data([6])), backward=True)
        assert all(value.any() for name, value in adapter.gradients().items() if "lora_B" in name)
        in_peft(directory, adapter, tmp_path / f"adapter-{number}")
