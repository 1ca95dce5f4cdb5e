"""What the sampler computes with: a model, its frozen adapters, and the memory for sequences.

`SampledModel` is the protocol. `CachedDecoder` implements it with our own decoder and a cache in blocks; models that
run through transformers implement it in `engine/general`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from tinsmith.config import MAX_BATCH_SEQUENCES, PREFILL_TOKENS
from tinsmith.engine.checkpoints.format import CheckpointInfo
from tinsmith.engine.cpu.compile import compile_kernels
from tinsmith.engine.cpu.linear import panel_width
from tinsmith.engine.lora import LoraAdapter, group_keys
from tinsmith.engine.models.decoder import Decoder
from tinsmith.engine.sampling.batch import Chunk, Drawn, SampleBatch
from tinsmith.engine.sampling.block_attention import BlockCache, block_bytes
from tinsmith.engine.sampling.cache_room import CacheRoom
from tinsmith.engine.sampling.decoder import FrozenAdapter, frozen_bytes
from tinsmith.engine.sampling.fused_decoder import FusedDecoder, inference_decoder
from tinsmith.engine.sampling.kv_cache import PrefixIndex
from tinsmith.engine.sampling.plan import TokenLimits
from tinsmith.engine.sampling.sequence import Sequence
from tinsmith.errors import InvalidInputError


@dataclass(frozen=True, slots=True)
class SamplerLimits:
    """The sizes of the sampler's cache and steps."""

    cache_bytes: int
    """Memory for the key/value cache."""
    block_size: int = 32
    """Tokens in a cache block, the unit in which prefixes are shared."""
    max_sequences: int = MAX_BATCH_SEQUENCES
    """Samples in one step, at most."""
    prefill_tokens: int = PREFILL_TOKENS
    """Prompt tokens in one step, at most; they determine how long a step takes."""


class Room(Protocol):
    """The memory for sequences, counted in blocks; `CacheRoom` says what each method is for."""

    @property
    def available(self) -> int: ...

    @property
    def blocks(self) -> int: ...

    def held_by_tenant(self, sequences: Iterable[Sequence]) -> Mapping[str, int]: ...

    def blocks_for(self, tokens: int) -> int: ...

    def take_prefix(self, sequence: Sequence) -> None: ...

    def is_ahead(self, running: Sequence, waiting: Sequence) -> bool: ...

    def reserve(self, sequence: Sequence, count: int) -> bool: ...

    def advance(self, sequence: Sequence, count: int) -> None: ...

    def share(self, source: Sequence, target: Sequence) -> None: ...

    def release(self, sequence: Sequence) -> None: ...

    def drop_adapter(self, name: Hashable) -> None: ...


class FrozenWeights(Protocol):
    """An adapter to sample from, which later training does not change."""

    @property
    def size_bytes(self) -> int: ...


class SampledModel(Protocol):
    """A model to sample from."""

    context_length: int
    """Tokens in the longest possible sequence: the model's context, or what the cache can hold."""

    @property
    def config(self) -> TokenLimits: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def room(self) -> Room: ...

    def adapter_bytes(self, info: CheckpointInfo) -> int:
        """Estimate the size of a frozen adapter before it is read."""

    def frozen(self, adapter: LoraAdapter) -> FrozenWeights:
        """Return a copy of an adapter to sample from."""

    def run(self, chunks: List[Chunk], adapters: Mapping[Hashable, Any]) -> list[Drawn]:
        """Compute the chunks, and draw tokens for those that reach their sequence's end.

        `adapters` has what `frozen` returned, by the names that the sequences' jobs give.
        """


class CachedDecoder:
    """Our own decoder, with a key/value cache in blocks."""

    def __init__(self, decoder: Decoder, limits: SamplerLimits, cache_dir: Path | None) -> None:
        """With `cache_dir`, kernels are compiled now, unless a note there says that this was done before; without it,
        they are compiled when first used.
        """
        self._decoder = inference_decoder(decoder)
        config, size = decoder.config, limits.block_size
        count = limits.cache_bytes // block_bytes(config, size, decoder.dtype)
        if count < 2:
            raise InvalidInputError(
                f"cache_bytes: {limits.cache_bytes} bytes hold {count} blocks; at least 2 are needed"
            )
        self.config = config
        self.context_length = min(config.max_context_length, (count - 1) * size)
        count = min(count, limits.max_sequences * (-(-config.max_context_length // size) + 1))
        cache = BlockCache(config, count, size, decoder.device, decoder.dtype)
        if cache_dir is not None and isinstance(self._decoder, FusedDecoder):
            compile_kernels(cache_dir)
        self.room = CacheRoom(cache, PrefixIndex(count, size))
        self._batch = SampleBatch(self._decoder, cache)

    @property
    def device(self) -> torch.device:
        return self._decoder.device

    def adapter_bytes(self, info: CheckpointInfo) -> int:
        keys = group_keys(self.config, info.train_attn, info.train_mlp, info.train_unembed)
        dtype = self._decoder.dtype
        unit = panel_width(self.device, dtype)
        return frozen_bytes(self.config, [group for _, group in keys], info.rank, unit) * dtype.itemsize // 4

    def frozen(self, adapter: LoraAdapter) -> FrozenAdapter:
        return FrozenAdapter(adapter, self.device, self._decoder.dtype)

    def run(self, chunks: List[Chunk], adapters: Mapping[Hashable, Any]) -> list[Drawn]:
        return self._batch.run(chunks, adapters)
