"""Attention over a key/value cache in blocks.

Owns: the tensors of the cache, writing new keys and values into it, and attention of new tokens over cached ones.
Does not know: who holds which block (`kv_blocks`), which tokens run (`sampler`).

Every product has the same inner shape whatever the batch: one block of keys or values against a multiple of four query
rows. The parts of a sequence's blocks are joined by one softmax and a sum in the order of the blocks. So the result for
a token does not depend on what else is in the batch, nor on whether it came with others (prefill) or alone (decode).

Shapes: T new tokens, H query heads, K key/value heads, G = H / K, C head dim, S tiles, R query rows of a tile,
B block size, N blocks, P pairs of a tile and a block, W blocks of the longest tile, L layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tinsmith.engine.models.config import ModelConfig

TILE_TOKENS = 64
"""Prefill handles this many new tokens of a sequence at a time: bounds the memory of the scores."""
_ROW_MULTIPLE = 4
"""Products with fewer rows take other kernels, whose sums are ordered differently."""


def block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Memory of one block over all layers."""
    return 2 * config.num_layers * config.kv_size * block_size * dtype.itemsize


class BlockCache:
    """Keys and values of all layers. Memory is taken from the system as blocks are first used."""

    def __init__(
        self, config: ModelConfig, block_count: int, block_size: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.config = config
        self.block_size = block_size
        heads, head_dim, layers = config.num_kv_heads, config.head_dim, config.num_layers
        self.keys_LNKCB = torch.zeros(layers, block_count, heads, head_dim, block_size, device=device, dtype=dtype)
        self.values_LNKBC = torch.zeros(layers, block_count, heads, block_size, head_dim, device=device, dtype=dtype)
        self._staged = torch.empty(0, device=device, dtype=dtype)

    def clear(self, block: int) -> None:
        """Forget a block's values: what is not finite must not reach the next holder (0 * nan is nan)."""
        self.values_LNKBC[:, block].zero_()

    def copy(self, source: int, target: int) -> None:
        self.keys_LNKCB[:, target] = self.keys_LNKCB[:, source]
        self.values_LNKBC[:, target] = self.values_LNKBC[:, source]

    def staging(self, like_NX: torch.Tensor, count: int) -> torch.Tensor:
        """Room for `count` blocks, used again by each layer."""
        shape = (count, *like_NX.shape[1:])
        size = count * like_NX[0].numel()
        if self._staged.numel() < size:
            self._staged = torch.empty(size, device=like_NX.device, dtype=like_NX.dtype)
        return self._staged[:size].view(shape)


@dataclass(frozen=True, slots=True)
class NewTokens:
    """New tokens of one sequence: `count` rows of the batch from `row` on, at positions from `start` on."""

    row: int
    start: int
    count: int
    blocks: Sequence[int]
    """The sequence's blocks, with room for the new tokens."""


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Tiles of equally many rows, and the blocks they look at."""

    rows: slice | torch.Tensor
    """The tokens' rows of the batch, tile after tile."""
    count: int
    tokens: int
    """Tokens of one tile."""
    blocks_P: torch.Tensor
    first_block: int | None
    """Set when the blocks lie one after another in the cache: nothing needs to be gathered."""
    owners_P: torch.Tensor
    slots_P: torch.Tensor | None
    """Where a pair belongs in S * W; None when all tiles have W blocks."""
    width: int
    last_ST: torch.Tensor
    """Position of each token of each tile."""


class BlockAttention:
    """The `attend` of one sampler step."""

    def __init__(self, cache: BlockCache, batch: Sequence[NewTokens]) -> None:
        self._cache = cache
        self._config = cache.config
        self._groups = cache.config.num_heads // cache.config.num_kv_heads
        self._device = cache.keys_LNKCB.device
        size = cache.block_size
        places = [(new.blocks[p // size], p % size) for new in batch for p in range(new.start, new.start + new.count)]
        self._block_T, self._slot_T = torch.tensor(places, device=self._device).unbind(1)
        self._tiles = self._plan(batch)
        self._masks: dict[tuple[int, int | None], torch.Tensor] = {}

    def __call__(self, layer: int, q_THC: torch.Tensor, k_TKC: torch.Tensor, v_TKC: torch.Tensor) -> torch.Tensor:
        keys_NKCB, values_NKBC = self._cache.keys_LNKCB[layer], self._cache.values_LNKBC[layer]
        keys_NKCB[self._block_T, :, :, self._slot_T] = k_TKC
        values_NKBC[self._block_T, :, self._slot_T] = v_TKC
        scaled_THC = q_THC * self._config.head_dim**-0.5
        if len(self._tiles) == 1 and isinstance(self._tiles[0].rows, slice):
            return self._attend(0, layer, scaled_THC)
        out_THC = torch.empty_like(scaled_THC)
        for number, tiles in enumerate(self._tiles):
            out_THC[tiles.rows] = self._attend(number, layer, scaled_THC[tiles.rows])
        return out_THC

    def _attend(self, number: int, layer: int, q_THC: torch.Tensor) -> torch.Tensor:
        """Attention of the tokens of some tiles."""
        tiles, config = self._tiles[number], self._config
        size, kv_heads, head_dim = self._cache.block_size, config.num_kv_heads, config.head_dim
        q_SKRC = self._query_rows(tiles, q_THC)
        rows = q_SKRC.shape[2]
        pairs = len(tiles.blocks_P)
        keys = self._blocks(self._cache.keys_LNKCB[layer], tiles)
        q_PKRC = q_SKRC if pairs == tiles.count else q_SKRC.index_select(0, tiles.owners_P)
        scores = torch.bmm(q_PKRC.reshape(-1, rows, head_dim), keys.view(-1, head_dim, size))
        scores_SKRT = _joined(scores.view(pairs, kv_heads, rows, size), tiles)
        scores_SKRT = scores_SKRT.masked_fill_(self._mask(number, layer, rows), float("-inf"))
        probs = _parted(scores_SKRT.softmax(dim=-1), tiles, size)
        values = self._blocks(self._cache.values_LNKBC[layer], tiles)
        out = torch.bmm(probs.view(-1, rows, size), values.view(-1, size, head_dim))
        out_SKRC = _summed(out.view(pairs, kv_heads, rows, head_dim), tiles)
        out_SKTGC = out_SKRC[:, :, : tiles.tokens * self._groups].unflatten(2, (tiles.tokens, self._groups))
        return out_SKTGC.transpose(1, 2).reshape(-1, config.num_heads, head_dim)

    def _query_rows(self, tiles: _Tiles, q_THC: torch.Tensor) -> torch.Tensor:
        """q_SKRC: a tile's tokens and the heads that share keys as rows, filled up to a multiple of four."""
        kv_heads, groups, head_dim = self._config.num_kv_heads, self._groups, self._config.head_dim
        q_STKGC = q_THC.reshape(tiles.count, tiles.tokens, kv_heads, groups, head_dim)
        used = tiles.tokens * groups
        rows = -(-used // _ROW_MULTIPLE) * _ROW_MULTIPLE
        q_SKRC = torch.zeros(tiles.count, kv_heads, rows, head_dim, device=q_THC.device, dtype=q_THC.dtype)
        q_SKRC[:, :, :used].unflatten(2, (tiles.tokens, groups)).copy_(q_STKGC.transpose(1, 2))
        return q_SKRC

    def _blocks(self, cached_NX: torch.Tensor, tiles: _Tiles) -> torch.Tensor:
        count = len(tiles.blocks_P)
        if tiles.first_block is not None:
            return cached_NX[tiles.first_block : tiles.first_block + count]
        return torch.index_select(cached_NX, 0, tiles.blocks_P, out=self._cache.staging(cached_NX, count))

    def _mask(self, number: int, layer: int, rows: int) -> torch.Tensor:
        """True where a row must not look: after its token, or before its window. Shape [S, 1, R, W * B]."""
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
        """Single tokens of all sequences together, longer runs by themselves in tiles."""
        singles = [new for new in batch if new.count == 1]
        plan = [self._tiles_of(singles)] if singles else []
        for new in batch:
            if new.count > 1:
                for offset in range(0, new.count, TILE_TOKENS):
                    count = min(TILE_TOKENS, new.count - offset)
                    plan.append(
                        self._tiles_of([NewTokens(new.row + offset, new.start + offset, count, new.blocks)])
                    )
        return plan

    def _tiles_of(self, tiles: Sequence[NewTokens]) -> _Tiles:
        size, tokens, device = self._cache.block_size, tiles[0].count, self._device
        widths = [-(-(tile.start + tokens) // size) for tile in tiles]
        pairs = [(tile.blocks[b], s, b) for s, tile in enumerate(tiles) for b in range(widths[s])]
        blocks = [block for block, _, _ in pairs]
        width = max(widths)
        is_range = blocks == list(range(blocks[0], blocks[0] + len(blocks)))
        rows = [tile.row + t for tile in tiles for t in range(tokens)]
        is_slice = rows == list(range(rows[0], rows[0] + len(rows)))
        slots = torch.tensor([s * width + b for _, s, b in pairs], device=device)
        return _Tiles(
            rows=slice(rows[0], rows[0] + len(rows)) if is_slice else torch.tensor(rows, device=device),
            count=len(tiles),
            tokens=tokens,
            blocks_P=torch.tensor(blocks, device=device),
            first_block=blocks[0] if is_range else None,
            owners_P=torch.tensor([s for _, s, _ in pairs], device=device),
            slots_P=None if len(pairs) == width * len(tiles) else slots,
            width=width,
            last_ST=torch.tensor([[tile.start + t for t in range(tokens)] for tile in tiles], device=device),
        )


def _joined(scores_PKRB: torch.Tensor, tiles: _Tiles) -> torch.Tensor:
    """Pairs side by side as scores_SKRT; what no pair fills is masked later."""
    if tiles.slots_P is not None:
        full = scores_PKRB.new_zeros(tiles.count * tiles.width, *scores_PKRB.shape[1:])
        scores_PKRB = full.index_copy_(0, tiles.slots_P, scores_PKRB)
    if tiles.width == 1:
        return scores_PKRB
    return scores_PKRB.unflatten(0, (tiles.count, tiles.width)).permute(0, 2, 3, 1, 4).flatten(3)


def _parted(probs_SKRT: torch.Tensor, tiles: _Tiles, size: int) -> torch.Tensor:
    """The inverse of `_joined`."""
    if tiles.width == 1:
        return probs_SKRT
    parts = probs_SKRT.unflatten(3, (tiles.width, size)).permute(0, 3, 1, 2, 4).flatten(0, 1)
    return parts.contiguous() if tiles.slots_P is None else parts.index_select(0, tiles.slots_P)


def _summed(out_PKRC: torch.Tensor, tiles: _Tiles) -> torch.Tensor:
    """The parts of each tile added up, in the order of its blocks."""
    if tiles.slots_P is not None:
        full = out_PKRC.new_zeros(tiles.count * tiles.width, *out_PKRC.shape[1:])
        out_PKRC = full.index_copy_(0, tiles.slots_P, out_PKRC)
    return out_PKRC if tiles.width == 1 else out_PKRC.unflatten(0, (tiles.count, tiles.width)).sum(dim=1)
