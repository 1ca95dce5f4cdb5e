"""A chat template, which comes from a server or the hub, can only use a bounded amount of memory and time."""

from __future__ import annotations

import collections
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.server_process import environment

from tinsmith.errors import InvalidInputError
from tinsmith.text import tokenizer
from tinsmith.text.chat_template import render
from tinsmith.text.template_sandbox import MAX_CHAT_CHARACTERS, MAX_STEPS, MAX_TEMPLATE_CHARACTERS, Meter

pytest.importorskip("jinja2")

NESTED = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
ENDS = "{% endfor %}{% endfor %}{% endfor %}"
SPACE = "{% set n = namespace(x='ab', l=[]) %}"
HOSTILE = [
    "{{ 'a' * 10**9 }}",
    "{{ 10**9 * 'a' }}",
    "{{ 'a' * 10**6 * 10**6 }}",
    "{{ [1] * 10**9 }}",
    "{{ (1,) * 10**9 }}",
    "{{ 9 ** 9 ** 9 }}",
    "{{ 9 ** 60 * 9 ** 60 }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' % (1000000000, 1) }}",
    "{{ '%1000000000d' | format(1) }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 1000000000) }}",
    "{{ '{x:1000000000}'.format_map({'x': 1}) }}",
    "{{ 'a'.ljust(10**9) }}",
    "{{ 'a'.rjust(10**9) }}",
    "{{ 'a'.center(10**9) }}",
    "{{ 'a'.zfill(10**9) }}",
    "{{ '\\t\\t'.expandtabs(10**9) }}",
    "{{ ('a' * 10**6).replace('', 'b' * 10**6) }}",
    "{{ ('a' * 10**6).replace('a', 'b' * 10**6) }}",
    "{{ ('b' * 10**6).join(['a'] * 10**6) }}",
    "{{ ('b' * 10**6).join('a' * 10**6) }}",
    "{{ ('a ' * 8 * 10**6).split() }}",
    "{{ ('a,' * 8 * 10**6).split(',') | length }}",
    "{{ 'a'.translate({97: 'b' * 10**6}) }}",
    "{{ 'a' | center(10**9) }}",
    "{{ 'a\\n' | indent(10**9, true) }}",
    "{{ ('a\\n' * 10**6) | indent(10**6) }}",
    "{{ ('a\\n' * 10**6) | indent('b' * 10**6) }}",
    "{{ ('a' * 10**6) | replace('a', 'b' * 10**6) }}",
    "{{ (['a'] * 10**6) | join('b' * 10**6) }}",
    "{{ ('a b ' * 10**6) | wordwrap(1, wrapstring='b' * 10**6) }}",
    "{{ [1] | slice(10**9) | list }}",
    "{{ [1] | batch(10**9, 0) | list }}",
    "{{ [[1]] | sum(start=[]) }}",
    "{{ {'a': [1, 2, 3]} | tojson(indent=10**9) }}",
    "{{ ([[1]] * 10**6) | tojson(indent=10**5) }}",
    "{{ {'a': 1, 'b': 2} | tojson(separators=('c' * 10**7, 'd' * 10**7)) }}",
    "{{ ('a' * 16 * 10**6) | list }}",
    "{% set x = ['a' * 10**6] * 1000 %}{% set y = [x] * 10**6 %}{{ y }}",
    "{% set x = ['a' * 10**6] * 1000 %}{% set y = [x] * 10**6 %}{{ y | string | length }}",
    "{% set x = ['a' * 10**6] * 1000 %}{% set y = [x] * 10**6 %}{{ y | tojson | length }}",
    "{% set x = ['a' * 10**6] * 1000 %}{{ [x, x, x] | map('join') | join }}",
    SPACE + "{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    SPACE + "{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    SPACE + "{% for i in range(99) %}{% set n.l = n.l + n.l + [1] %}{% endfor %}",
    SPACE + "{% for i in range(99) %}{% set n.x = '%s%s' % (n.x, n.x) %}{% endfor %}",
    SPACE + "{% for i in range(99) %}{% set n.x = [n.x, n.x] | join %}{% endfor %}",
    SPACE + "{% set n.x = 'a' * 10**7 %}{% for i in range(9999) %}{% set n.l = n.l + [n.x[:-1]] %}{% endfor %}",
    SPACE + "{% set n.x = 'a' * 10**7 %}{% for i in range(9999) %}{% set n.l = n.l + [n.x | upper] %}{% endfor %}",
    SPACE + "{% set n.x = 'a' * 10**7 %}{% for i in range(9999) %}{% set n.l = n.l + [n.x.lower()] %}{% endfor %}",
    "{% set x %}" + NESTED + "aaaaaaaaaaaaaaaaaaaa" + ENDS + "{% endset %}",
    "{% macro m() %}" + NESTED + "aaaaaaaaaaaaaaaaaaaa" + ENDS + "{% endmacro %}{{ m() | length }}",
    NESTED + ENDS,
    NESTED + "{{ 1 }}" + ENDS,
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "{% for i in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "{{ lipsum(n=10**6) }}",
    "{{ strftime_now('%1000000000d') }}",
    "{{ strftime_now('%-1000000000d') }}",
    "{{ strftime_now('x' * 10**6) }}",
    "{{ '" + "a" * (MAX_TEMPLATE_CHARACTERS + 1) + "' }}",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "{% if true %}" * 200 + "x" + "{% endif %}" * 200,
    "{{ " + "-" * 5000 + "1 }}",
]

PROGRAM = """
import json, resource, sys
from tinsmith.text import tokenizer
from tinsmith.text.chat_template import render
from tinsmith.errors import InvalidInputError
render("{{ 1 }}", {})
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
resource.setrlimit(resource.RLIMIT_CPU, (120, 120))
found = []
for template in json.load(sys.stdin):
    began = resource.getrusage(resource.RUSAGE_SELF)
    try:
        said = "rendered " + str(len(render(template, {"messages": []})))
    except InvalidInputError as error:
        said = str(error)
    ended = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = ended.ru_utime + ended.ru_stime - began.ru_utime - began.ru_stime
    found.append([said, cpu_s, (ended.ru_maxrss - before) // 1024])
json.dump(found, sys.stdout)
"""
CPU_S = 40.0
"""More than any may take, on any machine; the bound of a template itself is half of this."""
GROWTH_MB = 450


def test_templates_of_a_stranger_take_little() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps(HOSTILE),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for template, (said, cpu_s, grown_mb) in zip(HOSTILE, json.loads(done.stdout), strict=True):
        assert said.startswith("chat template: "), f"{template[:100]}: {said}"
        assert len(said) < 300, template[:100]
        assert cpu_s < CPU_S, template[:100]
        assert grown_mb < GROWTH_MB, template[:100]


CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "<think>hm</think>hi", "tool_calls": [{"name": "f", "arguments": {"x": [1, 2]}}]},
]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (
            "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ m.role }}{{ loop.last }} {% endfor %}",
            "1/3system",
        ),
        ("{% for m in messages[1:] %}{{ m['content'].split('</think>')[-1].strip() }}{% endfor %}", "hellohi"),
        ("{% for m in messages[::-1] %}{{ m.role[0] }}{% endfor %}", "aus"),
        ("{{ messages[-1].tool_calls[0] | tojson(indent=4) }}", '{\n    "name": "f"'),
        ("{% set n = namespace(x=0) %}{% for m in messages %}{% set n.x = n.x + 1 %}{% endfor %}{{ n.x }}", "3"),
        ("{{ 'a' ~ 1 ~ none ~ [1] }}", "a1None[1]"),
        ("{% for m in messages if m.role != 'system' %}{{ loop.revindex }}{% else %}none{% endfor %}", "21"),
        ("{% for k, v in {'a': 1}.items() %}{{ '%s=%02d' % (k, v) }}{{ '{}-{}'.format(k, v) }}{% endfor %}", "a=01a-1"),
        ("{{ messages | map(attribute='role') | join(', ') | title | center(30) | trim }}", "System, User, Assistant"),
        ("{% macro m(x) %}<{{ x }}>{% endmacro %}{{ m(messages | length) }}{{ [3, 1] | sort | list }}", "<3>[1, 3]"),
        (
            "{{ 'x' | indent(2, true) }}|{{ 'a b' | wordwrap(1) }}|{{ [1, 2] | sum }}|{{ 2 ** 10 }}|{{ 7 // 2 }}",
            "  x|a\nb|3",
        ),
        ("{% for i in range(3) %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "02"),
    ],
)
def test_templates_of_models_work_as_ever(template: str, expected: str) -> None:
    assert render(template, {"messages": CHAT}).startswith(expected)


def test_a_long_conversation_is_no_attack() -> None:
    text = "word " * 1000
    chat = [{"role": "user", "content": text} for _ in range(400)]
    template = (
        "{% set n = namespace(all='') %}{% for m in messages %}{% set n.all = n.all + m.role %}"
        "<|{{ m.role }}|>{{ m.content | trim }}{{ m.content.replace('word', 'Word')[:10] }}"
        "{% for other in messages %}{% if other.role == 'tool' %}{{ other }}{% endif %}{% endfor %}{% endfor %}"
        "{{ n.all }}"
    )
    assert len(render(template, {"messages": chat})) > 400 * len(text)


def test_the_meter_stops_at_each_bound() -> None:
    seconds = [0.0]
    many = Meter(ValueError, lambda: 0.0)
    for _ in range(MAX_STEPS):
        many.step()
    with pytest.raises(ValueError, match="steps"):
        many.step()
    meter = Meter(ValueError, lambda: seconds[0])
    with pytest.raises(ValueError, match="longer than"):
        meter.room(MAX_CHAT_CHARACTERS + 1)
    with pytest.raises(ValueError, match="bytes of text"):
        meter.step(2**40)
    late = Meter(ValueError, lambda: seconds[0])
    seconds[0] = 1e6
    with pytest.raises(ValueError, match="takes more than"):
        collections.deque((late.step() for _ in range(100)), maxlen=0)


def test_files_of_a_tokenizer_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "MAX_FILE_BYTES", 1000)
    (tmp_path / "tokenizer.json").write_text("x" * 1001)
    with pytest.raises(InvalidInputError, match="larger than 1000 bytes"):
        tokenizer.load_tokenizer(tmp_path)


def test_what_was_refused_says_so_shortly() -> None:
    with pytest.raises(InvalidInputError, match="a part of it is longer than 16777216 characters"):
        render("{{ 'a' * 10**9 }}", {})
