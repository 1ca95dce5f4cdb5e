"""Samples with penalties, bias and grammars: right, complete, and the same whatever else runs."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.tiny_sampler import collect, finish, job, load, logits_of, make_sampler, prompt

from tinsmith.engine.sampling.draw import DrawRule, draw_from, uniforms
from tinsmith.engine.sampling.grammar import FairThread
from tinsmith.engine.sampling.logit_changes import DrawnTokens, RowChanges, logit_rule
from tinsmith.engine.sampling.sampler import DoneEvent, FailedEvent, NewToken
from tinsmith.errors import InvalidInputError
from tinsmith.wire.messages.sampling import OutputFormat, SampledSequence, SampleResponse, SamplingParams
from tinsmith.wire.rules.grammar_rules import check_grammar

PENALTIES: dict[str, Any] = {
    "frequency_penalty": 0.5,
    "presence_penalty": 0.3,
    "repetition_penalty": 1.2,
    "logit_bias": {40: 1.5, 41: -3.0},
    "min_p": 0.02,
}
DIGITS = OutputFormat(type="regex", schema="[0-9]{2,6}")
SCHEMA = OutputFormat(
    type="json_schema",
    schema=json.dumps(
        {
            "type": "object",
            "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "yy"]}},
            "required": ["a", "b"],
            "additionalProperties": False,
            "x-guidance": {"whitespace_flexible": False},
        }
    ),
)

AMBIGUOUS = OutputFormat(type="lark", schema='start: s "z"\ns: s s | s s s | "a"')


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory):
    return load(Path(tmp_path_factory.mktemp("model")))


def text(model: Any, sequence: SampledSequence) -> str:
    """A sample's text without the token that ended it, if that is special."""
    decoder, table = model
    ends = set(decoder.config.eos_token_ids)
    return b"".join(table[token] for token in sequence.tokens if token not in ends).decode(errors="replace")


def bits(answer: SampleResponse) -> list[Any]:
    return [(row.tokens, row.logprobs, row.stop_reason) for row in answer.sequences]


@pytest.mark.parametrize("rule", [DrawRule(1.0, -1, 1.0, 0.02), DrawRule(0.0, min_p=0.02)], ids=str)
def test_penalties_follow_the_tokens_of_each_sample(model: Any, rule: DrawRule) -> None:
    decoder, _ = model
    tokens = prompt(20)
    sampler = make_sampler(model)
    options = {**PENALTIES, "temperature": rule.temperature}
    sampler.add(job("a", tokens, max_tokens=12, stop=[], num_samples=3, **options))
    changed = logit_rule(SamplingParams(**options), tokens)
    assert changed is not None
    for index, sequence in enumerate(finish(sampler)["a"].sequences):
        drawn: list[int] = []
        for position in range(12):
            logits = logits_of(decoder, tokens + drawn)[-1:]
            change = RowChanges(changed, DrawnTokens(changed, drawn) if drawn else None, None)
            token, logprob, _ = draw_from(logits, [0], [rule], uniforms([7], [index], [position]), {0: change})
            drawn.append(int(token[0]))
            assert sequence.logprobs is not None
            assert abs(sequence.logprobs[position] - float(logprob[0])) < 1e-4
        assert sequence.tokens == drawn


def crowd() -> list[Any]:
    plain = [job(f"plain{i}", prompt(10 + i, i), seed=i, max_tokens=15, stop=[]) for i in range(3)]
    penalised = [job(f"own{i}", prompt(9 + i, i), seed=i, max_tokens=15, stop=[], **PENALTIES) for i in range(3)]
    formats = [SCHEMA, DIGITS, OutputFormat(type="json_object"), OutputFormat(type="lark", schema='start: "a" /[bc]+/')]
    constrained = [
        job(
            f"format{i}",
            prompt(12, i),
            seed=i,
            max_tokens=30,
            num_samples=3,
            output_format=output,
            **(PENALTIES if i % 2 else {}),
        )
        for i, output in enumerate(formats)
    ]
    return [*plain, *penalised, *constrained]


@pytest.mark.parametrize(
    "limits", [{}, {"max_sequences": 4, "prefill_tokens": 5}, {"blocks": 14}], ids=["roomy", "few places", "preempted"]
)
def test_a_sample_is_the_same_alone_and_in_any_crowd(model: Any, limits: dict[str, int]) -> None:
    alone = {}
    for each in crowd():
        sampler = make_sampler(model)
        sampler.add(each)
        alone |= finish(sampler)
    sampler = make_sampler(model, **limits)
    for each in crowd():
        sampler.add(each)
    together = finish(sampler)
    assert {name: bits(answer) for name, answer in together.items()} == {
        name: bits(answer) for name, answer in alone.items()
    }


def test_rows_without_options_are_drawn_as_ever(model: Any) -> None:
    """The same bits beside rows with options as without them, and options without effect are no options."""
    sampler = make_sampler(model)
    sampler.add(job("a", prompt(10), max_tokens=10, stop=[]))
    without = finish(sampler)["a"]
    sampler = make_sampler(model)
    sampler.add(job("a", prompt(10), max_tokens=10, stop=[], frequency_penalty=0.0, min_p=0.0, repetition_penalty=1.0))
    sampler.add(job("b", prompt(10, 1), max_tokens=10, stop=[], **PENALTIES))
    assert bits(finish(sampler)["a"]) == bits(without)


@pytest.mark.parametrize("temperature", [0.0, 1.0, 3.0])
def test_a_schema_is_kept(model: Any, temperature: float) -> None:
    sampler = make_sampler(model)
    sampler.add(
        job("a", prompt(8), max_tokens=60, num_samples=8, temperature=temperature, output_format=SCHEMA, top_p=0.95)
    )
    for sequence in finish(sampler)["a"].sequences:
        assert sequence.stop_reason == "stop"
        read = json.loads(text(model, sequence))
        assert 0 <= read["a"] <= 99
        assert read["b"] in ("x", "yy")


def test_an_expression_may_end_only_where_it_is_complete(model: Any) -> None:
    sampler = make_sampler(model)
    sampler.add(job("a", prompt(8), max_tokens=30, num_samples=40, temperature=2.0, output_format=DIGITS))
    found = finish(sampler)["a"].sequences
    texts = [text(model, sequence) for sequence in found]
    assert all(re.fullmatch("[0-9]{2,6}", each) for each in texts)
    assert {sequence.stop_reason for sequence in found} == {"stop"}
    assert len(set(map(len, texts))) > 1


def test_length_ends_what_is_not_complete(model: Any) -> None:
    sampler = make_sampler(model)
    sampler.add(job("a", prompt(8), max_tokens=3, output_format=OutputFormat(type="regex", schema="[ab]{100}")))
    sequence = finish(sampler)["a"].sequences[0]
    assert (sequence.stop_reason, len(sequence.tokens)) == ("length", 3)


def test_a_stop_token_of_the_request_may_end_a_complete_text_only(model: Any) -> None:
    decoder, table = model
    end = table.index(b"!")
    bias = {end: 100.0, **dict.fromkeys(decoder.config.eos_token_ids, -100.0)}
    sampler = make_sampler(model)
    sampler.add(
        job("a", prompt(8), max_tokens=30, stop_token_ids=[end], logit_bias=bias, temperature=0.0, output_format=DIGITS)
    )
    sequence = finish(sampler)["a"].sequences[0]
    assert sequence.stop_reason == "stop"
    assert re.fullmatch("[0-9]{2,6}!", text(model, sequence))
    assert sum(map(len, (table[token] for token in sequence.tokens[:-2]))) < 2  # it ends as soon as it may


def test_stop_token_ids_are_added_to_stop(model: Any) -> None:
    def first(**options: Any) -> SampledSequence:
        sampler = make_sampler(model)
        sampler.add(job("a", prompt(8), max_tokens=20, temperature=0.0, **options))
        return finish(sampler)["a"].sequences[0]

    whole = first(stop=[])
    ended = first(stop=[], stop_token_ids=[whole.tokens[4]])
    assert ended.tokens == whole.tokens[: whole.tokens.index(whole.tokens[4]) + 1]
    assert ended.stop_reason == "stop"
    assert first(stop=["\x00never"], stop_token_ids=[whole.tokens[4]]).tokens == ended.tokens


def test_special_tokens_are_not_text(tmp_path: Path, model: Any) -> None:
    """A grammar that allows any text does not allow the name of a special token as one token."""
    from tinsmith.engine.sampling.grammar import Grammars
    from tinsmith.text.token_bytes import read_special_tokens

    written = {"added_tokens": [{"id": 4, "content": "<|x|>", "special": True}, {"id": 5, "content": "<y>"}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(written))
    assert read_special_tokens(tmp_path / "tokenizer.json") == {4}
    table = [b"a", b"b", b"<", b"|", b"<|x|>", b"<y>", b"<|end|>"]
    grammars = Grammars(table, frozenset({4}), [6], 7)
    compiled = grammars.compile(OutputFormat(type="regex", schema="[a-y<>|]+"), frozenset({6}), "t").result(60)
    assert compiled.first_mask_V.tolist() == [True, True, True, True, False, True, False]
    unended = Grammars(table[:6], frozenset({4}), [], 6)
    compiled = unended.compile(OutputFormat(type="regex", schema="a*"), frozenset(), "t").result(60)
    assert compiled.first_mask_V.tolist() == [True, False, False, False, False, False]


def test_a_grammar_that_turns_out_too_complex_fails_its_own_request_only(model: Any) -> None:
    check_grammar(AMBIGUOUS, 300)  # not before it has been followed for a while
    sampler = make_sampler(model)
    without_end = {model[1].index(b"z"): -100.0}
    sampler.add(job("bad", prompt(8), max_tokens=100, logit_bias=without_end, output_format=AMBIGUOUS))
    sampler.add(job("good", prompt(8), max_tokens=20, output_format=SCHEMA))
    events = []
    while sampler.has_work:
        events += sampler.step().events
    failed = [event for event in events if isinstance(event, FailedEvent)]
    assert [event.job_id for event in failed] == ["bad"]
    assert isinstance(failed[0].error, InvalidInputError)
    assert "items" in str(failed[0].error)
    assert [event.job_id for event in events if isinstance(event, DoneEvent)] == ["good"]
    sampler.add(job("bad", prompt(8), max_tokens=20))  # its name is free again
    assert set(finish(sampler)) == {"bad"}


def test_others_do_not_wait_for_a_mask_that_takes_long(model: Any) -> None:
    sampler = make_sampler(model)
    words = OutputFormat(type="regex", schema="[a-z]{30}")
    sampler.add(job("slow", prompt(8), max_tokens=20, output_format=words))
    sampler.add(job("other", prompt(9), max_tokens=100, stop=[]))
    drawn: list[str] = []

    def step() -> None:
        drawn.extend(event.job_id for event in sampler.step().events if isinstance(event, NewToken))

    while drawn.count("slow") < 2:
        step()
    gate = threading.Event()
    sampler._grammars._thread.submit("someone", lambda: gate.wait(60))
    step()  # the mask of this token may have been ready; those of later ones are not
    step()
    drawn.clear()
    for _ in range(3):
        step()
    assert drawn == ["other"] * 3
    gate.set()
    answers = finish(sampler)
    assert len(answers["slow"].sequences[0].tokens) >= 6
    alone = make_sampler(model)
    alone.add(job("slow", prompt(8), max_tokens=20, output_format=words))
    assert bits(finish(alone)["slow"]) == bits(answers["slow"])


def test_a_request_can_be_cancelled_while_its_grammar_compiles(model: Any) -> None:
    sampler = make_sampler(model)
    sampler.add(job("a", prompt(8), max_tokens=20, output_format=SCHEMA))
    assert sampler.cancel("a")
    assert not sampler.has_work
    assert sampler.step().events == []


def test_scoring_a_prompt_draws_nothing(model: Any) -> None:
    """`max_tokens: 0` with prompt logprobs is how evaluations score a text; a format has nothing to constrain then."""
    tokens = prompt(12)
    sampler = make_sampler(model)
    sampler.add(job("a", tokens, max_tokens=0, prompt_logprobs=True, topk_prompt_logprobs=2, output_format=SCHEMA))
    answer = finish(sampler)["a"]
    assert [(row.tokens, row.stop_reason) for row in answer.sequences] == [([], "length")]
    expected = logits_of(model[0], tokens).log_softmax(1)
    assert answer.prompt_logprobs is not None
    assert answer.prompt_logprobs[0] is None
    for place in range(1, 12):
        found = answer.prompt_logprobs[place]
        assert found is not None
        assert abs(found - float(expected[place - 1, tokens[place]])) < 1e-4


def test_streamed_tokens_carry_their_tables(model: Any) -> None:
    sampler = make_sampler(model)
    sampler.add(job("a", prompt(8), max_tokens=4, stop=[], num_samples=2, topk_sample_logprobs=3, min_p=0.1))
    events, answers = [], {}
    while sampler.has_work:
        step = sampler.step().events
        events += [event for event in step if isinstance(event, NewToken)]
        collect(step, answers)
    for index, sequence in enumerate(answers["a"].sequences):
        rows = [event.topk for event in events if event.index == index]
        assert sequence.topk_logprobs_np is not None
        assert np.array_equal(
            np.stack([row[0] for row in rows if row is not None]), sequence.topk_logprobs_np.token_ids
        )
        assert np.array_equal(np.stack([row[1] for row in rows if row is not None]), sequence.topk_logprobs_np.logprobs)


LEAVES = st.sampled_from(
    [
        {"type": "boolean"},
        {"type": "null"},
        {"type": "integer", "minimum": -5, "maximum": 120},
        {"enum": ["a", 7, None, [1]]},
        {"const": {"k": [True]}},
        {"type": "string", "pattern": "^[ab]{1,3}$"},
        {"type": "string", "minLength": 1, "maxLength": 4},
    ]
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: (
        st.builds(lambda item, most: {"type": "array", "items": item, "maxItems": most}, inner, st.integers(0, 2))
        | st.builds(
            lambda fields, count: {
                "type": "object",
                "properties": fields,
                "required": sorted(fields)[:count],
                "additionalProperties": False,
            },
            st.dictionaries(st.sampled_from(["p", "q q", "\u00fc"]), inner, max_size=3),
            st.integers(0, 3),
        )
        | st.builds(lambda one, other: {"anyOf": [one, other]}, inner, inner)
    ),
    max_leaves=4,
)


def is_valid(value: Any, schema: dict[str, Any]) -> bool:
    """The part of JSON Schema that SCHEMAS uses."""
    if "anyOf" in schema:
        return any(is_valid(value, each) for each in schema["anyOf"])
    if "enum" in schema:
        return any(value == each and type(value) is type(each) for each in schema["enum"])
    if "const" in schema:
        return bool(value == schema["const"])
    match schema["type"]:
        case "boolean":
            return isinstance(value, bool)
        case "null":
            return value is None
        case "integer":
            return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
        case "string":
            if not isinstance(value, str):
                return False
            fits = schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", 99)
            return fits and bool(re.search(schema.get("pattern", ""), value))
        case "array":
            fits = isinstance(value, list) and len(value) <= schema["maxItems"]
            return fits and all(is_valid(each, schema["items"]) for each in value)
        case _:
            fields = schema["properties"]
            has_all = isinstance(value, dict) and set(schema["required"]) <= value.keys() <= fields.keys()
            return has_all and all(is_valid(each, fields[name]) for name, each in value.items())


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(schema=SCHEMAS, seed=st.integers(0, 2**32))
def test_every_finished_sample_is_valid(model: Any, schema: dict[str, Any], seed: int) -> None:
    compact = {**schema, "x-guidance": {"whitespace_flexible": False}}
    output = OutputFormat(type="json_schema", schema=json.dumps(compact))
    sampler = make_sampler(model)
    sampler.add(job("a", prompt(6), seed=seed, max_tokens=80, num_samples=2, output_format=output))
    for sequence in finish(sampler)["a"].sequences:
        if sequence.stop_reason == "stop":
            assert is_valid(msgspec.json.decode(text(model, sequence)), schema)


def test_tenants_take_turns_in_the_thread() -> None:
    thread, gate, order = FairThread(), threading.Event(), []
    first = thread.submit("loud", gate.wait)
    later = [thread.submit("loud", lambda i=i: order.append(f"loud{i}")) for i in range(3)]  # type: ignore[misc]
    quiet = thread.submit("quiet", lambda: order.append("quiet"))
    dropped = thread.submit("quiet", lambda: order.append("dropped"))
    assert dropped.cancel()
    gate.set()
    for future in (first, *later, quiet):
        future.result(60)
    assert order.index("quiet") < order.index("loud1")
    assert "dropped" not in order
    again = thread.submit("loud", lambda: 5)
    assert again.result(60) == 5
    with pytest.raises(ZeroDivisionError):
        thread.submit("loud", lambda: 1 // 0).result(60)
