"""The bytes of every token of a base model, with which the API process makes text without loading a tokenizer.

A reader process reads the tokenizer once and sends the table. Joining bytes costs far less than asking a tokenizer to
decode, and is exact: byte-level and SentencePiece vocabularies define text as the bytes of its tokens.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence, Set
from typing import cast

from tinsmith.engine.protocol import ModelCard
from tinsmith.errors import InvalidInputError
from tinsmith.server.bodies.questions import VocabularyQuestion, VocabularyReading
from tinsmith.server.bodies.reader_pool import ReaderPool

MARKS = frozenset({b"[TOOL_CALLS]", b"<|python_tag|>", b"<think>", b"</think>", b"<tool_call>", b"</tool_call>"})
"""Special tokens that `chat_parts` must see."""


class Vocabulary:
    """Tokens as bytes."""

    def __init__(self, reading: VocabularyReading) -> None:
        self._pieces = reading.pieces
        self._ends = array("I", reading.ends)
        self.special: Set[int] = frozenset(reading.special)
        """Tokens that are no text."""
        self.unmarked: Set[int] = frozenset(token for token in reading.special if self.raw(token) not in MARKS)
        """The same, without those that mark parts of a chat's answer."""

    def raw(self, token: int) -> bytes:
        """Return a token's bytes; of a special token, its name."""
        if token >= len(self._ends):
            return b""
        return self._pieces[self._ends[token - 1] if token else 0 : self._ends[token]]

    def text_bytes(self, tokens: Sequence[int], hidden: Set[int]) -> bytes:
        """Return the bytes of tokens, without the hidden ones."""
        if len(tokens) == 1:  # as in a stream
            return b"" if tokens[0] in hidden else self.raw(tokens[0])
        return b"".join([self.raw(token) for token in tokens if token not in hidden])

    def shown(self, token: int) -> str:
        """Return a token as a string; one that is part of a character, as OpenAI writes it: `bytes:\\xe2\\x80`."""
        raw = self.raw(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class Vocabularies:
    """Of each base model, once it is needed."""

    def __init__(self, readers: ReaderPool) -> None:
        self._readers = readers
        self._loading: dict[str, asyncio.Task[Vocabulary]] = {}

    async def of(self, card: ModelCard) -> Vocabulary:
        """Return a base model's vocabulary."""
        directory = card.tokenizer_directory
        if directory is None:
            raise InvalidInputError(
                f"model: this server has no tokenizer for {card.name}; use the Tinker API, which takes token ids",
                field="model",
            )
        task = self._loading.get(directory)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = self._loading[directory] = asyncio.get_running_loop().create_task(self._load(directory))
        return await asyncio.shield(task)

    async def _load(self, directory: str) -> Vocabulary:
        reading = await self._readers.ask("", VocabularyQuestion(directory=directory), b"")
        return Vocabulary(cast(VocabularyReading, reading))
