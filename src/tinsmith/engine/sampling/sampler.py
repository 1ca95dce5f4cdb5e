"""The sampler: continuous batching of samples over the base model and any number of adapters.

A step computes the next token of every running sample, and a limited number of prompt tokens of new ones (chunked
prefill), all in one batch. Requests join and leave between any two steps, so none waits for a batch to end. When the
cache is full, the youngest sequence of the tenant that holds most is preempted: it loses its blocks, keeps its tokens,
and is computed again later. Which tenants take part in a step is decided by `worker/scheduler`.

The same (prompt, weights, seed, sample index) gives the same tokens and logprobs whatever else runs, however often the
sample is preempted, and whatever the cache held: bit for bit if `cpu/linear.can_pack`, else up to the rounding of
products of different size, which can change a token only on a near tie.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from collections.abc import Sequence as List
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch

from tinsmith.engine.checkpoints.format import CheckpointInfo
from tinsmith.engine.lora import LoraAdapter
from tinsmith.engine.models.decoder import Decoder
from tinsmith.engine.sampling.batch import Chunk, Drawn
from tinsmith.engine.sampling.draw import Listed
from tinsmith.engine.sampling.grammar import Grammar, Grammars
from tinsmith.engine.sampling.plan import SampleJob, StopMatcher, plan_sample
from tinsmith.engine.sampling.prompt_scores import PromptScores
from tinsmith.engine.sampling.sampled_model import CachedDecoder, FrozenWeights, SampledModel, SamplerLimits
from tinsmith.engine.sampling.sequence import JobState, SampleTokens, Sequence, SequenceQueue
from tinsmith.errors import InvalidInputError
from tinsmith.wire.messages.sampling import SampleResponse

MASK_WAIT_S = 0.002
"""How long a step waits for masks of its samples; those that take longer join a later step."""
GRAMMAR_WAIT_S = 0.01
"""How long a step that has nothing else to do waits for a grammar."""


@dataclass(frozen=True, slots=True)
class NewToken:
    """One more token of a sample."""

    job_id: str
    index: int
    token: int
    logprob: float
    topk: Listed | None = None
    """The most likely tokens at its position, if the request asks for them."""


@dataclass(frozen=True, slots=True)
class DoneEvent:
    """All samples of a job are finished."""

    job_id: str
    response: SampleResponse


@dataclass(frozen=True, slots=True)
class FailedEvent:
    """A job failed; the others continue."""

    job_id: str
    error: Exception


Event: TypeAlias = NewToken | DoneEvent | FailedEvent


@dataclass(frozen=True, slots=True)
class StepReport:
    """The results of a step."""

    events: list[Event]
    tokens_by_tenant: Counter[str]
    """Tokens computed for each tenant, to divide the step's cost by."""
    tokens_by_job: Counter[str]


class Sampler:
    """Draws samples, one step at a time. Not thread-safe."""

    def __init__(
        self,
        model: Decoder | SampledModel,
        token_bytes: List[bytes],
        limits: SamplerLimits,
        cache_dir: Path | None = None,
        special_tokens: frozenset[int] = frozenset(),
    ) -> None:
        """`token_bytes` are the bytes of each token (`token_bytes.read_token_bytes`), for stop strings and grammars.

        `special_tokens` are those that are no text, which a grammar never allows. `cache_dir` is for `CachedDecoder`.
        """
        self.limits = limits
        self._model = CachedDecoder(model, limits, cache_dir) if isinstance(model, Decoder) else model
        self._token_bytes = token_bytes
        config = self._model.config
        self.context_length = self._model.context_length
        self._room = self._model.room
        self._adapters: dict[Hashable, FrozenWeights] = {}
        self._grammars = Grammars(token_bytes, special_tokens, config.eos_token_ids, config.vocab_size)
        self._compiling: dict[JobState, Future[Grammar]] = {}
        """Jobs that start when their grammar is compiled."""
        self._jobs: dict[str, JobState] = {}
        self._running: list[Sequence] = []
        self._waiting = SequenceQueue()
        self._prefilled: Counter[str] = Counter()
        """Prompt tokens computed so far for each tenant that still has prompts to compute."""
        self._arrivals = 0

    @property
    def device(self) -> torch.device:
        return self._model.device

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting or self._compiling)

    def add_adapter(self, name: Hashable, adapter: LoraAdapter) -> int:
        """Store a frozen copy of an adapter and return its size in bytes.

        The caller makes sure that two tenants never use the same name: the weights are not compared.
        """
        self.remove_adapter(name)
        frozen = self._adapters[name] = self._model.frozen(adapter)
        return frozen.size_bytes

    def adapter_bytes(self, info: CheckpointInfo) -> int:
        """Estimate the size of a frozen adapter before it is read."""
        return self._model.adapter_bytes(info)

    def has_adapter(self, name: Hashable) -> bool:
        return name in self._adapters

    def remove_adapter(self, name: Hashable) -> None:
        """Remove an adapter and everything cached for it."""
        if any(state.job.adapter == name for state in self._jobs.values()):
            raise InvalidInputError(f"adapter {name!r} is in use; wait for its samples to finish, or cancel them")
        if self._adapters.pop(name, None) is not None:
            self._room.drop_adapter(name)

    def add(self, job: SampleJob) -> None:
        """Validate and queue a job."""
        if job.id in self._jobs:
            raise InvalidInputError(f"job {job.id!r} is already running")
        if job.adapter is not None and job.adapter not in self._adapters:
            raise InvalidInputError(f"adapter {job.adapter!r} is not loaded")
        plan = plan_sample(job.request, self._model.config, self.context_length)
        state = JobState(job, plan, PromptScores(job.request, plan, job.seed))
        self._jobs[job.id] = state
        output = job.request.sampling_params.output_format
        if output is not None and plan.max_new:
            self._compiling[state] = self._grammars.compile(output, plan.stop.tokens, job.tenant)
        else:
            self._enqueue(state)

    def cancel(self, job_id: str) -> bool:
        """Cancel a job and free its memory at once; return whether it existed."""
        state = self._jobs.pop(job_id, None)
        if state is None:
            return False
        if state in self._compiling:
            self._compiling.pop(state).cancel()
        for sequence in [s for s in self._running if s.state is state]:
            self._room.release(sequence)
            sequence.drop_grammar()
        self._running = [s for s in self._running if s.state is not state]
        self._waiting.remove_job(state)
        return True

    @torch.inference_mode()
    def step(self, tenants: Iterable[str] | None = None) -> StepReport:
        """Run one step for these tenants (None: all)."""
        events: list[Event] = []
        self._begin_compiled(events)
        self._await_masks()
        chunks = self._schedule(None if tenants is None else frozenset(tenants))
        if not chunks:
            self._await_grammars()
        if chunks:
            drawn = self._model.run(chunks, self._adapters)
            for chunk in chunks:
                self._room.advance(chunk.sequence, chunk.count)
            for row in drawn:
                self._take_or_fail(row, events)
        by_tenant: Counter[str] = Counter()
        by_job: Counter[str] = Counter()
        for chunk in chunks:
            by_tenant[chunk.sequence.tenant] += chunk.count
            by_job[chunk.sequence.state.job.id] += chunk.count
        return StepReport(events, by_tenant, by_job)

    def _enqueue(self, state: JobState) -> None:
        self._waiting.add(Sequence(state, None, self._next_arrival(), SampleTokens(state.plan.prompt)))

    def _begin_compiled(self, events: list[Event]) -> None:
        """Queue the jobs whose grammar is compiled; fail those whose grammar cannot be."""
        for state, compiled in list(self._compiling.items()):
            if not compiled.done():
                continue
            del self._compiling[state]
            try:
                state.grammar = compiled.result()
            except Exception as error:
                del self._jobs[state.job.id]
                events.append(FailedEvent(state.job.id, error))
            else:
                self._enqueue(state)

    def _pending_masks(self) -> list[Future[Any]]:
        constrained = [sequence for sequence in self._running if sequence.state.grammar is not None]
        return [mask for sequence in constrained if (mask := sequence.mask) is not None and not mask.done()]

    def _await_masks(self) -> None:
        """Give masks that are nearly ready the time to join this step."""
        if masks := self._pending_masks():
            wait(masks, MASK_WAIT_S)

    def _await_grammars(self) -> None:
        """Wait a moment for a grammar or a mask when nothing else can run, instead of looking again at once."""
        if pending := [*self._compiling.values(), *self._pending_masks()]:
            wait(pending, GRAMMAR_WAIT_S, FIRST_COMPLETED)

    def _next_arrival(self) -> int:
        self._arrivals += 1
        return self._arrivals

    def _schedule(self, tenants: frozenset[str] | None) -> list[Chunk]:
        """Choose the tokens of this step and reserve their blocks: running samples first, then prompts by tenant."""
        chunks: list[Chunk] = []
        allowed = [s for s in self._running if (tenants is None or s.tenant in tenants) and s.is_ready]
        for sequence in sorted(allowed, key=lambda s: s.arrival):
            if sequence.is_single and sequence in self._running and self._make_room(sequence, 1, chunks):
                chunks.append(Chunk(sequence, 1))
        budget = self.limits.prefill_tokens
        for tenant in self._prompt_order(tenants):
            if budget:
                used = self._prefill(tenant, tenants, budget, chunks)
                self._prefilled[tenant] += used
                budget -= used
        return chunks

    def _prompt_order(self, tenants: frozenset[str] | None) -> list[str]:
        """Return the tenants with prompts to compute, the one with the fewest computed tokens first.

        A new tenant starts with the count of the lowest, so that it cannot claim the past.
        """
        active = [s.tenant for s in self._running if not s.is_single]
        active += self._waiting.tenants()
        least = min((self._prefilled[name] for name in active if name in self._prefilled), default=0)
        self._prefilled = Counter({name: self._prefilled.get(name, least) for name in active})
        allowed = [name for name in self._prefilled if tenants is None or name in tenants]
        return sorted(allowed, key=lambda name: self._prefilled[name])

    def _prefill(self, tenant: str, tenants: frozenset[str] | None, budget: int, chunks: list[Chunk]) -> int:
        """Add up to `budget` tokens of a tenant's prompts, running ones before new ones; return how many were added."""
        left = budget
        own = [s for s in self._running if s.tenant == tenant and not s.is_single and s.is_ready]
        for sequence in sorted(own, key=lambda s: s.arrival):
            count = min(sequence.pending, left)
            if count and sequence in self._running and self._make_room(sequence, count, chunks):
                chunks.append(Chunk(sequence, count))
                left -= count
        while left > 0 and (newcomer := self._admit(tenant, tenants, chunks)) is not None:
            count = min(newcomer.pending, left)
            has_room = self._room.reserve(newcomer, count)
            assert has_room, "an admitted sequence has no room"
            chunks.append(Chunk(newcomer, count))
            left -= count
        return budget - left

    def _make_room(self, sequence: Sequence, count: int, chunks: list[Chunk]) -> bool:
        """Reserve blocks for the next tokens of a sequence; return False if it was preempted itself.

        If there are none, the youngest sequence of the tenant that holds most blocks is preempted.
        """
        while not self._room.reserve(sequence, count):
            held = self._room.held_by_tenant(self._running)
            most = max(held.values())
            heaviest = sequence.tenant if held[sequence.tenant] == most else max(held, key=lambda name: held[name])
            youngest = max((s for s in self._running if s.tenant == heaviest), key=lambda s: s.arrival)
            self._put_back(youngest, chunks)
            if youngest is sequence:
                return False
        return True

    def _put_back(self, sequence: Sequence, chunks: list[Chunk]) -> None:
        """Preempt a sequence: it keeps its tokens and loses its blocks and its place in a grammar."""
        self._room.release(sequence)
        sequence.drop_grammar()
        self._running.remove(sequence)
        self._waiting.add(sequence)
        chunks[:] = [chunk for chunk in chunks if chunk.sequence is not sequence]

    def _admit(self, tenant: str, tenants: frozenset[str] | None, chunks: list[Chunk]) -> Sequence | None:
        """Start the next waiting sequence of a tenant, if there is room for it."""

        def may_begin(waiting: Sequence) -> bool:
            return waiting.is_ready and not any(self._room.is_ahead(chunk.sequence, waiting) for chunk in chunks)

        sequence = self._waiting.first(tenant, may_begin)
        if sequence is None:
            return None
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
        """Return whether a sequence can start; if so, it holds the blocks that the cache already has of it."""
        if len(self._running) >= self.limits.max_sequences:
            return False
        self._room.take_prefix(sequence)
        needed = self._room.blocks_for(len(sequence.tokens)) - len(sequence.blocks)
        spare = len(self._running)  # each running sequence may soon need one more block
        if needed + spare <= self._room.available:
            return True
        self._room.release(sequence)
        return False

    def _victim_for(self, sequence: Sequence, tenants: frozenset[str] | None, is_idle: bool) -> Sequence | None:
        """Return the sequence to preempt for a new one, if any.

        It belongs to a tenant with at least two more running sequences than the new one's, or to one that holds more
        than its share of the cache while the new one's stays within its own. If nothing could run otherwise, it is one
        of a tenant that does not take part in this step.
        """
        running = Counter(s.tenant for s in self._running)
        if not running:
            return None
        heaviest: str | None = max(running, key=lambda tenant: running[tenant])
        if max(running.values()) < running[sequence.tenant] + 2:
            heaviest = self._above_its_share(sequence)
        candidates = [s for s in self._running if s.tenant == heaviest]
        if not candidates:
            is_paused = tenants is not None and is_idle
            candidates = [s for s in self._running if is_paused and s.tenant not in (tenants or ())]
        return max(candidates, key=lambda s: s.arrival, default=None)

    def _above_its_share(self, sequence: Sequence) -> str | None:
        """Return the tenant that holds most, if that exceeds its share and the new sequence stays within its own."""
        held = self._room.held_by_tenant(self._running)
        share = self._room.blocks // len(held.keys() | {sequence.tenant})
        if held[sequence.tenant] + self._room.blocks_for(len(sequence.tokens)) + 1 > share:
            return None
        most = max(held, key=lambda tenant: held[tenant])
        return most if held[most] > share and most != sequence.tenant else None

    def _take_or_fail(self, drawn: Drawn, events: list[Event]) -> None:
        """Process the tokens drawn for one sequence; an error fails only the job that it belongs to."""
        job_id = drawn.sequence.state.job.id
        try:
            self._take(drawn, events)
        except Exception as error:
            self.cancel(job_id)
            events.append(FailedEvent(job_id, error))

    def _take(self, drawn: Drawn, events: list[Event]) -> None:
        """Process drawn tokens: the first tokens of all samples of a prompt, or the next one of a sample."""
        sequence = drawn.sequence
        state = sequence.state
        if state.job.id not in self._jobs:
            return  # failed by an earlier row of this step
        if drawn.error is not None:
            raise drawn.error
        samples = self._begin_samples(sequence) if sequence.index is None else [sequence]
        waiting = set(samples).difference(self._running) if sequence.index is None else ()
        for sample, token, logprob, row in zip(samples, drawn.tokens, drawn.logprobs, drawn.topk, strict=True):
            assert sample.index is not None
            events.append(NewToken(state.job.id, sample.index, token, logprob, row))
            if sample.push(token, logprob, row):
                self._drop(sample)
            elif sample in waiting:
                sample.drop_grammar()
        if state.is_done:
            del self._jobs[state.job.id]
            events.append(DoneEvent(state.job.id, state.response()))

    def _drop(self, sample: Sequence) -> None:
        self._room.release(sample)
        if sample in self._running:
            self._running.remove(sample)
        else:
            self._waiting.remove(sample)

    def _begin_samples(self, prompt: Sequence) -> list[Sequence]:
        """Create the samples of a computed prompt; they share its blocks."""
        state = prompt.state
        samples = []
        for index in range(state.job.request.num_samples):
            sample = Sequence(
                state, index, prompt.arrival if index == 0 else self._next_arrival(), SampleTokens(prompt.tokens.prompt)
            )
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
