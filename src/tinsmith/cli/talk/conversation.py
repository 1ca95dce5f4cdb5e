"""A conversation with one model, or with two at once: it keeps the messages, samples answers and prints them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tinsmith.cli.models import Speaker, named_speaker
from tinsmith.cli.output import console, echo
from tinsmith.errors import TinkerError
from tinsmith.types import ModelInput, SamplingParams

UNFINISHED = "\ufffd"
"""What an incomplete UTF-8 sequence decodes to."""


@dataclass(slots=True)
class Side:
    """One model and its messages."""

    speaker: Speaker
    messages: list[dict[str, str]] = field(default_factory=list)


class Conversation:
    """The messages so far; every question goes to all sides."""

    def __init__(self, service: Any, params: SamplingParams, speakers: Sequence[Speaker]) -> None:
        self._service = service
        self._params = params
        self._sides = [Side(speaker) for speaker in speakers]
        self._before: Side | None = None
        """Whom the user was talking to before comparing."""
        self._system = ""

    @property
    def names(self) -> list[str]:
        return [side.speaker.name for side in self._sides]

    @property
    def title(self) -> str:
        return " and ".join(self.names)

    def system(self, text: str) -> None:
        self._system = text

    def reset(self) -> None:
        for side in self._sides:
            side.messages.clear()

    def change(self, names: Sequence[str]) -> None:
        """Switch to other models and start over; going from two models to one of them keeps its messages."""
        known = {side.speaker.name: side for side in self._sides}
        if len(names) == 1 and names[0] in known:
            self._sides = [known[names[0]]]
        else:
            speakers = [known[name].speaker if name in known else named_speaker(self._service, name) for name in names]
            self._sides = [Side(speaker) for speaker in speakers]
        self._before = None

    def compare(self, names: Sequence[str]) -> None:
        """Ask two models at once from now on."""
        before = self._before if len(self._sides) > 1 else self._sides[0]
        self.change(names)
        self._before = before

    def stop_comparing(self) -> bool:
        """Return to the conversation before comparing, as it was; False if there is one model only."""
        if len(self._sides) == 1:
            return False
        self._sides = [self._before or self._sides[0]]
        self._before = None
        return True

    def chats(self) -> list[dict[str, Any]]:
        """Return the messages, one chat per side."""
        return [{"messages": self._messages(side), "model": side.speaker.name} for side in self._sides if side.messages]

    def ask(self, text: str) -> None:
        """Ask every side and print the answers. The part of an interrupted answer that was shown is kept."""
        for side in self._sides:
            side.messages.append({"role": "user", "content": text})
        answers: list[list[int]] = [[] for _ in self._sides]
        try:
            if len(self._sides) == 1 and self._service.holder.connection.extensions.get("sample_stream"):
                asyncio.run(self._stream(self._sides[0], answers[0]))
            else:
                self._whole(answers)
        finally:
            for side, tokens in zip(self._sides, answers, strict=True):
                if tokens:
                    answer = side.speaker.text(tokens).strip()
                    side.messages.append({"role": "assistant", "content": answer})
                else:
                    side.messages.pop()

    def _messages(self, side: Side) -> list[dict[str, str]]:
        system = [{"role": "system", "content": self._system}] if self._system else []
        return [*system, *side.messages]

    def _question(self, side: Side) -> tuple[list[int], SamplingParams]:
        """Return a side's prompt, and parameters with as many tokens as still fit its context."""
        tokens = side.speaker.prompt(self._messages(side))
        try:
            room = side.speaker.room(tokens, self._params.max_tokens or 1)
        except TinkerError as error:
            raise TinkerError(f"{error}; use /reset to clear the conversation") from None
        return tokens, self._params.model_copy(update={"max_tokens": room})

    def _whole(self, answers: list[list[int]]) -> None:
        """Print the answers when all of them are complete."""
        futures = []
        for side in self._sides:
            tokens, params = self._question(side)
            futures.append(side.speaker.sample(tokens, 1, params))
        try:
            for tokens, future in zip(answers, futures, strict=True):
                tokens += future.result().sequences[0].tokens
        except BaseException:
            for tokens, future in zip(answers, futures, strict=True):
                tokens.clear()  # keep all answers or none, so that the sides stay in step
                future.cancel()
            raise
        texts = [side.speaker.text(tokens).strip() for side, tokens in zip(self._sides, answers, strict=True)]
        if len(texts) == 1:
            echo(texts[0])
            return
        from rich.table import Table

        table = Table(expand=True)
        for name in self.names:
            table.add_column(name, ratio=1, overflow="fold")
        table.add_row(*texts)
        console().print(table)

    async def _stream(self, side: Side, answer: list[int]) -> None:
        """Print tokens as they arrive, up to the last complete character."""
        tokens, params = self._question(side)
        shown = ""
        pieces = side.speaker.sampler.sample_stream(ModelInput.from_ints(tokens), params)
        async with contextlib.aclosing(pieces):
            async for piece in pieces:
                answer += piece.tokens
                text = side.speaker.text(answer).lstrip()
                if not text.endswith(UNFINISHED):
                    echo(text[len(shown) :], nl=False)
                    shown = text
        echo(side.speaker.text(answer).strip()[len(shown) :])
