"""Tiny random models of architectures that run through transformers, as complete directories with a tokenizer."""

from __future__ import annotations

import contextlib
import io
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from support.model_reference import randomized
from support.tiny_engine import NAME
from tinsmith.engine.general.architecture import general_config
from tinsmith.engine.general.model import GeneralModel
from tinsmith.engine.ipc import EngineSpec
from tinsmith.engine.lora import LoraAdapter
from tinsmith.engine.models.tiny import make_tiny
from tinsmith.engine.protocol import ModelCard
from tinsmith.engine.worker.executor import TorchOptions
from tinsmith.engine.worker.startup import read_options, torch_spec
from tinsmith.engine.worker.torch_executor import TorchExecutor

VOCAB = 264
COMMON = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2}
KINDS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "gpt_neox": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "max_position_embeddings": 128,
    },
    "mixtral": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "num_local_experts": 4,
        "max_position_embeddings": 128,
    },
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
    "falcon": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": False},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "gptj": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "rotary_dim": 4},
    "cohere": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "max_position_embeddings": 128,
        "pad_token_id": 2,
        "logit_scale": 0.5,
    },
}
PLAIN_HEADS = ("gpt2", "gpt_neox", "mixtral", "mamba", "falcon", "bloom")
OWN_LOGITS = ("gptj", "cohere")
"""Heads with a bias, and logits that are scaled."""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """transformers and peft warn of what does not matter here."""
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def make_general(directory: Path, kind: str, seed: int = 0, **values: Any) -> Path:
    """Write a tiny model of a kind that our decoder does not compute."""
    if (directory / "config.json").exists():
        return directory
    make_tiny(directory)
    with quiet():
        import transformers

        config = transformers.AutoConfig.for_model(kind, **COMMON, **KINDS[kind], **values)
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim > 1 and "norm" not in name and "A_log" not in name:
                    parameter.mul_(4)  # far enough from uniform that a mistake shows
        model.save_pretrained(directory)
    return directory


def load_general(directory: Path, dtype: torch.dtype = torch.float32) -> GeneralModel:
    with quiet():
        config = general_config(directory)
        assert config is not None
        return GeneralModel(directory, config, "cpu", dtype)


def theirs(directory: Path) -> Any:
    """The model as transformers loads it, with nothing of ours around it."""
    with quiet():
        import transformers

        return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def adapter_of(model: GeneralModel, rank: int = 3, seed: int = 5) -> LoraAdapter:
    """An adapter with an effect, on all that the model allows."""
    return randomized(LoraAdapter(model.modules, rank, seed, train_mlp=not model.modules.experts))


def set_config(directory: Path, **values: Any) -> Path:
    """Change settings of a model's config.json."""
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    return directory


def general_card(name: str, directory: Path) -> ModelCard:
    with quiet():
        config = general_config(directory)
    assert config is not None
    return ModelCard(
        name=name,
        vocab_size=config.vocab_size,
        max_context_length=config.max_context_length,
        arch=config.architecture,
        tokenizer_id=name,
        tokenizer_directory=str(directory),
    )


def general_spec(name: str, directory: Path, kind: str, **options: Any) -> EngineSpec:
    """An engine process that runs a tiny model through transformers."""
    source = make_general(directory / "models" / name, kind)
    values = {"dtype": "float32", "threads": 1, "cache_bytes": 1 << 22, **options}
    card = general_card(name, source)
    return torch_spec(TorchOptions(card=card, source=str(source), cache_dir=str(directory / "cache"), **values))


def general_executor(home: Path, kind: str = "gpt2", **options: Any) -> TorchExecutor:
    """The executor on a tiny model, in this process."""
    spec = general_spec(NAME, home, kind, **options)
    with quiet():
        return TorchExecutor(read_options(spec.options), "float32")
