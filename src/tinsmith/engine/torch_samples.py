"""Sample jobs on the torch sampler: from a job's bytes to the sampler and back, and the frozen adapters it needs.

Does not know: how tokens are drawn (`sampler`), whose turn it is (`scheduler`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch

from tinsmith.engine import frames, sampler
from tinsmith.engine.base import Category, Done, Sample, TokenEvent, Usage
from tinsmith.engine.checkpoints import CheckpointInfo, read_checkpoint, read_manifest
from tinsmith.engine.executor import SampleEvent, Step
from tinsmith.engine.lora import LoraAdapter
from tinsmith.engine.memory_caps import MemoryCaps
from tinsmith.engine.models.config import ModelConfig
from tinsmith.engine.models.load import LoadedModel
from tinsmith.engine.sample_job import SampleJob
from tinsmith.engine.sampler import Sampler, SamplerLimits
from tinsmith.engine.token_bytes import read_token_bytes
from tinsmith.errors import InvalidInputError
from tinsmith.wire import json_codec
from tinsmith.wire.proto_sampling import encode_response
from tinsmith.wire.sampling import SampleRequest, SampleResponse


@dataclass(eq=False, slots=True)
class _Running:
    job: Sample
    prompt_tokens: int
    is_streamed: bool
    device_s: float = 0.0


class TorchSamples:
    """The samples under way and the adapters they are drawn from, the one used last at the end."""

    def __init__(self, model: LoadedModel, caps: MemoryCaps, cache_dir: Path) -> None:
        table = read_token_bytes(model.tokenizer_dir / "tokenizer.json")
        self._config = model.config
        self._device = model.decoder.device
        limits = SamplerLimits(cache_bytes=caps.cache_bytes)
        self._sampler = Sampler(model.decoder, table, limits, cache_dir)
        self._max_bytes = caps.sampler_adapter_bytes
        self._running: dict[str, _Running] = {}
        self._sizes: dict[str, int] = {}

    def add(self, job: Sample, stream: bool) -> None:
        request = json_codec.decode(job.body, SampleRequest)
        name = self._adapter(job)
        self._sampler.add(SampleJob(id=job.job_id, request=request, seed=job.seed, adapter=name, tenant=job.tenant))
        self._running[job.job_id] = _Running(job, request.prompt.length, stream)

    def cancel(self, job_id: str) -> None:
        self._running.pop(job_id, None)
        self._sampler.cancel(job_id)

    def step(self, tenants: frozenset[str]) -> Step:
        began_at = time.perf_counter()
        report = self._sampler.step(tenants)
        self._charge(report.tokens_by_tenant, time.perf_counter() - began_at)
        events: list[SampleEvent] = []
        for event in report.events:
            events += self._told(event)
        return Step(events, report.tokens_by_tenant)

    def _charge(self, tokens: dict[str, int], seconds: float) -> None:
        """Share a step's time out by tokens among tenants, evenly among the jobs of each."""
        total = sum(tokens.values())
        for tenant, count in tokens.items():
            jobs = [running for running in self._running.values() if running.job.tenant == tenant]
            for running in jobs:
                running.device_s += seconds * count / total / len(jobs)

    def _told(self, event: sampler.Event) -> list[SampleEvent]:
        running = self._running[event.job_id]
        if isinstance(event, sampler.TokenEvent):
            if not running.is_streamed:
                return []
            token = TokenEvent(sample=event.index, tokens=(event.token,), logprobs=(event.logprob,))
            return [frames.Tokens(event.job_id, token)]
        del self._running[event.job_id]
        if isinstance(event, sampler.FailedEvent):
            category: Category = "user" if isinstance(event.error, InvalidInputError) else "server"
            return [frames.Failed(event.job_id, str(event.error), category)]
        ends = _ends(event.job_id, event.response) if running.is_streamed else []
        return [*ends, frames.Finished(event.job_id, _done(event.response, running))]

    def _adapter(self, job: Sample) -> str | None:
        """The name of the frozen adapter that a job is drawn from, loaded if it was not."""
        if job.directory is None:
            return None
        name = job.adapter_key or job.directory
        if name in self._sizes:
            self._sizes[name] = self._sizes.pop(name)
            return name
        adapter = read_frozen(Path(job.directory), job.base_model, self._config, self._device)
        self._make_room(4 * adapter.parameter_count())
        self._sampler.add_adapter(name, adapter)
        self._sizes[name] = 4 * adapter.parameter_count()
        return name

    def _make_room(self, size_bytes: int) -> None:
        used = {running.job.adapter_key or running.job.directory for running in self._running.values()}
        for name in [name for name in self._sizes if name not in used]:
            if sum(self._sizes.values()) + size_bytes <= self._max_bytes:
                return
            self._sampler.remove_adapter(name)
            del self._sizes[name]


def read_frozen(directory: Path, base_model: str, config: ModelConfig, device: torch.device) -> LoraAdapter:
    """The adapter of a checkpoint, to sample from."""
    info = check_base(directory, base_model)
    switches = (info.train_attn, info.train_mlp, info.train_unembed)
    adapter = LoraAdapter(config, info.rank, info.seed or 0, *switches, info.alpha, device)
    adapter.load(read_checkpoint(directory, with_optimizer=False).weights)
    return adapter


def check_base(directory: Path, base_model: str) -> CheckpointInfo:
    """What a checkpoint is of; refuses one of another base model."""
    info = read_manifest(directory).info
    if info.base_model != base_model:
        raise InvalidInputError(
            f"checkpoint {directory.name!r} belongs to base model {info.base_model!r}, not to {base_model!r}"
        )
    return info


def _ends(job_id: str, response: SampleResponse) -> list[frames.Tokens]:
    """Says of each streamed sample why it ended; the sampler knows that when all of a job have."""
    return [
        frames.Tokens(job_id, TokenEvent(sample=i, tokens=(), logprobs=(), stop_reason=sequence.stop_reason))
        for i, sequence in enumerate(response.sequences)
    ]


def _done(response: SampleResponse, running: _Running) -> Done:
    cached = response.prompt_cache_hit_tokens
    sampled = sum(0 if row.tokens_np is None else row.tokens_np.size for row in response.sequences)
    usage = Usage(prefill=running.prompt_tokens - cached, prefill_cached=cached, sampled=sampled)
    return Done(body=encode_response(response), encoding="protobuf", usage=usage, device_s=running.device_s)
