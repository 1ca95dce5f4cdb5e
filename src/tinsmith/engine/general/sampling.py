"""Sampling from a model of transformers: each sequence on its own, with the cache that its class provides.

A prompt is computed in one forward pass when the step that ends it comes, and each drawn token in one of its own. A
sequence that lost its memory is computed again in the same way. So a sample has the same bits alone and beside others.
The samples of one prompt share its cache until each draws its second token; then they get copies.

A model whose cache does not continue a sequence correctly computes the whole sequence again for each token.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass
from typing import Any

import torch

from tinsmith.engine.checkpoints.format import CheckpointInfo
from tinsmith.engine.general.model import ActiveAdapter, GeneralModel, pairs_of
from tinsmith.engine.lora import LoraAdapter, group_specs
from tinsmith.engine.sampling.batch import Chunk, Drawn, draw_rows, score_prompt
from tinsmith.engine.sampling.sampled_model import SamplerLimits
from tinsmith.engine.sampling.sequence import Sequence
from tinsmith.errors import InvalidInputError


class GeneralFrozen:
    """A copy of an adapter."""

    def __init__(self, adapter: LoraAdapter) -> None:
        pairs = {key: (A_RD.clone(), B_ER.clone()) for key, (A_RD, B_ER) in pairs_of(adapter).items()}
        self.active = ActiveAdapter(pairs, adapter.scale)
        self.size_bytes = sum(tensor.nbytes for pair in pairs.values() for tensor in pair)


@dataclass(eq=False, slots=True)
class HeldCache:
    """The cache of one sequence, or of several samples that have drawn at most one token."""

    blocks: int
    cache: Any = None
    tokens: int = 0
    """Tokens that are in it."""
    holders: int = 1


class GeneralRoom:
    """Counts the memory of caches in blocks; the caches themselves grow as the model appends to them."""

    def __init__(self, blocks: int, block_tokens: int, fixed_blocks: int) -> None:
        """A sequence takes `fixed_blocks`, and one more for each `block_tokens` tokens (0: none for its tokens)."""
        self.blocks = blocks
        self._block_tokens, self._fixed_blocks = block_tokens, fixed_blocks
        self._used = 0
        self._held: dict[Sequence, HeldCache] = {}

    @property
    def available(self) -> int:
        return self.blocks - self._used

    def cache_of(self, sequence: Sequence) -> HeldCache:
        return self._held[sequence]

    def held_by_tenant(self, sequences: Iterable[Sequence]) -> Counter[str]:
        """Return how many blocks the sequences of each tenant hold; a shared cache counts once."""
        seen: set[HeldCache] = set()
        totals: Counter[str] = Counter()
        for sequence in sequences:
            held = self._held.get(sequence)
            totals[sequence.tenant] += held.blocks if held is not None and held not in seen else 0
            seen.update(() if held is None else (held,))
        return totals

    def blocks_for(self, tokens: int) -> int:
        return self._fixed_blocks + (-(-tokens // self._block_tokens) if self._block_tokens else 0)

    def take_prefix(self, sequence: Sequence) -> None:
        """Do nothing: caches of finished sequences are not kept."""

    def is_ahead(self, running: Sequence, waiting: Sequence) -> bool:
        return False

    def reserve(self, sequence: Sequence, count: int) -> bool:
        """Count the blocks for the next `count` tokens; a shared cache is copied first. Return False if it is full."""
        held, needed = self._held.get(sequence), self.blocks_for(sequence.computed + count)
        own = held is not None and held.holders == 1
        more = needed - held.blocks if held is not None and own else needed
        if more > self.available:
            return False
        if held is None or not own:
            cache = HeldCache(needed)
            if held is not None:
                with torch.inference_mode(False):
                    cache.cache, cache.tokens = copy.deepcopy(held.cache), held.tokens
                held.holders -= 1
            self._held[sequence] = cache
        else:
            held.blocks = needed
        self._used += more
        return True

    def advance(self, sequence: Sequence, count: int) -> None:
        sequence.computed += count

    def share(self, source: Sequence, target: Sequence) -> None:
        self._held[target] = self._held[source]
        self._held[target].holders += 1
        target.computed = source.computed

    def release(self, sequence: Sequence) -> None:
        held = self._held.pop(sequence, None)
        if held is not None:
            held.holders -= 1
            self._used -= 0 if held.holders else held.blocks
        sequence.computed = 0

    def drop_adapter(self, name: Hashable) -> None:
        """Do nothing: caches of finished sequences are not kept."""


class GeneralSampling:
    """What the sampler computes with."""

    def __init__(self, model: GeneralModel, limits: SamplerLimits) -> None:
        self._model = model
        self.config = model.config
        self.device = model.device
        self.room, self.context_length = _room(model, limits)

    def adapter_bytes(self, info: CheckpointInfo) -> int:
        specs = group_specs(self._model.modules, info.train_attn, info.train_mlp, info.train_unembed)
        return sum(4 * info.rank * (spec.inputs + sum(spec.outputs)) for spec in specs)

    def frozen(self, adapter: LoraAdapter) -> GeneralFrozen:
        return GeneralFrozen(adapter)

    def run(self, chunks: List[Chunk], adapters: Mapping[Hashable, GeneralFrozen]) -> list[Drawn]:
        """Compute the sequences whose chunks reach their end; earlier chunks only wait for their turn."""
        ending = [chunk for chunk in chunks if chunk.ends]
        if not ending:
            return []
        # Not in inference mode: a model may keep what it computes, such as rotations, for the next training pass.
        with torch.inference_mode(False), torch.no_grad():
            logits_SV = torch.cat([self._last_logits(chunk, adapters) for chunk in ending])
        return draw_rows([chunk.sequence for chunk in ending], logits_SV)

    def _last_logits(self, chunk: Chunk, adapters: Mapping[Hashable, GeneralFrozen]) -> torch.Tensor:
        frozen = None if chunk.adapter is None else adapters[chunk.adapter]
        active = None if frozen is None else frozen.active
        sequence = chunk.sequence
        with self._model.adapted(active):
            output_TY = self._advanced(sequence, sequence.computed + chunk.count)
        if sequence.index is None:
            score_prompt(sequence, 0, output_TY, lambda rows_TY: self._logits(rows_TY, active))
        return self._logits(output_TY[-1:], active)

    def _advanced(self, sequence: Sequence, stop: int) -> torch.Tensor:
        """Return the outputs for the last tokens before `stop`; those of a whole prompt if it had to be computed."""
        prompt = len(sequence.tokens.prompt)
        if not self._model.has_cache:
            output_TY, _ = self._model.forward(self._tokens(sequence, 0, stop))
            return output_TY
        held = self.room.cache_of(sequence)
        if not prompt <= held.tokens < stop:
            held.cache, held.tokens = None, 0
            output_TY = self._step(held, self._tokens(sequence, 0, prompt))
        for place in range(held.tokens, stop):
            output_TY = self._step(held, self._tokens(sequence, place, place + 1))
        return output_TY

    def _step(self, held: HeldCache, tokens_T: torch.Tensor) -> torch.Tensor:
        """Run tokens on a cache. If that fails, the cache is empty: it may have changed in part."""
        cache, tokens = held.cache, held.tokens
        held.cache, held.tokens = None, 0
        output_TY, cache = self._model.forward(tokens_T, cache, is_cached=True)
        held.cache, held.tokens = cache, tokens + len(tokens_T)
        return output_TY

    def _tokens(self, sequence: Sequence, start: int, stop: int) -> torch.Tensor:
        return torch.tensor(sequence.tokens.part(start, stop), device=self.device)

    def _logits(self, rows_TY: torch.Tensor, active: ActiveAdapter | None) -> torch.Tensor:
        return self._model.logits(rows_TY, active) if self._model.has_plain_head else rows_TY


def _room(model: GeneralModel, limits: SamplerLimits) -> tuple[GeneralRoom, int]:
    """Return the room in the limits' memory, and the longest sequence that fits into it."""
    size, most = limits.block_size, model.config.max_context_length
    per_token, fixed = model.cache_token_bytes, model.cache_fixed_bytes
    if not per_token:
        blocks = limits.cache_bytes // max(fixed, 1) if fixed else limits.max_sequences
        room, context_length = GeneralRoom(blocks, 0, 1), most
    else:
        blocks, fixed_blocks = limits.cache_bytes // (size * per_token), -(-fixed // (size * per_token))
        room, context_length = GeneralRoom(blocks, size, fixed_blocks), min(most, (blocks - fixed_blocks - 1) * size)
    if context_length < 1 or blocks < 1:
        needed = fixed + 2 * size * per_token
        raise InvalidInputError(f"cache_bytes: {limits.cache_bytes} bytes hold no sequence; it takes {needed}")
    return room, context_length
