"""The losses by name: which tensors each reads from a datum, and which options it takes.

This is the only declaration of a loss outside its formula, which is in `engine/training/losses/<name>.py`. The type of
`loss_fn`, the dtypes of plain lists and the checks in `wire/rules/loss_rules.py` all follow from it.
docs/decisions/0014-losses.md has the reasons for what the protocol leaves open.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

LossFnType: TypeAlias = Literal[
    "cross_entropy",
    "importance_sampling",
    "ppo",
    "cispo",
    "dro",
    "gspo",
    "stable_reinforce",
    "custom",
]
"""The names that `loss_fn` may have: the keys of LOSSES, spelled out because a type checker needs them."""


@dataclass(frozen=True, slots=True)
class LossOption:
    """A number in `loss_fn_config`: its default, and the smallest value that is allowed."""

    default: float
    least: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSpec:
    """What a loss reads: float32 tensors of the shape of `target_tokens`, whose allowed ranks are `target_ranks`."""

    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    target_ranks: tuple[int, ...] = (1,)
    options: Mapping[str, LossOption] = field(default_factory=dict)
    refusal: str = ""
    """Why this server does not compute the loss; empty if it does."""


CLIP_INPUTS = ("clip_low_threshold", "clip_high_threshold")
"""Options that a datum may also give per token; the values per token then win."""


def _reinforcement(*inputs: str, **options: float) -> LossSpec:
    clips = tuple(name for name in CLIP_INPUTS if name in options)
    return LossSpec(
        required=("logprobs", "advantages", *inputs),
        optional=("weights", *clips),
        options={name: LossOption(default) for name, default in options.items()},
    )


LOSSES: Mapping[LossFnType, LossSpec] = {
    "cross_entropy": LossSpec(required=("weights",), target_ranks=(1, 2)),
    "importance_sampling": _reinforcement(),
    "ppo": _reinforcement(clip_low_threshold=0.8, clip_high_threshold=1.2),
    "cispo": _reinforcement(clip_low_threshold=0.0, clip_high_threshold=4.0),
    "dro": _reinforcement(beta=0.05),
    "gspo": _reinforcement("sequence_ratio_mask", clip_low_threshold=1 - 3e-4, clip_high_threshold=1 + 4e-4),
    "stable_reinforce": LossSpec(
        refusal="its formula is not public; use importance_sampling, ppo, cispo, gspo or a custom loss"
    ),
    "custom": LossSpec(target_ranks=(1, 2)),
}
"""Every loss of the protocol. All of them also read `target_tokens`, int64. The formula of `custom` is uploaded."""

OFFERED: tuple[LossFnType, ...] = tuple(name for name, spec in LOSSES.items() if not spec.refusal)
"""The losses to suggest in errors: all but those that are always refused."""

COMPUTED: tuple[LossFnType, ...] = tuple(name for name in OFFERED if name != "custom")
"""The losses whose formula is a file in `engine/training/losses`."""

LIST_DTYPES: Mapping[str, Literal["int64", "float32"]] = {
    "target_tokens": "int64",
    **{name: "float32" for spec in LOSSES.values() for name in (*spec.required, *spec.optional)},
}
"""The dtype of a plain list, by its key. Each of these tensors has one entry (or row) per input token."""
