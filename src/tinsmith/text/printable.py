"""Make untrusted text safe to show in a terminal or a log.

A name, a note or an error message may contain characters that a terminal acts on: escape sequences that move the
cursor, rewrite earlier lines, or set the title or the clipboard, and marks that reverse the direction of the text.
"""

from __future__ import annotations

import logging
import re

_KEPT = "\t\n"
_RANGES = (
    (0x00, 0x1F),  # C0 control characters, including escape
    (0x7F, 0x9F),  # delete, and C1 control characters: one of them starts an escape sequence by itself
    (0x061C, 0x061C),  # Arabic letter mark
    (0x200E, 0x200F),  # left-to-right and right-to-left marks
    (0x2028, 0x202E),  # line and paragraph separators, bidirectional embeddings and overrides
    (0x2066, 0x2069),  # bidirectional isolates
    (0xD800, 0xDFFF),  # surrogates, which cannot be encoded as UTF-8
    (0xFFF9, 0xFFFB),  # interlinear annotation, which hides text
    (0xE0000, 0xE007F),  # invisible tags
)
_CONTROL = re.compile("[" + "".join(f"{chr(first)}-{chr(last)}" for first, last in _RANGES) + "]")
_LINES = re.compile(r"[\t\n]+")


def printable(text: str) -> str:
    """Replace each character that a terminal would act on with U+FFFD; keep line breaks and tabs."""
    return _CONTROL.sub(lambda found: found[0] if found[0] in _KEPT else "\ufffd", text)


def one_line(text: str) -> str:
    """Do the same and replace line breaks with spaces, so that a name cannot pass for a line of its own."""
    return printable(_LINES.sub(" ", text))


class PrintableLines(logging.Formatter):
    """A log formatter that keeps each message on one line, so that text in it cannot forge log lines; tracebacks keep
    theirs."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return one_line(super().formatMessage(record))

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))
