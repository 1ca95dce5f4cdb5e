"""Output formats: what a grammar admits."""

from __future__ import annotations

import json

import pytest

from tinsmith.wire.messages.sampling import OutputFormat
from tinsmith.wire.rules.grammar_rules import start_matcher

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"type": "integer"}}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
VALUE = {"a": 1, "b": [1, 2]}
FORMATS = [OutputFormat(type="json_object"), OutputFormat(type="json_schema", schema=json.dumps(SCHEMA))]


def admits(output: OutputFormat, text: str) -> bool:
    from llguidance import LLTokenizer

    tokenizer = LLTokenizer("byte")
    matcher = start_matcher(output, tokenizer)
    tokens = tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize("output", FORMATS, ids=lambda output: output.type)
def test_json_has_any_usual_spacing_and_no_endless_blanks(output: OutputFormat) -> None:
    assert admits(output, json.dumps(VALUE))
    assert admits(output, json.dumps(VALUE, separators=(",", ":")))
    assert admits(output, json.dumps(VALUE, indent=2))
    assert not admits(output, json.dumps(VALUE).replace(" ", "  "))
    assert not admits(output, json.dumps(VALUE, indent=2).replace("\n", "\n\n"))


def test_a_schema_may_choose_its_own_spacing() -> None:
    compact = SCHEMA | {"x-guidance": {"whitespace_flexible": False}}
    output = OutputFormat(type="json_schema", schema=json.dumps(compact))
    assert admits(output, json.dumps(VALUE, separators=(",", ":")))
    assert not admits(output, json.dumps(VALUE))
