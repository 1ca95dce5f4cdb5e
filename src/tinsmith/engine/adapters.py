"""The adapters that are alive in an engine, with their optimizers: in memory up to a limit, the rest on disk.

An adapter that was not used for longest goes to disk first and comes back when it is needed, bit for bit. The files
have no names: they vanish with the process, however it ends, as everything here does.

Does not know: jobs, arithmetic, checkpoints.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import safetensors.torch
import torch

from tinsmith.engine.base import JobFailedError, LoraSpec
from tinsmith.engine.lora import LoraAdapter
from tinsmith.engine.models.config import ModelConfig
from tinsmith.engine.optim import AdamW

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Model:
    """An adapter and its optimizer."""

    adapter: LoraAdapter
    optimizer: AdamW

    @property
    def size_bytes(self) -> int:
        """Weights, two moments, and gradients as if they were there."""
        return 4 * 4 * self.adapter.parameter_count()


@dataclass(eq=False, slots=True)
class _Slot:
    lora: LoraSpec
    model: Model | None
    file: IO[bytes] | None = None
    users: int = 0
    has_gradients: bool = field(default=False)


class Adapters:
    """Models by id, the one used last at the end."""

    def __init__(
        self,
        config: ModelConfig,
        device: torch.device,
        max_bytes: int,
        directory: Path | None = None,
    ) -> None:
        self._config = config
        self._device = device
        self._max_bytes = max_bytes
        self._directory = directory
        self._slots: dict[str, _Slot] = {}

    def __contains__(self, model_id: object) -> bool:
        return model_id in self._slots

    def fresh(self, lora: LoraSpec) -> Model:
        """A new model, not kept yet."""
        adapter = LoraAdapter(
            self._config,
            lora.rank,
            lora.seed,
            lora.train_attn,
            lora.train_mlp,
            lora.train_unembed,
            lora.alpha,
            self._device,
        )
        return Model(adapter, AdamW(adapter.parameters()))

    def add(self, model_id: str, lora: LoraSpec, model: Model) -> None:
        if model_id in self._slots:
            raise JobFailedError(f"model {model_id!r} is there already; unload it first")
        self._slots[model_id] = _Slot(lora, model)
        self._make_room()

    def remove(self, model_id: str) -> None:
        slot = self._slot(model_id)
        if slot.file is not None:
            slot.file.close()
        del self._slots[model_id]

    @contextmanager
    def use(self, model_id: str) -> Iterator[Model]:
        """A model, in memory for as long as it is used."""
        slot = self._slot(model_id)
        slot.users += 1
        try:
            if slot.model is None:
                slot.model = self._read(slot)
            self._slots[model_id] = self._slots.pop(model_id)
            self._make_room()
            yield slot.model
        finally:
            slot.users -= 1

    def close(self) -> None:
        """Forget all models."""
        for model_id in list(self._slots):
            self.remove(model_id)

    @property
    def in_memory(self) -> list[str]:
        return [model_id for model_id, slot in self._slots.items() if slot.model is not None]

    def _slot(self, model_id: str) -> _Slot:
        if model_id not in self._slots:
            raise JobFailedError(f"model {model_id!r} is not loaded: it was never created here, or was unloaded")
        return self._slots[model_id]

    def _make_room(self) -> None:
        """Write what was not used for longest, until the rest fits; what is in use stays."""
        total = sum(slot.model.size_bytes for slot in self._slots.values() if slot.model is not None)
        for model_id, slot in list(self._slots.items())[:-1]:
            if total <= self._max_bytes:
                return
            if slot.model is not None and not slot.users:
                size_bytes = slot.model.size_bytes
                try:
                    self._write(slot, slot.model)
                except OSError as error:  # better too much memory than a job that fails for another's sake
                    logger.warning("model %s stays in memory, it cannot be written: %s", model_id, error)
                    return
                total -= size_bytes
                logger.info("model %s goes to disk", model_id, extra={"event": "adapter_evicted"})

    def _write(self, slot: _Slot, model: Model) -> None:
        slot.has_gradients = model.adapter.grads is not None
        tensors = {f"p.{name}": tensor for name, tensor in model.adapter.parameters().items()}
        tensors |= {f"o.{name}": tensor for name, tensor in model.optimizer.state().items()}
        if slot.has_gradients:
            tensors |= {f"g.{name}": tensor for name, tensor in model.adapter.gradients().items()}
        data = safetensors.torch.save({name: tensor.cpu().contiguous() for name, tensor in tensors.items()})
        file = tempfile.TemporaryFile(dir=self._directory, prefix="adapter-")  # noqa: SIM115 - closed when read
        try:
            file.write(data)
            file.flush()
        except OSError:
            file.close()
            raise
        slot.file, slot.model = file, None

    def _read(self, slot: _Slot) -> Model:
        assert slot.file is not None
        slot.file.seek(0)
        tensors = safetensors.torch.load(slot.file.read())
        model = self.fresh(slot.lora)
        model.adapter.load(_part(tensors, "p."))
        model.optimizer.load_state(_part(tensors, "o."))
        if slot.has_gradients:
            saved = _part(tensors, "g.")
            for name, gradient in model.adapter.gradients().items():
                gradient.copy_(saved[name])
        slot.file.close()
        slot.file = None
        return model


def _part(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
