"""Sampler: continuous batching of samples over the base model and any number of adapters.

Owns: which sequences run in a step, prefill in chunks, pre-emption when the cache is full, and the resulting events.
Does not know: tenants' shares of the device (`scheduler`), HTTP, training.

The same (prompt, weights, seed, sample index) gives the same tokens and logprobs whatever else runs, however often the
sample is pre-empted, and whatever the cache held: bit for bit where `packed_linear.can_pack` says so, else up to the
rounding of products of different size, which can turn a token only on a near tie.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from collections.abc import Sequence as List
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch

from tinsmith.engine.block_attention import BlockCache, block_bytes
from tinsmith.engine.cache_room import CacheRoom
from tinsmith.engine.compiling import compile_kernels
from tinsmith.engine.fused_inference import inference_decoder
from tinsmith.engine.lora import LoraAdapter
from tinsmith.engine.models.decoder import Decoder
from tinsmith.engine.prefix import PrefixIndex
from tinsmith.engine.prompt_scores import PromptScores
from tinsmith.engine.row_adapters import FrozenAdapter
from tinsmith.engine.sample_batch import Chunk, Drawn, SampleBatch
from tinsmith.engine.sample_job import SampleJob, plan_sample
from tinsmith.engine.sample_state import JobState, Sequence
from tinsmith.engine.stop import StopMatcher
from tinsmith.errors import InvalidInputError, TinkerError
from tinsmith.wire.sampling import SampleResponse


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One more token of a sample."""

    job_id: str
    index: int
    token: int
    logprob: float


@dataclass(frozen=True, slots=True)
class DoneEvent:
    """All samples of a job."""

    job_id: str
    response: SampleResponse


@dataclass(frozen=True, slots=True)
class FailedEvent:
    """A job that cannot be finished; the others go on."""

    job_id: str
    error: TinkerError


Event: TypeAlias = TokenEvent | DoneEvent | FailedEvent


@dataclass(frozen=True, slots=True)
class SamplerLimits:
    """How much the sampler does at once."""

    cache_bytes: int = 2**30
    """Memory of the key/value cache."""
    block_size: int = 32
    """Tokens of a cache block; the unit of sharing."""
    max_sequences: int = 64
    """Samples in one step."""
    prefill_tokens: int = 256
    """Prompt tokens in one step; bounds its length."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a step did."""

    events: list[Event]
    tokens_by_tenant: Counter[str]
    """Tokens computed for each tenant, to share out the step's cost."""


class Sampler:
    """Draws samples, a step at a time. Not thread-safe: one owner calls it."""

    def __init__(
        self,
        decoder: Decoder,
        token_bytes: List[bytes],
        limits: SamplerLimits | None = None,
        cache_dir: Path | None = None,
    ) -> None:
        """`token_bytes` are the bytes of each token (`token_bytes.read_token_bytes`), for stop texts.

        `cache_dir` is where it is noted that kernels were compiled; without, they are compiled when first needed.
        """
        self.limits = limits or SamplerLimits()
        self._decoder = inference_decoder(decoder)
        self._token_bytes = token_bytes
        config, size = decoder.config, self.limits.block_size
        count = self.limits.cache_bytes // block_bytes(config, size, decoder.dtype)
        if count < 2:
            raise InvalidInputError(
                f"cache_bytes: {self.limits.cache_bytes} hold {count} blocks, 2 are needed at least"
            )
        self.context_length = min(config.max_context_length, (count - 1) * size)
        """Tokens of the longest sequence: the model's, or what the cache can hold."""
        count = min(count, self.limits.max_sequences * (-(-config.max_context_length // size) + 1))
        cache = BlockCache(config, count, size, decoder.device, decoder.dtype)
        if cache_dir is not None:
            compile_kernels(self._decoder, cache_dir)
        self._room = CacheRoom(cache, PrefixIndex(count, size))
        self._batch = SampleBatch(self._decoder, cache)
        self._adapters: dict[Hashable, FrozenAdapter] = {}
        self._jobs: dict[str, JobState] = {}
        self._running: list[Sequence] = []
        self._waiting: list[Sequence] = []
        self._arrivals = 0

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    def add_adapter(self, name: Hashable, adapter: LoraAdapter) -> None:
        """Keep a frozen copy of an adapter. A name stands for the same weights as long as it is in use."""
        self.remove_adapter(name)
        self._adapters[name] = FrozenAdapter(adapter, self._decoder.device, self._decoder.dtype)

    def has_adapter(self, name: Hashable) -> bool:
        return name in self._adapters

    def remove_adapter(self, name: Hashable) -> None:
        """Forget an adapter and what the cache holds of it."""
        if any(state.job.adapter == name for state in self._jobs.values()):
            raise InvalidInputError(f"adapter {name!r} is in use; finish or cancel its samples first")
        if self._adapters.pop(name, None) is not None:
            self._room.index.drop_adapter(name)

    def add(self, job: SampleJob) -> None:
        """Queue a job; one that cannot be done is refused here."""
        if job.id in self._jobs:
            raise InvalidInputError(f"job {job.id!r} is under way already")
        if job.adapter is not None and job.adapter not in self._adapters:
            raise InvalidInputError(f"adapter {job.adapter!r} is not loaded")
        plan = plan_sample(job.request, self._decoder.config, self.context_length)
        state = JobState(job, plan, PromptScores(job.request, plan, job.seed))
        self._jobs[job.id] = state
        self._waiting.append(Sequence(state, None, self._next_arrival(), list(plan.prompt)))

    def cancel(self, job_id: str) -> bool:
        """Drop a job and free its room at once; whether it was there."""
        state = self._jobs.pop(job_id, None)
        if state is None:
            return False
        for sequence in [s for s in self._running if s.state is state]:
            self._room.release(sequence)
        self._running = [s for s in self._running if s.state is not state]
        self._waiting = [s for s in self._waiting if s.state is not state]
        return True

    @torch.inference_mode()
    def step(self, tenants: Iterable[str] | None = None) -> StepReport:
        """Run one step for these tenants (None: for all)."""
        chunks = self._schedule(None if tenants is None else frozenset(tenants))
        events: list[Event] = []
        if chunks:
            drawn = self._batch.run(chunks, self._adapters)
            for chunk in chunks:
                self._room.advance(chunk.sequence, chunk.count)
            for row in drawn:
                self._take(row, events)
        used: Counter[str] = Counter()
        for chunk in chunks:
            used[chunk.sequence.tenant] += chunk.count
        return StepReport(events, used)

    def _next_arrival(self) -> int:
        self._arrivals += 1
        return self._arrivals

    def _schedule(self, tenants: frozenset[str] | None) -> list[Chunk]:
        """The tokens of this step, each with room in the cache: single tokens first, then prompts, then newcomers."""
        chunks: list[Chunk] = []
        budget = self.limits.prefill_tokens
        allowed = [s for s in self._running if tenants is None or s.tenant in tenants]
        for sequence in sorted(allowed, key=lambda s: (s.pending > 1 or s.index is None, s.arrival)):
            is_single = sequence.pending == 1 and sequence.index is not None
            count = 1 if is_single else min(sequence.pending, budget)
            if count and sequence in self._running and self._make_room(sequence, count, chunks):
                chunks.append(Chunk(sequence, count))
                budget -= 0 if is_single else count
        while budget > 0 and (newcomer := self._admit(tenants, chunks)) is not None:
            count = min(newcomer.pending, budget)
            has_room = self._room.reserve(newcomer, count)
            assert has_room, "an admitted sequence has no room"
            chunks.append(Chunk(newcomer, count))
            budget -= count
        return chunks

    def _make_room(self, sequence: Sequence, count: int, chunks: list[Chunk]) -> bool:
        """Room for the next tokens; younger sequences give way, and the youngest of all is put back itself."""
        while not self._room.reserve(sequence, count):
            youngest = max(self._running, key=lambda s: s.arrival)
            self._put_back(youngest, chunks)
            if youngest is sequence:
                return False
        return True

    def _put_back(self, sequence: Sequence, chunks: list[Chunk]) -> None:
        """Pre-empt: its tokens are kept, its room is not."""
        self._room.release(sequence)
        self._running.remove(sequence)
        self._waiting.append(sequence)
        chunks[:] = [chunk for chunk in chunks if chunk.sequence is not sequence]

    def _admit(self, tenants: frozenset[str] | None, chunks: list[Chunk]) -> Sequence | None:
        """The next sequence to begin: of the tenant with the fewest running, then by priority and arrival."""
        waiting = [s for s in self._waiting if tenants is None or s.tenant in tenants]
        waiting = [s for s in waiting if not any(self._room.is_ahead(chunk.sequence, s) for chunk in chunks)]
        if not waiting:
            return None
        running = Counter(s.tenant for s in self._running)
        sequence = min(waiting, key=lambda s: (running[s.tenant], -s.state.job.priority, s.arrival))
        while not self._fits(sequence):
            victim = self._victim_for(sequence, tenants, is_idle=not chunks)
            if victim is None:
                return None
            self._put_back(victim, chunks)
        self._waiting.remove(sequence)
        self._running.append(sequence)
        if sequence.state.hit_tokens is None:
            sequence.state.hit_tokens = sequence.computed
        return sequence

    def _fits(self, sequence: Sequence) -> bool:
        """Whether a sequence can begin; it then holds what the cache has of it."""
        if len(self._running) >= self.limits.max_sequences:
            return False
        self._room.take_prefix(sequence)
        needed = self._room.blocks_for(len(sequence.tokens)) - len(sequence.blocks)
        spare = len(self._running)  # each that runs may soon need one more
        if needed + spare <= self._room.available:
            return True
        self._room.release(sequence)
        return False

    def _victim_for(self, sequence: Sequence, tenants: frozenset[str] | None, is_idle: bool) -> Sequence | None:
        """Who gives way to a newcomer: one of a tenant with two more running; if nothing runs, one that pauses."""
        running = Counter(s.tenant for s in self._running)
        if not running:
            return None
        heaviest = max(running, key=lambda tenant: running[tenant])
        candidates = [s for s in self._running if s.tenant == heaviest]
        if running[heaviest] < running[sequence.tenant] + 2:
            is_paused = tenants is not None and is_idle
            candidates = [s for s in self._running if is_paused and s.tenant not in (tenants or ())]
        return max(candidates, key=lambda s: s.arrival, default=None)

    def _take(self, drawn: Drawn, events: list[Event]) -> None:
        """What a step gave one sequence: the first tokens of all samples of a prompt, or the next of one."""
        sequence = drawn.sequence
        state = sequence.state
        if state.job.id not in self._jobs:
            return  # failed by an earlier row of this step
        if drawn.error is not None:
            self.cancel(state.job.id)
            events.append(FailedEvent(state.job.id, drawn.error))
            return
        samples = self._begin_samples(sequence) if sequence.index is None else [sequence]
        for sample, token, logprob, row in zip(samples, drawn.tokens, drawn.logprobs, drawn.topk, strict=True):
            assert sample.index is not None
            events.append(TokenEvent(state.job.id, sample.index, token, logprob))
            if sample.push(token, logprob, row):
                self._drop(sample)
        if state.is_done:
            del self._jobs[state.job.id]
            events.append(DoneEvent(state.job.id, state.response()))

    def _drop(self, sample: Sequence) -> None:
        self._room.release(sample)
        (self._running if sample in self._running else self._waiting).remove(sample)

    def _begin_samples(self, prompt: Sequence) -> list[Sequence]:
        """The samples of a computed prompt, which share its blocks."""
        state = prompt.state
        samples = []
        for index in range(state.job.request.num_samples):
            sample = Sequence(state, index, prompt.arrival if index == 0 else self._next_arrival(), list(prompt.tokens))
            sample.matcher = StopMatcher(state.plan.stop, self._token_bytes)
            self._room.share(prompt, sample)
            samples.append(sample)
        self._running.remove(prompt)
        self._room.release(prompt)
        if state.plan.max_new == 0:
            for sample in samples:
                sample.finish("length")
                self._room.release(sample)
            return []
        self._running.extend(samples)
        for sample in reversed(samples[max(self.limits.max_sequences - len(self._running) + len(samples), 1) :]):
            self._put_back(sample, [])
        return samples
