"""How long, in what batches and how fast to train if the user does not say: chosen by the size of the data.

Few examples have to be seen more often: a model that saw 20 of them three times, in nine steps, has learned little.
The numbers were measured with `bench/defaults.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tinsmith.cli.output import plural


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What training needs in order to learn from data of some size."""

    learning_rate: float
    batch_size: int
    steps: int
    """Steps to reach by more epochs."""
    epochs: tuple[int, int]
    """The fewest and the most epochs."""


FEW = 64
"""Data with fewer examples is small."""
RULES = {
    ("sft", True): Rule(learning_rate=1e-3, batch_size=4, steps=40, epochs=(3, 12)),
    ("sft", False): Rule(learning_rate=5e-4, batch_size=8, steps=40, epochs=(3, 12)),
    ("dpo", True): Rule(learning_rate=1e-4, batch_size=4, steps=40, epochs=(1, 6)),
    ("dpo", False): Rule(learning_rate=5e-5, batch_size=4, steps=40, epochs=(1, 6)),
}
"""By method, and whether the data is small."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Epochs, batch size and learning rate of a run, and a sentence that says which were chosen and why."""

    epochs: int
    batch_size: int
    learning_rate: float
    said: str
    """Empty if nothing was chosen."""


def settings_for(method: str, examples: int, given: Mapping[str, Any]) -> Settings:
    """Choose the settings for a number of examples or pairs; those that are `given` stay as they are."""
    is_small = examples < FEW
    rule = RULES[method, is_small]
    batch_size = given.get("batch_size", rule.batch_size)
    fewest, most = rule.epochs
    wanted = math.ceil(rule.steps / math.ceil(examples / batch_size))
    epochs = given.get("epochs", min(most, max(fewest, wanted)))
    rate = given.get("learning_rate", rule.learning_rate)
    parts = {
        "epochs": plural(epochs, "epoch"),
        "batch_size": f"batches of {batch_size}",
        "learning_rate": f"learning rate {rate:g}",
    }
    chosen = [text for name, text in parts.items() if name not in given]
    what = plural(examples, "pair" if method == "dpo" else "example")
    why = f"fewer than {FEW} are seen more often, in small batches" if is_small else f"as for any data of {FEW} or more"
    said = f"{what}: {', '.join(chosen)} ({why})" if chosen else ""
    return Settings(epochs=epochs, batch_size=batch_size, learning_rate=rate, said=said)
