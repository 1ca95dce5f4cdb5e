"""The state of samples under way: what has been drawn, and which blocks hold it.

Owns: one job's samples from admission to the wire answer. Does not know: scheduling, tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tinsmith.engine.prompt_scores import PromptScores
from tinsmith.engine.sample_job import SampleJob, SamplePlan
from tinsmith.engine.sampling_math import DrawRule
from tinsmith.engine.stop import StopMatcher
from tinsmith.wire.sampling import SampledSequence, SampleResponse, StopReason, TopkLogprobs, TopkRow


@dataclass(slots=True, eq=False)
class JobState:
    """A job with its finished samples."""

    job: SampleJob
    plan: SamplePlan
    scores: PromptScores
    finished: dict[int, SampledSequence] = field(default_factory=dict)
    hit_tokens: int | None = None
    """Prompt tokens found in the cache when the job first ran."""

    @property
    def rule(self) -> DrawRule:
        params = self.job.request.sampling_params
        return DrawRule(params.temperature, params.top_k, params.top_p)

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


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens that are computed together: a prompt on its way to the first token, or one sample."""

    state: JobState
    index: int | None
    """Number of the sample; None while it is the prompt of all."""
    arrival: int
    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    """Tokens whose keys and values are in the cache."""
    matcher: StopMatcher | None = None
    logprobs: list[float] = field(default_factory=list)
    topk: list[TopkRow] = field(default_factory=list)

    @property
    def tenant(self) -> str:
        return self.state.job.tenant

    @property
    def pending(self) -> int:
        return len(self.tokens) - self.computed

    @property
    def drawn(self) -> int:
        """Tokens drawn so far."""
        return len(self.logprobs)

    def reusable(self) -> int:
        """Tokens that may come from the cache: the last one never, and none whose logits are still needed."""
        if self.index is not None:
            return len(self.tokens) - 1
        return min(self.state.plan.first_needed, len(self.tokens) - 1)

    def push(self, token: int, logprob: float, row: TopkRow) -> bool:
        """Take a drawn token; whether the sample has ended."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if self.state.job.request.topk_sample_logprobs:
            self.topk.append(row)
        assert self.matcher is not None
        if self.matcher.push(token):
            self.finish("stop")
            return True
        if self.drawn == self.state.plan.max_new:
            self.finish("length")
            return True
        return False

    def finish(self, reason: StopReason) -> None:
        assert self.index is not None
        drawn = np.array(self.tokens[len(self.state.plan.prompt) :], np.int32)
        topk = TopkLogprobs.from_rows(self.topk, "topk_logprobs") if self.topk else None
        logprobs = np.array(self.logprobs, np.float32)
        self.state.finished[self.index] = SampledSequence(reason, "", drawn, logprobs, topk)
