"""The decoder's layers, forward and backward, for training an adapter. The backward pass is written by hand.

The trick. Autograd would record a graph of every operation and keep every intermediate tensor. But the base model is
frozen, so no gradient of a base weight is ever needed: gradients only flow through the layers, and only A and B of the
adapter collect some. Each layer therefore keeps a short tape (`_LayerTape`): the inputs of its norms, the
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

from tinsmith.engine.lora import LoraAdapter, LoraGroup, LoraGroups
from tinsmith.engine.models.attention import Angles, positions_of
from tinsmith.engine.models.config import GROUPS, ModelConfig
from tinsmith.engine.models.decoder import Decoder, Layer, Linear
from tinsmith.engine.training.attention import Attended, training_attention
from tinsmith.engine.training.pauses import finished
from tinsmith.engine.training.row_ops import norm_backward, norm_scale, row_ops

_Normed = tuple[torch.Tensor, torch.Tensor] | None
"""The input of a norm of what is added to the residual, and its scale; None if the model has no such norm."""


@dataclass(slots=True)
class _LayerTape:
    """What the backward pass of a layer needs from its forward pass."""

    x_TD: torch.Tensor
    x_scale_T1: torch.Tensor | None
    """The scale of a norm; None here and below if the model does not have it."""
    raw_TEC: torch.Tensor | None
    """Queries, keys and values before the head norm, for models that have one."""
    attended: Attended
    output: _Normed
    middle_TD: torch.Tensor
    middle_scale_T1: torch.Tensor | None
    gate_up_TE: torch.Tensor
    down: _Normed
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
        self._rows = row_ops(decoder.device, decoder.dtype, decoder.config.activation)
        self._is_checkpointed = is_checkpointed
        self._is_recording = is_recording and any(layer is not None for layer, _ in adapter.groups)
        self._tapes: list[_LayerTape | torch.Tensor] = []
        self._angles: tuple[Angles, ...] = ()
        self._last: tuple[torch.Tensor, torch.Tensor] | None = None

    def forward(self, tokens_T: torch.Tensor) -> torch.Tensor:
        """Return hidden_TD after the final norm."""
        return finished(self.forward_steps(tokens_T))

    @torch.no_grad()
    def forward_steps(self, tokens_T: torch.Tensor) -> Generator[None, None, torch.Tensor]:
        """Run `forward` with a pause after each layer."""
        decoder = self._decoder
        self._angles = decoder.angles(positions_of(self._lengths, decoder.device))
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
        layer = self._decoder.layers[index]
        lows: dict[str, torch.Tensor] = {}
        normed_TD, x_scale_T1 = self._norm(x_TD, layer.input_norm_D)
        stacked_TE = self._project(index, "qkv", layer.qkv, normed_TD, lows)
        raw_TEC, qkv_TEC = self._heads(index, layer, stacked_TE)
        attended = self._attention.forward(index, qkv_TEC, needs_graph)
        output_TD = self._project(index, "output", layer.output, attended.out_THC.flatten(1), lows)
        middle_TD, output = self._add(output_TD, layer.output_norm_D, x_TD)
        normed_TD, middle_scale_T1 = self._norm(middle_TD, layer.mlp_norm_D)
        gate_up_TE = self._project(index, "gate_up", layer.gate_up, normed_TD, lows)
        active_TI = self._rows.gate(gate_up_TE)
        down_TD = self._project(index, "down", layer.down, active_TI, lows)
        out_TD, down = self._add(down_TD, layer.down_norm_D, middle_TD)
        scales = middle_TD, middle_scale_T1
        return out_TD, _LayerTape(x_TD, x_scale_T1, raw_TEC, attended, output, *scales, gate_up_TE, down, lows)

    def _norm(self, x_TD: torch.Tensor, weight_D: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return what attention or MLP reads, and the scale of the norm if there is one."""
        return (x_TD, None) if weight_D is None else self._rows.norm(x_TD, weight_D, self._decoder.config.norm_eps)

    def _norm_again(
        self, x_TD: torch.Tensor, scale_T1: torch.Tensor | None, weight_D: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the first result of `_norm` once more."""
        return x_TD if scale_T1 is None or weight_D is None else self._rows.scaled(x_TD, scale_T1, weight_D)

    def _norm_back(
        self,
        grad_TD: torch.Tensor,
        x_TD: torch.Tensor,
        scale_T1: torch.Tensor | None,
        weight_D: torch.Tensor | None,
        beside_TD: torch.Tensor,
    ) -> torch.Tensor:
        """Return the gradient of the input of `_norm`, plus that of the residual beside it."""
        if scale_T1 is None or weight_D is None:
            return grad_TD + beside_TD
        return self._rows.norm_back(grad_TD, x_TD, scale_T1, weight_D, beside_TD)

    def _add(
        self, y_TD: torch.Tensor, weight_D: torch.Tensor | None, x_TD: torch.Tensor
    ) -> tuple[torch.Tensor, _Normed]:
        """Add a result to the residual, after its norm if the model has one there."""
        added_TD, normed, scale = y_TD, None, self._decoder.config.residual_scale
        if weight_D is not None:
            added_TD, scale_T1 = self._rows.norm(y_TD, weight_D, self._decoder.config.norm_eps)
            normed = y_TD, scale_T1
        return (added_TD if scale == 1.0 else added_TD.mul_(scale)).add_(x_TD), normed

    def _add_back(self, grad_TD: torch.Tensor, weight_D: torch.Tensor | None, normed: _Normed) -> torch.Tensor:
        """Return the gradient of what `_add` added to the residual."""
        scale = self._decoder.config.residual_scale
        grad_TD = grad_TD if scale == 1.0 else grad_TD * scale
        if normed is None or weight_D is None:
            return grad_TD
        return self._rows.norm_back(grad_TD, *normed, weight_D, None)

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
        norms = self._head_norms(layer)
        if norms:
            raw_TEC = qkv_TEC
            normed = [
                (x_TGW * norm_scale(x_TGW, config.norm_eps) * weight_GW).view(len(x_TGW), -1, config.head_dim)
                for x_TGW, weight_GW in zip(self._normed_parts(raw_TEC, norms), norms, strict=True)
            ]
            qkv_TEC = torch.cat((*normed, raw_TEC[:, -config.num_kv_heads :]), dim=1)
        which = config.rope_index(index)
        if which is not None:
            qkv_TEC = self._rows.turn(qkv_TEC, config.num_heads + config.num_kv_heads, *self._angles[which])
        return raw_TEC, qkv_TEC

    def _head_norms(self, layer: Layer) -> list[torch.Tensor]:
        """Return the weights of the norms as [G, W], G runs of W numbers: all heads, or all queries and all keys.

        The list is empty if the model has no such norms.
        """
        if layer.query_norm_C is None or layer.key_norm_C is None:
            return []
        config = self._decoder.config
        if config.is_qk_norm_wide:
            return [layer.query_norm_C.unsqueeze(0), layer.key_norm_C.unsqueeze(0)]
        heads = (config.num_heads, -1), (config.num_kv_heads, -1)
        return [torch.cat((layer.query_norm_C.expand(heads[0]), layer.key_norm_C.expand(heads[1])))]

    def _normed_parts(self, x_TEC: torch.Tensor, norms: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return queries and keys, or anything of their shape, in the runs that the norms are over."""
        turned_TEC, head_dim = x_TEC[:, : -self._decoder.config.num_kv_heads], self._decoder.config.head_dim
        parts = torch.split_with_sizes(turned_TEC, [weight_GW.numel() // head_dim for weight_GW in norms], dim=1)
        if len(norms) == 1:
            return list(parts)
        return [part_THC.flatten(1).unsqueeze(1) for part_THC in parts]

    def _layer_backward(self, index: int, tape: _LayerTape, grad_TD: torch.Tensor, grads: LoraGroups) -> torch.Tensor:
        layer = self._decoder.layers[index]
        grad_TD = self._mlp_backward(index, layer, tape, grad_TD, grads)
        out_THC = tape.attended.out_THC
        added_grad_TD = self._add_back(grad_TD, layer.output_norm_D, tape.output)
        grad_TE = self._linear_backward(index, "output", layer.output, out_THC.flatten(1), added_grad_TD, tape, grads)
        qkv_grad_TEC = self._attention.backward(tape.attended, grad_TE.view(out_THC.shape))
        stacked_TE = self._heads_backward(index, layer, tape, qkv_grad_TEC)
        normed_TD = self._norm_again(tape.x_TD, tape.x_scale_T1, layer.input_norm_D)
        normed_grad_TD = self._linear_backward(index, "qkv", layer.qkv, normed_TD, stacked_TE, tape, grads)
        return self._norm_back(normed_grad_TD, tape.x_TD, tape.x_scale_T1, layer.input_norm_D, grad_TD)

    def _mlp_backward(
        self, index: int, layer: Layer, tape: _LayerTape, grad_TD: torch.Tensor, grads: LoraGroups
    ) -> torch.Tensor:
        active_TI = self._rows.gate(tape.gate_up_TE)
        added_grad_TD = self._add_back(grad_TD, layer.down_norm_D, tape.down)
        active_grad_TI = self._linear_backward(index, "down", layer.down, active_TI, added_grad_TD, tape, grads)
        gate_up_grad_TE = self._rows.gate_back(active_grad_TI, tape.gate_up_TE)
        normed_TD = self._norm_again(tape.middle_TD, tape.middle_scale_T1, layer.mlp_norm_D)
        normed_grad_TD = self._linear_backward(index, "gate_up", layer.gate_up, normed_TD, gate_up_grad_TE, tape, grads)
        return self._norm_back(normed_grad_TD, tape.middle_TD, tape.middle_scale_T1, layer.mlp_norm_D, grad_TD)

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
        which = config.rope_index(index)
        if which is not None:
            cos_T1F, sin_T1F = self._angles[which]
            grad_TEC = self._rows.turn(grad_TEC, config.num_heads + config.num_kv_heads, cos_T1F, -sin_T1F)
        norms = self._head_norms(layer)
        if norms:
            assert tape.raw_TEC is not None
            parts = zip(
                self._normed_parts(grad_TEC, norms), self._normed_parts(tape.raw_TEC, norms), norms, strict=True
            )
            through = [
                norm_backward(grad_TGW, x_TGW, norm_scale(x_TGW, config.norm_eps), weight_GW)
                for grad_TGW, x_TGW, weight_GW in parts
            ]
            whole = [part_TGW.view(len(grad_TEC), -1, config.head_dim) for part_TGW in through]
            grad_TEC = torch.cat((*whole, grad_TEC[:, -config.num_kv_heads :]), dim=1)
        return grad_TEC.flatten(1)


def recorded_bytes(config: ModelConfig, rank: int, dtype: torch.dtype) -> int:
    """Return how many bytes `forward` keeps per token at most, which decides how many tokens can be recorded."""
    projected = config.query_size + 2 * config.kv_size
    attention = projected * (2 if config.has_qk_norm else 1) + 2 * config.query_size + config.num_heads
    modules = sum(len(config.modules(group)) for group in GROUPS)
    norms = config.has_input_norms + config.has_output_norms
    states = 2 * ((1 + config.has_output_norms) * config.hidden_size + norms)
    per_layer = states + attention + 2 * config.intermediate_size + modules * rank
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
