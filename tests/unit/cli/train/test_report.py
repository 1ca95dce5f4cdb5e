"""The report of a run: its axes, its curves, and the answers before and after."""

from __future__ import annotations

import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

from tinsmith.cli.dataset import DataFile, Example
from tinsmith.cli.dpo import Pair, margins_of, share_right
from tinsmith.cli.report import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, curve_svg, curves_svg, report_html, ticks_of
from tinsmith.cli.train.comparison import LONGEST_ANSWER, LONGEST_PROMPT, answers_to, prompts_of
from tinsmith.cli.train.run import TrainRun, curves_of
from tinsmith.cli.train.state import RunPlan
from tinsmith.errors import RequestFailedError


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ([0.12, 3.9], [0, 1, 2, 3, 4]),
        ([2.19, 2.2], [2.19, 2.192, 2.194, 2.196, 2.198, 2.2]),
        ([100.0], [0, 20, 40, 60, 80, 100]),
        ([0.0, 0.0], [0, 0.2, 0.4, 0.6, 0.8, 1]),
        ([-5.0, 5.0], [-6, -4, -2, 0, 2, 4, 6]),
        ([-3.0], [-3, -2, -1, 0]),
        ([-1e308, 1e308], [-1e308, 1e308]),
    ],
)
def test_ticks_are_round_numbers_around_the_values(values: list[float], ticks: list[float]) -> None:
    assert ticks_of(values, 5) == pytest.approx(ticks)


def test_steps_have_whole_numbers() -> None:
    assert ticks_of([1, 3], 8, least=1.0) == [1, 2, 3]
    assert ticks_of([0, 60], 8, least=1.0) == [0, 10, 20, 30, 40, 50, 60]


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter("text")]


def test_axes_have_ticks_and_names_and_a_curve_stays_inside_them() -> None:
    svg = curve_svg("Loss", [(1, 3.9), (2, math.nan), (3, 0.1)])
    assert texts(svg) == ["0", "1", "2", "3", "4", "1", "2", "3", "step", "Loss"]
    line = ElementTree.fromstring(svg).find("polyline")
    assert line is not None
    places = [tuple(map(float, place.split(","))) for place in line.attrib["points"].split()]
    assert len(places) == 2, "a value that is not finite is left out"
    assert [x for x, _ in places] == [LEFT, WIDTH - RIGHT]
    assert all(TOP <= y <= HEIGHT - BOTTOM for _, y in places)
    assert places[0][1] < places[1][1], "a larger value is higher up"
    assert "Loss, step 3: 0.1" in svg


def test_two_series_share_their_axes_and_have_a_legend() -> None:
    svg = curves_svg("Loss", {"training": [(1, 4.0), (4, 1.0)], "held out": [(0, 5.0), (4, 2.0)]})
    assert texts(svg)[-2:] == ["training", "held out"]
    first, second = (
        line.attrib["points"].split()[-1].split(",") for line in ElementTree.fromstring(svg).iter("polyline")
    )
    assert first[0] == second[0]
    assert float(first[1]) > float(second[1])
    assert "<circle" not in curve_svg("Loss", [(step, 1.0) for step in range(1000)])


def test_a_metrics_file_becomes_curves() -> None:
    rows = [
        {"step": 0, "held_out_loss": 0.7, "held_out_accuracy": 0.0, "held_out_margin": 0.0},
        {"step": 1, "loss": 0.6, "accuracy": 0.5, "margin": 0.1},
        {"step": 2, "loss": 0.5, "accuracy": 1.0, "margin": 0.3},
    ]
    assert curves_of(rows, "dpo") == {
        "Loss per pair": {"training": [(1, 0.6), (2, 0.5)], "held out": [(0, 0.7)]},
        "Share right (%)": {"training": [(1, 50.0), (2, 100.0)], "held out": [(0, 0.0)]},
        "Margin": {"training": [(1, 0.1), (2, 0.3)], "held out": [(0, 0.0)]},
    }
    assert curves_of(rows[1:], "sft") == {"Loss per token": {"training": [(1, 0.6), (2, 0.5)]}}


def test_answers_have_a_column_for_the_one_in_the_data() -> None:
    page = report_html("t", {}, {}, [("q", "", "after", "wanted")], "Where from.")
    assert re.findall(r"<th>(.*?)</th>", page) == ["Prompt", "Before", "After", "In the data"]
    assert "<td><i>(empty)</i></td><td>after</td><td>wanted</td>" in page
    assert "<p>Where from.</p>" in page
    assert "In the data" not in report_html("t", {}, {}, [("q", "a", "b")])


class Letters:
    def decode(self, tokens: Any, skip_special_tokens: bool = False) -> str:
        return bytes(token for token in tokens if token or not skip_special_tokens).decode()


def example(prompt: str, answer: str, line: int) -> Example:
    tokens = (*prompt.encode(), *answer.encode(), 0)
    return Example(tokens, (0.0,) * len(prompt) + (1.0,) * (len(answer) + 1), line)


def test_prompts_of_a_report_are_spread_over_the_data() -> None:
    rows = {n: {"prompt": f"q{n}", "completion": f"a{n}"} for n in range(1, 41)}
    found = prompts_of([example(f"q{n}", f"a{n}", n) for n in rows], rows, Letters(), None)
    assert [(prompt.text, prompt.expected) for prompt in found] == [(f"q{n}", f"a{n}") for n in (1, 11, 21, 31)]
    assert [bytes(prompt.tokens) for prompt in found] == [b"q1", b"q11", b"q21", b"q31"]


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]}, "one"),
        ({"prompt": [{"role": "user", "content": "one"}], "chosen": "a", "rejected": "b"}, "one"),
        (
            {"chosen": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "x"}], "rejected": []},
            "one",
        ),
        ({"messages": [{"role": "assistant", "content": "two"}]}, ""),
        ({"prompt": "a" * 2000 + "the end", "completion": "x"}, "... " + "a" * (LONGEST_PROMPT - 7) + "the end"),
    ],
    ids=["chat", "pair", "chats", "no question", "long"],
)
def test_the_last_question_of_a_line_is_shown(row: Any, text: str) -> None:
    item = Pair(example("p", "good", 7), example("p", "bad", 7)) if "chosen" in row else example("p", "good", 7)
    (prompt,) = prompts_of([item], {7: row}, Letters(), None)
    assert (prompt.text, prompt.expected) == (text, "good")


def test_answers_fit_the_context_and_end_in_dots_if_cut() -> None:
    row = {1: {"prompt": "p", "completion": "c"}}
    assert prompts_of([example("p" * 64, "c", 1)], row, Letters(), 64) == []
    (short,) = prompts_of([example("p" * 60, "c", 1)], row, Letters(), 64)
    (long,) = prompts_of([example("p", "c" * 999, 1)], row, Letters(), None)
    assert (short.max_tokens, long.max_tokens) == (4, LONGEST_ANSWER)

    asked: list[Any] = []

    def sample(given: Any, count: int, params: Any) -> Any:
        asked.append((given.to_ints(), count, params.temperature, params.max_tokens))
        reason = "length" if len(asked) == 1 else "stop"
        sequence = SimpleNamespace(tokens=list(b" hi \x00"), stop_reason=reason)
        return SimpleNamespace(result=lambda: SimpleNamespace(sequences=[sequence]))

    assert answers_to(SimpleNamespace(sample=sample), Letters(), [short, long]) == ["hi ...", "hi"]
    assert asked == [(list(b"p" * 60), 1, 0.0, 4), (list(b"p"), 1, 0.0, LONGEST_ANSWER)]


def run_with(service: Any) -> TrainRun:
    """A run that is far enough to be asked for answers."""
    run = object.__new__(TrainRun)
    plan = RunPlan(
        model="base", method="sft", rank=1, learning_rate=1.0, epochs=1, batch_size=1, eval_split=0.0, seed=0, beta=0.1,
        truncate=False,
    )  # fmt: skip
    run.plan, run.items, run.held_out = plan, [example("p", "c", 1)], []
    run._service, run._tokenizer, run._context = service, Letters(), None
    run._data = DataFile(Path("d"), "", ((1, {"prompt": "p", "completion": "c"}),))
    return run


class Models:
    """A server whose models answer with their own name."""

    def create_sampling_client(self, base_model: str = "", model_path: str = "") -> Any:
        sequence = SimpleNamespace(tokens=list((base_model or model_path).encode()), stop_reason="stop")
        future = SimpleNamespace(result=lambda: SimpleNamespace(sequences=[sequence]))
        return SimpleNamespace(sample=lambda *_: future)


def test_both_models_are_asked() -> None:
    rows, said = run_with(Models())._answers("tuned")
    assert rows == [("p", "base", "tuned", "c")]
    assert said == "Greedy answers to prompts of the training data."


def test_a_server_that_refuses_to_sample_costs_the_report_its_answers_only() -> None:
    class Refusing:
        def create_sampling_client(self, **_: Any) -> Any:
            raise RequestFailedError("this key may not sample", "r1", "user")

    assert run_with(Refusing())._answers("tuned") == ([], "There are no answers to compare: this key may not sample")


def test_a_margin_is_how_much_more_the_chosen_answer_gained() -> None:
    margins = margins_of([-1.0, -5.0, -2.0, -2.0], [-2.0, -4.0, -1.0, -3.0])
    assert margins == [2.0, -2.0]
    assert share_right(margins) == 0.5
    assert share_right([0.0]) == 0.0
