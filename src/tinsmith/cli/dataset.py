"""Training data from a JSONL file: chats (`messages`), or `prompt` and `completion`.

Errors name the file and line, and all bad lines are reported together.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from tinsmith.errors import InvalidInputError, TinkerError
from tinsmith.types import Datum, ModelInput

T = TypeVar("T")
R = TypeVar("R")

Check = Callable[[Any, str], None]
"""Raises `BadDataError` if a row cannot be used; the second argument is its place."""

MAX_ERRORS = 20
"""Bad lines of a file that are listed; the rest are counted."""
JSON_KINDS = {
    list: "a list",
    str: "a string",
    int: "a number",
    float: "a number",
    bool: "a boolean",
    type(None): "null",
}


class BadDataError(TinkerError):
    """A data file that cannot be used; the message names the file, the line and the problem."""

    code = "bad_data"


@dataclass(frozen=True, slots=True)
class Example:
    """A training example: tokens, the weight of each token in the loss, and its line in the file."""

    tokens: tuple[int, ...]
    weights: tuple[float, ...]
    line: int = 0
    is_cut: bool = False
    """Whether it was truncated to the model's context length."""

    def datum(self, scale: float = 1.0) -> Datum:
        """Return the example as the server expects it: input tokens, and the target token after each."""
        weights = [weight * scale for weight in self.weights[1:]]
        return Datum(
            model_input=ModelInput.from_ints(list(self.tokens[:-1])),
            loss_fn_inputs={"target_tokens": list(self.tokens[1:]), "weights": weights},
        )

    @property
    def counted(self) -> float:
        """The total weight of the target tokens."""
        return sum(self.weights[1:])

    @property
    def last_answer(self) -> int:
        """The index at which the last run of tokens with a weight begins."""
        start = len(self.weights)
        while start and not self.weights[start - 1]:
            start -= 1
        while start and self.weights[start - 1]:
            start -= 1
        return start


@dataclass(frozen=True, slots=True)
class DataFile:
    """The parsed lines of a JSONL file, with their line numbers, and a digest of its bytes."""

    path: Path
    digest: str
    rows: tuple[tuple[int, Any], ...]

    @classmethod
    def read(cls, path: Path, check: Check) -> DataFile:
        """Read a file, skipping empty lines; parse and check each row, so that a bad file is refused at once.

        A check needs no tokenizer: it looks at the shape of a row (`check_example`, or `check_pair` of `dpo`).
        """
        try:
            content = path.read_bytes()
            lines = content.decode("utf-8-sig").split("\n")  # splitlines() would split at U+2028 inside a string
        except OSError as error:
            raise BadDataError(f"cannot read {path}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            line = content[: error.start].count(b"\n") + 1
            raise BadDataError(f"{path}:{line}: not UTF-8 ({error.reason})") from None
        filled = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
        if not filled:
            raise BadDataError(f"{path} is empty; each line must be a JSON object with one example")

        def checked(numbered: tuple[int, str]) -> tuple[int, Any]:
            line, text = numbered
            where = f"{path}:{line}"
            row = _parsed(text, where)
            check(row, where)
            return line, row

        try:
            rows = each_row(filled, checked)
        except BadDataError as error:
            raise BadDataError(_layout_problem(content, path) or f"{error}{_hint(filled[0][1])}") from None
        return cls(path, hashlib.sha256(content).hexdigest(), tuple(rows))

    def where(self, line: int) -> str:
        """Return a place for error messages: the file and the line."""
        return f"{self.path}:{line}"


def each_row(rows: Iterable[T], convert: Callable[[T], R]) -> list[R]:
    """Convert each row. Problems are collected and raised as one error, so that a file can be fixed in one go."""
    converted: list[R] = []
    problems: list[str] = []
    for row in rows:
        try:
            converted.append(convert(row))
        except BadDataError as error:
            problems.append(str(error))
    if problems:
        more = len(problems) - MAX_ERRORS
        raise BadDataError("\n".join(problems[:MAX_ERRORS] + ([f"... and {more} more"] if more > 0 else [])))
    return converted


def _layout_problem(content: bytes, path: Path) -> str | None:
    """Describe a file that is JSON as a whole, in one array or on several lines, and not line by line."""
    try:
        whole = json.loads(content)
    except (ValueError, RecursionError):
        return None
    name = shlex.quote(str(path))
    if isinstance(whole, list) and whole and all(isinstance(row, dict) for row in whole):
        return f"{path} is one JSON array; write each example on a line of its own: jq -c '.[]' {name}"
    if b"\n" in content.strip():
        return f"{path} is one JSON value on several lines; write it on one line: jq -c . {name}"
    return None


def _hint(first_line: str) -> str:
    """Say what a file must look like if not even its first line is JSON."""
    try:
        json.loads(first_line)
    except (ValueError, RecursionError):
        return "\nEach line of the file must be a JSON object (JSONL)."
    return ""


def _parsed(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        problem = error.msg.removesuffix(" at")  # some messages end in it
        raise BadDataError(f"{where}: not valid JSON: {problem} at column {error.colno}") from None
    except ValueError as error:  # for example a number with too many digits
        raise BadDataError(f"{where}: not valid JSON: {error}") from None
    except RecursionError:
        raise BadDataError(f"{where}: not valid JSON: nested too deeply") from None


def read_examples(path: Path, tokenizer: Any, max_length: int | None) -> list[Example]:
    """Read a file and tokenize its examples."""
    return examples_of(DataFile.read(path, check_example), tokenizer, max_length)


def examples_of(data: DataFile, tokenizer: Any, max_length: int | None, *, truncate: bool = False) -> list[Example]:
    """Tokenize the file's examples. An example that exceeds `max_length` is an error, or cut with `truncate`."""

    def tokenized(numbered: tuple[int, Any]) -> Example:
        line, row = numbered
        tokens, weights = _tokens(row, tokenizer, data.where(line))
        return fitted(Example(tokens, weights, line), max_length, data.where(line), truncate=truncate)

    return each_row(data.rows, tokenized)


def check_example(row: Any, where: str) -> None:
    """Check the shape of a row: a chat with an answer, or a prompt and its completion."""
    if isinstance(row, dict) and isinstance(row.get("messages"), list):
        check_messages(row["messages"], where, "messages")
        if not any(message["role"] == "assistant" for message in row["messages"]):
            refuse(where, "no message has the role 'assistant', so there is nothing to learn")
    elif not (isinstance(row, dict) and all(isinstance(row.get(key), str) for key in ("prompt", "completion"))):
        refuse(where, f"needs 'messages' (a chat), or 'prompt' and 'completion' (strings); {_found(row)}")
    else:
        check_answer(row["completion"], where, "'completion'")


def check_messages(messages: Sequence[Any], where: str, name: str) -> None:
    """Check that every message has a role and content, and that no answer is empty."""
    if not messages:
        refuse(where, f"{name} is empty")
    for index, message in enumerate(messages):
        is_message = isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))
        if not is_message:
            refuse(where, f"{name}[{index}] needs 'role' and 'content', both strings")
        if message["role"] == "assistant":
            check_answer(message["content"], where, f"the answer in {name}[{index}]")


def check_answer(text: str, where: str, name: str) -> None:
    """Refuse an empty answer: a model that learns from it learns to say nothing."""
    if not text.strip():
        refuse(where, f"{name} is empty; write an answer, or delete the line")


def refuse(where: str, text: str) -> NoReturn:
    """Reject a row of the file."""
    raise BadDataError(f"{where}: {text}")


def _found(row: Any) -> str:
    if not isinstance(row, dict):
        return f"this is {JSON_KINDS.get(type(row), 'not an object')}"
    if {"chosen", "rejected"} <= row.keys():
        return "it has 'chosen' and 'rejected': use --dpo"
    wrong = [key for key in ("prompt", "completion") if key in row and not isinstance(row[key], str)]
    if wrong:
        return f"{wrong[0]!r} is {JSON_KINDS.get(type(row[wrong[0]]), 'an object')}"
    return f"it has {', '.join(map(repr, row))}" if row else "it is empty"


def fitted(example: Example, max_length: int | None, where: str, *, truncate: bool) -> Example:
    """Return the example if it fits the model's context; else cut it with `truncate`, or reject it."""
    count = len(example.tokens)
    if max_length is None or count <= max_length:
        return example
    if not truncate:
        refuse(
            where,
            f"has {count} tokens, more than the model's context of {max_length}; shorten it, or use --truncate",
        )
    cut = Example(example.tokens[:max_length], example.weights[:max_length], example.line, True)
    if not cut.counted:
        refuse(where, f"cannot truncate: the first {max_length} of its {count} tokens contain nothing to learn")
    return cut


def _tokens(row: Any, tokenizer: Any, where: str) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Return a row's tokens and weights."""
    if "messages" in row:
        return chat_tokens(row["messages"], tokenizer, where)
    return completion_tokens(row["prompt"], row["completion"], tokenizer, where)


def completion_tokens(
    prompt: str, completion: str, tokenizer: Any, where: str
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Return tokens and weights of a prompt and its completion; the completion and the end token count."""
    first = list(tokenizer.encode(prompt))
    end = tokenizer.eos_token_id
    rest = [*tokenizer.encode(completion, add_special_tokens=False), *([] if end is None else [end])]
    if not first:
        if tokenizer.bos_token_id is None:
            refuse(where, "the prompt is empty, and this model has no begin-of-text token to start from")
        first = [tokenizer.bos_token_id]
    if not rest:
        refuse(where, "the completion is empty")
    return tuple(first + rest), (0.0,) * len(first) + (1.0,) * len(rest)


def chat_tokens(messages: Sequence[Any], tokenizer: Any, where: str) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Return tokens and weights of a chat in the model's template; the assistant's messages count.

    The chat is rendered up to each assistant message and again with it: the difference is what the assistant says.
    """
    tokens: list[int] = []
    weights: list[float] = []
    try:
        for turn, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = chat_prompt(messages[:turn], tokenizer)
            whole = list(tokenizer.apply_chat_template(list(messages[: turn + 1]), tokenize=True))
            if prompt[: len(tokens)] != tokens or whole[: len(prompt)] != prompt:
                refuse(
                    where,
                    "the chat template rewrites earlier turns, so it is unclear which tokens are the assistant's",
                )
            weights += [0.0] * (len(prompt) - len(tokens)) + [1.0] * (len(whole) - len(prompt))
            tokens = whole
    except InvalidInputError as error:  # raised by the template itself
        raise BadDataError(f"{where}: {error}") from None
    return tuple(tokens), tuple(weights)


def chat_prompt(messages: Sequence[Any], tokenizer: Any) -> list[int]:
    """Return a chat's tokens up to where the assistant's answer begins."""
    return list(tokenizer.apply_chat_template(list(messages), tokenize=True, add_generation_prompt=True))
