"""Cost of constrained output: compile times and mask times of llguidance and, if it is installed, xgrammar.

    python bench/grammars.py [vocabulary]

Both get the same vocabulary (random words over single bytes) and the same grammars, and follow the same rule: the next
token is drawn evenly from those that are allowed. Times are CPU milliseconds of this process.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from tinsmith.wire.messages.sampling import OutputFormat
from tinsmith.wire.rules.grammar_rules import make_tokenizer, start_matcher

STEPS = 60
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name"],
}
MANY = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(60)}}
CASES = {
    "json_object": ("json_schema", '{"type": "object"}'),
    "two properties": ("json_schema", json.dumps(PERSON)),
    "60 optional properties": ("json_schema", json.dumps(MANY)),
    "5,000 constants": ("json_schema", json.dumps({"enum": [f"v{i:06d}" for i in range(5000)]})),
    "hostile: repeated repetition": ("regex", "((a{100}){100}){100}"),
    "hostile: [a-z]{1,60000}": ("regex", "[a-z]{1,60000}"),
    "hostile: exponential automaton": ("regex", "[ab]*a[ab]{25}"),
    "hostile: ambiguous": ("lark", 'start: s\ns: s s s s | s s | /a+/ | /a?b?/ | "a" | '),
}


def vocabulary(size: int) -> list[bytes]:
    random, words = np.random.default_rng(0), set()
    while len(words) < size - 257:
        words.add(bytes(random.integers(97, 123, random.integers(2, 8)).astype(np.uint8)))
    return [*(bytes([byte]) for byte in range(256)), b"", *sorted(words)]


class Guidance:
    """llguidance, as the sampler uses it."""

    def __init__(self, tokens: list[bytes]) -> None:
        self._tokenizer = make_tokenizer(tokens, [256])

    def start(self, kind: str, text: str) -> None:
        self._matcher = start_matcher(OutputFormat(type=kind, schema=text), self._tokenizer)  # type: ignore[arg-type]

    def mask(self) -> bytes:
        return self._matcher.compute_bitmask()

    def push(self, token: int) -> bool:
        return self._matcher.consume_token(token) and not self._matcher.is_stopped()


class XGrammar:
    """xgrammar with its defaults."""

    def __init__(self, tokens: list[bytes]) -> None:
        import xgrammar

        self._library: Any = xgrammar
        info = xgrammar.TokenizerInfo(tokens, xgrammar.VocabType.RAW, stop_token_ids=[256])
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._bits = xgrammar.allocate_token_bitmask(1, len(tokens))

    def start(self, kind: str, text: str) -> None:
        if kind == "lark":
            raise ValueError("it does not read Lark")
        compile_ = self._compiler.compile_regex if kind == "regex" else self._compiler.compile_json_schema
        self._matcher = self._library.GrammarMatcher(compile_(text))

    def mask(self) -> bytes:
        self._matcher.fill_next_token_bitmask(self._bits)
        return bytes(self._bits.numpy().tobytes())

    def push(self, token: int) -> bool:
        return bool(self._matcher.accept_token(token)) and not self._matcher.is_terminated()


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    began = time.process_time()
    found = call()
    return (time.process_time() - began) * 1e3, found


def follow(library: Any) -> tuple[list[float], list[float]]:
    """Return the milliseconds of each mask and of each accepted token."""
    random, masks, pushes = np.random.default_rng(1), [], []
    for _ in range(STEPS):
        spent, bits = timed(library.mask)
        masks.append(spent)
        allowed = np.flatnonzero(np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little"))
        allowed = allowed[allowed != 256]
        if not allowed.size:
            break
        token = int(random.choice(allowed))
        spent, goes_on = timed(lambda token=token: library.push(token))
        pushes.append(spent)
        if not goes_on:
            break
    return masks, pushes


def main() -> None:
    tokens = vocabulary(int(sys.argv[1]) if len(sys.argv) > 1 else 50_000)
    libraries: dict[str, type[Any]] = {"llguidance": Guidance}
    if importlib.util.find_spec("xgrammar") is not None:
        libraries["xgrammar"] = XGrammar
    print(f"{len(tokens)} tokens; milliseconds of CPU")
    for name, library in libraries.items():
        spent, made = timed(lambda library=library: library(tokens))
        print(f"\n{name}: vocabulary {spent:.0f} ms\n{'':32}compile   mask mean   worst   token worst")
        for case, (kind, text) in CASES.items():
            try:
                compiled, _ = timed(lambda made=made, kind=kind, text=text: made.start(kind, text))
                masks, pushes = follow(made)
            except Exception as error:
                print(f"{case:32}{type(error).__name__}: {str(error)[:60]}")
                continue
            worst = max(pushes, default=0.0)
            print(f"{case:32}{compiled:7.1f}{np.mean(masks):12.3f}{max(masks):8.2f}{worst:14.2f}", flush=True)


if __name__ == "__main__":
    main()
