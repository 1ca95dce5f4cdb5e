"""A conversation with one model, or with two at once: who said what, asking, and showing answers as they come.

Does not know: commands, where lines come from.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import click

from tinsmith.cli.output import console
from tinsmith.cli.speakers import Speaker, named_speaker, printable
from tinsmith.errors import TinkerError
from tinsmith.types import ModelInput, SamplingParams

UNFINISHED = "\ufffd"
"""What bytes that are no whole character yet decode to."""


@dataclass(slots=True)
class Side:
    """One model and what was said to and by it."""

    speaker: Speaker
    messages: list[dict[str, str]] = field(default_factory=list)


class Conversation:
    """What was said so far; the same questions go to every side."""

    def __init__(self, service: Any, params: SamplingParams, speakers: Sequence[Speaker]) -> None:
        self._service = service
        self._params = params
        self._sides = [Side(speaker) for speaker in speakers]
        self._system = ""

    @property
    def names(self) -> list[str]:
        return [side.speaker.name for side in self._sides]

    @property
    def title(self) -> str:
        return " beside ".join(self.names)

    def system(self, text: str) -> None:
        self._system = text

    def reset(self) -> None:
        for side in self._sides:
            side.messages.clear()

    def change(self, names: Sequence[str]) -> None:
        """Talk to others, from the beginning; one that stays alone keeps what was said."""
        known = {side.speaker.name: side for side in self._sides}
        if len(names) == 1 and names[0] in known:
            self._sides = [known[names[0]]]
            return
        speakers = [known[name].speaker if name in known else named_speaker(self._service, name) for name in names]
        self._sides = [Side(speaker) for speaker in speakers]

    def chats(self) -> list[dict[str, Any]]:
        """What was said, one chat per side."""
        return [{"messages": self._messages(side), "model": side.speaker.name} for side in self._sides if side.messages]

    def ask(self, text: str) -> None:
        """Ask every side and show the answers. What an interrupted answer says so far counts as said."""
        for side in self._sides:
            side.messages.append({"role": "user", "content": text})
        said: list[list[int]] = [[] for _ in self._sides]
        try:
            if len(self._sides) == 1 and self._service.holder.connection.extensions.get("sample_stream"):
                asyncio.run(self._stream(self._sides[0], said[0]))
            else:
                self._whole(said)
        finally:
            for side, tokens in zip(self._sides, said, strict=True):
                if tokens:
                    answer = side.speaker.text(tokens).strip()
                    side.messages.append({"role": "assistant", "content": answer})
                else:
                    side.messages.pop()

    def _messages(self, side: Side) -> list[dict[str, str]]:
        system = [{"role": "system", "content": self._system}] if self._system else []
        return [*system, *side.messages]

    def _question(self, side: Side) -> tuple[list[int], SamplingParams]:
        """What a side is asked: the conversation, and as many tokens as still fit."""
        tokens = side.speaker.prompt(self._messages(side))
        try:
            room = side.speaker.room(tokens, self._params.max_tokens or 1)
        except TinkerError as error:
            raise TinkerError(f"{error}; /reset forgets the conversation") from None
        return tokens, self._params.model_copy(update={"max_tokens": room})

    def _whole(self, said: list[list[int]]) -> None:
        """Answers when they are done."""
        futures = []
        for side in self._sides:
            tokens, params = self._question(side)
            futures.append(side.speaker.sample(tokens, 1, params))
        try:
            for tokens, future in zip(said, futures, strict=True):
                tokens += future.result().sequences[0].tokens
        except BaseException:
            for tokens, future in zip(said, futures, strict=True):
                tokens.clear()  # either all sides answered or none did
                future.cancel()
            raise
        texts = [printable(side.speaker.text(tokens).strip()) for side, tokens in zip(self._sides, said, strict=True)]
        if len(texts) == 1:
            click.echo(texts[0])
            return
        from rich.table import Table

        table = Table(expand=True)
        for name in self.names:
            table.add_column(name, ratio=1, overflow="fold")
        table.add_row(*texts)
        console().print(table)

    async def _stream(self, side: Side, said: list[int]) -> None:
        """Tokens as they come; text is shown up to the last whole character."""
        tokens, params = self._question(side)
        shown = ""
        pieces = side.speaker.sampler.sample_stream(ModelInput.from_ints(tokens), params)
        async with contextlib.aclosing(pieces):
            async for piece in pieces:
                said += piece.tokens
                text = side.speaker.text(said).lstrip()
                if not text.endswith(UNFINISHED):
                    click.echo(printable(text[len(shown) :]), nl=False)
                    shown = text
        click.echo(printable(side.speaker.text(said).strip()[len(shown) :]))
