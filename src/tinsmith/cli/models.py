"""Choosing a server's models, and a base model or checkpoint with its tokenizer, ready to sample from."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click

from tinsmith.cli.dataset import chat_prompt
from tinsmith.errors import TinkerError
from tinsmith.types import ModelInput, SamplingParams
from tinsmith.wire.messages.weights import PATH_PREFIX


@dataclass(frozen=True, slots=True)
class Speaker:
    """A model to sample from, and its tokenizer."""

    name: str
    sampler: Any
    tokenizer: Any
    context: int | None = None
    """The model's context length in tokens, if the server reports it."""

    def prompt(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return a chat as tokens, up to where the assistant's answer begins."""
        if self.tokenizer.chat_template is None:
            raise TinkerError(f"{self.name} has no chat template; use --raw to pass the prompt as plain text")
        return chat_prompt(messages, self.tokenizer)

    def text(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def room(self, tokens: Sequence[int], wanted: int) -> int:
        """Return how many of the wanted tokens fit after a prompt."""
        if self.context is None:
            return wanted
        if len(tokens) >= self.context:
            raise TinkerError(f"the prompt has {len(tokens)} tokens, which fills the model's context of {self.context}")
        return min(wanted, self.context - len(tokens))

    def sample(self, tokens: Sequence[int], count: int, params: SamplingParams) -> Any:
        """Start sampling and return the future."""
        return self.sampler.sample(ModelInput.from_ints(list(tokens)), count, params)


def offered_models(service: Any) -> dict[str, Any]:
    """Return the server's models by name."""
    return {str(item.model_name): item for item in service.get_server_capabilities().supported_models}


def chosen_model(service: Any, name: str | None, *, use: str) -> Any:
    """Return the named model, or the server's first one that is `trainable` or `sampleable` (`use`)."""
    offered = {n: item for n, item in offered_models(service).items() if getattr(item, use) is not False}
    if not offered:
        raise TinkerError(f"the server has no {use} model; see: tinsmith model list")
    if name is None:
        return next(iter(offered.values()))
    if name not in offered:
        raise TinkerError(f"the server has no {use} model {name!r} (available: {', '.join(offered)})")
    return offered[name]


def open_speaker(service: Any, *, model: str | None = None, checkpoint: str | None = None) -> Speaker:
    """Open a checkpoint, a base model, or the server's first model."""
    if checkpoint is not None:
        sampler = service.create_sampling_client(model_path=checkpoint)
        base = offered_models(service).get(sampler.get_base_model())
        context = base.max_context_length if base is not None else None
        return Speaker(checkpoint, sampler, sampler.get_tokenizer(), context)
    chosen = chosen_model(service, model, use="sampleable")
    sampler = service.create_sampling_client(base_model=chosen.model_name)
    return Speaker(chosen.model_name, sampler, sampler.get_tokenizer(), chosen.max_context_length)


def named_speaker(service: Any, name: str) -> Speaker:
    """Open a checkpoint by its `tinker://` path, or a base model by its name."""
    if name.startswith(PATH_PREFIX):
        return open_speaker(service, checkpoint=name)
    return open_speaker(service, model=name)


def command_line(*words: str) -> str:
    """Return a command to paste, which uses the same server as this command."""
    url = click.get_current_context().meta.get("tinsmith.base_url")
    return shlex.join(["tinsmith", words[0], *(["--base-url", url] if url else []), *words[1:]])
