"""Text from tokens, as they arrive.

Never a part of a character: bytes that do not complete one wait for the next token. Never a part of a stop string: as
long as the end of the text could be the beginning of one, it is held back. Both work on bytes, so that characters and
stop strings may be spread over tokens in any way.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence, Set

from tinsmith.server.dialects.vocabulary import Vocabulary


class TextStream:
    """The text of one sample."""

    def __init__(self, vocabulary: Vocabulary, stops: Sequence[str], hidden: Set[int]) -> None:
        """`hidden` tokens are not in the text."""
        self._vocabulary = vocabulary
        self._stops = [stop.encode(errors="surrogatepass") for stop in stops]
        self._hidden = hidden
        self._held = b""
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self.is_stopped = False
        """Whether a stop string was found; nothing after it is text."""
        self.stopped_by: str | None = None
        """The stop string that was found."""

    def push(self, tokens: Sequence[int]) -> str:
        """Return the text that is certain after these tokens."""
        new = self._vocabulary.text_bytes(tokens, self._hidden)
        return self._certain(new) if new else ""

    def finish(self) -> str:
        """Return the rest, when no more tokens come."""
        rest = b"" if self.is_stopped else self._held
        self._held = b""
        return self._characters.decode(rest, final=True)

    def _certain(self, new: bytes) -> str:
        if not self._stops:
            return self._characters.decode(new)
        if self.is_stopped:
            return ""
        text = self._held + new
        found = [(place + len(stop), place) for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:  # the one that is complete first: it would have ended the sample by itself
            end, place = min(found)
            self.is_stopped = True
            self.stopped_by = text[place:end].decode(errors="surrogatepass")
            self._held = b""
            return self._characters.decode(text[:place])
        keep = held_back(text, self._stops)
        self._held = text[len(text) - keep :]
        return self._characters.decode(text[: len(text) - keep])


def held_back(text: bytes, stops: Sequence[bytes]) -> int:
    """Return the length of the longest end of a text with which a stop begins."""
    longest = 0
    for stop in stops:
        for size in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:size]):
                longest = size
                break
    return longest
