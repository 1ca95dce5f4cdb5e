"""The frozen adapters that samples are drawn from: loaded when they are needed, evicted when memory is full.

The limit counts what the sampler really holds. When it is reached, the tenant that holds most gives up adapters
(`engine/eviction`). If all of them are in use, a job that needs another adapter waits until one of its own tenant's is
free. A tenant without any adapter in memory always gets its first one: other tenants cannot keep it waiting, and an
adapter larger than the limit still works.

An adapter's name contains its tenant, so that nobody gets, or can tell from the time it takes, what another has loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

import torch

from tinsmith.engine.checkpoints.format import MAX_NAME, CheckpointInfo, read_checkpoint, read_manifest
from tinsmith.engine.eviction import Held, to_evict
from tinsmith.engine.lora import LoraAdapter, ModuleLayout
from tinsmith.engine.models.config import ModelConfig
from tinsmith.engine.protocol import Sample
from tinsmith.engine.sampling.sampler import Sampler
from tinsmith.errors import InvalidInputError

Name: TypeAlias = tuple[str, str]
"""A tenant, and the key of the weights."""


class SamplerAdapters:
    """Adapters in a sampler, the most recently used last."""

    def __init__(self, sampler: Sampler, config: ModelConfig | ModuleLayout, max_bytes: int) -> None:
        self._sampler = sampler
        self._config = config
        self._max_bytes = max_bytes
        self._held: dict[Name, Held] = {}

    @property
    def names(self) -> list[Name]:
        return list(self._held)

    @property
    def size_bytes(self) -> int:
        """The memory that all of them use."""
        return sum(held.size_bytes for held in self._held.values())

    def held_by(self, tenant: str) -> int:
        return sum(held.size_bytes for held in self._held.values() if held.tenant == tenant)

    def take(self, job: Sample) -> Name | None:
        """Return the adapter of a job, to use until `give_back`; None if there is no room yet."""
        assert job.directory is not None
        name = job.tenant, job.adapter_key or job.directory
        if name not in self._held and not self._load(name, Path(job.directory), job.base_model):
            return None
        held = self._held[name] = self._held.pop(name)
        held.users += 1
        return name

    def give_back(self, name: Name) -> None:
        self._held[name].users -= 1

    def _load(self, name: Name, directory: Path, base_model: str) -> bool:
        tenant, info = name[0], check_base(directory, base_model)
        needed = self._sampler.adapter_bytes(info)
        going = to_evict(self._held, tenant, needed, self._max_bytes)
        left = {key: held for key, held in self._held.items() if key not in going}
        is_full = needed + sum(held.size_bytes for held in left.values()) > self._max_bytes
        if is_full and any(held.tenant == tenant for held in left.values()):
            return False
        adapter = read_frozen(directory, info, self._config, self._sampler.device)
        for key in going:
            self._sampler.remove_adapter(key)
            del self._held[key]
        self._held[name] = Held(tenant, self._sampler.add_adapter(name, adapter))
        return True


def read_frozen(
    directory: Path, info: CheckpointInfo, config: ModelConfig | ModuleLayout, device: torch.device
) -> LoraAdapter:
    """Return the adapter of a checkpoint, to sample from."""
    weights = read_checkpoint(directory, with_optimizer=False).weights
    for name, tensor in weights.items():  # before an adapter is created, since its size follows from the claimed rank
        if tensor.ndim != 2 or info.rank not in tensor.shape:
            raise InvalidInputError(
                f"adapter weight {name[:MAX_NAME]} has shape {list(tensor.shape)}, which does not fit rank {info.rank}"
            )
    switches = (info.train_attn, info.train_mlp, info.train_unembed)
    adapter = LoraAdapter(config, info.rank, info.seed or 0, *switches, info.alpha, device)
    adapter.load(weights)
    return adapter


def check_base(directory: Path, base_model: str) -> CheckpointInfo:
    """Return a checkpoint's description; raise if it belongs to another base model."""
    info = read_manifest(directory).info
    if info.base_model != base_model:
        raise InvalidInputError(
            f"checkpoint {directory.name!r} belongs to base model {info.base_model!r}, not {base_model!r}"
        )
    return info
