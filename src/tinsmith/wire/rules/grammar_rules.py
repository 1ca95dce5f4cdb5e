"""Output formats as grammars: how they are written for llguidance, and which ones are refused.

The server compiles a grammar before it journals a request, in the process that reads bodies, and the engine compiles it
again under the same limits. So an unusable one is refused with a 400, and one that would take long is stopped in a
process that nobody waits for. Grammars come from strangers: the limits count the library's own units of work, never
seconds, so that the same grammar has the same fate on every machine. docs/decisions/0030-constrained-output.md has the
measurements behind them.

The library is imported when the first output format arrives. A client never needs it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tinsmith.errors import InvalidInputError
from tinsmith.wire.messages.sampling import OutputFormat

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

FIELD = "sampling_params.output_format"
MAX_REASON_CHARS = 500
"""Of the library's error messages, some of which repeat the whole grammar."""
CHECKED_BYTES = 32
"""How many bytes of a text are tried before a grammar is accepted."""
_BYTES = 256
_TRIED = (*range(0x21, _BYTES), *range(0x21))
"""The order in which bytes are tried: spaces last, because they often lead nowhere."""


def check_grammar(output: OutputFormat, vocab_size: int) -> None:
    """Refuse a format that cannot be compiled, is too complex, or that no text has.

    The tokens are single bytes here: enough to compile a grammar and to follow it for a while, without a model's
    tokenizer. Most grammars that are too complex are so within a few bytes.
    """
    matcher = start_matcher(output, _byte_tokenizer(vocab_size))
    for _ in range(CHECKED_BYTES):
        mask = matcher.compute_bitmask()
        refuse_errors(matcher)
        byte = next((byte for byte in _TRIED if mask[byte >> 3] >> (byte & 7) & 1), None)
        if byte is None or matcher.is_stopped():
            return
        matcher.consume_token(byte)
        refuse_errors(matcher)


def start_matcher(output: OutputFormat, tokenizer: LLTokenizer) -> LLMatcher:
    """Compile a format; raise InvalidInputError if that is not possible."""
    from llguidance import LLMatcher

    matcher = LLMatcher(tokenizer, _grammar(output), log_level=0, limits=_limits())
    refuse_errors(matcher)
    return matcher


def refuse_errors(matcher: LLMatcher) -> None:
    """Raise the error that a matcher has run into."""
    if matcher.is_error():
        reason = matcher.get_error().removesuffix("<non-verbose/>").strip()[:MAX_REASON_CHARS]
        raise InvalidInputError(f"{FIELD}: the grammar cannot be used: {reason}", field=FIELD)


def make_tokenizer(tokens: list[bytes], eos_tokens: list[int]) -> LLTokenizer:
    """Return the library's tokenizer for these tokens. Tokens without bytes are no part of a text."""
    from llguidance import LLTokenizer

    asked: Any = _Tokens(tokens, eos_tokens[0])
    made = LLTokenizer(asked, eos_token=eos_tokens)
    asked.tokenize = made.greedy_tokenize
    return made


class _Tokens:
    """What the library asks of a tokenizer."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    special_token_ids: tuple[int, ...] = ()
    tokenize: Callable[[str], list[int]]

    def __init__(self, tokens: list[bytes], eos_token: int) -> None:
        self.tokens, self.eos_token_id = tokens, eos_token

    def __call__(self, text: str) -> list[int]:
        """Tokenize a text that a grammar forces, if it turns off _FREE."""
        return self.tokenize(text)


_FREE = '\n%llguidance {"no_forcing": true}\n'
"""Where only one text can follow, the library would choose its tokens; this leaves the choice to the model."""


_SPACING = {"whitespace_pattern": r"( |\n {0,20})?"}
"""White space between the parts of JSON: a space, or a new line with its indentation. Without a limit, models that want
to write something else write blanks until their tokens are used up."""


def _grammar(output: OutputFormat) -> str:
    """Return a format in the library's Lark dialect."""
    from llguidance import LLMatcher

    match output.type:
        case "json_object":
            return _json_grammar({"type": "object"})
        case "json_schema":
            return _json_grammar(_schema(output.schema))
        case "regex":
            made = json.loads(LLMatcher.grammar_from_regex(output.schema))
            return f"{made['grammars'][0]['lark_grammar']}{_FREE}"
        case "lark":
            return output.schema + _FREE


def _json_grammar(schema: dict[str, Any]) -> str:
    return f"start: %json {json.dumps({'x-guidance': _SPACING} | schema)}{_FREE}"


def _schema(text: str) -> dict[str, Any]:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"{FIELD}.schema: is not JSON: {error}", field=f"{FIELD}.schema") from None
    if not isinstance(schema, dict):
        raise InvalidInputError(
            f"{FIELD}.schema: must be a JSON object, got {type(schema).__name__}", field=f"{FIELD}.schema"
        )
    return schema


@functools.cache
def _limits() -> LLParserLimits:
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=400,
        initial_lexer_fuel=200_000,
        step_lexer_fuel=20_000,
        step_max_items=10_000,
        max_lexer_states=10_000,
        max_grammar_size=50_000,
        verbose_errors=False,
    )


@functools.lru_cache(maxsize=8)
def _byte_tokenizer(vocab_size: int) -> LLTokenizer:
    """Return a tokenizer with one token per byte, and as many tokens as a model has: a grammar may name them by id."""
    size = max(vocab_size, _BYTES) + 1
    return make_tokenizer([bytes([byte]) for byte in range(_BYTES)] + [b""] * (size - _BYTES), [size - 1])
