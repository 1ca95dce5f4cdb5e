"""Tokenizers without transformers: loading, sharing, pickling, chat templates, and the errors for a missing one."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tinsmith.errors import InvalidInputError, TinkerError
from tinsmith.text.optional_packages import library
from tinsmith.text.template_sandbox import MAX_CHAT_CHARACTERS
from tinsmith.text.tokenizer import (
    LLAMA_3_MIRROR,
    Tokenizer,
    TokenizerFiles,
    load_tokenizer,
    tokenizer_source,
)

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
USER = [{"role": "user", "content": "hello <world> & 'you'"}]


def files(template: str | None = CHATML, **config: Any) -> TokenizerFiles:
    """A small byte-level BPE tokenizer, made on the spot."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=280, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(["hello world, hello you"] * 4, trainer)
    backend.add_special_tokens(["<s>", "<|im_start|>", "<|im_end|>"])
    around = [("<s>", backend.token_to_id("<s>"))]
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=around)
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    return TokenizerFiles(backend.to_str().encode(), {"eos_token": "<|im_end|>", "bos_token": "<s>"} | config, template)


def save(directory: Path, made: TokenizerFiles) -> Path:
    (directory / "tokenizer.json").write_bytes(made.tokenizer_json)
    (directory / "tokenizer_config.json").write_text(json.dumps(made.config))
    if made.chat_template is not None:
        (directory / "chat_template.jinja").write_text(made.chat_template)
    return directory


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    loaded: Tokenizer = load_tokenizer(files())
    return loaded


@pytest.mark.parametrize("text", ["", "hello world", "  two  spaces ", "ünï\n\t🙂", "a<|im_end|>b", "x" * 5000])
def test_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode(text) == [tokenizer.bos_token_id, *ids]
    assert tokenizer(text) == {"input_ids": tokenizer.encode(text), "attention_mask": [1] * (len(ids) + 1)}


def test_encodings_are_read_either_way(tokenizer: Tokenizer) -> None:
    encoding = tokenizer(["hello", "you"], add_special_tokens=False)
    assert encoding.input_ids == encoding["input_ids"] == [tokenizer.encode(t, False) for t in ("hello", "you")]
    assert encoding.attention_mask == [[1] * len(row) for row in encoding.input_ids]
    with pytest.raises(AttributeError, match="input_ids, attention_mask, not offsets"):
        _ = encoding.offsets


def test_ids_may_come_as_arrays(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello you")
    for form in (tuple(ids), np.array(ids), np.array(ids, np.int32), torch.tensor(ids), iter(ids)):
        assert tokenizer.decode(form) == "<s>hello you"  # type: ignore[arg-type]
    assert tokenizer.decode(np.int64(ids[0])) == "<s>"  # type: ignore[arg-type]
    assert tokenizer.batch_decode(np.array([ids, ids]), skip_special_tokens=True) == ["hello you"] * 2


@pytest.mark.parametrize("wrong", [[[1, 2]], [1.5], ["hello"], [-1], [None]], ids=str)
def test_wrong_ids_are_named(tokenizer: Tokenizer, wrong: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"token_ids\[0\]: expected a token id, got"):
        tokenizer.decode(wrong)


def test_only_text_is_encoded(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidInputError, match="expected a string, got int"):
        tokenizer.encode(3)  # type: ignore[arg-type]


def test_special_tokens_can_be_set_for_one_tokenizer_alone() -> None:
    one, other = load_tokenizer(files()), load_tokenizer(files())
    assert one.pad_token is one.pad_token_id is None
    one.pad_token = one.eos_token
    assert one.pad_token_id == one.eos_token_id == one.convert_tokens_to_ids("<|im_end|>")
    assert other.pad_token is None
    assert one.all_special_tokens == ["<s>", "<|im_end|>"]
    assert one.all_special_ids == [one.bos_token_id, one.eos_token_id]


def test_one_vocabulary_is_shared_by_all_who_load_it(tmp_path: Path) -> None:
    directory = save(tmp_path, files())
    with ThreadPoolExecutor(8) as pool:
        loaded = list(pool.map(load_tokenizer, [directory, str(directory), files()] * 8))
    assert len({id(item._backend) for item in loaded}) == 1
    assert len({id(item) for item in loaded}) == len(loaded)
    assert load_tokenizer(files(pad_token="<pad>"))._backend is not loaded[0]._backend


def test_a_changed_file_is_loaded_anew(tmp_path: Path) -> None:
    before = load_tokenizer(save(tmp_path, files()))
    after = load_tokenizer(save(tmp_path, files(pad_token="<pad>")))
    assert (before.pad_token, after.pad_token, len(after)) == (None, "<pad>", len(before) + 1)


def test_threads_may_share_a_tokenizer(tokenizer: Tokenizer) -> None:
    texts = [f"hello {i} <|im_end|> world" * 20 for i in range(64)]
    expected = [tokenizer.encode(text) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(tokenizer.encode, texts)) == expected


def test_pickles_by_content(tmp_path: Path) -> None:
    original = load_tokenizer(save(tmp_path, files()))
    original.pad_token = "<s>"
    data = pickle.dumps(original)
    for path in tmp_path.iterdir():
        path.unlink()
    source = (
        "import pickle, sys; t = pickle.loads(sys.stdin.buffer.read()); print(t.encode('hello you'), t.pad_token, "
        "t.name_or_path, t.apply_chat_template([{'role': 'user', 'content': 'hello'}]))"
    )
    result = subprocess.run([sys.executable, "-c", source], input=data, capture_output=True, check=True, timeout=60)
    chat = original.apply_chat_template([{"role": "user", "content": "hello"}])
    assert result.stdout.decode().strip() == f"{original.encode('hello you')} <s> {tmp_path} {chat}"


def test_tokens_and_ids_convert(tokenizer: Tokenizer) -> None:
    assert tokenizer.convert_tokens_to_ids(["<s>", "no such token"]) == [tokenizer.bos_token_id, None]
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("hello")) == ["<s>", "hello"]
    assert tokenizer.convert_ids_to_tokens(tokenizer.bos_token_id) == "<s>"
    assert len(tokenizer) == tokenizer.vocab_size + 3
    assert "tokens" in repr(tokenizer)


def test_ids_that_contradict_the_vocabulary_are_refused() -> None:
    wrong = files(added_tokens_decoder={"5": {"content": "<s>", "special": True}})
    with pytest.raises(InvalidInputError, match=r"added_tokens_decoder\['5'\]: '<s>', which has the id \d+"):
        load_tokenizer(wrong)


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b'{"version": "1.0"}'])
def test_a_broken_file_is_refused(content: bytes) -> None:
    with pytest.raises(InvalidInputError, match=r"tokenizer.json: "):
        load_tokenizer(TokenizerFiles(content))


def test_a_conversation_becomes_text_or_ids(tokenizer: Tokenizer) -> None:
    text = tokenizer.apply_chat_template(USER, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nhello <world> & 'you'<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.apply_chat_template(USER, add_generation_prompt=True)
    assert ids == tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.apply_chat_template(USER, add_generation_prompt=True, return_dict=True).input_ids == ids
    assert tokenizer.chat_template == CHATML


def render(template: str, messages: Any = USER, **variables: Any) -> Any:
    return load_tokenizer(files(template)).apply_chat_template(messages, tokenize=False, **variables)


def test_templates_have_what_transformers_gives_them() -> None:
    assert render("{{ {'a': '<é>', 'b': [1]} | tojson }}") == '{"a": "<é>", "b": [1]}'
    assert render("{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=true) }}") == '{\n "a": 2,\n "b": 1\n}'
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("a{% generation %}b{% set c = 1 %}{% endgeneration %}{{ c is defined }}") == "abFalse"
    assert render("  {% if true %}\nx\n  {% endif %}\n") == "x\n"
    assert (
        render("{{ strftime_now('%Y') | int > 2000 }}{{ bos_token }}{{ eos_token }}{{ pad_token }}")
        == "True<s><|im_end|>"
    )
    assert render("{{ documents is none }}{{ tools is none }}{{ mine }}", mine=3) == "TrueTrue3"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('no tools here') }}", "chat template: no tools here"),
        ("{% if %}", "chat template: Expected an expression"),
        ("{{ messages.append(1) }}", "chat template: .*unsafe|not safely callable"),
        ("{{ messages.__class__.__mro__ }}", "chat template: access to attribute '__class__'"),
        ("{{ nothing.at.all }}", "chat template: 'nothing' is undefined"),
        ("{% for i in range(1000) %}{{ 'x' * 100000 }}{% endfor %}", f"longer than {MAX_CHAT_CHARACTERS} characters"),
        ("{{ 'x' * 10000000000 }}", "a part of it is longer than"),
        ("{{ 10000000000 * [1] }}", "a part of it is longer than"),
        ("{% for i in range(10000000) %}{% endfor %}", "Range too big"),
        ("{{ 'a' + none }}", "chat template: can only concatenate str"),
    ],
)
def test_templates_that_go_wrong_are_stopped(template: str, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        render(template)


def test_numbers_still_multiply() -> None:
    assert render("{{ 3 * 4 }}{{ 'ab' * 2 }}") == "12abab"


def test_templates_are_chosen_by_name() -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    loaded = load_tokenizer(files(None, chat_template=named))
    assert loaded.apply_chat_template(USER, tokenize=False) == "plain"
    assert loaded.apply_chat_template(USER, tokenize=False, tools=[{"name": "add"}]) == "with tools"
    assert loaded.apply_chat_template(USER, tokenize=False, chat_template="tool_use") == "with tools"
    assert loaded.apply_chat_template(USER, tokenize=False, chat_template="{{ 1 }}") == "1"
    with pytest.raises(InvalidInputError, match="has no chat template; pass one"):
        load_tokenizer(files(None)).apply_chat_template(USER)


def test_what_only_transformers_can_do_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(
        InvalidInputError, match=r"return_tensors: only load_tokenizer\(..., prefer_transformers=True\)"
    ):
        tokenizer.apply_chat_template(USER, return_tensors="pt")
    assert tokenizer.apply_chat_template(USER, padding=False, truncation=False) == tokenizer.apply_chat_template(USER)
    with pytest.raises(InvalidInputError, match=r"messages\[0\]: expected an object, got list"):
        tokenizer.apply_chat_template([USER])  # type: ignore[list-item]
    with pytest.raises(InvalidInputError, match=r"tools\[0\]: expected an object, got function"):
        tokenizer.apply_chat_template(USER, tools=[lambda: 0])  # type: ignore[list-item]


def test_a_directory_may_lack_all_but_the_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(files().tokenizer_json)
    loaded = load_tokenizer(str(tmp_path))
    assert (loaded.eos_token, loaded.chat_template, loaded.name_or_path) == (None, None, str(tmp_path))
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(InvalidInputError, match=r"contains no tokenizer.json.*prefer_transformers=True"):
        load_tokenizer(tmp_path)


def test_model_names_lead_to_a_tokenizer(tmp_path: Path) -> None:
    assert tokenizer_source("Qwen/Qwen3-8B:peft") == "Qwen/Qwen3-8B"
    assert tokenizer_source("a/b/c") == "a/b"
    assert tokenizer_source("meta-llama/Llama-3.2-1B") == LLAMA_3_MIRROR
    assert tokenizer_source("meta-llama/Llama-3.2-1B", "mine/own:x") == "mine/own:x"
    (tmp_path / "a:b").mkdir()
    assert tokenizer_source(str(tmp_path / "a:b")) == str(tmp_path / "a:b")


@pytest.mark.parametrize("name", ["no-such-org/no-such-model", "not/a/hub/id", ""])
def test_offline_a_directory_is_asked_for(name: str) -> None:
    source = (
        "from tinsmith.text.tokenizer import load_tokenizer\nfrom tinsmith.errors import TinkerError\n"
        f"try:\n    load_tokenizer({name!r})\nexcept TinkerError as error:\n    print(error)"
    )
    environment = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": ":".join(sys.path)}
    result = subprocess.run(
        [sys.executable, "-c", source], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    assert f"{name!r} is not a directory" in result.stdout
    assert "Offline, pass a directory that contains tokenizer.json" in result.stdout


@pytest.mark.parametrize(
    ("package", "call"),
    [
        ("huggingface_hub", lambda: load_tokenizer("no-such-org/no-such-model")),
        ("transformers", lambda: load_tokenizer("no-such-org/no-such-model", prefer_transformers=True)),
        ("tokenizers", lambda: load_tokenizer(TokenizerFiles(b"never loaded"))),
        ("jinja2", lambda: load_tokenizer(files()).apply_chat_template(USER)),
    ],
)
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, package: str, call: Any) -> None:
    files()
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        TinkerError, match=f"needs the package {package}, which is not installed: pip install {package}"
    ) as told:
        call()
    assert isinstance(told.value, ImportError)
    assert told.value.name == package


def test_a_package_that_lacks_another_says_so_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "half_there.py").write_text("import no_such_package_at_all")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_package_at_all"):
        library("half_there", "this test")
