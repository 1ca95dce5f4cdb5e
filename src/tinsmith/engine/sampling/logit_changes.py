"""What a request changes about a row of logits before a token is drawn: penalties, bias, and the mask of a grammar.

Only tokens that were seen are touched. A sample keeps the tokens it drew and how often, in arrays that grow with it, so
that a step costs as much as there are different tokens, not as much as the vocabulary. All of it follows from the
prompt and the tokens drawn so far: a sample that is drawn again after a crash is changed in the same way.

Shapes: V vocabulary, P different tokens of a prompt, B tokens with a bias, U different tokens drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tinsmith.wire.messages.sampling import SamplingParams

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]
"""mask_V: whether a token may be drawn."""

_LARGEST = 1e30
"""A repetition penalty near 0 would divide a logit beyond what float32 holds."""


@dataclass(frozen=True, slots=True, eq=False)
class LogitRule:
    """The penalties and bias of a request. A penalty that has no effect is None."""

    occurrences: tuple[float, float] | None
    """Frequency and presence penalty."""
    repetition: float | None
    prompt_P: Ids
    """The different tokens of the prompt; empty unless there is a repetition penalty."""
    prompt: frozenset[int]
    biased_B: Ids
    bias_B: Floats

    def change(self, logits_V: torch.Tensor, drawn: DrawnTokens | None) -> None:
        """Apply the penalties and then the bias to one row, in place."""
        if self.repetition is not None:
            _repel(logits_V, self.prompt_P, self.repetition)
            if drawn is not None:
                _repel(logits_V, drawn.beyond_prompt(), self.repetition)
        if self.occurrences is not None and drawn is not None:
            frequency, presence = self.occurrences
            _add(logits_V, drawn.tokens(), -(frequency * drawn.counts() + presence).astype(np.float32))
        _add(logits_V, self.biased_B, self.bias_B)


def logit_rule(params: SamplingParams, prompt: Sequence[int]) -> LogitRule | None:
    """Return the penalties and bias of a request; None if it has none."""
    occurrences = params.frequency_penalty or 0.0, params.presence_penalty or 0.0
    repetition = params.repetition_penalty if params.repetition_penalty is not None else 1.0
    bias = params.logit_bias or {}
    if not any(occurrences) and repetition == 1 and not bias:
        return None
    seen = frozenset(prompt) if repetition != 1 else frozenset()
    return LogitRule(
        occurrences if any(occurrences) else None,
        repetition if repetition != 1 else None,
        np.array(sorted(seen), np.int64),
        seen,
        np.array(list(bias), np.int64),
        np.array(list(bias.values()), np.float32),
    )


class DrawnTokens:
    """The different tokens that a sample has drawn, and how often each."""

    __slots__ = ("_beyond", "_counts", "_place", "_prompt", "_tokens")

    def __init__(self, rule: LogitRule, tokens: Sequence[int] = ()) -> None:
        self._prompt = rule.prompt
        self._place: dict[int, int] = {}
        self._tokens = np.empty(16, np.int64)
        self._counts = np.empty(16, np.int64)
        self._beyond = np.empty(16, np.bool_)
        for token in tokens:
            self.push(token)

    def push(self, token: int) -> None:
        place = self._place.get(token)
        if place is None:
            place = self._place[token] = len(self._place)
            if place == len(self._tokens):
                self._tokens = np.resize(self._tokens, 2 * place)
                self._counts = np.resize(self._counts, 2 * place)
                self._beyond = np.resize(self._beyond, 2 * place)
            self._tokens[place], self._counts[place], self._beyond[place] = token, 0, token not in self._prompt
        self._counts[place] += 1

    def tokens(self) -> Ids:
        """Return tokens_U."""
        return self._tokens[: len(self._place)]

    def counts(self) -> Ids:
        """Return counts_U: how often each token was drawn."""
        return self._counts[: len(self._place)]

    def beyond_prompt(self) -> Ids:
        """Return the tokens that the prompt does not have, which a repetition penalty has not changed yet."""
        return self.tokens()[self._beyond[: len(self._place)]]


@dataclass(frozen=True, slots=True, eq=False)
class RowChanges:
    """Everything that changes one row."""

    rule: LogitRule | None
    drawn: DrawnTokens | None
    """None: nothing was drawn yet."""
    mask_V: Mask | None

    def apply(self, logits_V: torch.Tensor) -> None:
        """Change one row in place: penalties, bias, then the mask."""
        if self.rule is not None:
            self.rule.change(logits_V, self.drawn)
        if self.mask_V is not None:
            logits_V.masked_fill_(~torch.from_numpy(self.mask_V).to(logits_V.device), -torch.inf)


def _repel(logits_V: torch.Tensor, tokens_U: Ids, penalty: float) -> None:
    """Make tokens less likely (more, if the penalty is below 1), whatever the sign of their logits."""
    index_U = torch.from_numpy(tokens_U).to(logits_V.device)
    found_U = logits_V[index_U]
    logits_V[index_U] = torch.where(found_U > 0, found_U / penalty, found_U * penalty).clamp_(-_LARGEST, _LARGEST)


def _add(logits_V: torch.Tensor, tokens_U: Ids, numbers_U: Floats) -> None:
    index_U = torch.from_numpy(tokens_U).to(logits_V.device)
    logits_V[index_U] += torch.from_numpy(numbers_U).to(logits_V)
