"""What clients and logs may see: strings without secrets, errors without the server's paths, and a log of refusals.

Telemetry may quote requests with their headers, so secrets in it are found in one pass, whatever a stranger wrote.
Clients get error messages without secrets and without paths; the log has the full messages, and repeated ones once a
minute.
"""

from __future__ import annotations

import logging
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tinsmith.errors import TinkerError, redacted
from tinsmith.server.auth.identity import Caller

_NAME = re.compile(r"x-api-key|authorization|api_key|cookie", re.IGNORECASE)
"""Fields whose values are secrets."""
_QUOTES = "\"'"
_HIDDEN = "***"


def without_secrets(text: str) -> str:
    """Return the text with the values of secret fields, and everything that looks like a key, replaced by `***`.

    A field is found in JSON, in what `repr` writes, and in either of them quoted again: its quotes then have
    backslashes before them, the same number at all four. A value that does not end is hidden to the end of the text.
    """
    return redacted("".join(_pieces(text)))


def _pieces(text: str) -> Iterator[str]:
    done = 0
    for name in _NAME.finditer(text):
        if name.start() < done:
            continue  # inside a value that is hidden already
        mark = _mark_before(text, name.start(), done)
        begin = _value_after(text, name.end(), mark) if mark else 0
        if not begin:
            continue
        end = text.find(mark, begin)
        yield text[done:begin] + _HIDDEN
        if end < 0:
            return
        done = end
    yield text[done:]


def _mark_before(text: str, position: int, floor: int) -> str:
    """Return the quote before a name, with its backslashes; empty if there is none."""
    quote = position - 1
    if quote < floor or text[quote] not in _QUOTES:
        return ""
    start = quote
    while start > floor and text[start - 1] == "\\":
        start -= 1
    return text[start:position]


def _value_after(text: str, position: int, mark: str) -> int:
    """Return where the value begins after a name that ends here, its quote, a colon and a quote; else 0."""
    if not text.startswith(mark, position):
        return 0
    colon = _after_spaces(text, position + len(mark))
    if not text.startswith(":", colon):
        return 0
    value = _after_spaces(text, colon + 1)
    return value + len(mark) if text.startswith(mark, value) else 0


def _after_spaces(text: str, position: int) -> int:
    while position < len(text) and text[position].isspace():
        position += 1
    return position


logger = logging.getLogger(__name__)

QUIET_S = 60.0
"""How long the same refusal (key, route and code) is not logged again; the next line says how often it came."""
MAX_KNOWN = 10_000
"""Different refusals that are remembered; beyond that, those unseen for longest are forgotten."""
MAX_TEXT = 300
"""Characters of an error in the log."""

_OURS = r"(?!api/v1\b|tinsmith/v1\b)"
_IN_QUOTES = re.compile(rf"""(?P<quote>['"])(?:file://)?/{_OURS}(?:[^'"\n]*/)?(?P<name>[^'"/\n]*)(?P=quote)""")
_END = r"""\s/:;,'"()\[\]<>"""
_PLAIN = re.compile(rf"""(?<![\w:/.~'"-])(?:file://)?/{_OURS}(?:[^{_END}]+/)+(?P<name>[^{_END}]*)""")


def redacted_text(text: str) -> str:
    """Return a string that clients may read: no secrets, and of the server's files only the names, not the paths."""
    text = redacted(text)
    if "/" not in text:
        return text
    text = _IN_QUOTES.sub(lambda match: f"{match['quote']}.../{match['name']}{match['quote']}", text)
    return _PLAIN.sub(lambda match: f".../{match['name']}", text)


@dataclass(slots=True)
class _Seen:
    until: float
    more: int = 0


class RefusalLog:
    """Logs each refusal, and repeated ones once a minute."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._seen: OrderedDict[tuple[str, str, int], _Seen] = OrderedDict()

    def add(self, route: str, status: int, caller: Caller, error: TinkerError) -> None:
        """Log that a request was refused."""
        name = (route, error.code, caller.key_id)
        now = self.clock()
        seen = self._seen.get(name)
        if seen is not None and now < seen.until:
            seen.more += 1
            return
        self._seen[name] = _Seen(now + QUIET_S)
        self._seen.move_to_end(name)
        if len(self._seen) > MAX_KNOWN:
            self._seen.popitem(last=False)
        more = f" ({seen.more} more before)" if seen is not None and seen.more else ""
        text = redacted(str(error))[:MAX_TEXT]
        logger.log(
            logging.ERROR if status >= 500 else logging.INFO,
            "refused %s: %d %s, org %r, key %d: %a%s",  # escaped: the text may hold what the caller wrote
            route,
            status,
            error.code,
            caller.org_id,
            caller.key_id,
            text,
            more,
            extra={
                "event": "refused",
                "route": route,
                "status": status,
                "code": error.code,
                "org_id": caller.org_id,
                "key_id": caller.key_id,
            },
        )
