"""The formulas of the losses, one file each, named after the loss; each file ends in `LOSS = ...`.

`wire/losses.py` declares what each loss reads and which options it has. `custom` is not here: its formula is uploaded
(`engine/training/custom_loss`). Start with `base`, then `ppo`.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from tinsmith.engine.training.losses.base import Evaluation, Loss, MetricTotals, TokenLoss, evaluate
from tinsmith.wire.losses import COMPUTED

__all__ = ["LOSSES", "Evaluation", "Loss", "MetricTotals", "TokenLoss", "evaluate"]

LOSSES: Mapping[str, Loss] = {name: import_module(f"tinsmith.engine.training.losses.{name}").LOSS for name in COMPUTED}
