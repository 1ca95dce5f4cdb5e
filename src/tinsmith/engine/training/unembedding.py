"""From hidden states to the logprobs of the targets and back, in chunks: logits never exist for a whole batch.

The logits of a batch would be by far its largest tensor (positions x vocabulary). So log-softmax and its gradient are
computed for a chunk of positions at a time. Losses are computed elsewhere: the caller passes a function that returns
dL/dlogprob.

Shapes: T positions of a batch, N positions of a chunk, K targets per position, D hidden, V vocabulary, R rank.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch

from tinsmith.engine.lora import LoraAdapter, LoraGroups
from tinsmith.engine.models.config import LM_HEAD
from tinsmith.engine.models.decoder import Adapter, Linear

CHUNK_BYTES = 24 * 2**20
"""Size of the logits that exist at once: small enough for the last-level cache of many processors, and for memory that
is reused rather than returned to the system (`worker/memory`)."""

GradientOf: TypeAlias = Callable[[slice, torch.Tensor], torch.Tensor | None]
"""gradient_of(rows, logprobs_NK) returns dL/dlogprob as [N, K]; None: no gradient is needed."""


class Unembedder(Protocol):
    """The last matrix of a model: a `Decoder`, or the head of another one that is a plain product."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def unembedding(self) -> Linear: ...

    def logits(self, hidden_TD: torch.Tensor, adapter: Adapter | None = None) -> torch.Tensor: ...

    def slopes(self, logits_TV: torch.Tensor) -> torch.Tensor | float:
        """Return the derivative of `logits` by what the product with the matrix returned."""


@dataclass(frozen=True)
class Unembedding:
    """The unembedding of one model with one adapter. It pauses between chunks."""

    decoder: Unembedder
    adapter: LoraAdapter | None = None

    def logprobs(self, hidden_TD: torch.Tensor, targets_TK: torch.Tensor) -> Generator[None, None, torch.Tensor]:
        """Return the logprobs of the targets at each position, in float32."""
        logprobs_TK, _ = yield from self.fused(hidden_TD, targets_TK, lambda rows, logprobs_NK: None, None)
        return logprobs_TK

    @torch.no_grad()
    def fused(
        self,
        hidden_TD: torch.Tensor,
        targets_TK: torch.Tensor,
        gradient_of: GradientOf,
        grads: LoraGroups | None,
    ) -> Generator[None, None, tuple[torch.Tensor, torch.Tensor | None]]:
        """Return logprobs and the gradient of the hidden states (None if there is none), in one pass over the
        vocabulary.

        The unembedding's own gradients are added to `grads`. Positions without a gradient skip the backward pass.
        """
        logprobs_TK = torch.empty(targets_TK.shape, dtype=torch.float32, device=hidden_TD.device)
        hidden_grad_TD: torch.Tensor | None = None
        chunk = max(1, CHUNK_BYTES // (4 * self.decoder.vocab_size))
        for start in range(0, len(hidden_TD), chunk):
            if start:
                yield
            rows = slice(start, min(start + chunk, len(hidden_TD)))
            hidden_ND, targets_NK = hidden_TD[rows], targets_TK[rows]
            logits_NV = self._logits(hidden_ND)
            slopes_NV = self.decoder.slopes(logits_NV)
            logprobs_NK, sum_N1 = _exponentials_(logits_NV, targets_NK)
            logprobs_TK[rows] = logprobs_NK
            gradient_NK = gradient_of(rows, logprobs_NK)
            if gradient_NK is None or not bool(gradient_NK.any()):
                continue
            if hidden_grad_TD is None:
                hidden_grad_TD = torch.zeros_like(hidden_TD)
            chunk_rows = hidden_ND, targets_NK, logits_NV, sum_N1, gradient_NK
            hidden_grad_TD[rows] = self._chunk_backward(*chunk_rows, slopes_NV, grads)
        return logprobs_TK, hidden_grad_TD

    def backward(
        self, hidden_TD: torch.Tensor, targets_TK: torch.Tensor, gradient_TK: torch.Tensor, grads: LoraGroups
    ) -> Generator[None, None, torch.Tensor | None]:
        """Return the gradient of the hidden states for a given dL/dlogprob; only rows that have one are recomputed."""
        active_N = gradient_TK.ne(0).any(dim=1).nonzero().squeeze(1)
        if not len(active_N):
            return None
        gradient_NK = gradient_TK[active_N]
        _, part_ND = yield from self.fused(
            hidden_TD[active_N], targets_TK[active_N], lambda rows, logprobs_NK: gradient_NK[rows], grads
        )
        assert part_ND is not None
        return torch.zeros_like(hidden_TD).index_copy_(0, active_N, part_ND)

    def _logits(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """Return logits_NV in float32, which may be overwritten."""
        return self.decoder.logits(hidden_ND, self.adapter)

    def _chunk_backward(
        self,
        hidden_ND: torch.Tensor,
        targets_NK: torch.Tensor,
        exponentials_NV: torch.Tensor,
        sum_N1: torch.Tensor,
        gradient_NK: torch.Tensor,
        slopes_NV: torch.Tensor | float,
        grads: LoraGroups | None,
    ) -> torch.Tensor:
        """Return the gradient of a chunk's hidden states; overwrites the exponentials."""
        rows = hidden_ND, targets_NK, exponentials_NV, sum_N1, gradient_NK
        active_M = gradient_NK.ne(0).any(dim=1).nonzero().squeeze(1)
        if len(active_M) == len(hidden_ND):
            return self._rows_backward(*rows, slopes_NV, grads)
        hidden_MD, targets_MK, exponentials_MV, sum_M1, gradient_MK = (tensor[active_M] for tensor in rows)
        slopes_MV = slopes_NV if isinstance(slopes_NV, float) else slopes_NV[active_M]
        part_MD = self._rows_backward(hidden_MD, targets_MK, exponentials_MV, sum_M1, gradient_MK, slopes_MV, grads)
        return torch.zeros_like(hidden_ND).index_copy_(0, active_M, part_MD)

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
        logits_grad_NV = logits_gradient_(exponentials_NV, sum_N1, targets_NK, gradient_NK)
        if not isinstance(slopes_NV, float) or slopes_NV != 1.0:
            logits_grad_NV.mul_(slopes_NV)
        hidden_grad_ND = self.decoder.unembedding.back(logits_grad_NV.to(hidden_ND.dtype))
        group = self.adapter.groups.get((None, LM_HEAD)) if self.adapter is not None else None
        if group is None or self.adapter is None or grads is None:
            return hidden_grad_ND
        A_RD, B_VR, scale = group.A_GRD, group.Bs_ER[0], self.adapter.scale
        wide_ND = hidden_ND.float()
        low_NR, low_grad_NR = wide_ND @ A_RD.t(), (logits_grad_NV @ B_VR).mul_(scale)
        own = grads[None, LM_HEAD]
        own.Bs_ER[0].addmm_(logits_grad_NV.t(), low_NR, alpha=scale)
        own.A_GRD.addmm_(low_grad_NR.t(), wide_ND)
        return hidden_grad_ND.add_(low_grad_NR @ A_RD)


def logits_gradient_(
    exponentials_NV: torch.Tensor, sum_N1: torch.Tensor, targets_NK: torch.Tensor, gradient_NK: torch.Tensor
) -> torch.Tensor:
    """Return the gradient of the logits for a given dL/dlogprob, in the place of their exponentials."""
    logits_grad_NV = exponentials_NV.mul_(gradient_NK.sum(dim=1, keepdim=True).div_(sum_N1).neg_())
    return logits_grad_NV.scatter_add_(1, targets_NK, gradient_NK)


def _exponentials_(logits_NV: torch.Tensor, targets_NK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Replace the logits by exp(logit - largest); return the logprobs of the targets and the sum of each row."""
    chosen_NK = logits_NV.gather(1, targets_NK)
    largest_N1 = logits_NV.amax(dim=1, keepdim=True)
    sum_N1 = logits_NV.sub_(largest_N1).exp_().sum(dim=1, keepdim=True)
    return chosen_NK.sub_(largest_N1).sub_(sum_N1.log()), sum_N1
