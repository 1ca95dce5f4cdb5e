"""Tokenizers and chat templates compared with the official client's choice and with transformers."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.official import Oracle
from support.releases import OFFICIAL, ROOT

from tinsmith.text.tokenizer import PINNED_REVISIONS, load_tokenizer, tokenizer_source

MODEL_NAMES = [
    "Qwen/Qwen3-8B",
    "Qwen/Qwen3-8B:peft",
    "a/b:c:d",
    "a:b/c",
    "plain",
    "a/b/c",
    "a/b/c:x",
    "a/b/c/d",
    "meta-llama/Llama-3",
    "meta-llama/Llama-3.1-8B-Instruct",
    "meta-llama/Llama-3.1-8B:x",
    "meta-llama/Llama-3.1-8B/x",
    "meta-llama/Llama-30B",
    "meta-llama/Meta-Llama-3-8B",
    "meta-llama/llama-3",
    "meta-llama/Llama-4-Scout",
    "x/meta-llama/Llama-3",
    "nvidia/Llama-3_3-Nemotron",
    "moonshotai/Kimi-K2",
    *PINNED_REVISIONS,
]


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_model_names_lead_to_the_same_tokenizer(oracle: Oracle, name: str) -> None:
    theirs, options = oracle.ask("tokenizer_source", model_name=name, tokenizer_id=None)
    assert tokenizer_source(name) == theirs
    assert PINNED_REVISIONS.get(tokenizer_source(name)) == options.get("revision")


@pytest.mark.parametrize("tokenizer_id", ["tok/x", "tok/x:y", "a/b/c", "meta-llama/Llama-3.1-8B", ""])
def test_a_given_tokenizer_id_is_taken_as_it_is(oracle: Oracle, tokenizer_id: str) -> None:
    theirs, _ = oracle.ask("tokenizer_source", model_name="Qwen/Qwen3-8B:peft", tokenizer_id=tokenizer_id)
    assert tokenizer_source("Qwen/Qwen3-8B:peft", tokenizer_id) == theirs == tokenizer_id


CHATML = """\
{%- for message in messages %}
    {%- if loop.first and messages[0].role != 'system' %}
        {{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""
LLAMA_3 = """\
{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = strftime_now("%d %b %Y") %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start|>system<|end|>\\n\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- eos_token }}
{% for message in messages %}
    {{- '<|start|>' + message['role'] + '<|end|>\\n\\n'+ message['content'] | trim + eos_token }}
{% endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant<|end|>\\n\\n' }}
{%- endif %}
"""
TOOLS = """\
{%- if tools %}
# Tools: {{ tools | length }}
{%- for tool in tools %}
{{ tool | tojson }}
{{ tool.function | tojson(indent=2) }}
{%- endfor %}
{% endif %}
{%- set ns = namespace(calls=0) %}
{%- for message in messages %}
    {%- if message.role not in ['system', 'user', 'assistant', 'tool'] %}
        {{- raise_exception('Unknown role ' + message.role) }}
    {%- endif %}
    {%- if not message.content and not message.tool_calls %}{% continue %}{% endif %}
[{{ message.role }}]{% if message.role == 'assistant' %}{% generation %}{{ message.content or '' }}
    {%- for call in message.tool_calls or [] %}
        {%- set ns.calls = ns.calls + 1 %}
<call n={{ ns.calls }}>{{ call.function.name }}({{ call.function.arguments | tojson }})</call>
    {%- endfor %}
{% endgeneration %}{% else %}{{ message.content }}{% endif %}
{{ message | tojson(ensure_ascii=True, separators=(',', ':'), sort_keys=True) }}
{%- endfor %}
{{ eos_token }}{{ pad_token }}{{ documents is none }}
"""
HELLO = [{"role": "user", "content": "  hello <b>world</b> & 'you' — ünï  "}]
CHAT = [{"role": "system", "content": "be brief"}, *HELLO, {"role": "assistant", "content": "Hi."}]
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "a < b & 'c' é", "parameters": {"type": "object", "properties": {}}},
}
CALLED = [
    *HELLO,
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": {"a": "é"}}}]},
    {"role": "assistant", "content": ""},
    {"role": "tool", "content": "3"},
]


def save_tokenizer(directory: Path, template: str | None = None, **config: Any) -> Path:
    """A byte-level BPE tokenizer in a directory, as a model's repository has it."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(["hello world, this is a small text. Don't you think? user assistant"] * 4, trainer)
    made.add_special_tokens(["<s>", "<|im_start|>", "<|im_end|>", "<|start|>", "<|end|>"])
    made.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    around = [("<s>", made.token_to_id("<s>"))]
    made.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=around)
    made.enable_truncation(4)
    directory.mkdir(parents=True, exist_ok=True)
    made.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps(
            {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "bos_token": "<s>"} | config
        )
    )
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    return directory


def same(oracle: Oracle, directory: Path, calls: list[tuple[str, list[Any], dict[str, Any]]]) -> list[Any]:
    """Ask transformers and our own tokenizer of a directory the same; they agree."""
    theirs = oracle.ask("tokenizer", directory=str(directory), calls=calls)
    ours = load_tokenizer(directory)
    answers = []
    for name, args, kwargs in calls:
        value = len(ours) if name == "__len__" else getattr(ours, name)
        answers.append(value(*args, **kwargs) if callable(value) else value)
    assert dict(zip(map(str, calls), answers, strict=True)) == dict(zip(map(str, calls), theirs, strict=True))
    return answers


CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tokens as objects": {"eos_token": {"__type": "AddedToken", "content": "<|end|>", "special": True}},
    "tokens that are new": {
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "additional_special_tokens": ["<|start|>", "<new>"],
        "clean_up_tokenization_spaces": True,
    },
    "more names": {"extra_special_tokens": {"image_token": "<img>"}, "pad_token": "hello", "add_bos_token": False},
    "named but not special": {"eos_token": "<think>"},
}


TEXT = "hello world . Don 't <|im_end|><pad><late><think> ünï"
IDS = [5, 292, 299, 300, 301, 303, 304, 305, 306]
QUESTIONS: list[tuple[str, list[Any], dict[str, Any]]] = [
    ("encode", [TEXT], {}),
    ("encode", [TEXT], {"add_special_tokens": False}),
    ("encode", [""], {}),
    ("__call__", [TEXT], {}),
    ("__call__", [[TEXT, "hello"]], {}),
    ("decode", [IDS], {}),
    ("decode", [IDS], {"skip_special_tokens": True}),
    ("decode", [5], {}),
    ("batch_decode", [[IDS, [5]]], {"skip_special_tokens": True}),
    ("convert_ids_to_tokens", [IDS], {}),
    ("convert_ids_to_tokens", [5], {}),
    ("convert_tokens_to_ids", [["hello", "<|end|>", "no such token"]], {}),
    ("convert_tokens_to_ids", ["<|end|>"], {}),
    *((name, [], {}) for name in ("vocab_size", "__len__", "all_special_ids", "all_special_tokens")),
    *((f"{name}_token{suffix}", [], {}) for name in ("bos", "eos", "pad", "unk") for suffix in ("", "_id")),
    ("name_or_path", [], {}),
]


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_tokenizers_are_alike(oracle: Oracle, tmp_path: Path, config: dict[str, Any]) -> None:
    same(oracle, save_tokenizer(tmp_path, **config), QUESTIONS)


def test_tokens_that_only_the_configuration_has_are_added_alike(oracle: Oracle, tmp_path: Path) -> None:
    size = len(load_tokenizer(save_tokenizer(tmp_path)))
    added = {str(size + 1): {"content": "<pad>", "lstrip": True}, str(size): {"content": "<late>", "special": True}}
    same(oracle, save_tokenizer(tmp_path, added_tokens_decoder=added), QUESTIONS)


@pytest.mark.parametrize(
    ("template", "messages", "options"),
    [
        (CHATML, CHAT, {}),
        (CHATML, HELLO, {"add_generation_prompt": True}),
        (CHATML, HELLO, {"add_generation_prompt": True, "enable_thinking": False}),
        (LLAMA_3, CHAT, {"date_string": "26 Jul 2024", "add_generation_prompt": True}),
        (LLAMA_3, HELLO, {}),
        (TOOLS, CALLED, {"tools": [TOOL, TOOL]}),
        (TOOLS, CALLED, {}),
    ],
)
def test_chat_templates_render_alike(
    oracle: Oracle, tmp_path: Path, template: str, messages: list[Any], options: dict[str, Any]
) -> None:
    text, ids, encoding = same(
        oracle,
        save_tokenizer(tmp_path, template),
        [
            ("apply_chat_template", [messages], {"tokenize": False, **options}),
            ("apply_chat_template", [messages], {"return_dict": False, **options}),
            ("apply_chat_template", [messages], {"return_dict": True, **options}),
        ],
    )
    assert load_tokenizer(tmp_path).decode(ids) == text
    assert encoding["input_ids"] == ids


def test_several_templates_are_chosen_from_alike(oracle: Oracle, tmp_path: Path) -> None:
    named = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": TOOLS}]
    same(
        oracle,
        save_tokenizer(tmp_path, chat_template=named),
        [
            ("apply_chat_template", [HELLO], {"tokenize": False}),
            ("apply_chat_template", [HELLO], {"tokenize": False, "tools": [TOOL]}),
            ("apply_chat_template", [HELLO], {"tokenize": False, "chat_template": "tool_use"}),
            ("apply_chat_template", [HELLO], {"tokenize": False, "chat_template": "{{ messages | length }}"}),
        ],
    )


def test_special_tokens_map_wins_over_the_configuration(oracle: Oracle, tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|end|>", "pad_token": "<s>"}))
    same(oracle, tmp_path, [(name, [], {}) for name in ("eos_token", "pad_token_id", "bos_token", "all_special_ids")])


PREFER_TRANSFORMERS = """
import sys
from pathlib import Path
from tinsmith.text.tokenizer import TokenizerFiles, load_tokenizer
directory = Path(sys.argv[1])
files = TokenizerFiles.read(directory)
for source in (str(directory), directory, files):
    theirs, ours = load_tokenizer(source, prefer_transformers=True), load_tokenizer(source)
    assert type(theirs).__module__.startswith("transformers."), type(theirs)
    assert theirs.encode("hello world") == ours.encode("hello world")
    assert theirs.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == (
        ours.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    )
"""


def test_transformers_own_tokenizer_is_there_for_the_asking(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, CHATML)
    subprocess.run(
        [OFFICIAL / "venv" / "bin" / "python", "-c", PREFER_TRANSFORMERS, str(tmp_path)],
        env={"PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1", "PATH": os.environ["PATH"]},
        check=True,
        timeout=120,
    )
