"""The live adapters of an engine with their optimizers: in memory up to a limit, the others on disk.

When memory is full, the tenant that holds most gives up its least recently used adapter: it is written to disk and read
back when it is needed, bit for bit. The files are unlinked temporary files, so they disappear with the process, however
it ends.
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

from tinsmith.engine.eviction import Held, to_evict
from tinsmith.engine.lora import LoraAdapter, ModuleLayout
from tinsmith.engine.models.config import ModelConfig
from tinsmith.engine.protocol import JobFailedError, LoraSpec
from tinsmith.engine.training.adamw import AdamW

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Model:
    """An adapter and its optimizer."""

    adapter: LoraAdapter
    optimizer: AdamW

    @property
    def size_bytes(self) -> int:
        """The size of weights, gradients (whether there are any or not) and both moments."""
        return 4 * 4 * self.adapter.parameter_count()


@dataclass(eq=False, slots=True)
class _Slot:
    lora: LoraSpec
    tenant: str
    model: Model | None
    file: IO[bytes] | None = None
    users: int = 0
    has_gradients: bool = field(default=False)


class Adapters:
    """Models by id, the most recently used last."""

    def __init__(
        self,
        config: ModelConfig | ModuleLayout,
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
        """Return a new model, which is not in the pool yet."""
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

    def add(self, model_id: str, lora: LoraSpec, model: Model, tenant: str = "") -> None:
        if model_id in self._slots:
            raise JobFailedError(f"model {model_id!r} already exists; unload it first")
        self._slots[model_id] = _Slot(lora, tenant, model)
        self._make_room(model_id)

    def remove(self, model_id: str) -> None:
        slot = self._slot(model_id)
        if slot.file is not None:
            slot.file.close()
        del self._slots[model_id]

    @contextmanager
    def use(self, model_id: str) -> Iterator[Model]:
        """Provide a model, and keep it in memory while it is used."""
        slot = self._slot(model_id)
        slot.users += 1
        try:
            if slot.model is None:
                slot.model = self._read(slot)
            self._slots[model_id] = self._slots.pop(model_id)
            self._make_room(model_id)
            yield slot.model
        finally:
            slot.users -= 1

    def close(self) -> None:
        """Drop all models."""
        for model_id in list(self._slots):
            self.remove(model_id)

    @property
    def in_memory(self) -> list[str]:
        return [model_id for model_id, slot in self._slots.items() if slot.model is not None]

    def _slot(self, model_id: str) -> _Slot:
        if model_id not in self._slots:
            raise JobFailedError(f"model {model_id!r} is not loaded: it was never created here, or it was unloaded")
        return self._slots[model_id]

    def _make_room(self, model_id: str) -> None:
        """Write models to disk until the model used now fits; models in use stay in memory."""
        new, held = self._slots[model_id], {}
        for name, slot in self._slots.items():
            if slot.model is not None and slot is not new:
                held[name] = Held(slot.tenant, slot.model.size_bytes, slot.users)
        assert new.model is not None
        for name in to_evict(held, new.tenant, new.model.size_bytes, self._max_bytes):
            slot = self._slots[name]
            assert slot.model is not None
            try:
                self._write(slot, slot.model)
            except OSError as error:  # using too much memory is better than failing another tenant's job
                logger.warning("model %s stays in memory because it cannot be written to disk: %s", name, error)
                return
            logger.info("moved model %s to disk", name, extra={"event": "adapter_evicted"})

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
