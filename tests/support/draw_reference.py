"""The distribution that a rule for drawing stands for, in plain float64."""

from __future__ import annotations

import numpy as np

from tinsmith.engine.sampling.draw import DrawRule


def reference_probs(logits: np.ndarray, rule: DrawRule) -> np.ndarray:
    """The distribution a rule means, written plainly: temperature, top_k, top_p, then min_p."""
    if rule.temperature == 0:
        return np.eye(len(logits))[np.argmax(logits)]
    scaled = logits.astype(np.float64) / rule.temperature
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    is_likely = probs >= rule.min_p * probs.max()
    order = np.argsort(-probs, kind="stable")
    if rule.top_k > 0:
        probs[order[rule.top_k :]] = 0
        probs /= probs.sum()
    if rule.top_p < 1:
        before = np.cumsum(probs[order]) - probs[order]
        probs[order[before >= rule.top_p]] = 0
    probs[~is_likely] = 0
    return probs / probs.sum()
