"""Training on a model of transformers: autograd through its layers, our own unembedding and losses around it.

One datum is one forward pass, without padding: what is computed together follows from the request alone. Gradients
are taken for A and B only, and go into the buffers of the request, so that a pass that fails leaves no trace.

Shapes: T tokens of a datum, N of a chunk, K targets, Y outputs of the model (hidden states or logits), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch

from tinsmith.engine.general.model import ActiveAdapter, GeneralModel, pairs_of
from tinsmith.engine.lora import LoraAdapter, LoraGroups
from tinsmith.engine.models.config import LM_HEAD
from tinsmith.engine.training.unembedding import Unembedding, logits_gradient_

ONE_DATUM = 1
"""The micro-batch of these models: a datum is longer than this, so it runs alone."""


class GeneralTraining:
    """What the trainer computes with."""

    def __init__(self, model: GeneralModel) -> None:
        self._model = model
        self.device = model.device

    def training_pass(
        self, adapter: LoraAdapter, lengths: Sequence[int], *, is_recording: bool, is_checkpointed: bool
    ) -> GeneralPass:
        assert len(lengths) == 1, "datums of these models run one by one"
        return GeneralPass(self._model, adapter, is_recording)

    def unembedding(self, adapter: LoraAdapter) -> Unembedding:
        return Unembedding(self._model, adapter) if self._model.has_plain_head else OwnLogits(self._model, adapter)


class GeneralPass:
    """One datum on its way through the model."""

    def __init__(self, model: GeneralModel, adapter: LoraAdapter, is_recording: bool) -> None:
        self._model = model
        self._scale = adapter.scale
        self._pairs = {key: pair for key, pair in pairs_of(adapter).items() if not self._is_outside(key)}
        self._is_recording = is_recording and bool(self._pairs)
        self._output: torch.Tensor | None = None

    def forward_steps(self, tokens_T: torch.Tensor) -> Generator[None, None, torch.Tensor]:
        """Return output_TY, without a graph; it is kept here for the way back."""
        if self._is_recording:
            self._pairs = {
                key: (A_RD.detach().requires_grad_(), B_ER.detach().requires_grad_())
                for key, (A_RD, B_ER) in self._pairs.items()
            }
        with torch.set_grad_enabled(self._is_recording), self._model.adapted(ActiveAdapter(self._pairs, self._scale)):
            output_TY, _ = self._model.forward(tokens_T)
        self._output = output_TY
        yield
        return output_TY.detach()

    def backward_steps(self, grad_TY: torch.Tensor, grads: LoraGroups) -> Generator[None, None, None]:
        """Add the gradients of A and B to `grads`, given that of the output."""
        assert self._output is not None, "backward before forward, or twice"
        output_TY, self._output = self._output, None
        if not output_TY.requires_grad:
            return
        leaves = [tensor for pair in self._pairs.values() for tensor in pair]
        found = iter(torch.autograd.grad(output_TY, leaves, grad_TY.to(output_TY.dtype), allow_unused=True))
        for key in self._pairs:
            group = grads[None, key]
            for total in (group.A_GRD, group.Bs_ER[0]):
                gradient = next(found)
                if gradient is not None:  # experts that no token went to have none
                    total.add_(gradient)
        yield

    def _is_outside(self, key: str) -> bool:
        """Return whether a module is the unembedding, and not part of what `forward` computes."""
        return key == LM_HEAD and self._model.has_plain_head


class OwnLogits(Unembedding):
    """Logprobs from the logits that the model computed itself, for heads that do more than a product."""

    def _logits(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        return hidden_ND.clone()

    def _rows_backward(
        self,
        hidden_ND: torch.Tensor,
        targets_NK: torch.Tensor,
        exponentials_NV: torch.Tensor,
        sum_N1: torch.Tensor,
        gradient_NK: torch.Tensor,
        slopes_NV: torch.Tensor | float,
        grads: LoraGroups | None,
    ) -> torch.Tensor:
        return logits_gradient_(exponentials_NV, sum_N1, targets_NK, gradient_NK)
