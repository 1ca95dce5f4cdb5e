"""Data files, preference pairs and the state of `tinsmith train`, without a server."""

from __future__ import annotations

import json
import math
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tinsmith.cli.dataset import MAX_ERRORS, BadDataError, Check, DataFile, Example, chat_tokens, check_example, fitted
from tinsmith.cli.dpo import Pair, check_pair, dpo_loss, texts_of
from tinsmith.cli.progress import ProgressView, duration
from tinsmith.cli.report import curve_svg, numbered, report_html
from tinsmith.cli.train import state as run_state
from tinsmith.cli.train.demo import INCLUDED_DATA, PROMPTS
from tinsmith.cli.train.sft import Plan, split
from tinsmith.cli.train.state import MetricsFile, OutputError, RunPlan, RunState, opened, read_state, write_state

CHAT = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}


def written(tmp_path: Path, *lines: Any, check: Check = check_example) -> DataFile:
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return DataFile.read(path, check)


def test_lines_are_counted_as_editors_count_them(tmp_path: Path) -> None:
    separator = json.dumps({"prompt": "a\u2028b\x85", "completion": "c"}, ensure_ascii=False)
    data = written(tmp_path, separator, "", "   ", CHAT)
    assert [line for line, _ in data.rows] == [1, 4]


def test_a_byte_order_mark_is_no_part_of_the_data(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(CHAT).encode())
    assert DataFile.read(path, check_example).rows == ((1, CHAT),)


def test_a_line_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b"{}\n\xff\n")
    with pytest.raises(BadDataError, match=r"data\.jsonl:2: not UTF-8"):
        DataFile.read(path, check_example)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, "it is empty"),
        ({"text": "x"}, "it has 'text'"),
        ({"chosen": 1, "rejected": 2}, "use --dpo"),
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"role": "user", "content": "x"}]}, "nothing to learn"),
        ({"messages": [{"role": "assistant", "content": [{"type": "text"}]}]}, r"messages\[0\] needs"),
        ({"prompt": "x", "completion": 3}, "needs 'messages'"),
        ({"prompt": "x", "completion": ""}, "'completion' is empty; write an answer, or delete the line"),
        ({"messages": [*CHAT["messages"], {"role": "assistant", "content": " \n"}]}, r"messages\[2\] is empty; write"),
    ],
    ids=["empty", "other", "pair", "no messages", "no answer", "parts", "number", "no completion", "blank answer"],
)
def test_what_is_no_example_is_refused(row: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(BadDataError, match=rf"data\.jsonl:2: .*{message}"):
        written(tmp_path, CHAT, row)


def test_all_bad_lines_are_reported_together(tmp_path: Path) -> None:
    with pytest.raises(BadDataError) as caught:
        written(tmp_path, CHAT, {"text": "x"}, "{", CHAT, {"text": "x"}, {"prompt": "q", "completion": " "}, '{"a" 1}')
    assert [line.rpartition("data.jsonl:")[2] for line in str(caught.value).splitlines()] == [
        "2: needs 'messages' (a chat), or 'prompt' and 'completion' (strings); it has 'text'",
        "3: not valid JSON: Expecting property name enclosed in double quotes at column 2",
        "5: needs 'messages' (a chat), or 'prompt' and 'completion' (strings); it has 'text'",
        "6: 'completion' is empty; write an answer, or delete the line",
        "7: not valid JSON: Expecting ':' delimiter at column 6",
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            json.dumps([CHAT, CHAT]),
            "data.jsonl is one JSON array; write each example on a line of its own: jq -c '.[]' ",
        ),
        (json.dumps([CHAT, CHAT], indent=2), "data.jsonl is one JSON array; write each example on a line of its own"),
        (json.dumps(CHAT, indent=2), "data.jsonl is one JSON value on several lines; write it on one line: jq -c . "),
    ],
    ids=["array", "indented array", "indented object"],
)
def test_json_that_is_not_line_by_line_is_recognized(text: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(BadDataError) as caught:
        written(tmp_path, text)
    assert problem in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_file_that_is_no_json_is_told_what_it_should_be(tmp_path: Path) -> None:
    with pytest.raises(BadDataError) as caught:
        written(tmp_path, "prompt,completion", '{"a')
    assert [line.rpartition("data.jsonl:")[2] for line in str(caught.value).splitlines()] == [
        "1: not valid JSON: Expecting value at column 1",
        "2: not valid JSON: Unterminated string starting at column 2",
        "Each line of the file must be a JSON object (JSONL).",
    ]


@pytest.mark.parametrize(
    ("bad", "end"), [(20, "data.jsonl:20: messages is empty"), (21, "... and 1 more"), (500, "... and 480 more")]
)
def test_the_first_twenty_bad_lines_are_listed_and_the_rest_counted(bad: int, end: str, tmp_path: Path) -> None:
    with pytest.raises(BadDataError) as caught:
        written(tmp_path, *[{"messages": []}] * bad, CHAT)
    lines = str(caught.value).splitlines()
    assert MAX_ERRORS == 20
    assert [line.rpartition("data.jsonl:")[2] for line in lines[:20]] == [
        f"{n}: messages is empty" for n in range(1, 21)
    ]
    assert lines[-1].endswith(end)
    assert len(lines) <= 21


ASK, SAY = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
OTHER = {"role": "assistant", "content": "b"}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "q", "chosen": "a", "rejected": "b"},
        {"prompt": [ASK], "chosen": "a", "rejected": "b"},
        {"prompt": [ASK], "chosen": SAY, "rejected": OTHER},
        {"prompt": [ASK], "chosen": [SAY], "rejected": [OTHER]},
        {"chosen": [ASK, SAY], "rejected": [ASK, OTHER]},
    ],
    ids=["texts", "messages and texts", "message", "list", "chats"],
)
def test_forms_of_pairs(row: Any, tmp_path: Path) -> None:
    assert len(written(tmp_path, row, check=check_pair).rows) == 1


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([], "needs 'prompt'"),
        ({"prompt": "q", "chosen": "a"}, "needs 'prompt'"),
        ({"prompt": 1, "chosen": "a", "rejected": "b"}, "'prompt' is a number"),
        ({"prompt": "q", "chosen": [SAY], "rejected": "b"}, "'chosen' must be a string"),
        ({"chosen": "a", "rejected": "b"}, "needs 'prompt'"),
        ({"chosen": [SAY], "rejected": [ASK, OTHER]}, "'chosen' is only an answer"),
        ({"prompt": [ASK], "chosen": [ASK], "rejected": [OTHER]}, "must have the role 'assistant'"),
        (CHAT, "this looks like an example: omit --dpo"),
        ({"prompt": "q", "chosen": "", "rejected": "b"}, "'chosen' is empty"),
        ({"prompt": [ASK], "chosen": "a", "rejected": "  "}, "'rejected' is empty"),
        ({"chosen": [ASK, SAY], "rejected": [ASK, {**OTHER, "content": ""}]}, r"rejected\[1\] is empty"),
    ],
    ids=[
        *("list", "no rejected", "number", "mixed", "no prompt", "alone", "user"),
        *("example", "no text", "blank", "no message"),
    ],
)
def test_what_is_no_pair_is_refused(row: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(BadDataError, match=rf"data\.jsonl:1: .*{message}"):
        written(tmp_path, row, check=check_pair)


class SpellingTokenizer:
    """A token per letter; a chat is written as its roles' first letters and contents, each ended by a dot."""

    def apply_chat_template(self, messages: Any, tokenize: bool = True, add_generation_prompt: bool = False) -> Any:
        text = "".join(f"{message['role'][0]}{message['content']}." for message in messages)
        return [ord(letter) for letter in text + ("a" if add_generation_prompt else "")]


def test_what_the_assistant_says_counts() -> None:
    messages = [ASK, SAY, {"role": "user", "content": "xy"}, {"role": "assistant", "content": "zz"}]
    tokens, weights = chat_tokens(messages, SpellingTokenizer(), "here")
    counted = "".join(chr(token) if weight else "-" for token, weight in zip(tokens, weights, strict=True))
    assert counted == "----a.-----zz."
    assert Example(tokens, weights).last_answer == len(tokens) - 3


def test_only_what_still_teaches_something_is_cut() -> None:
    example = Example(tuple(range(6)), (0.0, 0.0, 0.0, 1.0, 1.0, 1.0), 3)
    assert fitted(example, 6, "f:3", truncate=False) is example
    cut = fitted(example, 4, "f:3", truncate=True)
    assert (cut.tokens, cut.is_cut, cut.line) == ((0, 1, 2, 3), True, 3)
    with pytest.raises(
        BadDataError, match="f:3: cannot truncate: the first 3 of its 6 tokens contain nothing to learn"
    ):
        fitted(example, 3, "f:3", truncate=True)


def test_the_gradient_of_dpo_is_that_of_its_formula() -> None:
    generator = np.random.default_rng(0)
    texts = texts_of(
        [
            Pair(
                *(Example(tuple(range(5 + side)), (0.0, 0.0, 1.0, 1.0, *[1.0] * (1 + side))) for side in (0, 1)),
            )
            for _ in range(3)
        ]
    )
    logprobs = [torch.tensor(generator.normal(size=len(text.weights) - 1), requires_grad=True) for text in texts]
    reference = generator.normal(size=len(texts)).tolist()
    masks = [torch.tensor(text.weights[1:], dtype=torch.float64) for text in texts]
    sums = torch.stack([(row * mask).sum() for row, mask in zip(logprobs, masks, strict=True)])
    gains = sums - torch.tensor(reference, dtype=torch.float64)
    loss = -torch.nn.functional.logsigmoid(0.3 * (gains[0::2] - gains[1::2])).mean()
    loss.backward()
    found = dpo_loss(texts, sums.tolist(), reference, 0.3)
    assert found.loss == pytest.approx(float(loss.detach()), abs=1e-12)
    for row, gradient in zip(logprobs, found.gradients, strict=True):
        assert row.grad is not None
        np.testing.assert_allclose(gradient, row.grad.numpy(), atol=1e-12)
    assert found.accuracy == pytest.approx(float(((gains[0::2] - gains[1::2]) > 0).float().mean()))


def test_dpo_begins_at_ln_2_and_bears_large_margins() -> None:
    texts = [Example((1, 2), (0.0, 1.0)), Example((1, 3), (0.0, 1.0))]
    assert dpo_loss(texts, [-1.0, -2.0], [-1.0, -2.0], 0.1).loss == math.log(2)
    assert dpo_loss(texts, [0.0, -1e6], [0.0, 0.0], 1.0).loss == 0.0
    assert dpo_loss(texts, [-1e6, 0.0], [0.0, 0.0], 1.0).loss == 1e6


def test_batches_and_splits_follow_the_seed() -> None:
    items = list(range(10))
    plan = Plan(epochs=2, batch_size=4, seed=1)
    assert plan.batches(items) == Plan(epochs=2, batch_size=4, seed=1).batches(items)
    assert plan.batches(items) != Plan(epochs=2, batch_size=4, seed=2).batches(items)
    assert [len(batch) for batch in plan.batches(items)] == [4, 4, 2, 4, 4, 2]
    learned, held = split(items, 0.25, 1)
    assert (len(learned), len(held)) == (8, 2)
    assert sorted(learned + held) == items
    assert split(items, 0.0, 1) == (items, [])
    assert [len(part) for part in split([1, 2], 0.9, 1)] == [1, 1]
    assert [len(part) for part in split([1], 0.5, 1)] == [1, 0]


def state(**changes: Any) -> RunState:
    plan = RunPlan(
        model="m", method="sft", rank=1, learning_rate=1e-3, epochs=1, batch_size=1, eval_split=0.0, seed=0, beta=0.1,
        truncate=False,
    )  # fmt: skip
    values = {"version": 1, "run": "r", "checkpoint": "c", "step": 1, "total": 2, "plan": plan}
    return RunState(**{**values, "data": "d", "data_sha256": "0", **changes})


def test_a_state_comes_back_and_others_are_refused(tmp_path: Path) -> None:
    assert read_state(tmp_path) is None
    write_state(tmp_path, state())
    assert read_state(tmp_path) == state()
    write_state(tmp_path, state(version=2))
    with pytest.raises(OutputError, match="has version 2; this tinsmith reads version 1"):
        read_state(tmp_path)
    (tmp_path / run_state.STATE).write_text("{}")
    with pytest.raises(OutputError, match="is not a state file of tinsmith train"):
        read_state(tmp_path)


def test_a_state_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_state(tmp_path, state())

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_state.os, "fsync", full)
    with pytest.raises(OutputError, match=r"cannot write .*state\.json: No space left on device"):
        write_state(tmp_path, state(step=2))
    assert read_state(tmp_path) == state()
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]


def test_metrics_after_a_checkpoint_are_forgotten(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path)
    for step in range(1, 5):
        metrics.add({"step": step, "loss": 1.0 / step})
    with (tmp_path / run_state.METRICS).open("a") as file:
        file.write('{"step": 5, "lo')  # cut off by a crash
    metrics.keep(2)
    assert [row["step"] for row in metrics.rows()] == [1, 2]


def test_an_output_directory_has_one_user(tmp_path: Path) -> None:
    with (
        opened(tmp_path / "out"),
        pytest.raises(OutputError, match="another tinsmith train is using"),
        opened(tmp_path / "out"),
    ):
        pass
    with opened(tmp_path / "out"):
        pass


class Lines:
    """A console that is no terminal."""

    is_terminal = False

    def __init__(self) -> None:
        self.printed: list[str] = []

    def print(self, text: str, **_: Any) -> None:
        self.printed.append(text)


@pytest.mark.parametrize(
    ("total", "first", "shown"),
    [
        (5, 0, [1, 2, 3, 4, 5]),
        (45, 0, [1, 5, 10, 15, 20, 25, 30, 35, 40, 45]),
        (33, 29, [30, 32, 33]),
        (2001, 0, [1, *range(200, 2001, 200), 2001]),
    ],
    ids=["few", "many", "resumed", "more"],
)
def test_outside_a_terminal_every_nth_step_and_the_last_have_a_line(total: int, first: int, shown: list[int]) -> None:
    console = Lines()
    with ProgressView(console, total, first) as view:
        for step in range(first + 1, total + 1):
            view.step(step, "loss", "rest")
    assert [line.split()[1] for line in console.printed] == [f"{step}/{total}" for step in shown]


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (99, "99 s"), (100, "1 min 40 s"), (7300, "2 h 01 min")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_report_has_its_curves_and_escapes_what_models_say() -> None:
    curves = {"Loss": {"training": numbered([2.0, 1.0])}, "Reward": {"training": [(0, 1.0)]}}
    page = report_html("t", {"a": "<b>"}, curves, [("q", "<u>", "&")])
    assert page.count("<svg") == 2
    assert "&lt;u&gt;" in page
    assert "<u>" not in page
    assert curve_svg("x", []) == curve_svg("x", [(1, math.nan)]) == ""


def test_the_demo_has_its_data() -> None:
    with resources.as_file(INCLUDED_DATA) as path:
        data = DataFile.read(path, check_example)
    assert len(data.rows) > 20
    asked = {message["content"] for _, row in data.rows for message in row["messages"]}
    assert not asked & set(PROMPTS)
