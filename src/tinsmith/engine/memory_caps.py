"""How much memory an engine keeps for what it may drop again: adapters in training, adapters to sample from, the cache.

Owns: the defaults, from what the machine or device has. By what is built in, not by what is free: the longest sequence
that a sampler takes must not change from start to start. Does not know: torch, the machine (`models.load`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

GB = 1 << 30


@dataclass(frozen=True, slots=True)
class MemoryCaps:
    """Most bytes of each kind."""

    adapter_bytes: int
    """Adapters in training."""
    sampler_adapter_bytes: int
    """Frozen adapters."""
    cache_bytes: int
    """Keys and values of the sampler."""

    def __str__(self) -> str:
        adapters, samplers, cache = (
            f"{size / GB:.2f} GB" for size in (self.adapter_bytes, self.sampler_adapter_bytes, self.cache_bytes)
        )
        return f"at most {adapters} of adapters in training, {samplers} of adapters to sample from, {cache} of cache"


LEAST = MemoryCaps(GB // 2, GB // 4, GB // 2)
"""Half a gigabyte of cache holds the whole context of the default model."""
MOST = MemoryCaps(64 * GB, 32 * GB, 64 * GB)
USUAL_BYTES = 16 * GB
"""What a machine is taken to have that does not tell."""
PARTS = {"cpu": MemoryCaps(8, 16, 16), "cuda": MemoryCaps(4, 8, 4)}
"""Each may take one part in so many of what the weights leave: of a machine, which other programs share, a quarter in
all; of a device five eighths, the rest is for activations."""


def default_caps(built_in: int | None, weights_bytes: int, device_kind: str, engines: int = 1) -> MemoryCaps:
    """Caps of one engine out of `engines` on a machine or device with so much memory; None: it does not tell."""
    left = max(0, (built_in or USUAL_BYTES) - weights_bytes) // engines
    parts = PARTS["cuda" if device_kind == "cuda" else "cpu"]
    return MemoryCaps(
        _within(LEAST.adapter_bytes, left // parts.adapter_bytes, MOST.adapter_bytes),
        _within(LEAST.sampler_adapter_bytes, left // parts.sampler_adapter_bytes, MOST.sampler_adapter_bytes),
        _within(LEAST.cache_bytes, left // parts.cache_bytes, MOST.cache_bytes),
    )


def chosen_caps(defaults: MemoryCaps, **given: int | None) -> MemoryCaps:
    """The defaults, but for what an operator has set."""
    return replace(defaults, **{name: size for name, size in given.items() if size is not None})


def _within(least: int, size: int, most: int) -> int:
    return max(least, min(size, most))
