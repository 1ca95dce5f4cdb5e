"""Direct preference optimization (DPO): preference pairs from JSONL, and the loss.

The loss is -log sigmoid(beta * margin). The margin is how much more the model prefers the chosen answer to the rejected
one than the reference does, which is the model before training. The gradient with respect to the logprobs is written
out here, so that torch is not needed: a forward pass returns the logprobs, and a cross-entropy weighted with the
negative gradient then trains on it (see `client/losses/custom_loss.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tinsmith.cli.dataset import (
    JSON_KINDS,
    DataFile,
    Example,
    chat_tokens,
    check_answer,
    check_messages,
    completion_tokens,
    each_row,
    fitted,
    refuse,
)

FORMS = (
    "needs 'prompt' (a string or messages), 'chosen' and 'rejected' (strings or messages), "
    "or whole chats as 'chosen' and 'rejected'"
)


@dataclass(frozen=True, slots=True)
class Pair:
    """Two answers to one prompt, the better one first."""

    chosen: Example
    rejected: Example

    @property
    def line(self) -> int:
        return self.chosen.line

    @property
    def is_cut(self) -> bool:
        return self.chosen.is_cut or self.rejected.is_cut


def pairs_of(data: DataFile, tokenizer: Any, max_length: int | None, *, truncate: bool = False) -> list[Pair]:
    """Tokenize the file's pairs."""

    def tokenized(numbered: tuple[int, Any]) -> Pair:
        line, row = numbered
        where = data.where(line)
        sides = [
            fitted(Example(*_tokens(row, side, tokenizer, where), line), max_length, where, truncate=truncate)
            for side in ("chosen", "rejected")
        ]
        return Pair(sides[0], sides[1])

    return each_row(data.rows, tokenized)


def check_pair(row: Any, where: str) -> None:
    """Check the shape of a row: two different answers to one prompt."""
    if not isinstance(row, dict) or not {"chosen", "rejected"} <= row.keys():
        refuse(where, FORMS + _advice(row))
    prompt = row.get("prompt")
    if isinstance(prompt, list):
        check_messages(prompt, where, "prompt")
    elif prompt is not None and not isinstance(prompt, str):
        refuse(where, f"'prompt' is {JSON_KINDS.get(type(prompt), 'an object')}; the line {FORMS}")
    for side in ("chosen", "rejected"):
        _check_side(row, side, where)
    if row["chosen"] == row["rejected"]:
        refuse(where, "'chosen' and 'rejected' are the same, so there is nothing to prefer")


def _advice(row: Any) -> str:
    is_example = isinstance(row, dict) and ("messages" in row or "completion" in row)
    return "; this looks like an example: omit --dpo" if is_example else ""


def _check_side(row: dict[str, Any], side: str, where: str) -> None:
    prompt, answer = row.get("prompt"), row[side]
    if isinstance(prompt, str) and not isinstance(answer, str):
        refuse(where, f"{side!r} must be a string, as 'prompt' is")
    if isinstance(answer, str) and prompt is not None:
        check_answer(answer, where, repr(side))
        return
    messages = [answer] if isinstance(answer, dict) else answer
    if not isinstance(messages, list):
        refuse(where, FORMS)
    check_messages(messages, where, side)
    if messages[-1]["role"] != "assistant":
        refuse(where, f"the last message of {side!r} must have the role 'assistant'")
    if prompt is None and len(messages) < 2:
        refuse(where, f"{side!r} is only an answer; add 'prompt', or give whole chats")


def _tokens(row: dict[str, Any], side: str, tokenizer: Any, where: str) -> tuple[tuple[int, ...], tuple[float, ...]]:
    prompt, answer = row.get("prompt"), row[side]
    if isinstance(prompt, str):
        return completion_tokens(prompt, answer, tokenizer, where)
    if isinstance(answer, str):
        answer = [{"role": "assistant", "content": answer}]
    messages = [*(prompt or []), *([answer] if isinstance(answer, dict) else answer)]
    tokens, weights = chat_tokens(messages, tokenizer, where)
    # In a chat of several turns, the two sides differ in the last answer only: nothing else counts.
    start = Example(tokens, weights).last_answer
    return tokens, (0.0,) * start + weights[start:]


@dataclass(frozen=True, slots=True, eq=False)
class DpoLoss:
    """The loss of a batch of pairs, its gradient with respect to each text's logprobs, the share of pairs whose chosen
    answer is preferred, and the mean margin."""

    loss: float
    gradients: list[Any]
    accuracy: float
    margin: float


def texts_of(pairs: Sequence[Pair]) -> list[Example]:
    """Return both texts of every pair, the chosen one first."""
    return [text for pair in pairs for text in (pair.chosen, pair.rejected)]


def answer_logprobs(texts: Sequence[Example], outputs: Sequence[Any]) -> list[float]:
    """Return the logprob of each text's answer, from the outputs of a forward pass."""
    return [
        float(np.dot(np.asarray(output["logprobs"].to_numpy(), np.float64), np.asarray(text.weights[1:])))
        for text, output in zip(texts, outputs, strict=True)
    ]


def margins_of(logprobs: Sequence[float], reference: Sequence[float]) -> list[float]:
    """Return each pair's margin from the logprobs of `texts_of`: those of the model, and those of the reference."""
    gains = [mine - before for mine, before in zip(logprobs, reference, strict=True)]
    return [chosen - rejected for chosen, rejected in zip(gains[0::2], gains[1::2], strict=True)]


def share_right(margins: Sequence[float]) -> float:
    """Return the share of pairs whose chosen answer is preferred."""
    return sum(margin > 0 for margin in margins) / len(margins)


def dpo_loss(texts: Sequence[Example], logprobs: Sequence[float], reference: Sequence[float], beta: float) -> DpoLoss:
    """Compute the mean over pairs of -log sigmoid(beta * margin), and its gradient."""
    margins = margins_of(logprobs, reference)
    count = len(margins)
    total, gradients = 0.0, []
    for i, margin in enumerate(margins):
        total += _softplus(-beta * margin)
        slope = beta * _sigmoid(-beta * margin) / count
        for sign, text in ((-1.0, texts[2 * i]), (1.0, texts[2 * i + 1])):
            gradients.append(np.asarray(text.weights[1:]) * (sign * slope))
    return DpoLoss(total / count, gradients, share_right(margins), sum(margins) / count)


def _softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))
