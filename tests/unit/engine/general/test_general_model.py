"""Models of transformers: their logits are transformers' own, and what does not work is refused by name."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.general_models import KINDS, OWN_LOGITS, PLAIN_HEADS, load_general, make_general, quiet, set_config, theirs

from tinsmith.engine.general import model as general_model
from tinsmith.engine.general.architecture import general_config
from tinsmith.engine.models import load
from tinsmith.engine.models.tiny import make_tiny
from tinsmith.errors import InvalidInputError, TinkerError

TOKENS = torch.tensor([5, 9, 2, 33, 7, 100, 4, 4, 263, 0, 17])


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    directory = make_general(tmp_path / kind, kind)
    model = load_general(directory)
    assert model.has_plain_head == (kind in PLAIN_HEADS)
    with torch.no_grad():
        output, _ = model.forward(TOKENS)
        logits = model.logits(output) if model.has_plain_head else output
        expected = theirs(directory)(input_ids=TOKENS.unsqueeze(0)).logits[0]
    assert expected.std() > 0.1
    torch.testing.assert_close(logits, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_continues_a_sequence(tmp_path: Path, kind: str) -> None:
    model = load_general(make_general(tmp_path / kind, kind))
    assert model.has_cache
    with torch.no_grad():
        whole, _ = model.forward(TOKENS)
        last, cache = model.forward(TOKENS[:6], is_cached=True)
        parts = [last]
        for place in range(6, len(TOKENS)):
            last, cache = model.forward(TOKENS[place : place + 1], cache, is_cached=True)
            parts.append(last)
    torch.testing.assert_close(torch.cat(parts), whole, atol=1e-4, rtol=1e-4)
    measured = model.cache_fixed_bytes + len(TOKENS) * model.cache_token_bytes
    assert general_model.tensor_bytes(cache) == measured


def test_modules_belong_to_attention_or_mlp_by_their_path(tmp_path: Path) -> None:
    found = {}
    for kind in ("gpt2", "gpt_neox", "mixtral", "mamba", "falcon", "bloom"):
        modules = load_general(make_general(tmp_path / kind, kind)).modules
        parts = modules.attention, modules.mlp, (modules.unembedding,)
        found[kind] = tuple(sorted({module.path.rpartition(".")[2] for module in part}) for part in parts)
    dense = (["dense", "query_key_value"], ["dense_4h_to_h", "dense_h_to_4h"], ["lm_head"])
    assert found == {
        "gpt2": (["c_attn", "c_proj"], ["c_fc", "c_proj"], ["lm_head"]),
        "gpt_neox": dense,
        "mixtral": (["k_proj", "o_proj", "q_proj", "v_proj"], [], ["lm_head"]),
        "mamba": (["in_proj", "x_proj"], [], ["lm_head"]),
        "falcon": dense,
        "bloom": dense,
    }


def test_linears_that_are_not_called_stay_as_they_are(tmp_path: Path) -> None:
    modules = load_general(make_general(tmp_path / "mamba", "mamba")).modules
    assert {path.rpartition(".")[2] for path in modules.unadapted} == {"dt_proj", "out_proj"}


def test_a_product_in_groups_is_not_a_linear_that_an_adapter_can_change(tmp_path: Path, monkeypatch: Any) -> None:
    from transformers.models.gpt_neox import modeling_gpt_neox

    class Grouped(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.linear(x, self.weight, self.bias).unflatten(-1, (2, -1)).transpose(-1, -2)

    class Mlp(modeling_gpt_neox.GPTNeoXMLP):  # type: ignore[misc, name-defined]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.dense_h_to_4h = Grouped(32, 64)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return self.dense_4h_to_h(self.act(self.dense_h_to_4h(hidden).flatten(-2)))

    monkeypatch.setattr(modeling_gpt_neox, "GPTNeoXMLP", Mlp)
    modules = load_general(make_general(tmp_path / "neox", "gpt_neox")).modules
    assert {path.rpartition(".")[2] for path in modules.unadapted} == {"dense_h_to_4h"}


def test_small_vectors_in_three_dimensions_are_not_experts(tmp_path: Path) -> None:
    make_tiny(tmp_path / "rwkv")
    with quiet():
        import transformers

        config = transformers.AutoConfig.for_model("rwkv", vocab_size=264, hidden_size=32, num_hidden_layers=2)
        torch.manual_seed(0)
        transformers.RwkvForCausalLM(config).save_pretrained(tmp_path / "rwkv")
        model = load_general(tmp_path / "rwkv")
    assert model.modules.experts == ()
    assert {module.path.rpartition(".")[2] for module in model.modules.mlp} == {"key", "receptance", "value"}
    assert model._cache_name == "state"


def test_experts_that_no_adapter_can_change_are_refused_unless_they_are_left_out(tmp_path: Path) -> None:
    modules = load_general(make_general(tmp_path / "mixtral", "mixtral")).modules
    with pytest.raises(InvalidInputError, match=r"train_mlp: MixtralForCausalLM .*experts.*train_mlp=False"):
        modules.group_specs(True, True, True)
    assert len(modules.group_specs(True, False, True)) == 9


def test_a_switch_that_leaves_nothing_to_train_is_refused(tmp_path: Path) -> None:
    modules = load_general(make_general(tmp_path / "mamba", "mamba")).modules
    assert len(modules.group_specs(True, True, False)) == 4
    with pytest.raises(InvalidInputError, match="nothing to train"):
        modules.group_specs(False, True, False)


def test_our_own_architectures_do_not_go_through_transformers(tmp_path: Path) -> None:
    assert general_config(make_tiny(tmp_path / "llama")) is None
    assert general_config(set_config(make_tiny(tmp_path / "plain"), num_attention_heads=None)) is None
    with quiet():
        partial = general_config(set_config(make_tiny(tmp_path / "partial"), partial_rotary_factor=0.5))
    assert partial is not None
    assert partial.architecture == "LlamaForCausalLM"


def refusal(directory: Path) -> str:
    with pytest.raises(InvalidInputError) as caught, quiet():
        general_config(directory)
    assert str(directory) in str(caught.value)
    return str(caught.value)


def test_without_transformers_the_refusal_says_what_to_install(tmp_path: Path, monkeypatch: Any) -> None:
    directory = make_general(tmp_path / "gpt2", "gpt2")
    monkeypatch.setattr("tinsmith.engine.general.architecture.transformers_version", lambda: None)
    text = refusal(directory)
    assert "GPT2LMHeadModel" in text
    assert "LlamaForCausalLM" in text
    assert "pip install 'tinsmith[transformers]'" in text


@pytest.mark.parametrize(
    ("architecture", "kind", "reason"),
    [
        ("T5ForConditionalGeneration", "t5", "encoder-decoder"),
        ("BertForMaskedLM", "bert", "no causal language-model head"),
        ("LlavaForConditionalGeneration", "llava", "no causal language-model head"),
        ("NobodyForCausalLM", "nobody", "does not know it"),
    ],
)
def test_other_models_are_refused_by_name(tmp_path: Path, architecture: str, kind: str, reason: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture], "model_type": kind}))
    text = refusal(tmp_path)
    assert architecture in text
    assert reason in text


def test_code_in_a_repository_is_never_run(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    (tmp_path / "configuration_own.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    auto = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    values = {"architectures": ["OwnForCausalLM"], "model_type": "own", "auto_map": auto}
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert "never run" in refusal(tmp_path)
    assert not marker.exists()
    assert os.environ["USE_HUB_KERNELS"] == "NO"


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    directory = make_general(tmp_path / "gpt2", "gpt2")
    assert "quantization_config" in refusal(set_config(directory, quantization_config={"quant_method": "bitsandbytes"}))


def test_a_model_that_looks_ahead_is_refused(tmp_path: Path) -> None:
    make_tiny(tmp_path / "bert")
    with quiet():
        import transformers

        sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
        config = transformers.AutoConfig.for_model("bert", vocab_size=264, is_decoder=False, **sizes)
        transformers.BertLMHeadModel(config).save_pretrained(tmp_path / "bert")
    with pytest.raises(InvalidInputError, match=r"BertLMHeadModel does not run.*not a causal model"):
        load_general(tmp_path / "bert")


def test_a_missing_weight_is_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = make_general(tmp_path / "gpt2", "gpt2") / "model.safetensors"
    tensors = load_file(path)
    del tensors["transformer.h.1.mlp.c_fc.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(InvalidInputError, match=r"transformer.h.1.mlp.c_fc.weight .*missing"):
        load_general(path.parent)


def test_a_model_that_does_not_fit_is_refused_before_it_is_loaded(tmp_path: Path, monkeypatch: Any) -> None:
    directory = make_general(tmp_path / "gpt2", "gpt2")
    monkeypatch.setattr(load, "available_bytes", lambda device: 1000)
    monkeypatch.setattr(general_model, "_loaded", lambda *_: pytest.fail("it was loaded"))
    with pytest.raises(TinkerError, match=r"needs 0.0 GB in float32 \(.* weights\), but only 0.0 GB are free"):
        load_general(directory)


@pytest.mark.parametrize("kind", OWN_LOGITS)
def test_heads_that_do_more_than_a_product_keep_their_own_logits(tmp_path: Path, kind: str) -> None:
    assert not load_general(make_general(tmp_path / kind, kind)).has_plain_head
