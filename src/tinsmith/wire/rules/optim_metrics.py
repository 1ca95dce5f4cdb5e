"""The names of the metrics that `optim_step` returns, and the names they used to have.

Training loops merge these metrics into a dict of their own (`metrics.update(result.metrics)` in tinker-cookbook), which
usually has a `step` and a `learning_rate` already. The prefix keeps the two apart. The engines write these names; the
server and the command line, which may read rows and results from before, translate the old ones.
"""

from __future__ import annotations

from collections.abc import Mapping

from tinsmith.wire.codecs import json_codec
from tinsmith.wire.messages.training import OptimStepResponse

PREFIX = "optim/"
GRAD_NORM = f"{PREFIX}grad_norm"
"""The norm of the gradient over all parameters, before clipping."""
UPDATE_NORM = f"{PREFIX}update_norm"
"""The norm of the change that the step made to the parameters."""
LEARNING_RATE = f"{PREFIX}learning_rate"
STEP = f"{PREFIX}step"
"""How many steps this optimizer has done, this one included."""

OPTIM_METRICS = (GRAD_NORM, UPDATE_NORM, LEARNING_RATE, STEP)
"""In the order in which the engines return them."""
_RENAMED = {name.removeprefix(PREFIX): name for name in OPTIM_METRICS}
_FORMER = {name: former for former, name in _RENAMED.items()}


def with_current_names(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of a step under today's names.

    A row with any current name is left alone: an unprefixed `step` in it is a metric of the user's own loss.
    """
    if any(name.startswith(PREFIX) for name in metrics):
        return dict(metrics)
    return {_RENAMED.get(name, name): value for name, value in metrics.items()}


def body_with_former_names(body: bytes) -> bytes:
    """Return the JSON of an `optim_step` result as a former version wrote it.

    A replay compares results byte for byte with what was delivered, which may have been under the former names.
    """
    metrics = json_codec.decode(body, OptimStepResponse).metrics or {}
    former = {_FORMER.get(name, name): value for name, value in metrics.items()}
    return json_codec.encode(OptimStepResponse(metrics=former))
