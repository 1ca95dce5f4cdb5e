"""A model that answers: a base model or a checkpoint, with its tokenizer.

Does not know: what is asked, or how answers are shown.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click

from tinsmith.cli.chat_data import chat_prompt
from tinsmith.errors import TinkerError
from tinsmith.types import ModelInput, SamplingParams
from tinsmith.wire.weights import PATH_PREFIX


@dataclass(frozen=True, slots=True)
class Speaker:
    """Weights to sample from, and how to turn text into what they read."""

    name: str
    sampler: Any
    tokenizer: Any
    context: int | None = None
    """Tokens that fit, if the server says."""

    def prompt(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """A chat as tokens, up to where the assistant speaks."""
        if self.tokenizer.chat_template is None:
            raise TinkerError(f"{self.name} has no chat template; use --raw to give it plain text")
        return chat_prompt(messages, self.tokenizer)

    def text(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def room(self, tokens: Sequence[int], wanted: int) -> int:
        """How many of the wanted tokens fit behind a prompt."""
        if self.context is None:
            return wanted
        if len(tokens) >= self.context:
            raise TinkerError(f"{len(tokens)} tokens leave no room in the model's context of {self.context}")
        return min(wanted, self.context - len(tokens))

    def sample(self, tokens: Sequence[int], count: int, params: SamplingParams) -> Any:
        """A future of samples."""
        return self.sampler.sample(ModelInput.from_ints(list(tokens)), count, params)


_CONTROL = dict.fromkeys([*range(32), *range(127, 160)], "\ufffd") | {9: "\t", 10: "\n"}


def printable(text: str) -> str:
    """What a model says without what would control the terminal."""
    return text.translate(_CONTROL)


def offered_models(service: Any) -> dict[str, Any]:
    """The server's models by name."""
    return {str(item.model_name): item for item in service.get_server_capabilities().supported_models}


def chosen_model(service: Any, name: str | None, *, use: str) -> Any:
    """A model of the server that is `trainable` or `sampleable`; without a name the first."""
    offered = {n: item for n, item in offered_models(service).items() if getattr(item, use) is not False}
    if not offered:
        raise TinkerError(f"this server offers no {use} model")
    if name is None:
        return next(iter(offered.values()))
    if name not in offered:
        raise TinkerError(f"the server has no {use} model {name!r} (it has: {', '.join(offered)})")
    return offered[name]


def open_speaker(service: Any, *, model: str | None = None, checkpoint: str | None = None) -> Speaker:
    """A checkpoint, a base model, or the server's first model."""
    if checkpoint is not None:
        sampler = service.create_sampling_client(model_path=checkpoint)
        base = offered_models(service).get(sampler.get_base_model())
        context = base.max_context_length if base is not None else None
        return Speaker(checkpoint, sampler, sampler.get_tokenizer(), context)
    chosen = chosen_model(service, model, use="sampleable")
    sampler = service.create_sampling_client(base_model=chosen.model_name)
    return Speaker(chosen.model_name, sampler, sampler.get_tokenizer(), chosen.max_context_length)


def named_speaker(service: Any, name: str) -> Speaker:
    """A speaker by a `tinker://` path or the name of a base model."""
    if name.startswith(PATH_PREFIX):
        return open_speaker(service, checkpoint=name)
    return open_speaker(service, model=name)


def command_line(*words: str) -> str:
    """A command to paste, for the server that this command talks to."""
    url = click.get_current_context().meta.get("tinsmith.base_url")
    return shlex.join(["tinsmith", words[0], *(["--base-url", url] if url else []), *words[1:]])
