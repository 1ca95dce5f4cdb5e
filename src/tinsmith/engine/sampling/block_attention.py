"""The tensors of the key/value cache, and attention over its blocks in plain torch, for any device and dtype.

On a CPU in float32, `cpu/cached_attention` does the same faster. Every product here has the same inner shape whatever
the batch is: one block of keys or values against a multiple of four query rows. The parts of a sequence's blocks are
joined by one softmax, and summed in the order of the blocks. So the result for a token does not depend on what else is
in the batch, nor on whether it was computed with others (prefill) or alone (decode).

Shapes: T new tokens, H query heads, K key/value heads, G = H / K, C head dim, S tiles, R query rows of a tile,
B block size, N blocks, P pairs of a tile and a block, W blocks of the longest tile, L layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from tinsmith.engine.models.attention import softcap
from tinsmith.engine.models.config import ModelConfig
from tinsmith.errors import InvalidInputError

TILE_TOKENS = 64
"""New tokens of a sequence that prefill handles at a time, to limit the memory of the scores."""
_ROW_MULTIPLE = 4
"""Products with fewer rows use other kernels, whose sums are ordered differently."""
MAX_SPREAD = 1.25
"""If a batch's blocks span at most this many blocks per block used, they are read in place; else they are gathered."""
BLOCK_MULTIPLE = 16
"""Block sizes must be a multiple of this: sums over less than a vector register are ordered differently too."""


def block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Return the memory of one block over all layers."""
    return 2 * config.num_layers * config.kv_size * block_size * dtype.itemsize


class BlockCache:
    """Keys and values of all layers. The system provides the memory when a block is first used."""

    def __init__(
        self, config: ModelConfig, block_count: int, block_size: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        if block_size < 1 or block_size % BLOCK_MULTIPLE:
            raise InvalidInputError(f"block_size: must be a multiple of {BLOCK_MULTIPLE}, got {block_size}")
        self.config = config
        self.block_size = block_size
        heads, head_dim, layers = config.num_kv_heads, config.head_dim, config.num_layers
        self.keys_LNKCB = torch.zeros(layers, block_count, heads, head_dim, block_size, device=device, dtype=dtype)
        self.values_LNKBC = torch.zeros(layers, block_count, heads, block_size, head_dim, device=device, dtype=dtype)
        self._staged = torch.empty(0, device=device, dtype=dtype)

    def clear(self, block: int) -> None:
        """Zero a block's values: a NaN must not reach the next holder, not even with weight zero (0 * NaN is NaN)."""
        self.values_LNKBC[:, block].zero_()

    def copy(self, source: int, target: int) -> None:
        self.keys_LNKCB[:, target] = self.keys_LNKCB[:, source]
        self.values_LNKBC[:, target] = self.values_LNKBC[:, source]

    def staging(self, like_NX: torch.Tensor, count: int) -> torch.Tensor:
        """Return a buffer for `count` blocks, which each layer reuses."""
        shape = (count, *like_NX.shape[1:])
        size = count * like_NX[0].numel()
        if self._staged.numel() < size:
            self._staged = torch.empty(size, device=like_NX.device, dtype=like_NX.dtype)
        return self._staged[:size].view(shape)


@dataclass(frozen=True, slots=True)
class NewTokens:
    """New tokens of one sequence: `count` rows of the batch, from `row` on, at positions from `start` on."""

    row: int
    start: int
    count: int
    blocks: Sequence[int]
    """The sequence's blocks, with room for the new tokens."""


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Tiles with the same number of rows, and the blocks they attend to."""

    rows: slice | torch.Tensor
    """The tokens' rows in the batch, tile by tile."""
    count: int
    tokens: int
    """Tokens of one tile."""
    blocks_P: torch.Tensor
    first_block: int | None
    """Set if the blocks are consecutive in the cache, so that nothing needs to be gathered."""
    owners_P: torch.Tensor
    slots_P: torch.Tensor | None
    """The index of each pair in S * W (S * W itself: unused); None if they are in that order already."""
    sources_P: torch.Tensor
    """The same, with an arbitrary index for unused pairs."""
    width: int
    last_ST: torch.Tensor
    """The position of each token of each tile."""


class BlockAttention:
    """The attention of one sampler step."""

    def __init__(self, cache: BlockCache, batch: Sequence[NewTokens]) -> None:
        self._cache = cache
        self._config = cache.config
        self._groups = cache.config.num_heads // cache.config.num_kv_heads
        self._device = cache.keys_LNKCB.device
        size = cache.block_size
        places = [(new.blocks[p // size], p % size) for new in batch for p in range(new.start, new.start + new.count)]
        self._block_T, self._slot_T = torch.tensor(places, device=self._device).unbind(1)
        self._nothing = torch.empty(1, 1, 1, device=self._device, dtype=cache.keys_LNKCB.dtype)
        self._tiles = self._plan(batch)
        self._masks: dict[tuple[int, int | None], torch.Tensor] = {}

    def __call__(self, layer: int, q_THC: torch.Tensor, k_TKC: torch.Tensor, v_TKC: torch.Tensor) -> torch.Tensor:
        keys_NKCB, values_NKBC = self._cache.keys_LNKCB[layer], self._cache.values_LNKBC[layer]
        keys_NKCB[self._block_T, :, :, self._slot_T] = k_TKC
        values_NKBC[self._block_T, :, self._slot_T] = v_TKC
        if len(self._tiles) == 1 and isinstance(self._tiles[0].rows, slice):
            return self._attend(0, layer, q_THC)
        out_THC = torch.empty_like(q_THC, memory_format=torch.contiguous_format)
        for number, tiles in enumerate(self._tiles):
            out_THC[tiles.rows] = self._attend(number, layer, q_THC[tiles.rows])
        return out_THC

    def _attend(self, number: int, layer: int, q_THC: torch.Tensor) -> torch.Tensor:
        """Compute the attention of the tokens of some tiles."""
        tiles, config = self._tiles[number], self._config
        size, kv_heads, head_dim = self._cache.block_size, config.num_kv_heads, config.head_dim
        q_SKRC = self._query_rows(tiles, q_THC)
        rows = q_SKRC.shape[2]
        pairs = len(tiles.blocks_P)
        keys = self._blocks(self._cache.keys_LNKCB[layer], tiles)
        is_plain = tiles.width == 1 and tiles.slots_P is None
        q_PKRC = q_SKRC if is_plain else q_SKRC.index_select(0, tiles.owners_P)
        scores = torch.baddbmm(
            self._nothing,
            q_PKRC.reshape(-1, rows, head_dim),
            keys.view(-1, head_dim, size),
            beta=0,
            alpha=config.score_scale,
        )
        if config.attention_softcap:
            scores = softcap(scores, config.attention_softcap)
        scores_SKRT = _joined(scores.view(pairs, kv_heads, rows, size), tiles)
        scores_SKRT = scores_SKRT.masked_fill_(self._mask(number, layer, rows), float("-inf"))
        probs = _parted(scores_SKRT.softmax(dim=-1), tiles, size)
        values = self._blocks(self._cache.values_LNKBC[layer], tiles)
        out = torch.bmm(probs.view(-1, rows, size), values.view(-1, size, head_dim))
        out_SKRC = _summed(out.view(pairs, kv_heads, rows, head_dim), tiles)
        used_SKRC = out_SKRC[:, :, : tiles.tokens * self._groups]
        if tiles.tokens == 1:
            return used_SKRC.reshape(-1, config.num_heads, head_dim)
        out_SKTGC = used_SKRC.reshape(tiles.count, kv_heads, tiles.tokens, self._groups, head_dim)
        return out_SKTGC.transpose(1, 2).reshape(-1, config.num_heads, head_dim)

    def _query_rows(self, tiles: _Tiles, q_THC: torch.Tensor) -> torch.Tensor:
        """Return q_SKRC: tokens of a tile and heads that share keys as rows, padded to a multiple of four."""
        kv_heads, groups, head_dim = self._config.num_kv_heads, self._groups, self._config.head_dim
        if tiles.tokens == 1:
            q_SKRC = q_THC.view(tiles.count, kv_heads, groups, head_dim)
        else:
            q_STKGC = q_THC.view(tiles.count, tiles.tokens, kv_heads, groups, head_dim)
            q_SKRC = q_STKGC.transpose(1, 2).flatten(2, 3)
        missing = -q_SKRC.shape[2] % _ROW_MULTIPLE
        return pad(q_SKRC, (0, 0, 0, missing)) if missing else q_SKRC

    def _blocks(self, cached_NX: torch.Tensor, tiles: _Tiles) -> torch.Tensor:
        count = len(tiles.blocks_P)
        if tiles.first_block is not None:
            return cached_NX[tiles.first_block : tiles.first_block + count]
        return torch.index_select(cached_NX, 0, tiles.blocks_P, out=self._cache.staging(cached_NX, count))

    def _mask(self, number: int, layer: int, rows: int) -> torch.Tensor:
        """Return True where a row must not attend: after its token, or before its window. Shape [S, 1, R, W * B]."""
        window = self._config.sliding_window(layer)
        mask = self._masks.get((number, window))
        if mask is None:
            tiles = self._tiles[number]
            positions_T = torch.arange(tiles.width * self._cache.block_size, device=self._device)
            last_SR = tiles.last_ST.repeat_interleave(self._groups, dim=1)
            last_SR = torch.cat((last_SR, last_SR[:, -1:].expand(-1, rows - last_SR.shape[1])), dim=1)
            distance_SRT = last_SR.unsqueeze(2) - positions_T
            hidden_SRT = distance_SRT < 0
            if window is not None:
                hidden_SRT |= distance_SRT >= window
            mask = self._masks[number, window] = hidden_SRT.unsqueeze(1)
        return mask

    def _plan(self, batch: Sequence[NewTokens]) -> list[_Tiles]:
        """Group single tokens of all sequences together; cut longer runs into tiles of their own."""
        singles = [new for new in batch if new.count == 1]
        plan = [self._tiles_of(singles)] if singles else []
        for new in batch:
            if new.count > 1:
                for offset in range(0, new.count, TILE_TOKENS):
                    count = min(TILE_TOKENS, new.count - offset)
                    plan.append(self._tiles_of([NewTokens(new.row + offset, new.start + offset, count, new.blocks)]))
        return plan

    def _tiles_of(self, tiles: Sequence[NewTokens]) -> _Tiles:
        size, tokens, device = self._cache.block_size, tiles[0].count, self._device
        widths = [-(-(tile.start + tokens) // size) for tile in tiles]
        width = max(widths)
        pairs = [_Pair(tile.blocks[b], s, s * width + b) for s, tile in enumerate(tiles) for b in range(widths[s])]
        spanned = _spanned(pairs, unused=width * len(tiles))
        pairs = spanned or pairs
        slots = [pair.slot for pair in pairs]
        rows = [tile.row + t for tile in tiles for t in range(tokens)]
        is_slice = rows == list(range(rows[0], rows[0] + len(rows)))
        return _Tiles(
            rows=slice(rows[0], rows[0] + len(rows)) if is_slice else torch.tensor(rows, device=device),
            count=len(tiles),
            tokens=tokens,
            blocks_P=torch.tensor([pair.block for pair in pairs], device=device),
            first_block=pairs[0].block if spanned else None,
            owners_P=torch.tensor([pair.owner for pair in pairs], device=device),
            slots_P=None if slots == list(range(width * len(tiles))) else torch.tensor(slots, device=device),
            sources_P=torch.tensor([min(slot, width * len(tiles) - 1) for slot in slots], device=device),
            width=width,
            last_ST=torch.tensor([[tile.start + t for t in range(tokens)] for tile in tiles], device=device),
        )


class _Pair(NamedTuple):
    """A block that a tile attends to, and its index among all tiles' blocks."""

    block: int
    owner: int
    slot: int


def _spanned(pairs: list[_Pair], unused: int) -> list[_Pair]:
    """Return the pairs in the order of the cache, with gaps filled by unused pairs, so that nothing must be gathered.

    Return nothing if blocks are shared or too far apart for that.
    """
    by_block = {pair.block: pair for pair in pairs}
    first, last = min(by_block), max(by_block)
    if len(by_block) < len(pairs) or last + 1 - first > MAX_SPREAD * len(pairs):
        return []
    return [by_block.get(block, _Pair(block, 0, unused)) for block in range(first, last + 1)]


def _joined(scores_PKRB: torch.Tensor, tiles: _Tiles) -> torch.Tensor:
    """Return the pairs side by side as scores_SKRT; what no pair fills is masked later."""
    if tiles.slots_P is not None:
        scores_PKRB = _placed(scores_PKRB, tiles.slots_P, tiles.count * tiles.width)
    if tiles.width == 1:
        return scores_PKRB
    return scores_PKRB.view(tiles.count, tiles.width, *scores_PKRB.shape[1:]).permute(0, 2, 3, 1, 4).flatten(3)


def _parted(probs_SKRT: torch.Tensor, tiles: _Tiles, size: int) -> torch.Tensor:
    """The inverse of `_joined`."""
    parts = probs_SKRT
    if tiles.width > 1:
        parts = probs_SKRT.view(*probs_SKRT.shape[:3], tiles.width, size).permute(0, 3, 1, 2, 4).flatten(0, 1)
    if tiles.slots_P is None:
        return parts.contiguous()
    return parts.index_select(0, tiles.sources_P)


def _summed(out_PKRC: torch.Tensor, tiles: _Tiles) -> torch.Tensor:
    """Return the sum of each tile's parts, in the order of its blocks."""
    if tiles.slots_P is not None:
        out_PKRC = _placed(out_PKRC, tiles.slots_P, tiles.count * tiles.width)
    return out_PKRC if tiles.width == 1 else out_PKRC.view(tiles.count, tiles.width, *out_PKRC.shape[1:]).sum(dim=1)


def _placed(parts_PX: torch.Tensor, slots_P: torch.Tensor, count: int) -> torch.Tensor:
    """Return `count` slots with each part in its slot and zeros elsewhere; parts of slot `count` are dropped."""
    full = parts_PX.new_zeros(count + 1, *parts_PX.shape[1:])
    return full.index_copy_(0, slots_P, parts_PX)[:count]
