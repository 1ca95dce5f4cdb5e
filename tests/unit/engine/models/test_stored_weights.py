"""A model whose weights keep the format of their file computes what it computes with float32 weights, to the last bit.

Samples, logprobs and gradients of both are compared, as is what is held in memory.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.model_reference import randomized
from support.quantised import QUANTISED, random_weights, reference
from support.tiny_sampler import finish, job, make_sampler, prompt, trained

from tinsmith.engine.cpu.formats import FORMATS, Format, Weights, format_of, widened
from tinsmith.engine.cpu.linear import can_compile, can_pack
from tinsmith.engine.lora import LoraAdapter
from tinsmith.engine.models.config import ModelConfig
from tinsmith.engine.models.decoder import Decoder, build_decoder, weight_shapes
from tinsmith.engine.models.families import config_from_hf
from tinsmith.engine.models.load import memory_needed
from tinsmith.engine.models.tiny import FAMILIES, SIZES
from tinsmith.engine.training.trainer import Trainer
from tinsmith.wire.messages.training import ForwardBackwardInput, ForwardBackwardRequest
from tinsmith.wire.values.inputs import Datum, ModelInput

CPU = torch.device("cpu")
compiles = pytest.mark.skipif(not can_pack(CPU, torch.float32) or not can_compile(), reason="no kernels here")
VOCAB = 264
MIXED = {"q_proj": "Q4_K", "k_proj": "Q4_K", "v_proj": "Q6_K", "embed_tokens": "Q6_K", "gate_proj": "Q5_K"}
"""As files with several formats have them."""


def config(family: str, **changes: Any) -> ModelConfig:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64}
    return config_from_hf({"vocab_size": VOCAB, **SIZES, **FAMILIES[family], **sizes, **changes})


def stored_weights(made: ModelConfig, name: str) -> dict[str, Weights]:
    found: dict[str, Weights] = {}
    for seed, (key, shape) in enumerate(weight_shapes(made).items()):
        if len(shape) == 1:
            found[key] = 1 + 0.1 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        else:
            format_name = MIXED.get(key.split(".")[-2], "Q4_K") if name == "mixed" else name
            found[key] = random_weights(format_name, (shape[0], shape[1]), seed)
    return found


def both(family: str, name: str) -> tuple[Decoder, Decoder]:
    """The decoder of a model with weights in this format, and of the same model in float32."""
    made = config(family)
    weights = stored_weights(made, name)
    wide = {key: reference(part) if len(part.shape) == 2 else part for key, part in weights.items()}
    return build_decoder(made, weights.__getitem__), build_decoder(made, wide.__getitem__)


cases = pytest.mark.parametrize(
    ("family", "name"), [("smollm", name) for name in [*FORMATS, "mixed"]] + [("qwen2", "BF16"), ("qwen3", "Q4_K")]
)


@compiles
@cases
def test_samples_have_the_bits_of_float32_weights(family: str, name: str) -> None:
    answers = []
    for decoder in both(family, name):
        sampler = make_sampler((decoder, tuple(bytes([token % 256]) for token in range(VOCAB))))
        sampler.add_adapter("mine", trained(decoder, 3))
        for number, length in enumerate((30, 9, 41)):
            adapter = "mine" if number == 1 else None
            options = {"prompt_logprobs": True, "num_samples": 2}
            sampler.add(job(f"j{number}", prompt(length), adapter=adapter, max_tokens=8, stop=[], **options))
        found = finish(sampler)
        answers.append(
            [(answer.prompt_logprobs, [(one.tokens, one.logprobs) for one in answer.sequences])
             for _, answer in sorted(found.items())]
        )  # fmt: skip
    assert answers[0] == answers[1]


@compiles
@cases
def test_losses_and_gradients_have_the_bits_of_float32_weights(family: str, name: str) -> None:
    data = [
        Datum(
            ModelInput.from_ints(prompt(length, length)),
            {"target_tokens": prompt(length, 1), "weights": [float(i % 3 > 0) for i in range(length)]},
        )
        for length in (37, 11, 70)
    ]
    work = ForwardBackwardInput(data=data, loss_fn="cross_entropy")
    request = ForwardBackwardRequest(forward_backward_input=work, model_id="m", seq_id=1)
    found = []
    for decoder in both(family, name):
        adapter = randomized(LoraAdapter(decoder.config, 4, 0))
        output = Trainer(decoder).forward_backward(adapter, request, True)
        found.append((output.metrics, output.loss_fn_outputs, adapter.gradients()))
    assert found[0][:2] == found[1][:2]
    assert any(gradient.any() for gradient in found[0][2].values())
    for key, gradient in found[0][2].items():
        assert torch.equal(gradient, found[1][2][key]), key


@compiles
@pytest.mark.parametrize("name", [*FORMATS, "mixed"])
def test_memory_is_that_of_the_format(name: str) -> None:
    """What is held, and what is announced before the model is read."""
    decoder, wide = both("smollm", name)
    held = sum(decoder.bytes_by_format.values())
    formats = set(MIXED.values()) if name == "mixed" else {name}
    assert set(decoder.bytes_by_format) == formats
    assert (held < sum(wide.bytes_by_format.values())) == (name != "F32")
    weights = stored_weights(decoder.config, name)

    class Announced:
        config = decoder.config

        def read_stored(self, key: str) -> Weights:
            raise AssertionError("nothing is read")

        def format_of(self, key: str) -> Format:
            return format_of(weights[key])

    needed = memory_needed(Announced(), CPU, torch.float32)
    largest = 4 * 512 * 256
    norms = sum(4 * part.shape[0] for part in weights.values() if len(part.shape) == 1)
    assert needed == held + norms + largest


@pytest.mark.parametrize("name", QUANTISED)
def test_other_devices_and_dtypes_get_plain_weights(name: str) -> None:
    made = config("llama")
    weights = stored_weights(made, name)
    decoder = build_decoder(made, weights.__getitem__, dtype=torch.bfloat16)
    assert decoder.layers[0].down.weight_ED.dtype == torch.bfloat16
    expected = widened(weights["model.layers.0.mlp.down_proj.weight"]).bfloat16()
    assert torch.equal(decoder.layers[0].down.weight_ED, expected)
    assert set(decoder.bytes_by_format) == {"bfloat16"}
