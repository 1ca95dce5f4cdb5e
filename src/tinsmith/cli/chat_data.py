"""Training data from JSONL: chats (`messages`) or `prompt` and `completion`; every error names its line.

Does not know: servers, training.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinsmith.errors import TinkerError
from tinsmith.types import Datum, ModelInput


class BadDataError(TinkerError):
    """A data file that cannot be used; the text names file, line and what is wrong."""

    code = "bad_data"


@dataclass(frozen=True, slots=True)
class Example:
    """A text to learn: its tokens, and which of them count."""

    tokens: tuple[int, ...]
    weights: tuple[float, ...]

    def datum(self) -> Datum:
        """As the server takes it: inputs, and the token that follows each."""
        return Datum(
            model_input=ModelInput.from_ints(list(self.tokens[:-1])),
            loss_fn_inputs={"target_tokens": list(self.tokens[1:]), "weights": list(self.weights[1:])},
        )

    @property
    def counted(self) -> float:
        return sum(self.weights[1:])


def read_examples(path: Path, tokenizer: Any, max_length: int) -> list[Example]:
    """All examples of a file, in order."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadDataError(f"{path} cannot be read: {error}") from error
    examples = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise BadDataError(f"{where}: not valid JSON: {error}") from None
        example = example_of(row, tokenizer, where)
        if len(example.tokens) > max_length:
            raise BadDataError(f"{where}: {len(example.tokens)} tokens do not fit the model's context of {max_length}")
        examples.append(example)
    if not examples:
        raise BadDataError(f"{path}: has no examples")
    return examples


def example_of(row: Any, tokenizer: Any, where: str) -> Example:
    """One line of a file."""
    if isinstance(row, dict) and isinstance(row.get("messages"), list):
        return _chat(row["messages"], tokenizer, where)
    if isinstance(row, dict) and isinstance(row.get("prompt"), str) and isinstance(row.get("completion"), str):
        return _completion(row["prompt"], row["completion"], tokenizer)
    raise BadDataError(f"{where}: needs 'messages' (a chat), or 'prompt' and 'completion' (texts)")


def _completion(prompt: str, completion: str, tokenizer: Any) -> Example:
    first = list(tokenizer.encode(prompt))
    rest = [*tokenizer.encode(completion, add_special_tokens=False), tokenizer.eos_token_id]
    return Example(tuple(first + rest), (0.0,) * len(first) + (1.0,) * len(rest))


def _chat(messages: list[Any], tokenizer: Any, where: str) -> Example:
    for index, message in enumerate(messages):
        is_message = isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))
        if not is_message:
            raise BadDataError(f"{where}: messages[{index}] needs 'role' and 'content', both texts")
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise BadDataError(f"{where}: has no message of the assistant, so there is nothing to learn")
    tokens: list[int] = []
    weights: list[float] = []
    for turn in turns:
        prompt = chat_prompt(messages[:turn], tokenizer)
        whole = list(tokenizer.apply_chat_template(messages[: turn + 1], tokenize=True))
        if prompt[: len(tokens)] != tokens or whole[: len(prompt)] != prompt:
            raise BadDataError(f"{where}: the chat template changes earlier turns, so they cannot be told apart")
        weights += [0.0] * (len(prompt) - len(tokens)) + [1.0] * (len(whole) - len(prompt))
        tokens = whole
    return Example(tuple(tokens), tuple(weights))


def chat_prompt(messages: Sequence[Any], tokenizer: Any) -> list[int]:
    """The tokens after which the assistant speaks."""
    return list(tokenizer.apply_chat_template(list(messages), tokenize=True, add_generation_prompt=True))
