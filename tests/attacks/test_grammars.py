"""Output formats from strangers: refused before they are journalled, compiled where nobody waits, and bounded."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from support.in_process import sample, serving

from tinsmith.engine.protocol import ModelCard
from tinsmith.errors import InvalidInputError
from tinsmith.server.bodies.read import NeedsProcessError, SampleQuestion, read, read_sample
from tinsmith.server.bodies.reader_pool import ReaderPool
from tinsmith.wire.messages.sampling import OutputFormat
from tinsmith.wire.rules.grammar_rules import MAX_REASON_CHARS, check_grammar

QUESTION = SampleQuestion(cards=(ModelCard(name="m", vocab_size=300, max_context_length=64),), max_samples=4)


def refs(depth: int) -> str:
    """References that double at each level."""
    twice = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(depth)}
    return json.dumps({"$defs": {**twice, f"d{depth}": {"type": "string"}}, "$ref": "#/$defs/d0"})


def choices(count: int) -> str:
    """Combinations that double with each part."""
    parts = [{"anyOf": [{"properties": {f"a{i}": {}}}, {"properties": {f"b{i}": {}}}]} for i in range(count)]
    return json.dumps({"allOf": parts})


REFUSED: dict[str, tuple[str, str]] = {
    "not JSON": ("json_schema", "{"),
    "no object": ("json_schema", "[1]"),
    "deeper than Python": ("json_schema", '{"items":' * 6000 + "{}" + "}" * 6000),
    "text after the schema": ("json_schema", '{"type": "object"}\nstart: /x/'),
    "unknown keyword": ("json_schema", '{"not": {"type": "string"}}'),
    "nothing fits": ("json_schema", '{"enum": []}'),
    "itself": ("json_schema", '{"$ref": "#"}'),
    "a file": ("json_schema", '{"$ref": "file:///etc/passwd"}'),
    "a page": ("json_schema", '{"$ref": "http://127.0.0.1:1/x"}'),
    "combinations": ("json_schema", choices(18)),
    "many optional properties": (
        "json_schema",
        json.dumps({"type": "object", "properties": {f"p{i}": {} for i in range(1500)}}),
    ),
    "a huge divisor": ("json_schema", '{"type": "integer", "multipleOf": 999999937}'),
    "broken expression": ("regex", "(a"),
    "nothing matches": ("regex", r"[^\s\S]"),
    "look-ahead": ("regex", "(?=a)b"),
    "nested groups": ("regex", "(" * 30_000 + "a" + ")" * 30_000),
    "costly intersection": ("lark", "start: X\nX: /.*a.{20}/ & /.*b.{20}/ & /.*c.{20}/"),
    "nested parentheses": ("lark", "start: " + "(" * 30_000 + '"a"' + ")" * 30_000),
    "unknown rule": ("lark", "start: nothing"),
    "unknown token": ("lark", "start: <[999999]>"),
    "special token": ("lark", "start: <|im_end|>"),
}
BOUNDED: dict[str, tuple[str, str]] = {
    "references": ("json_schema", refs(25)),
    "repeated repetition": ("regex", "((a{100}){100}){100}"),
    "exponential automaton": ("regex", "(.|\\n)*a(.|\\n){30}"),
    "nested stars": ("regex", "(((a*)*)*)*b"),
    "doubling rules": ("lark", "start: r0\n" + "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(60)) + '\nr60: "a"'),
    "ambiguous": ("lark", 'start: s\ns: s s | s s s | "a" | '),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_used_is_refused(name: str) -> None:
    kind, schema = REFUSED[name]
    with pytest.raises(InvalidInputError) as caught:
        check_grammar(OutputFormat(type=kind, schema=schema), 300)  # type: ignore[arg-type]
    assert (caught.value.field or "").startswith("sampling_params.output_format")
    assert len(str(caught.value)) < MAX_REASON_CHARS + 100


@pytest.mark.parametrize("name", BOUNDED)
def test_what_only_looks_dangerous_is_compiled_within_the_limits(name: str) -> None:
    kind, schema = BOUNDED[name]
    check_grammar(OutputFormat(type=kind, schema=schema), 300)  # type: ignore[arg-type]


def test_how_many_optional_properties_there_may_be() -> None:
    """The number that decision 30 names; required ones do not count."""

    def schema(count: int, **fields: Any) -> OutputFormat:
        properties = {f"p{i}": {"type": "string"} for i in range(count)}
        text = json.dumps({"type": "object", "properties": properties, **fields})
        return OutputFormat(type="json_schema", schema=text)

    check_grammar(schema(98), 300)
    check_grammar(schema(300, required=[f"p{i}" for i in range(300)]), 300)
    with pytest.raises(InvalidInputError, match="items"):
        check_grammar(schema(99), 300)


def body(output: Any, **params: Any) -> bytes:
    message = sample("s", 1)
    message["sampling_params"] |= {"output_format": output, **params}
    return json.dumps(message).encode()


def test_no_grammar_is_compiled_on_the_loop() -> None:
    """Not even if the name of the field is hidden from a search in the bytes."""
    hidden = body({"type": "regex", "schema": "a"}).replace(b"output_format", b"output\\u005fformat")
    for asked in (body({"type": "json_object"}), hidden):
        with pytest.raises(NeedsProcessError):
            read(QUESTION, asked, is_on_loop=True)
        assert read_sample(QUESTION, asked).faults == {}
    assert read(QUESTION, body(None), is_on_loop=True)


def test_small_bodies_with_a_grammar_are_read_in_a_process() -> None:
    async def scenario() -> None:
        pool = ReaderPool(1)
        try:
            await pool.ask("org", QUESTION, body(None))
            assert pool._all[0]._process is None
            reading = await pool.ask("org", QUESTION, body({"type": "regex", "schema": "(a"}))
            assert pool._all[0]._process is not None
            assert "unclosed group" in reading.faults["m"].text  # type: ignore[union-attr]
        finally:
            await pool.close()

    asyncio.run(scenario())


def test_a_grammar_that_cannot_be_used_is_never_journalled(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann = await server.client()
            sampler = await ann.sampler(await ann.session())
            message = sample(sampler, 1)
            message["sampling_params"] |= {"output_format": {"type": "lark", "schema": "start: nothing"}}
            answer = await ann.post("asample", message)
            assert answer.status == 400, answer.body
            assert b"unknown name" in answer.body
            assert server.backend.submitted == []

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "params",
    [
        b'"min_p": NaN',
        b'"min_p": 1e999',
        b'"frequency_penalty": Infinity',
        b'"repetition_penalty": -1',
        b'"logit_bias": {"1": 1e999}',
        b'"logit_bias": {"1": 101}',
        b'"logit_bias": {"999999": 1}',
        b'"logit_bias": {"1.5": 1}',
        b'"logit_bias": {%s}' % b",".join(b'"%d": 1' % i for i in range(1025)),
        b'"stop_token_ids": [99999999]',
        b'"stop_token_ids": [%s]' % b",".join([b"1"] * 65),
        b'"output_format": {"type": "xml"}',
        b'"output_format": {"type": "regex", "schema": "%s"}' % (b"a" * 65_537),
    ],
    ids=lambda params: params[:30].decode(),
)
def test_values_out_of_range_are_refused(tmp_path: Path, params: bytes) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            ann = await server.client()
            sampler = await ann.sampler(await ann.session())
            asked = json.dumps(sample(sampler, 1)).encode().replace(b'"max_tokens": 4', b'"max_tokens": 4, ' + params)
            answer = await ann.post("asample", asked)
            assert answer.status in (400, 422), answer.body
            assert server.backend.submitted == []

    asyncio.run(scenario())
