"""Custom losses and tokenizers beside the official client's own and transformers'."""

from __future__ import annotations

import inspect
import json
import math
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name that everyone uses
from conftest import NEWEST, OFFICIAL, Official, RefusedError
from support.releases import ROOT

from tinsmith.client import custom_loss
from tinsmith.client.loss_graph import LossHandle, trace
from tinsmith.client.tokenizers import PINNED_REVISIONS, load_tokenizer, tokenizer_source
from tinsmith.errors import InvalidInputError
from tinsmith.wire import json_codec
from tinsmith.wire.inputs import Datum, ModelInput
from tinsmith.wire.tensors import TensorData
from tinsmith.wire.training import CreateCustomLossRequest, ForwardBackwardOutput


class Oracle(Official):
    """The process of official/trace_oracle.py."""

    def __init__(self) -> None:
        self.release = NEWEST
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("TINKER", "PYTHON"))}
        script = Path(__file__).parent / "official" / "trace_oracle.py"
        self._process = subprocess.Popen(
            [OFFICIAL / "venv" / "bin" / "python", "-W", "ignore", script],
            env=environment | {"PYTHONPATH": str(OFFICIAL / NEWEST), "HF_HUB_OFFLINE": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )


@pytest.fixture(scope="module")
def oracle() -> Iterator[Oracle]:
    process = Oracle()
    yield process
    process.close()


def cross_entropy(logprobs: Any, weights: Any) -> Any:
    return -(logprobs * weights).sum(), {}


def importance_sampling(logprobs: Any, sampled: Any, advantages: Any) -> Any:
    ratio = torch.exp(logprobs - sampled)
    return -(ratio * advantages).sum(), {"custom/ratio:mean": ratio.mean(), "custom/tokens:sum": ratio.sum() * 0 + 1}


def clipped(logprobs: Any, sampled: Any, advantages: Any) -> Any:
    ratio = (logprobs - sampled).exp()
    bounded = ratio.clamp(min=0.8, max=1.2)
    return -torch.minimum(ratio * advantages, bounded * advantages).sum(), {
        "custom/clip_fraction:mean": (ratio != bounded).float().mean()
    }


def stopped_gradient(logprobs: Any, advantages: Any) -> Any:
    weight = torch.clamp(logprobs.detach().exp(), max=math.inf)
    return -(weight * logprobs * advantages).sum(), {}


def sliced(logprobs: Any, input: Any) -> Any:
    half = logprobs.size(0) // 2
    return logprobs[:half].sum() + logprobs[..., 1::2].mean() + input[[0, 1]].sum() + logprobs[None, :].sum(), {}


def typed(logprobs: Any) -> Any:
    zeros = torch.zeros_like(logprobs, dtype=torch.float64, layout=torch.strided, device=torch.device("cpu"))
    kept = logprobs.contiguous(memory_format=torch.contiguous_format).to(torch.bfloat16)
    return torch.where(kept > -math.inf, kept, zeros).sum() + torch.nan_to_num(logprobs, nan=math.nan).sum(), {}


def shaped(logprobs: Any, target_tokens: Any) -> Any:
    rows, columns = logprobs.shape
    flat = logprobs.reshape((rows * columns,)) * target_tokens.reshape(-1)
    return flat.sum() / logprobs.shape[0] + logprobs.sum(dim=(0, 1), keepdim=True).squeeze(), {}


def functional(logprobs: Any, reference: Any) -> Any:
    kl = F.kl_div(logprobs, reference, reduction="none", log_target=True)
    return kl.sum() + F.relu(logprobs).sum() - F.logsigmoid(logprobs).mean() + F.softmax(logprobs, dim=-1)[0], {}


def scalar_input(logprobs: Any, beta: Any) -> Any:
    return beta * logprobs.sum() / math.sqrt(logprobs.numel()), {"custom/a/b.c-d_0:sum": beta.detach()}


def listed(logprobs: Any) -> Any:
    parts = torch.stack([logprobs, logprobs * 2]) + torch.cat((logprobs, logprobs)).sum()
    return [parts.mean() ** 2 + abs(logprobs).sum() - -logprobs.T.sum() + sum([logprobs.sum(), 1]), {}]


def unpacked(logprobs: Any) -> Any:
    first, second = logprobs.split(2)
    best = logprobs.max(dim=0)
    unused = logprobs.exp()  # noqa: F841 - what is computed in vain is sent all the same
    return first.sum() * second.sum() + best.values + best[0] + torch.einsum("i,i->", logprobs, logprobs), {}


def operators(logprobs: Any, sum_1: Any) -> Any:
    logprobs += 1
    mask = (logprobs > 0) & ~(sum_1 >= 2) | (logprobs % 2 == 1)
    return (mask * (2 - logprobs) / (1 + sum_1) // 3).sum() + logprobs @ sum_1 + logprobs.clone().add_(1).sum(), {}


def special(logprobs: Any) -> Any:
    added = torch.ops.aten.sum.default(logprobs) + torch.linalg.norm(logprobs)
    return added + torch.special.expm1(logprobs).sum() + math.pi * F.softplus(logprobs).sum(), {}


LOSSES: list[tuple[Any, dict[str, int]]] = [
    (cross_entropy, {"logprobs": 1, "weights": 1}),
    (importance_sampling, {"advantages": 1, "sampled": 1, "logprobs": 1}),
    (clipped, {"logprobs": 1, "sampled": 1, "advantages": 1}),
    (stopped_gradient, {"logprobs": 1, "advantages": 1}),
    (sliced, {"logprobs": 1, "input": 1}),
    (typed, {"logprobs": 1}),
    (shaped, {"logprobs": 2, "target_tokens": 2}),
    (functional, {"logprobs": 1, "reference": 1}),
    (scalar_input, {"logprobs": 1, "beta": 0}),
    (listed, {"logprobs": 1}),
    (unpacked, {"logprobs": 1}),
    (operators, {"logprobs": 1, "sum_1": 1}),
    (special, {"logprobs": 1}),
]


def renamed(graph: dict[str, Any]) -> Any:
    """A graph whose nodes are named by their place."""
    names = {node["name"]: f"node{i}" for i, node in enumerate(graph["nodes"])}
    assert len(names) == len(graph["nodes"])

    def rename(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: names[item] if key == "ref" else rename(item) for key, item in value.items()}
        return [rename(item) for item in value] if isinstance(value, list) else value

    nodes = [{**rename(node), "name": names[node["name"]]} for node in graph["nodes"]]
    return {**graph, "nodes": nodes}


@pytest.mark.parametrize(("fn", "ranks"), LOSSES, ids=lambda value: getattr(value, "__name__", ""))
def test_losses_are_traced_alike(oracle: Oracle, fn: Any, ranks: dict[str, Any]) -> None:
    theirs = oracle.ask("trace", source=inspect.getsource(fn), name=fn.__name__, ranks=ranks)
    ours = trace(fn, ranks)
    handle = LossHandle(ours.name, tuple(ours.inputs), "session", ours.module)
    assert ours.name == theirs["name"]
    assert list(handle.input_names) == theirs["input_names"]
    assert [msgspec.to_builtins(item) for item in ours.inputs] == theirs["inputs"]
    request = CreateCustomLossRequest(
        session_id="session", custom_loss_seq_id=0, name=ours.name, inputs=ours.inputs, graph=ours.graph
    )
    sent = json.loads(json_codec.encode(request))
    assert oracle.ask("read_request", request=sent) == sent
    assert renamed(sent["graph"]) == renamed(theirs["graph"])


REFUSED = {
    "branch": "if logprobs.sum() > 0:\n        pass\n    return logprobs.sum(), {}",
    "loop": "total = 0\n    for x in logprobs:\n        total = total + x\n    return total, {}",
    "length": "return logprobs.sum() / len(logprobs), {}",
    "constant tensor": "return logprobs.sum() * torch.tensor(2.0), {}",
    "module": "return torch.nn.ReLU()(logprobs).sum(), {}",
    "host value": "return logprobs.sum(), {'custom/a:sum': logprobs.sum().item()}",
    "backward": "logprobs.sum().backward()\n    return logprobs.sum(), {}",
    "unknown method": "return logprobs.no_such_method(), {}",
    "complex": "return logprobs.sum() * 1j, {}",
    "range": "return logprobs.index_select(0, range(2)).sum(), {}",
    "function argument": "return logprobs.apply_(math.sin).sum(), {}",
    "no metrics": "return logprobs.sum()",
    "metrics of None": "return logprobs.sum(), None",
    "metric name": "return logprobs.sum(), {'loss:sum': logprobs.sum()}",
    "metric reduction": "return logprobs.sum(), {'custom/a:max': logprobs.sum()}",
    "metric of a number": "return logprobs.sum(), {'custom/a:sum': 1.0}",
    "loss of a number": "return 1.0, {}",
}


@pytest.mark.parametrize("body", REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_sent_is_refused_by_both(oracle: Oracle, body: str) -> None:
    source = f"def loss(logprobs):\n    {body}\n"
    names: dict[str, Any] = {"torch": torch, "math": math, "__name__": "losses"}
    exec(source, names)
    with pytest.raises(RefusedError):
        oracle.ask("trace", source=source, name="loss", ranks={"logprobs": 1})
    with pytest.raises(InvalidInputError):
        trace(names["loss"], {"logprobs": 1})


def test_a_traced_loss_runs_here_as_there(oracle: Oracle) -> None:
    logprobs = [[-1.0, -2.0, -3.0], [-0.5, -0.25]]
    inputs = [
        {
            "target_tokens": {"data": list(range(len(row))), "dtype": "int64", "shape": [len(row)]},
            "sampled": {"data": [-1.0] * len(row), "dtype": "float32", "shape": [len(row)]},
            "advantages": {"data": [0.5] * len(row), "dtype": "float32", "shape": [len(row)]},
        }
        for row in logprobs
    ]
    ranks: dict[str, Any] = {"logprobs": 1, "sampled": 1, "advantages": 1}
    theirs = oracle.ask(
        "run_handle",
        source=inspect.getsource(importance_sampling),
        name="importance_sampling",
        ranks=ranks,
        logprobs=logprobs,
        inputs=inputs,
    )
    traced = trace(importance_sampling, ranks)
    handle = LossHandle(traced.name, tuple(traced.inputs), "session", traced.module)
    data = [datum_of(item) for item in inputs]
    loss, metrics = custom_loss.loss_of_handle(handle)(data, [torch.tensor(row) for row in logprobs])
    assert float(loss) == pytest.approx(theirs["loss"], rel=1e-6)
    assert metrics == pytest.approx(theirs["metrics"], rel=1e-6)


def datum_of(inputs: dict[str, Any]) -> Datum:
    tensors = {key: TensorData(**value) for key, value in inputs.items()}
    return Datum(ModelInput.from_ints(list(range(len(tensors["target_tokens"])))), tensors)


def squares(data: Any, logprobs: Any) -> Any:
    loss = sum((tensor * tensor).sum() for tensor in logprobs)
    return loss, {"plain": 3.0, "b:mean": 2.0, "loss:sum": 99.0, "x:mean": 5.0, "surrogate_loss:sum": 4.0}


def one_cell(data: Any, logprobs: Any) -> Any:
    return sum(tensor.flatten()[-1] for tensor in logprobs).reshape(1), {}


TARGETS = {"data": [3, 4, 5], "dtype": "int64", "shape": [3]}
CUSTOM_DATA: dict[str, list[dict[str, Any]]] = {
    "plain": [{"target_tokens": TARGETS}, {"target_tokens": {"data": [1, 2], "dtype": "int64"}}],
    "weights and more": [
        {
            "target_tokens": TARGETS,
            "weights": {"data": [1.0, 0.5, 0.0], "dtype": "float32", "shape": [3]},
            "advantages": {"data": [1.0, 2.0, 3.0], "dtype": "float32", "shape": [3]},
        }
    ],
    "two dimensions": [{"target_tokens": {"data": list(range(60)), "dtype": "int64", "shape": [3, 20]}}],
}


@pytest.mark.parametrize("fn", [squares, one_cell], ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("inputs", CUSTOM_DATA.values(), ids=CUSTOM_DATA.keys())
def test_a_python_loss_sends_the_same(oracle: Oracle, inputs: list[dict[str, Any]], fn: Any) -> None:
    data = [datum_of(item) for item in inputs]
    logprobs = [-1.0 - 0.25 * datum.loss_fn_inputs["target_tokens"].array for datum in data]
    server = {"loss:sum": 7.5, "x:mean": 1.0}
    theirs = oracle.ask(
        "run_custom",
        source=inspect.getsource(fn),
        name=fn.__name__,
        inputs=inputs,
        logprobs=[array.tolist() for array in logprobs],
        metrics=server,
    )
    outputs = [{"logprobs": TensorData.from_numpy(array.astype(np.float32))} for array in logprobs]
    custom = custom_loss.gradients(fn, data, outputs)
    passes = [custom_loss.forward_data(data), custom_loss.backward_data(data, custom.gradients)]
    ours = custom_loss.result_metrics(ForwardBackwardOutput("T", outputs, server), custom)
    assert [call["call"] for call in theirs["calls"]] == ["forward", "forward_backward"]
    for call, sent in zip(theirs["calls"], passes, strict=True):
        assert (call["loss_fn"], call["config"]) == (custom_loss.SURROGATE, None)
        assert [
            {
                key: {
                    "dtype": tensor.dtype,
                    "values": tensor.tolist(),
                    "sparse_crow_indices": tensor.sparse_crow_indices,
                }
                for key, tensor in datum.loss_fn_inputs.items()
            }
            for datum in sent
        ] == call["inputs"]
    assert ours.metrics == theirs["metrics"]


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
from tinsmith.client.tokenizers import TokenizerFiles, load_tokenizer
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
