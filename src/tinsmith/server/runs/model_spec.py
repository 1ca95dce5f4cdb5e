"""Which base model and which adapter a request asks for, checked against what the server offers."""

from __future__ import annotations

import secrets

from tinsmith.engine.protocol import Backend, LoraSpec, ModelCard
from tinsmith.errors import InvalidInputError
from tinsmith.wire.messages import training as wire

MAX_RANK = 512


ADAMW = '{"type":"adamw"}'


def card_of(backend: Backend, name: str) -> ModelCard:
    """Return a base model by name; the error lists those that are served."""
    cards = backend.cards()
    for card in cards:
        if card.name == name:
            return card
    known = ", ".join(card.name for card in cards) or "none"
    raise InvalidInputError(f"base_model: {name!r} is not served here (served: {known})", field="base_model")


def lora_spec(config: wire.LoraConfig | None, card: ModelCard) -> LoraSpec:
    """Return the adapter that a request asks for, with a random seed if it gives none."""
    if config is None:
        raise InvalidInputError("lora_config: missing; this server trains LoRA adapters only", field="lora_config")
    if config.rank > MAX_RANK:
        raise InvalidInputError(
            f"lora_config.rank: {config.rank} is not between 1 and {MAX_RANK}", field="lora_config.rank"
        )
    if not (config.train_attn or config.train_mlp or config.train_unembed):
        raise InvalidInputError("lora_config: train_attn, train_mlp and train_unembed are all false: nothing to train")
    seed = config.seed if config.seed is not None else secrets.randbelow(2**31)
    return LoraSpec(
        rank=config.rank,
        seed=seed,
        train_attn=config.train_attn,
        train_mlp=config.train_mlp,
        train_unembed=config.train_unembed,
        alpha=card.lora_alpha,
    )
