"""The loops of `train` and `demo --rl`, with a model that records its requests."""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest

from tinsmith.cli.train.command import _interrupts, _options
from tinsmith.cli.train.defaults import FEW, RULES, Settings, settings_for
from tinsmith.cli.train.demo_rl import FACTS, UNSEEN, reward
from tinsmith.cli.train.rl import Question, RlPlan, reinforce
from tinsmith.cli.train.sft import Plan, Saved, Watcher, fine_tune
from tinsmith.cli.train.state import RunPlan
from tinsmith.client.runtime.futures import Future


def done(value: Any) -> Any:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


class Recording:
    """A training client; `calls` are its operations in order."""

    def __init__(self, answers: tuple[str, ...] = ()) -> None:
        self.calls: list[str] = []
        self.data: list[Any] = []
        self._answers = answers

    def save_state(self, name: str) -> Any:
        self.calls.append(name)
        return done(SimpleNamespace(path=f"tinker://run/weights/{name}"))

    def forward_backward(self, data: Any, loss: str) -> Any:
        self.calls.append(loss)
        self.data.append(data)
        return done(SimpleNamespace(metrics={"loss:sum": 1.0}))

    def optim_step(self, params: Any) -> Any:
        self.calls.append(f"step at {params.learning_rate:.3g}")
        return done(None)

    def save_weights_and_get_sampling_client(self) -> Any:
        return self

    def sample(self, prompt: Any, count: int, params: Any) -> Any:
        texts = [self._answers[i % len(self._answers)] for i in range(count)]
        sequences = [
            SimpleNamespace(tokens=list(text.encode()), logprobs=[-1.0] * len(text), stop_reason="stop")
            for text in texts
        ]
        return done(SimpleNamespace(sequences=sequences))


class Counting:
    """An objective whose batches are numbers."""

    def __init__(self, ahead: int) -> None:
        self.ahead = ahead

    def step(self, training: Any, batch: Any, params: Any) -> Any:
        training.calls.append(f"batch {batch[0]}")
        training.optim_step(params)
        return lambda: (float(batch[0]), {})

    def score(self, training: Any, items: Any) -> Any:
        training.calls.append("score")
        return lambda: (0.5, {})

    def tokens(self, batch: Any) -> int:
        return 1


@pytest.mark.parametrize("ahead", [1, 2])
def test_a_checkpoint_has_its_place_between_two_steps(ahead: int) -> None:
    training, saved = Recording(), list[Saved]()
    plan, batches = Plan(learning_rate=1.0), [[n] for n in range(1, 6)]
    count = fine_tune(
        training, Counting(ahead), batches, plan, Watcher(saved=saved.append), first=1, save_every=2, held_out=[0]
    )
    assert count == 5
    assert training.calls == [
        *("batch 2", "step at 0.8", "step-000002", "score", "batch 3", "step at 0.6"),
        *("batch 4", "step at 0.4", "step-000004", "score", "batch 5", "step at 0.2"),
    ]
    assert [(point.step, point.path, point.held_out) for point in saved] == [
        (2, "tinker://run/weights/step-000002", (0.5, {})),
        (4, "tinker://run/weights/step-000004", (0.5, {})),
    ]


def test_the_held_out_part_is_scored_after_each_epoch_and_with_each_checkpoint() -> None:
    training, saved, scored = Recording(), list[Saved](), list[tuple[int, Any]]()
    watcher = Watcher(saved=saved.append, scored=lambda step, measured: scored.append((step, measured)))
    batches = [[n] for n in range(1, 7)]
    fine_tune(training, Counting(2), batches, Plan(), watcher, save_every=4, score_every=2, held_out=[0])
    assert scored == [(2, (0.5, {}))]
    assert [(point.step, point.held_out) for point in saved] == [(4, (0.5, {}))]
    assert training.calls.count("score") == 2, "once at a step that both fall on; the end is its caller's"
    fine_tune(training, Counting(2), batches, Plan(), watcher, score_every=2)
    assert training.calls.count("score") == 2, "nothing was held out"


@pytest.mark.parametrize("method", ["sft", "dpo"])
@pytest.mark.parametrize("counts", [range(1, FEW), range(FEW, 1000)], ids=["small", "large"])
def test_little_data_is_seen_more_often(method: str, counts: range) -> None:
    rule = RULES[method, counts[0] < FEW]
    chosen = [settings_for(method, count, {}) for count in counts]
    epochs = [settings.epochs for settings in chosen]
    assert epochs == sorted(epochs, reverse=True)
    for settings, count in zip(chosen, counts, strict=True):
        per_epoch = math.ceil(count / rule.batch_size)
        enough = settings.epochs * per_epoch >= rule.steps > (settings.epochs - 1) * per_epoch
        assert enough or settings.epochs in rule.epochs
        assert (settings.batch_size, settings.learning_rate) == (rule.batch_size, rule.learning_rate)


@pytest.mark.parametrize(("method", "is_small"), RULES)
def test_the_rules_are_documented(method: str, is_small: bool) -> None:
    rule = RULES[method, is_small]
    of = f"fewer than {FEW}" if is_small else f"{FEW} or more"
    kind = " pairs, `--dpo`" if method == "dpo" else ""
    rate = f"{rule.learning_rate:.0e}".replace("e-0", "e-")
    epochs = f"as many as make {rule.steps} steps, from {rule.epochs[0]} to {rule.epochs[1]}"
    page = Path(__file__).resolve().parents[4] / "docs" / "howto" / "train.md"
    assert f"| {of}{kind} | {rule.batch_size} | {rate} | {epochs} |" in page.read_text()


def test_what_was_chosen_is_said_and_what_was_given_stays() -> None:
    assert settings_for("sft", 20, {}) == Settings(
        epochs=8,
        batch_size=4,
        learning_rate=1e-3,
        said="20 examples: 8 epochs, batches of 4, learning rate 0.001 "
        "(fewer than 64 are seen more often, in small batches)",
    )
    assert settings_for("sft", 640, {}).said.startswith("640 examples: 3 epochs, batches of 8, learning rate 0.0005 (")
    some = settings_for("sft", 20, {"epochs": 2, "learning_rate": 0.5, "rank": 8})
    assert (some.epochs, some.batch_size, some.learning_rate) == (2, 4, 0.5)
    assert some.said.startswith("20 examples: batches of 4 (")
    assert settings_for("sft", 20, {"batch_size": 1}).epochs == 3
    every = settings_for("dpo", 1, {"epochs": 9, "batch_size": 7, "learning_rate": 0.1})
    assert every == Settings(epochs=9, batch_size=7, learning_rate=0.1, said="")


def test_a_run_is_resumed_with_the_plan_that_it_was_started_with() -> None:
    values = {"model": "m", "method": "sft", "rank": 4, "learning_rate": 5e-4, "epochs": 3, "batch_size": 8}
    plan = RunPlan(**values, eval_split=0.0, seed=0, beta=0.1, truncate=False)
    nothing = dict.fromkeys(["model", "rank", "learning_rate", "epochs", "batch_size", "eval_split", "seed", "beta"])
    options = _options({**nothing, "dpo": False, "truncate": False}, SimpleNamespace(plan=plan), Path("out"))
    assert RunPlan(**options) == plan
    with pytest.raises(click.ClickException, match="was started with epochs 3, not 8; omit --epochs"):
        _options({**nothing, "epochs": 8}, SimpleNamespace(plan=plan), Path("out"))


def test_what_is_under_way_is_finished_when_it_stops() -> None:
    training, steps = Recording(), list[int]()
    watcher = Watcher(step=lambda progress: steps.append(progress.step), is_stopping=lambda: bool(steps))
    assert fine_tune(training, Counting(2), [[n] for n in range(9)], Plan(), watcher) == 2
    assert steps == [1, 2]


def test_the_first_interrupt_asks_and_the_second_ends() -> None:
    said: list[str] = []
    with _interrupts(said.append) as asked:
        assert not asked
        os.kill(os.getpid(), signal.SIGINT)
        assert asked
        assert "Press Ctrl-C again to quit" in said[0]
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


class Letters:
    def decode(self, tokens: Any, skip_special_tokens: bool = False) -> str:
        return bytes(tokens).decode()


def test_advantages_are_centred_in_their_group() -> None:
    training = Recording(("good", "bad"))
    question = Question((1, 2, 3), lambda text, _: 1.0 if text == "good" else 0.0)
    plan = RlPlan(steps=1, questions=1, samples=4, learning_rate=0.1)
    (step,) = reinforce(training, Letters(), [question], plan, lambda _: None)
    assert (step.reward, step.best, step.used) == (0.5, "good", 4)
    assert training.calls == ["importance_sampling", "step at 0.1"]
    good, bad = (datum.loss_fn_inputs for datum in training.data[0][:2])
    assert good["advantages"].tolist() == [0.0, 0.0, *[0.125] * 4]
    assert bad["advantages"].tolist() == [0.0, 0.0, *[-0.125] * 3]
    assert good["logprobs"].tolist() == [0.0, 0.0, -1.0, -1.0, -1.0, -1.0]
    assert good["target_tokens"].tolist() == [2, 3, *b"good"]


def test_a_group_of_equals_teaches_nothing() -> None:
    training = Recording(("same",))
    plan = RlPlan(steps=2, questions=1, samples=4)
    steps = reinforce(training, Letters(), [Question((1, 2), lambda *_: 0.3)], plan, lambda _: None)
    assert [step.used for step in steps] == [0, 0]
    assert training.calls == []


def test_all_questions_come_before_any_comes_again() -> None:
    questions = [Question((number,), lambda *_: 0.0) for number in range(5)]
    batches = list(RlPlan(steps=5, questions=3).batches(questions))
    order = [question.tokens[0] for batch in batches for question in batch]
    assert [len(batch) for batch in batches] == [3] * 5
    assert sorted(order[:5]) == sorted(order[5:10]) == sorted(order[10:]) == list(range(5))


def test_the_demos_reward() -> None:
    assert reward("Paris", True, "Paris") == 1.0
    assert reward("paris.", True, "Paris") == 1.0
    assert reward("It is Paris", True, "Paris") == pytest.approx(0.8)
    assert reward("Paris " * 20, True, "Paris") == 0.0
    assert reward("It is Paris", False, "Paris") < reward("It is Paris", True, "Paris")
    assert reward("Rome", True, "Paris") == 0.0
    assert reward("", True, "Paris") == 0.0
    assert not {question for question, _ in FACTS} & {question for question, _ in UNSEEN}
