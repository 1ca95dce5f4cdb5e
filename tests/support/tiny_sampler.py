"""What the sampler's tests share: a tiny model, requests, and samples computed plainly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from tinsmith.engine.lora import LoraAdapter
from tinsmith.engine.models.attention import PackedAttention
from tinsmith.engine.models.decoder import Decoder
from tinsmith.engine.models.load import load_model
from tinsmith.engine.models.tiny import make_tiny
from tinsmith.engine.sampling.draw import DrawRule, draw, uniforms
from tinsmith.engine.sampling.plan import SampleJob
from tinsmith.engine.sampling.sampler import DoneEvent, Event, FailedEvent, NewToken, Sampler, SamplerLimits
from tinsmith.text.token_bytes import read_token_bytes
from tinsmith.wire.messages.sampling import SampleRequest, SampleResponse, SamplingParams
from tinsmith.wire.values.inputs import ModelInput

BLOCK = 16
SAMPLING = set(SamplingParams.__struct_fields__)


def load(directory: Path, family: str = "smollm", **sizes: Any) -> tuple[Decoder, tuple[bytes, ...]]:
    model = make_tiny(directory / "tiny", family, num_attention_heads=6, num_key_value_heads=2, **sizes)
    return load_model(model, cache_dir=directory).decoder, read_token_bytes(model / "tokenizer.json")


def make_sampler(model: tuple[Decoder, tuple[bytes, ...]], blocks: int = 400, **limits: int) -> Sampler:
    decoder, table = model
    per_block = 2 * decoder.config.num_layers * decoder.config.kv_size * BLOCK * 4
    chosen = {"max_sequences": 16, "prefill_tokens": 24, **limits}
    return Sampler(decoder, table, SamplerLimits(cache_bytes=blocks * per_block, block_size=BLOCK, **chosen))


def trained(decoder: Decoder, seed: int, rank: int = 4) -> LoraAdapter:
    adapter = LoraAdapter(decoder.config, rank, seed)
    generator = torch.Generator().manual_seed(seed)
    for parameter in adapter.parameters().values():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return adapter


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 250, length).tolist()


def job(
    name: str, tokens: list[int], seed: int = 7, adapter: Any = None, tenant: str = "", **options: Any
) -> SampleJob:
    params = {key: options.pop(key) for key in list(options) if key in SAMPLING}
    request = SampleRequest(prompt=ModelInput.from_ints(tokens), sampling_params=SamplingParams(**params), **options)
    return SampleJob(id=name, request=request, seed=seed, adapter=adapter, tenant=tenant)


def finish(sampler: Sampler, most_steps: int = 5000) -> dict[str, SampleResponse]:
    """Run until nothing is left; a failure is raised."""
    answers: dict[str, SampleResponse] = {}
    for _ in range(most_steps):
        if not sampler.has_work:
            return answers
        collect(sampler.step().events, answers)
    raise AssertionError("the sampler does not finish")


def collect(events: list[Event], answers: dict[str, SampleResponse]) -> None:
    for event in events:
        if isinstance(event, FailedEvent):
            raise event.error
        if isinstance(event, DoneEvent):
            answers[event.job_id] = event.response


def streamed(events: list[Event]) -> list[tuple[str, int, int]]:
    return [(event.job_id, event.index, event.token) for event in events if isinstance(event, NewToken)]


def logits_of(decoder: Decoder, tokens: list[int], adapter: LoraAdapter | None = None) -> torch.Tensor:
    """logits_TV by the trainer's forward pass over the whole sequence."""
    with torch.no_grad():
        attend = PackedAttention(decoder.config, [len(tokens)])
        hidden = decoder.hidden(torch.tensor(tokens), torch.arange(len(tokens)), attend, adapter)
        return decoder.unembed(hidden, adapter)


def plain_sample(
    decoder: Decoder, tokens: list[int], count: int, seed: int, index: int, rule: DrawRule, adapter: Any = None
) -> tuple[list[int], list[float]]:
    """A sample drawn one token at a time, the whole sequence computed anew each time."""
    tokens, drawn, scores = list(tokens), [], []
    for position in range(count):
        logits = logits_of(decoder, tokens, adapter)[-1:]
        token, logprob = draw(logits, logits.log_softmax(1), [rule], uniforms([seed], [index], [position]))
        tokens.append(int(token))
        drawn.append(int(token))
        scores.append(float(logprob))
    return drawn, scores
