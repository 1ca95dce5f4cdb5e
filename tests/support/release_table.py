"""What each release of the official SDK can do with a server, as a table: made from runs of the program.

A feature works if all its steps returned. Does not know: how the program is run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from support.program_run import Steps

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "reference" / "server.md"
REFRESH = "run: PYTHONPATH=src:tests .venv/bin/python tests/e2e/test_server_releases.py --write"
_PART = re.compile(r"(<!-- measured:releases -->\n)(.*?)(<!-- /measured:releases -->)", re.DOTALL)

_SAMPLE = ("sample", "stop tokens", "default length")
FEATURES: Mapping[str, tuple[str, ...]] = {
    "capabilities, `get_info`": ("capabilities", "get_info"),
    "`forward`, `forward_backward`": ("forward", "forward_backward lists", "forward_backward numpy"),
    "policy losses (`ppo`)": ("ppo",),
    "calls of many chunks": ("many datums",),
    "`forward_backward_custom`": ("forward_backward_custom",),
    "`optim_step`, pipelined": ("optim_step Adam", "pipelined"),
    "`save_state`, `load_state`": ("save_state", "load_state"),
    "`load_state_with_optimizer`": ("load_state_with_optimizer",),
    "sampling: base model": tuple(f"base: {step}" for step in _SAMPLE),
    "sampling: weights just trained": tuple(f"ephemeral: {step}" for step in _SAMPLE),
    "sampling: saved weights": (
        "save_weights_for_sampler",
        *(f"{name}: {step}" for name in ("saved", "from training") for step in _SAMPLE),
    ),
    "prompt logprobs, `compute_logprobs`": ("base: prompt logprobs", "base: compute_logprobs"),
    "new client from a saved state": ("resumed", "save again"),
    "list runs and checkpoints": ("list_training_runs", "get_training_run", "list_checkpoints"),
    "list all own checkpoints": ("list_user_checkpoints",),
    "publish, unpublish": ("publish_checkpoint_from_tinker_path", "unpublish_checkpoint_from_tinker_path"),
    "time to live": ("set_checkpoint_ttl_from_tinker_path",),
    "weights info": ("get_weights_info_by_tinker_path",),
    "list sessions": ("list_sessions",),
    "checkpoint archive": ("get_checkpoint_archive_url_from_tinker_path",),
    "delete a checkpoint": ("delete_checkpoint_from_tinker_path",),
}


def cell(steps: Steps, names: Iterable[str]) -> str:
    """`yes`; `-` where the release has no such call; else what was raised."""
    values = [dict(steps)[name] for name in names]
    for value in values:
        if isinstance(value, dict) and "raises" in value:
            return str(value["raises"])
        if isinstance(value, dict) and "missing" in value:
            return "-"
    return "yes"


def release_table(runs: Mapping[str, Steps]) -> str:
    """One row for each feature, one column for each client."""
    lines = [["", *runs], ["---"] * (len(runs) + 1)]
    lines += [[feature, *(cell(steps, names) for steps in runs.values())] for feature, names in FEATURES.items()]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def with_table(text: str, table: str) -> str:
    """A document with the table in its place."""
    return _PART.sub(lambda part: f"{part[1]}\n{table}\n{part[3]}", text)
