"""The state of a job and its samples: the tokens drawn so far, the cache blocks that hold them, and the queue."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from tinsmith.engine.sampling.draw import DrawRule, Listed
from tinsmith.engine.sampling.grammar import Grammar, GrammarState
from tinsmith.engine.sampling.logit_changes import DrawnTokens, Mask, RowChanges
from tinsmith.engine.sampling.plan import SampleJob, SamplePlan, StopMatcher
from tinsmith.engine.sampling.prompt_scores import PromptScores
from tinsmith.wire.messages.sampling import SampledSequence, SampleResponse, StopReason, TopkLogprobs

LOOKED_AT = 64
"""How far a tenant's queue is searched for a sequence that may start, so that a long queue is not slow."""


@dataclass(slots=True, eq=False)
class JobState:
    """A job with its finished samples."""

    job: SampleJob
    plan: SamplePlan
    scores: PromptScores
    finished: dict[int, SampledSequence] = field(default_factory=dict)
    hit_tokens: int | None = None
    """Prompt tokens that the cache had when the job started."""
    grammar: Grammar | None = None
    """What the samples must look like; set before the job's first step."""

    rule: DrawRule = field(init=False)

    def __post_init__(self) -> None:
        params = self.job.request.sampling_params
        self.rule = DrawRule(params.temperature, params.top_k, params.top_p, params.min_p or 0.0)

    @property
    def is_done(self) -> bool:
        return len(self.finished) == self.job.request.num_samples

    def response(self) -> SampleResponse:
        return SampleResponse(
            [self.finished[index] for index in range(self.job.request.num_samples)],
            self.scores.logprobs(),
            self.scores.topk(),
            self.scores.targets(),
            self.hit_tokens or 0,
            self.scores.alternatives(),
        )


class SampleTokens:
    """A prompt and the tokens drawn after it. All samples share the prompt's tuple: there may be a thousand samples."""

    __slots__ = ("drawn", "prompt")

    def __init__(self, prompt: tuple[int, ...]) -> None:
        self.prompt = prompt
        self.drawn: list[int] = []

    def __len__(self) -> int:
        return len(self.prompt) + len(self.drawn)

    def part(self, start: int, stop: int) -> tuple[int, ...]:
        """Return the tokens from `start` up to, but not including, `stop`."""
        length = len(self.prompt)
        if stop <= length:
            return self.prompt[start:stop]
        return self.prompt[start:] + tuple(self.drawn[max(start - length, 0) : stop - length])


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens that run as one: a prompt until its first token is drawn, then one sample."""

    state: JobState
    index: int | None
    """The number of the sample; None for the prompt of all samples."""
    arrival: int
    tokens: SampleTokens
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    """Tokens whose keys and values are in the cache."""
    matcher: StopMatcher | None = None
    logprobs: list[float] = field(default_factory=list)
    topk: list[Listed] = field(default_factory=list)
    grammar: GrammarState | None = None
    """Where the sample is in its grammar; a preempted sample has none."""
    seen: DrawnTokens | None = None
    """The drawn tokens that penalties count."""

    @property
    def tenant(self) -> str:
        return self.state.job.tenant

    @property
    def pending(self) -> int:
        return len(self.tokens) - self.computed

    @property
    def is_single(self) -> bool:
        """Return whether it is a sample of which only the last token is not computed yet."""
        return self.pending == 1 and self.index is not None

    @property
    def drawn(self) -> int:
        """Return how many tokens have been drawn."""
        return len(self.logprobs)

    @property
    def mask(self) -> Future[Mask] | None:
        """Return the mask of the next token, which may still be computed; None if every token may be drawn."""
        if self.index is None or self.state.grammar is None:
            return None
        if self.grammar is None:
            self.grammar = self.state.grammar.resume(self.tokens.drawn)
        return self.grammar.mask

    @property
    def is_ready(self) -> bool:
        """Return whether a token can be drawn as soon as the model has computed its logits."""
        return self.state.grammar is None or (mask := self.mask) is None or mask.done()

    def changes(self) -> RowChanges | None:
        """Return how the logits of the next token are changed; None: not at all."""
        rule, grammar = self.state.plan.logit_rule, self.state.grammar
        if rule is None and grammar is None:
            return None
        if self.index is None:
            return RowChanges(rule, None, None if grammar is None else grammar.first_mask_V)
        return RowChanges(rule, self.seen, None if (mask := self.mask) is None else mask.result())

    def reusable(self) -> int:
        """Return how many tokens may come from the cache: not the last one, and none whose logits are needed."""
        if self.index is not None:
            return len(self.tokens) - 1
        return min(self.state.plan.first_needed, len(self.tokens) - 1)

    def push(self, token: int, logprob: float, row: Listed | None) -> bool:
        """Add a drawn token; return whether the sample has ended."""
        self.tokens.drawn.append(token)
        self.logprobs.append(logprob)
        if row is not None:
            self.topk.append(row)
        assert self.matcher is not None
        if self.matcher.push(token) or self._is_complete(token):
            self.finish("stop")
            return True
        if self.drawn == self.state.plan.max_new:
            self.finish("length")
            return True
        return False

    def _is_complete(self, token: int) -> bool:
        """Count and follow a token that has not ended the sample; return whether its grammar allows no more."""
        rule = self.state.plan.logit_rule
        if rule is not None:
            self.seen = self.seen or DrawnTokens(rule)
            self.seen.push(token)
        if self.state.grammar is None:
            return False
        if self.drawn == 1:
            self.grammar = self.state.grammar.start()
        assert self.grammar is not None, "a token was drawn before its mask was known"
        return self.grammar.push(token)

    def drop_grammar(self) -> None:
        """Forget where the sample is in its grammar while it does not run; its tokens tell."""
        if self.grammar is not None:
            self.grammar.mask.cancel()
            self.grammar = None

    def finish(self, reason: StopReason) -> None:
        assert self.index is not None
        drawn = np.array(self.tokens.drawn, np.int32)
        topk = TopkLogprobs(*map(np.stack, zip(*self.topk, strict=True))) if self.topk else None
        logprobs = np.array(self.logprobs, np.float32)
        self.state.finished[self.index] = SampledSequence(reason, "", drawn, logprobs, topk)


class SequenceQueue:
    """The sequences that wait to run: by tenant, then by arrival.

    Both a tenant's queue and a job's sequences are indexed, so that adding, finding and cancelling do not walk over
    all.
    """

    def __init__(self) -> None:
        self._tenants: dict[str, list[tuple[int, Sequence]]] = {}
        self._jobs: dict[JobState, dict[Sequence, None]] = {}

    def __bool__(self) -> bool:
        return bool(self._tenants)

    def __len__(self) -> int:
        return sum(map(len, self._tenants.values()))

    def add(self, sequence: Sequence) -> None:
        # Arrivals are unique, so the tuples' sequences are never compared.
        bisect.insort(self._tenants.setdefault(sequence.tenant, []), (sequence.arrival, sequence))
        self._jobs.setdefault(sequence.state, {})[sequence] = None

    def remove(self, sequence: Sequence) -> None:
        line = self._tenants[sequence.tenant]
        del line[bisect.bisect_left(line, (sequence.arrival,))]
        if not line:
            del self._tenants[sequence.tenant]
        del self._jobs[sequence.state][sequence]
        if not self._jobs[sequence.state]:
            del self._jobs[sequence.state]

    def remove_job(self, state: JobState) -> None:
        for sequence in list(self._jobs.get(state, ())):
            self.remove(sequence)

    def tenants(self) -> list[str]:
        """Return the tenants that have waiting sequences."""
        return list(self._tenants)

    def first(self, tenant: str, may_begin: Callable[[Sequence], bool]) -> Sequence | None:
        """Return the next sequence of a tenant that may start."""
        line = self._tenants.get(tenant, [])[:LOOKED_AT]
        return next((sequence for _, sequence in line if may_begin(sequence)), None)
