"""The decoder's layers, forward and backward, for training an adapter. The backward pass is written by hand.

The trick. Autograd would record a graph of every operation and keep every intermediate tensor. But the base model is
frozen, so no gradient of a base weight is ever needed: gradients only flow through the layers, and only A and B of the
adapter collect some. Each layer therefore keeps a short tape (`_LayerTape`): the inputs of its two norms, the
attention's queries, keys and values, the MLP's gate and up, and x A^T of each adapted linear. Everything else, such as
normalised inputs or gated activations, is cheap to compute again from these and is, to the same bits. For long batches
even the tape is too large: then only each layer's input is kept, and the layer runs forward once more on the way back
(`is_checkpointed`).

The gradients are compared with autograd through `Decoder.hidden` in tests/unit/engine.

Shapes: T tokens, D inputs, E outputs or heads of queries, keys and values, H of them without the values, K key/value
heads, C head dim, I intermediate, R rank, G modules of a group.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import linear

from tinsmith.engine.lora import GROUPS, LoraAdapter, LoraGroup, LoraGroups
from tinsmith.engine.models.attention import positions_of
from tinsmith.engine.models.config import ModelConfig
from tinsmith.engine.models.decoder import Decoder, Layer, Linear
from tinsmith.engine.training.attention import Attended, training_attention
from tinsmith.engine.training.pauses import finished
from tinsmith.engine.training.row_ops import norm_backward, norm_scale, row_ops

Angles = tuple[torch.Tensor, torch.Tensor]


@dataclass(slots=True)
class _LayerTape:
    """What the backward pass of a layer needs from its forward pass."""

    x_TD: torch.Tensor
    x_scale_T1: torch.Tensor
    raw_TEC: torch.Tensor | None
    """Queries, keys and values before the head norm, for models that have one."""
    attended: Attended
    middle_TD: torch.Tensor
    middle_scale_T1: torch.Tensor
    gate_up_TE: torch.Tensor
    lows: dict[str, torch.Tensor]
    """x A^T of each trained group."""


class TrainingPass:
    """One packed batch of sequences of the given lengths: call `forward`, then `backward` once.

    Without `is_recording` nothing is kept and there is no backward pass. With `is_checkpointed` only the input of each
    layer is kept, and the layer runs forward again on the way back. The `_steps` variants are generators that pause
    after each layer, so that the worker can run other tenants' jobs in between.
    """

    def __init__(
        self,
        decoder: Decoder,
        adapter: LoraAdapter,
        lengths: Sequence[int],
        *,
        is_recording: bool = True,
        is_checkpointed: bool = False,
    ) -> None:
        self._decoder = decoder
        self._adapter = adapter
        self._lengths = tuple(lengths)
        self._attention = training_attention(decoder.config, self._lengths, decoder.device, decoder.dtype)
        self._rows = row_ops(decoder.device, decoder.dtype)
        self._is_checkpointed = is_checkpointed
        self._is_recording = is_recording and any(layer is not None for layer, _ in adapter.groups)
        self._tapes: list[_LayerTape | torch.Tensor] = []
        self._angles: Angles | None = None
        self._last: tuple[torch.Tensor, torch.Tensor] | None = None

    def forward(self, tokens_T: torch.Tensor) -> torch.Tensor:
        """Return hidden_TD after the final norm."""
        return finished(self.forward_steps(tokens_T))

    @torch.no_grad()
    def forward_steps(self, tokens_T: torch.Tensor) -> Generator[None, None, torch.Tensor]:
        """Run `forward` with a pause after each layer."""
        decoder = self._decoder
        self._angles = decoder.rope.angles(positions_of(self._lengths, decoder.device))
        x_TD = decoder.embed(tokens_T)
        for index in range(len(decoder.layers)):
            before_TD = x_TD
            x_TD, tape = self._layer_forward(index, x_TD, needs_graph=self._is_recording and not self._is_checkpointed)
            if self._is_recording:
                self._tapes.append(before_TD if self._is_checkpointed else tape)
            yield
        normed_TD, scale_T1 = self._rows.norm(x_TD, decoder.norm_D, decoder.config.norm_eps)
        self._last = x_TD, scale_T1
        return normed_TD

    def backward(self, grad_TD: torch.Tensor, grads: LoraGroups) -> None:
        """Add the adapter's gradients to `grads`, given the gradient of the output of `forward`."""
        finished(self.backward_steps(grad_TD, grads))

    @torch.no_grad()
    def backward_steps(self, grad_TD: torch.Tensor, grads: LoraGroups) -> Generator[None, None, None]:
        """Run `backward` with a pause after each layer."""
        assert self._last is not None, "backward before forward, or twice"
        (x_TD, scale_T1), self._last = self._last, None
        if not self._is_recording:
            return
        grad_TD = self._rows.norm_back(grad_TD, x_TD, scale_T1, self._decoder.norm_D, None)
        for index in reversed(range(len(self._tapes))):
            tape = self._tapes.pop()
            if isinstance(tape, torch.Tensor):
                tape = self._layer_forward(index, tape, needs_graph=True)[1]
            grad_TD = self._layer_backward(index, tape, grad_TD, grads)
            yield

    def _layer_forward(self, index: int, x_TD: torch.Tensor, needs_graph: bool) -> tuple[torch.Tensor, _LayerTape]:
        layer, eps = self._decoder.layers[index], self._decoder.config.norm_eps
        lows: dict[str, torch.Tensor] = {}
        normed_TD, x_scale_T1 = self._rows.norm(x_TD, layer.input_norm_D, eps)
        stacked_TE = self._project(index, "qkv", layer.qkv, normed_TD, lows)
        raw_TEC, qkv_TEC = self._heads(index, layer, stacked_TE)
        attended = self._attention.forward(index, qkv_TEC, needs_graph)
        output_TD = self._project(index, "output", layer.output, attended.out_THC.flatten(1), lows)
        middle_TD = output_TD.add_(x_TD)
        normed_TD, middle_scale_T1 = self._rows.norm(middle_TD, layer.mlp_norm_D, eps)
        gate_up_TE = self._project(index, "gate_up", layer.gate_up, normed_TD, lows)
        active_TI = self._rows.gate(gate_up_TE)
        out_TD = self._project(index, "down", layer.down, active_TI, lows).add_(middle_TD)
        tape = _LayerTape(x_TD, x_scale_T1, raw_TEC, attended, middle_TD, middle_scale_T1, gate_up_TE, lows)
        return out_TD, tape

    def _project(
        self, index: int, name: str, base: Linear, x_TD: torch.Tensor, lows: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        """Apply a linear of the base with its adapter; x A^T is stored in `lows`."""
        y_TE = base.product(x_TD)
        group = self._adapter.groups.get((index, name))
        if group is None:
            return y_TE
        low_TR = lows[name] = linear(x_TD, group.A_GRD.to(x_TD.dtype))
        _add_up(y_TE, low_TR, group, self._adapter.scale)
        return y_TE

    def _heads(self, index: int, layer: Layer, stacked_TE: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Return queries, keys and values before the head norm (None if there is none), and normalised and rotated."""
        config = self._decoder.config
        qkv_TEC, raw_TEC = stacked_TE.view(len(stacked_TE), -1, config.head_dim), None
        norm_HC = self._head_norm(layer)
        if norm_HC is not None:
            raw_TEC = qkv_TEC
            heads_THC, v_TKC = raw_TEC[:, : -config.num_kv_heads], raw_TEC[:, -config.num_kv_heads :]
            qkv_TEC = torch.cat((heads_THC * norm_scale(heads_THC, config.norm_eps) * norm_HC, v_TKC), dim=1)
        if config.has_rope(index):
            assert self._angles is not None
            qkv_TEC = self._rows.turn(qkv_TEC, config.num_heads + config.num_kv_heads, *self._angles)
        return raw_TEC, qkv_TEC

    def _head_norm(self, layer: Layer) -> torch.Tensor | None:
        """Return the norm weights of all query and key heads, stacked; None if the model has no head norm."""
        if layer.query_norm_C is None or layer.key_norm_C is None:
            return None
        config = self._decoder.config
        heads = (config.num_heads, -1), (config.num_kv_heads, -1)
        return torch.cat((layer.query_norm_C.expand(heads[0]), layer.key_norm_C.expand(heads[1])))

    def _layer_backward(self, index: int, tape: _LayerTape, grad_TD: torch.Tensor, grads: LoraGroups) -> torch.Tensor:
        layer = self._decoder.layers[index]
        grad_TD = self._mlp_backward(index, layer, tape, grad_TD, grads)
        out_THC = tape.attended.out_THC
        grad_TE = self._linear_backward(index, "output", layer.output, out_THC.flatten(1), grad_TD, tape, grads)
        qkv_grad_TEC = self._attention.backward(tape.attended, grad_TE.view(out_THC.shape))
        stacked_TE = self._heads_backward(index, layer, tape, qkv_grad_TEC)
        normed_TD = self._rows.scaled(tape.x_TD, tape.x_scale_T1, layer.input_norm_D)
        normed_grad_TD = self._linear_backward(index, "qkv", layer.qkv, normed_TD, stacked_TE, tape, grads)
        return self._rows.norm_back(normed_grad_TD, tape.x_TD, tape.x_scale_T1, layer.input_norm_D, grad_TD)

    def _mlp_backward(
        self, index: int, layer: Layer, tape: _LayerTape, grad_TD: torch.Tensor, grads: LoraGroups
    ) -> torch.Tensor:
        active_TI = self._rows.gate(tape.gate_up_TE)
        active_grad_TI = self._linear_backward(index, "down", layer.down, active_TI, grad_TD, tape, grads)
        gate_up_grad_TE = self._rows.gate_back(active_grad_TI, tape.gate_up_TE)
        normed_TD = self._rows.scaled(tape.middle_TD, tape.middle_scale_T1, layer.mlp_norm_D)
        normed_grad_TD = self._linear_backward(index, "gate_up", layer.gate_up, normed_TD, gate_up_grad_TE, tape, grads)
        return self._rows.norm_back(normed_grad_TD, tape.middle_TD, tape.middle_scale_T1, layer.mlp_norm_D, grad_TD)

    def _linear_backward(
        self,
        index: int,
        name: str,
        base: Linear,
        x_TD: torch.Tensor,
        grad_TE: torch.Tensor,
        tape: _LayerTape,
        grads: LoraGroups,
    ) -> torch.Tensor:
        """Return the gradient of the linear's input; add those of A and B to `grads`."""
        x_grad_TD = base.back(grad_TE)
        group = self._adapter.groups.get((index, name))
        if group is not None:
            low_grad_TR = _lora_backward(group, grads[index, name], self._adapter.scale, x_TD, tape.lows[name], grad_TE)
            x_grad_TD.addmm_(low_grad_TR, group.A_GRD.to(low_grad_TR.dtype))
        return x_grad_TD

    def _heads_backward(self, index: int, layer: Layer, tape: _LayerTape, grad_TEC: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the stacked projection, given that of the normalised and rotated heads."""
        config = self._decoder.config
        if config.has_rope(index):
            assert self._angles is not None
            cos_T1F, sin_T1F = self._angles
            grad_TEC = self._rows.turn(grad_TEC, config.num_heads + config.num_kv_heads, cos_T1F, -sin_T1F)
        norm_HC = self._head_norm(layer)
        if norm_HC is not None:
            assert tape.raw_TEC is not None
            heads_THC = tape.raw_TEC[:, : -config.num_kv_heads]
            scale_TH1 = norm_scale(heads_THC, config.norm_eps)
            through_THC = norm_backward(grad_TEC[:, : -config.num_kv_heads], heads_THC, scale_TH1, norm_HC)
            grad_TEC = torch.cat((through_THC, grad_TEC[:, -config.num_kv_heads :]), dim=1)
        return grad_TEC.flatten(1)


def recorded_bytes(config: ModelConfig, rank: int, dtype: torch.dtype) -> int:
    """Return how many bytes `forward` keeps per token at most, which decides how many tokens can be recorded."""
    projected = config.query_size + 2 * config.kv_size
    attention = projected * (2 if config.has_qk_norm else 1) + 2 * config.query_size + config.num_heads
    modules = sum(len(modules) for modules in GROUPS.values())
    per_layer = 2 * (config.hidden_size + 1) + attention + 2 * config.intermediate_size + modules * rank
    return dtype.itemsize * config.num_layers * per_layer


def _add_up(y_TE: torch.Tensor, low_TR: torch.Tensor, group: LoraGroup, scale: float) -> None:
    """Add scale * low B^T to each module's columns of y."""
    start = 0
    for B_ER, part_TR in zip(group.Bs_ER, low_TR.chunk(len(group.modules), dim=1), strict=True):
        stop = start + len(B_ER)
        y_TE[:, start:stop].addmm_(part_TR, B_ER.t().to(y_TE.dtype), alpha=scale)
        start = stop


def _lora_backward(
    group: LoraGroup,
    grads: LoraGroup,
    scale: float,
    x_TD: torch.Tensor,
    low_TR: torch.Tensor,
    grad_TE: torch.Tensor,
) -> torch.Tensor:
    """Add the gradients of A and B to `grads`; return that of x A^T."""
    low_grad_TR = torch.empty_like(low_TR)
    parts = zip(group.Bs_ER, grads.Bs_ER, low_TR.chunk(len(group.modules), 1), strict=True)
    start, column = 0, 0
    for B_ER, B_grad_ER, part_TR in parts:
        stop, rank = start + len(B_ER), B_ER.shape[1]
        part_grad_TE = grad_TE[:, start:stop]
        torch.mm(part_grad_TE, B_ER.to(grad_TE.dtype), out=low_grad_TR[:, column : column + rank])
        _accumulate(B_grad_ER, part_grad_TE.t(), part_TR, scale)
        start, column = stop, column + rank
    low_grad_TR.mul_(scale)
    _accumulate(grads.A_GRD, low_grad_TR.t(), x_TD, 1.0)
    return low_grad_TR


def _accumulate(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, scale: float) -> None:
    """Compute total += scale * left right, summed in total's precision."""
    if left.dtype == total.dtype:
        total.addmm_(left, right, alpha=scale)
    else:
        total.add_(left @ right, alpha=scale)
