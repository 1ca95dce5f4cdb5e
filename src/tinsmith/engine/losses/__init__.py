"""The losses of the protocol, one file each. `wire/losses.py` says what each reads and what its options are.

`custom` is not among them: its formula is uploaded, see `engine/custom_graph.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

from tinsmith.engine.losses.base import Evaluation, Loss, TokenLoss, evaluate
from tinsmith.engine.losses.cispo import CISPO
from tinsmith.engine.losses.cross_entropy import CrossEntropy
from tinsmith.engine.losses.dro import DRO
from tinsmith.engine.losses.gspo import GSPO
from tinsmith.engine.losses.importance_sampling import ImportanceSampling
from tinsmith.engine.losses.metrics import MetricTotals
from tinsmith.engine.losses.ppo import PPO

__all__ = ["LOSSES", "Evaluation", "Loss", "MetricTotals", "TokenLoss", "evaluate"]

LOSSES: Mapping[str, Loss] = {
    "cross_entropy": CrossEntropy(),
    "importance_sampling": ImportanceSampling(),
    "ppo": PPO(),
    "cispo": CISPO(),
    "dro": DRO(),
    "gspo": GSPO(),
}
