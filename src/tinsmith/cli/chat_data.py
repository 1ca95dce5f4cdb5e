"""Training data from JSONL: chats (`messages`) or `prompt` and `completion`; every error names its line.

Does not know: servers, training.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from tinsmith.errors import InvalidInputError, TinkerError
from tinsmith.types import Datum, ModelInput


class BadDataError(TinkerError):
    """A data file that cannot be used; the text names file, line and what is wrong."""

    code = "bad_data"


@dataclass(frozen=True, slots=True)
class Example:
    """A text to learn: its tokens, which of them count, and the line it comes from."""

    tokens: tuple[int, ...]
    weights: tuple[float, ...]
    line: int = 0
    is_cut: bool = False
    """Whether its end was left out, for want of room in the model's context."""

    def datum(self, scale: float = 1.0) -> Datum:
        """As the server takes it: inputs, and the token that follows each."""
        weights = [weight * scale for weight in self.weights[1:]]
        return Datum(
            model_input=ModelInput.from_ints(list(self.tokens[:-1])),
            loss_fn_inputs={"target_tokens": list(self.tokens[1:]), "weights": weights},
        )

    @property
    def counted(self) -> float:
        return sum(self.weights[1:])

    @property
    def last_answer(self) -> int:
        """Where the last run of tokens that count begins."""
        start = len(self.weights)
        while start and not self.weights[start - 1]:
            start -= 1
        while start and self.weights[start - 1]:
            start -= 1
        return start


@dataclass(frozen=True, slots=True)
class DataFile:
    """A JSONL file as it was read: its values by line, and a digest of its bytes."""

    path: Path
    digest: str
    rows: tuple[tuple[int, Any], ...]

    @classmethod
    def read(cls, path: Path) -> DataFile:
        """Read a file whole; lines that are empty are left out."""
        try:
            content = path.read_bytes()
            lines = content.decode("utf-8-sig").split("\n")  # JSON may hold other separators of lines in its texts
        except OSError as error:
            raise BadDataError(f"{path} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            line = content[: error.start].count(b"\n") + 1
            raise BadDataError(f"{path}:{line}: not UTF-8 ({error.reason})") from None
        rows = tuple((n, _parsed(line, f"{path}:{n}")) for n, line in enumerate(lines, start=1) if line.strip())
        if not rows:
            raise BadDataError(f"{path}: has no examples")
        return cls(path, hashlib.sha256(content).hexdigest(), rows)

    def where(self, line: int) -> str:
        return f"{self.path}:{line}"


def _parsed(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise BadDataError(f"{where}: not valid JSON: {error}") from None
    except RecursionError:
        raise BadDataError(f"{where}: not valid JSON: nested too deeply") from None


def read_examples(path: Path, tokenizer: Any, max_length: int | None) -> list[Example]:
    """All examples of a file, in order."""
    return examples_of(DataFile.read(path), tokenizer, max_length)


def examples_of(data: DataFile, tokenizer: Any, max_length: int | None, *, truncate: bool = False) -> list[Example]:
    """The file's texts as tokens. One that is too long for the model is refused, or cut if that is asked for."""
    check_examples(data)
    examples = []
    for line, row in data.rows:
        tokens, weights = _tokens(row, tokenizer, data.where(line))
        examples.append(fitted(Example(tokens, weights, line), max_length, data.where(line), truncate=truncate))
    return examples


def check_examples(data: DataFile) -> None:
    """Refuse a file that does not hold examples; needs no tokenizer."""
    for line, row in data.rows:
        where = data.where(line)
        if isinstance(row, dict) and isinstance(row.get("messages"), list):
            check_messages(row["messages"], where, "messages")
            if not any(message["role"] == "assistant" for message in row["messages"]):
                refuse(where, "has no message of the assistant, so there is nothing to learn")
        elif not (isinstance(row, dict) and all(isinstance(row.get(key), str) for key in ("prompt", "completion"))):
            refuse(where, f"needs 'messages' (a chat), or 'prompt' and 'completion' (texts); {_found(row)}")


def check_messages(messages: Sequence[Any], where: str, name: str) -> None:
    if not messages:
        refuse(where, f"{name} is empty")
    for index, message in enumerate(messages):
        is_message = isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))
        if not is_message:
            refuse(where, f"{name}[{index}] needs 'role' and 'content', both texts")


def refuse(where: str, text: str) -> NoReturn:
    raise BadDataError(f"{where}: {text}")


def _found(row: Any) -> str:
    if not isinstance(row, dict):
        return f"this is a {type(row).__name__}"
    if {"chosen", "rejected"} <= row.keys():
        return "it has 'chosen' and 'rejected': use --dpo"
    return f"it has {', '.join(map(repr, row))}" if row else "it is empty"


def fitted(example: Example, max_length: int | None, where: str, *, truncate: bool) -> Example:
    """An example that the model can read whole."""
    count = len(example.tokens)
    if max_length is None or count <= max_length:
        return example
    if not truncate:
        refuse(
            where, f"{count} tokens do not fit the model's context of {max_length}; shorten it, or cut with --truncate"
        )
    cut = Example(example.tokens[:max_length], example.weights[:max_length], example.line, True)
    if not cut.counted:
        refuse(where, f"the first {max_length} of its {count} tokens hold nothing to learn, so it cannot be cut")
    return cut


def _tokens(row: Any, tokenizer: Any, where: str) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """One line of a file: tokens and weights."""
    if "messages" in row:
        return chat_tokens(row["messages"], tokenizer, where)
    return completion_tokens(row["prompt"], row["completion"], tokenizer, where)


def completion_tokens(
    prompt: str, completion: str, tokenizer: Any, where: str
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """A text and what follows it, which is what counts; the model then stops."""
    first = list(tokenizer.encode(prompt))
    end = tokenizer.eos_token_id
    rest = [*tokenizer.encode(completion, add_special_tokens=False), *([] if end is None else [end])]
    if not first:
        if tokenizer.bos_token_id is None:
            refuse(where, "the prompt is empty, and this model has no token to begin a text with")
        first = [tokenizer.bos_token_id]
    if not rest:
        refuse(where, "the completion is empty")
    return tuple(first + rest), (0.0,) * len(first) + (1.0,) * len(rest)


def chat_tokens(messages: Sequence[Any], tokenizer: Any, where: str) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """A chat as the model reads it; what the assistant says counts."""
    tokens: list[int] = []
    weights: list[float] = []
    try:
        for turn, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = chat_prompt(messages[:turn], tokenizer)
            whole = list(tokenizer.apply_chat_template(list(messages[: turn + 1]), tokenize=True))
            if prompt[: len(tokens)] != tokens or whole[: len(prompt)] != prompt:
                refuse(where, "the chat template changes earlier turns, so they cannot be told apart")
            weights += [0.0] * (len(prompt) - len(tokens)) + [1.0] * (len(whole) - len(prompt))
            tokens = whole
    except InvalidInputError as error:  # the template says no
        raise BadDataError(f"{where}: {error}") from None
    return tuple(tokens), tuple(weights)


def chat_prompt(messages: Sequence[Any], tokenizer: Any) -> list[int]:
    """The tokens after which the assistant speaks."""
    return list(tokenizer.apply_chat_template(list(messages), tokenize=True, add_generation_prompt=True))
