"""Strings from strangers are scanned in one pass: twice the text takes about twice the time, whatever is in it."""

from __future__ import annotations

import ast
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.in_process import run, serving

from tinsmith.errors import redacted
from tinsmith.server.auth.identity import Caller
from tinsmith.server.call import Call
from tinsmith.server.redaction import without_secrets
from tinsmith.wire.routes.table import BY_NAME

SOURCE = Path(__file__).parents[2] / "src" / "tinsmith"
SIZE = 4_000
"""Characters of the smaller text; a quadratic pattern takes a second for the larger one."""
NOISE_S = 0.02
"""What is faster than this is not compared."""
PIECES = ("\\", '"', "'", '\\"', '"cookie', '"cookie":"', "cookie", '\\"api_key\\":', "tml-", "eyJ", " ", "a", "9", "=")


def seconds(work: Callable[[], object]) -> float:
    """The least CPU time of three tries."""
    tries = []
    for _ in range(3):
        began = time.thread_time()
        work()
        tries.append(time.thread_time() - began)
        if tries[-1] < NOISE_S:
            break
    return min(tries)


def is_linear(work: Callable[[str], object], text: Callable[[int], str]) -> bool:
    larger = seconds(lambda: work(text(4 * SIZE)))
    return larger < NOISE_S or larger < 7 * seconds(lambda: work(text(SIZE)))


@pytest.mark.parametrize("piece", PIECES)
def test_hiding_secrets_takes_time_in_proportion(piece: str) -> None:
    for tail in ("", '"', ":", '"cookie'):
        assert is_linear(without_secrets, lambda size, tail=tail: piece * size + tail)  # type: ignore[misc]
    assert is_linear(redacted, lambda size: piece * size)


@pytest.mark.parametrize("character", ["\\", '"', " "])
def test_a_batch_of_one_character_holds_nobody_up(tmp_path: Path, character: str) -> None:
    """40 KB of backslashes once took ten seconds of everybody's time."""

    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann = await server.client(scopes=("read",))
            event = {
                "event": "UNHANDLED_EXCEPTION",
                "event_id": "1",
                "event_session_index": 0,
                "severity": "INFO",
                "timestamp": "2027-01-15T00:00:00Z",
                "error_type": "x",
                "error_message": character * 14_000,
            }
            batch = {"events": [event], "platform": "x", "sdk_version": "x", "session_id": "x"}
            began = time.thread_time()
            assert (await ann.post("telemetry", batch)).status < 500
            assert time.thread_time() - began < 0.5

    run(scenario())


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ('{"cookie": "abc", "b": 1}', '{"cookie": "***", "b": 1}'),
        ("{'Authorization': 'Bearer x', 'b': 1}", "{'Authorization': '***', 'b': 1}"),
        (r'{"m": "{\"api_key\":\"abc\",\"b\":\"c\"}"}', r'{"m": "{\"api_key\":\"***\",\"b\":\"c\"}"}'),
        ('{"x-api-key" : "a\\u0041', '{"x-api-key" : "***'),
        ('{"cookie": "a", "cookie": "b"}', '{"cookie": "***", "cookie": "***"}'),
        ('"cookie":"cookie":"a"', '"cookie":"***":"a"'),
        ("cookie: x", "cookie: x"),
        ('"cookie" "x"', '"cookie" "x"'),
        ('"cookies": "x"', '"cookies": "x"'),
        ("my key is tml-abcdefgh!", "my key is tml-***!"),
        ("", ""),
    ],
)
def test_values_of_secret_fields_are_hidden(text: str, kept: str) -> None:
    assert without_secrets(text) == kept


def compiled() -> Iterator[tuple[str, re.Pattern[Any]]]:
    """Every pattern that is written in the source, with its place."""
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and isinstance(node.func.value, ast.Name)
                and node.func.value.id == "re"
                and isinstance(node.args[0], ast.Constant)
            ):
                flags = [arg.attr for arg in node.args if isinstance(arg, ast.Attribute) and arg.attr.isupper()]
                pattern = re.compile(node.args[0].value, sum(getattr(re, flag) for flag in flags))
                yield f"{path.relative_to(SOURCE)}:{node.lineno}", pattern


def hostile(pattern: str) -> Iterator[Callable[[int], str]]:
    """Texts made of what a pattern looks for: each character of it, and each two, again and again, and never an end."""
    plain = re.sub(r"\\[dw]", "9", re.sub(r"\\s", " ", re.sub(r"\\x[0-9a-f]{2}", "\x01", pattern)))
    letters = sorted({*plain, "a", "9", " ", "\n"} - set("()[]{}*+?^$|"))
    words = [*letters, *re.findall(r"[\w:/\"'<-]{2,}", plain)]
    for word in words:
        yield lambda size, word=word: word * (size // len(word))
        yield lambda size, word=word: "x" + word * (size // len(word)) + "!"
    for first in words[-3:]:
        for second in letters:
            yield lambda size, pair=first + second: pair * (size // len(pair))


@pytest.mark.parametrize(
    ("place", "pattern"), list(compiled()), ids=lambda value: value if isinstance(value, str) else ""
)
def test_every_pattern_takes_time_in_proportion(place: str, pattern: re.Pattern[Any]) -> None:
    is_bytes = isinstance(pattern.pattern, bytes)
    source = pattern.pattern.decode() if is_bytes else pattern.pattern

    def search(text: str) -> None:
        whole = text.encode(errors="replace") if is_bytes else text
        for _ in pattern.finditer(whole):
            pass
        pattern.fullmatch(whole)

    for text in hostile(source):
        assert is_linear(search, text), (place, text(12))


def test_a_version_of_many_digits_is_read_at_once() -> None:
    def sdk(text: str) -> object:
        call = Call(
            route=BY_NAME["healthz"],
            caller=Caller(org_id="", user_id="", key_id=0, scopes=frozenset()),
            headers={"x-stainless-package-version": text},
        )
        return call.sdk

    assert is_linear(sdk, lambda size: "9" * size)
    assert sdk("9" * 5000 + ".1") == (999, 0)
    assert sdk("0.36.1") == (0, 36)
    assert sdk("AsyncTinker/Python 0.7.0") == (0, 7)
