"""`tinsmith demo --rl`: a model learns to give short, correct answers, from rewards alone."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tinsmith.cli.dataset import chat_prompt
from tinsmith.cli.models import chosen_model, command_line
from tinsmith.cli.output import quoted
from tinsmith.cli.progress import ProgressView, duration
from tinsmith.cli.report import numbered, report_html
from tinsmith.cli.train.comparison import greedy_answers, print_answers, print_comparison
from tinsmith.cli.train.rl import Question, RlPlan, RlStep, reinforce

FACTS = (
    ("What language is spoken in France?", "French"),
    ("What language is spoken in Germany?", "German"),
    ("What language is spoken in Spain?", "Spanish"),
    ("What language is spoken in Italy?", "Italian"),
    ("What language is spoken in Russia?", "Russian"),
    ("What language is spoken in Japan?", "Japanese"),
    ("What is the capital of England?", "London"),
    ("What is the capital of China?", "Beijing"),
    ("What is the capital of Greece?", "Athens"),
    ("What is the capital of Egypt?", "Cairo"),
    ("What is the opposite of wet?", "dry"),
    ("What is the opposite of hot?", "cold"),
)
UNSEEN = (
    ("What language is spoken in Portugal?", "Portuguese"),
    ("What is the capital of Japan?", "Tokyo"),
    ("What is the opposite of day?", "night"),
    ("How do I make tea?", ""),
)
"""Asked before and after; never trained on."""
PRICE = 0.1
"""What each word after the first costs."""
UNFINISHED = 4
"""Words added to the count of an answer that was cut off at `max_tokens`."""


def reward(answer: str, is_whole: bool, expected: str) -> float:
    """Return 1 for the right word alone, a tenth less for every other word, and 0 if it is missing."""
    words = re.findall(r"[\w']+", answer.lower())
    if expected.lower() not in words:
        return 0.0
    count = len(words) + (0 if is_whole else UNFINISHED)
    return max(0.0, 1.0 - PRICE * (count - 1))


def question_of(text: str, expected: str, tokenizer: Any) -> Question:
    tokens = chat_prompt([{"role": "user", "content": text}], tokenizer)
    return Question(tuple(tokens), lambda answer, is_whole: reward(answer, is_whole, expected))


def run_demo_rl(console: Any, service: Any, out: Path, model: str | None, rank: int, plan: RlPlan) -> None:
    """Run the demo and write its report."""
    began = time.monotonic()
    name = chosen_model(service, model, use="trainable").model_name
    training = service.create_lora_training_client(name, rank=rank, seed=plan.seed)
    tokenizer = training.get_tokenizer()
    questions = [question_of(text, expected, tokenizer) for text, expected in FACTS]

    prompts = tuple(text for text, _ in UNSEEN)

    console.print(f"[bold]2.[/] Answers of {quoted(name)} before training, to questions that it is not trained on")
    before = greedy_answers(service.create_sampling_client(base_model=name), tokenizer, prompts)
    print_answers(console, prompts, before)

    console.print("[bold]3.[/] Training by reward: 1 for the right word alone, 0.1 less for every other word")
    console.print(f"   {plan.steps} steps of {plan.questions} questions, {plan.samples} answers each, LoRA rank {rank}")
    steps = _train(console, training, tokenizer, questions, plan)

    console.print("[bold]4.[/] The same questions, before and after")
    saved = training.save_weights_for_sampler("demo-rl").result()
    after = greedy_answers(training.create_sampling_client(saved.path), tokenizer, prompts)
    answers = list(zip(prompts, before, after, strict=True))
    print_comparison(console, answers)

    rewards = [step.reward for step in steps]
    page = out / "report.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    took = time.monotonic() - began
    figures = {
        "Base model": name,
        "Adapter": f"LoRA, rank {rank}",
        "Reward": f"{_ends(rewards)[0]:.2f} to {_ends(rewards)[1]:.2f}: the right word alone is 1",
        "Samples": f"{plan.steps} steps of {plan.questions} questions, {plan.samples} answers each",
        "Loss": f"importance_sampling, learning rate {plan.learning_rate:g}, decaying to 0",
        "Time": duration(took),
        "Sampler checkpoint": saved.path,
    }
    page.write_text(
        report_html("Model trained by reward", figures, {"Reward": {"training": numbered(rewards)}}, answers),
        encoding="utf-8",
    )
    console.print(f"   report      {page}", soft_wrap=True, markup=False)
    low, high = _ends(rewards)
    console.print(f"Done in {duration(took)}: reward {low:.2f} to {high:.2f}. Try next:")
    talk = command_line("chat", "--checkpoint", saved.path)
    console.print(f"   chat with it:         {talk}", soft_wrap=True, markup=False)
    console.print("   use your own reward:  docs/tutorial/rl.md")


def _ends(rewards: Sequence[float]) -> tuple[float, float]:
    """Return the mean reward of the first and of the last three steps."""
    return sum(rewards[:3]) / len(rewards[:3]), sum(rewards[-3:]) / len(rewards[-3:])


def _train(console: Any, training: Any, tokenizer: Any, questions: list[Question], plan: RlPlan) -> list[RlStep]:
    began = time.monotonic()
    with ProgressView(console, plan.steps) as view:

        def show(step: RlStep) -> None:
            left = (time.monotonic() - began) / step.step * (plan.steps - step.step)
            view.step(step.step, f"   reward {step.reward:.3f}", f"{duration(left)} left  {step.best[:24]!r}")

        return reinforce(training, tokenizer, questions, plan, show)
