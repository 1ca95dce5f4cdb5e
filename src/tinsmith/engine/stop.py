"""When a sample ends: at a token, at a text, at the end of sequence, or only at its length.

Owns: the meaning of `stop`. Absent: the model's end-of-sequence tokens. `[]`: nothing ends the sample but its length.
Ids or texts: these, and the end-of-sequence tokens too. What ends the sample stays in it.
Does not know: how tokens are drawn.

Texts are compared as bytes, so that they are found across the borders of tokens and of their parts of a character.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tinsmith.errors import InvalidInputError


@dataclass(frozen=True, slots=True)
class StopRule:
    """What ends the samples of one request."""

    tokens: frozenset[int] = frozenset()
    texts: tuple[bytes, ...] = ()

    @property
    def longest_text(self) -> int:
        return max(map(len, self.texts), default=0)


def stop_rule(stop: str | Sequence[str | int] | None, eos_tokens: Sequence[int], vocab_size: int) -> StopRule:
    """The rule that a request's `stop` means; what can never be met is refused."""
    if stop is None:
        return StopRule(frozenset(eos_tokens))
    listed = [stop] if isinstance(stop, str) else list(stop)
    if not listed:
        return StopRule()
    for i, item in enumerate(listed):
        if item == "":
            raise InvalidInputError(f"stop[{i}]: an empty text would end every sample at once", field="stop")
        if isinstance(item, int) and not 0 <= item < vocab_size:
            raise InvalidInputError(f"stop[{i}]: token {item} is not in the vocabulary of {vocab_size}", field="stop")
    return StopRule(
        frozenset(eos_tokens).union(item for item in listed if isinstance(item, int)),
        tuple(item.encode() for item in listed if isinstance(item, str)),
    )


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
