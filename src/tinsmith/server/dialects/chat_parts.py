"""The parts of a chat model's answer: what it thought, what it says, and which tools it calls.

Models write all of that into one text, with marks that their chat template taught them. `ChatParts` takes the text as
it comes and never gives away a part of a mark. A call is read when it is complete; what looks like one and cannot be
read is content, so nothing that the model wrote is lost.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tinsmith.server.bodies.questions import PromptReading
from tinsmith.server.dialects.text_stream import held_back

THINK, END_THINK = "<think>", "</think>"
_HERMES = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)


@dataclass(slots=True)
class Delta:
    """What came new."""

    content: str = ""
    reasoning: str = ""
    calls: list[MadeCall] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)


@dataclass(frozen=True, slots=True)
class MadeCall:
    """A call of a tool."""

    name: str
    arguments: str
    """JSON."""
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")

    def to_dict(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class ChatParts:
    """Splits the text of one answer."""

    def __init__(self, reading: PromptReading) -> None:
        self._form = reading.tool_form
        self._most = 1 if reading.is_one_call else None
        self._take: Callable[[Delta], bool] = {
            "none": self._content,
            "marked": self._start,
            "begun": self._thought,
        }[reading.thinking]
        self._text = ""
        """What is not given away yet."""
        self._has_content = False
        self._has_thought = False

    def push(self, text: str) -> Delta:
        """Return what is certain after more text."""
        delta = Delta()
        self._text += text
        while self._take(delta):
            pass
        return delta

    def finish(self) -> Delta:
        """Return the rest, when no more text comes."""
        delta = Delta()
        text, self._text = self._text, ""
        if self._take == self._thought:
            delta.reasoning = text.rstrip()
        elif self._take == self._calls:
            delta.calls = calls_in(self._form, text)[: self._most]
            delta.content = "" if delta.calls else text
        else:
            delta.content = text
        return delta

    def _start(self, delta: Delta) -> bool:
        """Before the first character: does it think?"""
        text = self._text.lstrip()
        if text.startswith(THINK):
            self._text = text[len(THINK) :]
            self._take = self._thought
            return True
        if THINK.startswith(text):
            return False
        self._take = self._content
        return True

    def _thought(self, delta: Delta) -> bool:
        if not self._has_thought:  # line breaks before it are not part of it
            self._text = self._text.lstrip("\n")
        thought, mark, rest = self._text.partition(END_THINK)
        if mark:
            delta.reasoning += thought.rstrip()
            self._text = rest.lstrip("\n")
            self._take = self._answer
            return True
        certain = thought[: len(thought) - _held(thought, END_THINK)].rstrip()
        delta.reasoning += certain
        self._has_thought = self._has_thought or bool(certain)
        self._text = self._text[len(certain) :]
        return False

    def _answer(self, delta: Delta) -> bool:
        """After thinking: line breaks before the answer are not part of it."""
        self._text = self._text.lstrip("\n")
        if not self._text:
            return False
        self._take = self._content
        return True

    def _content(self, delta: Delta) -> bool:
        mark = MARKS[self._form]
        if self._form in ("llama", "forced") and not self._has_content:
            text = self._text.lstrip()
            if not text or (self._form == "llama" and mark.startswith(text)):
                return False
            if self._form == "forced" or text.startswith(("{", mark)):
                self._take = self._calls
                return False
        place = self._text.find(mark) if mark else -1
        if place >= 0:
            self._give(delta, self._text[:place].rstrip())
            self._text = self._text[place:]
            self._take = self._calls
            return False
        keep = _held(self._text, mark) if mark else 0
        if self._form in ("hermes", "mistral"):  # spaces before a call are not content
            keep = max(keep, len(self._text) - len(self._text[: len(self._text) - keep].rstrip()))
        self._give(delta, self._text[: len(self._text) - keep])
        self._text = self._text[len(self._text) - keep :]
        return False

    def _calls(self, delta: Delta) -> bool:
        return False

    def _give(self, delta: Delta, text: str) -> None:
        delta.content += text
        self._has_content = self._has_content or bool(text)


def _held(text: str, mark: str) -> int:
    """Return how much of the end of a text may be the beginning of a mark; marks are ASCII."""
    return held_back(text[-len(mark) :].encode(errors="replace"), [mark.encode()])


def calls_in(form: str, text: str) -> list[MadeCall]:
    """Return the calls in a text; none if it cannot be read."""
    try:
        return [_call(item) for item in READERS[form](text)]
    except (msgspec.DecodeError, RecursionError, KeyError, TypeError):
        return []


def _call(item: Any) -> MadeCall:
    name = item["name"]
    arguments = item["arguments"] if "arguments" in item else item.get("parameters", {})
    if not isinstance(name, str) or not isinstance(arguments, (str, dict)):
        raise TypeError("not a call")
    return MadeCall(name, arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode())


def _objects(text: str) -> list[Any]:
    """Return the object of a JSON text, or the objects of a JSON list."""
    found = msgspec.json.decode(text)
    return found if isinstance(found, list) else [found]


def _hermes(text: str) -> list[Any]:
    return [item for found in _HERMES.findall(text) for item in _objects(found)]


def _mistral(text: str) -> list[Any]:
    return _objects(text.removeprefix("[TOOL_CALLS]").strip())


def _llama(text: str) -> list[Any]:
    return _objects(text.strip().removeprefix("<|python_tag|>").strip())


MARKS: Mapping[str, str] = {
    "none": "",
    "hermes": "<tool_call>",
    "mistral": "[TOOL_CALLS]",
    "llama": "<|python_tag|>",
    "forced": "",
}
"""Where calls begin."""
READERS: Mapping[str, Callable[[str], list[Any]]] = {
    "hermes": _hermes,
    "mistral": _mistral,
    "llama": _llama,
    "forced": _objects,
}
"""How each form is read, into objects with a name and arguments."""
