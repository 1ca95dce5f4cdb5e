"""What the sampler will do for a request, fixed before any work starts: its prompt, its length, its stop rule.

`stop` has three meanings. Absent: a sample ends at one of the model's end-of-sequence tokens. `[]`: only its length
ends it. Token ids or strings: these end it, and so do the end-of-sequence tokens. `stop_token_ids` end it in each case.
What ends a sample is part of it.
Stop strings are matched as bytes, because a string (or one character of it) may be spread over several tokens.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tinsmith.engine.sampling.kv_cache import Weights
from tinsmith.engine.sampling.logit_changes import LogitRule, logit_rule
from tinsmith.errors import InvalidInputError
from tinsmith.wire.messages.sampling import SampleRequest
from tinsmith.wire.rules.sample_rules import check_sample


class TokenLimits(Protocol):
    """What a plan needs to know of a model."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_context_length(self) -> int: ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class StopRule:
    """What ends the samples of one request."""

    tokens: frozenset[int] = frozenset()
    texts: tuple[bytes, ...] = ()

    @property
    def longest_text(self) -> int:
        return max(map(len, self.texts), default=0)


def stop_rule(stop: str | Sequence[str | int] | None, eos_tokens: Sequence[int], also: Sequence[int] = ()) -> StopRule:
    """Return the rule that a request's `stop` stands for; `also` are its `stop_token_ids`."""
    if stop is None:
        return StopRule(frozenset(eos_tokens).union(also))
    listed = [stop] if isinstance(stop, str) else list(stop)
    if not listed:
        return StopRule(frozenset(also))
    texts = tuple(item.encode(errors="surrogatepass") for item in listed if isinstance(item, str))
    return StopRule(frozenset(eos_tokens).union(also, (item for item in listed if isinstance(item, int))), texts)


class StopMatcher:
    """Watches one sample."""

    __slots__ = ("_rule", "_table", "_tail")

    def __init__(self, rule: StopRule, table: Sequence[bytes]) -> None:
        self._rule = rule
        self._table = table
        self._tail = b""

    def push(self, token: int) -> bool:
        """Whether the sample ends with this token."""
        if token in self._rule.tokens:
            return True
        if not self._rule.texts:
            return False
        text = self._tail + (self._table[token] if token < len(self._table) else b"")
        if any(stop in text for stop in self._rule.texts):
            return True
        self._tail = text[max(len(text) - self._rule.longest_text + 1, 0) :]
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleJob:
    """Samples to draw. The server fixes the seed when it accepts the request, so that a replay draws the same."""

    id: str
    request: SampleRequest
    seed: int
    adapter: Hashable = None
    """Name of a loaded adapter; None: the base model."""
    tenant: str = ""

    @property
    def weights(self) -> Weights:
        """Return the tenant and adapter under which its keys and values are cached."""
        return self.tenant, self.adapter


@dataclass(frozen=True, slots=True)
class SamplePlan:
    """What a checked request asks for."""

    prompt: tuple[int, ...]
    max_new: int
    stop: StopRule
    scores_prompt: bool
    first_scored: int
    """The first prompt position whose logprob (and top-k) is requested."""
    first_needed: int
    """The first prompt position whose hidden state is needed; what lies before it may come from the cache."""
    logit_rule: LogitRule | None = None
    """Penalties and bias."""


def plan_sample(request: SampleRequest, config: TokenLimits, cache_tokens: int) -> SamplePlan:
    """Plan a request; raise InvalidInputError if it is invalid, or if its prompt does not fit into the cache.

    The key/value cache may hold fewer tokens than the model's context. A sample then ends where the cache does.
    """
    check_sample(request, vocab_size=config.vocab_size, max_context_length=config.max_context_length)
    prompt = tuple(request.prompt.to_ints())
    if len(prompt) > cache_tokens:
        text = f"prompt: has {len(prompt)} tokens, but the memory for sampling (cache_bytes) holds {cache_tokens}"
        raise InvalidInputError(text, field="prompt")
    params = request.sampling_params
    room = max(cache_tokens - len(prompt), 1)  # the last token drawn is never fed back, so it needs no room
    max_new = room if params.max_tokens is None else min(params.max_tokens, room)
    scores_prompt = bool(request.prompt_logprobs) or request.topk_prompt_logprobs > 0
    last_n = request.prompt_logprobs_last_n
    first_scored = 1 if last_n is None else len(prompt) - last_n
    needs_all = request.target_prompt_logprobs is not None or request.prompt_alt_tokens_k > 0
    first_needed = len(prompt) - 1
    if needs_all:
        first_needed = 0
    elif scores_prompt:
        first_needed = min(first_scored - 1, first_needed)
    return SamplePlan(
        prompt=prompt,
        max_new=max_new,
        stop=stop_rule(params.stop, config.eos_token_ids, params.stop_token_ids or ()),
        scores_prompt=scores_prompt,
        first_scored=first_scored,
        first_needed=first_needed,
        logit_rule=logit_rule(params, prompt),
    )
