"""The card of a model in a Hugging Face directory, from its config.json alone. Does not import torch."""

from __future__ import annotations

import json
from pathlib import Path

from tinsmith.engine.models.families import config_from_hf
from tinsmith.engine.protocol import ModelCard
from tinsmith.errors import InvalidInputError


def card_of(name: str, directory: Path, *, lora_alpha: float = 32.0) -> ModelCard:
    """What a server must know of the model before it is loaded; one that cannot be served is refused by name."""
    try:
        values = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidInputError(f"{directory}: its config.json cannot be read: {error}", field="source") from None
    config = config_from_hf(values)
    has_tokenizer = (directory / "tokenizer.json").exists()
    return ModelCard(
        name=name,
        vocab_size=config.vocab_size,
        max_context_length=config.max_context_length,
        arch=config.architecture,
        tokenizer_id=name,
        tokenizer_directory=str(directory) if has_tokenizer else None,
        lora_alpha=lora_alpha,
    )
