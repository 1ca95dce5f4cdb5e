"""Prompt logprobs, top-k, targets and alternatives of a request, collected as the prompt's tokens are computed.

A prompt may be computed in chunks of any size; this collects them and returns the results in the form of the wire.

Shapes: T prompt positions of a chunk, V vocabulary, K listed tokens.
"""

from __future__ import annotations

import numpy as np
import torch

from tinsmith.engine.sampling.draw import PROMPT_ALTERNATIVES, draw_alternatives, topk, uniforms
from tinsmith.engine.sampling.plan import SamplePlan
from tinsmith.wire.messages.sampling import FILL_LOGPROB, FILL_TOKEN, PromptAltTokens, SampleRequest, TopkLogprobs
from tinsmith.wire.rules.sample_rules import NOT_ASKED
from tinsmith.wire.values.numbers import Array
from tinsmith.wire.values.tensors import TensorData


class PromptScores:
    """Results for each prompt position; position p is scored by the logits of position p - 1."""

    def __init__(self, request: SampleRequest, plan: SamplePlan, seed: int) -> None:
        length = len(plan.prompt)
        self._request, self._plan, self._seed = request, plan, seed
        self._logprobs = np.full(length, np.nan, np.float32)
        k = request.topk_prompt_logprobs
        self._topk_tokens = np.full((length, k), FILL_TOKEN, np.int32)
        self._topk_logprobs = np.full((length, k), FILL_LOGPROB, np.float32)
        alternatives = request.prompt_alt_tokens_k
        self._alt_tokens = np.zeros((length - 1, alternatives), np.int64)
        self._alt_logprobs = np.zeros((length - 1, alternatives), np.float32)
        target = request.target_prompt_logprobs
        self._targets: Array | None = None if target is None else target.to_numpy(NOT_ASKED)
        self._target_logprobs = np.full((0, 0) if self._targets is None else self._targets.shape, np.nan, np.float32)

    def add(self, start: int, logits_TV: torch.Tensor) -> None:
        """Score the positions from `start` on, with the logits of the positions before them."""
        logprobs_TV = logits_TV.log_softmax(dim=1)
        stop = start + len(logits_TV)
        if self._plan.scores_prompt and stop > self._plan.first_scored:
            first = max(start, self._plan.first_scored)
            self._add_logprobs(first, stop, logprobs_TV[first - start :])
        if self._targets is not None:
            asked = self._targets[start - 1 : stop - 1]
            index_TK = torch.from_numpy(np.maximum(asked, 0)).to(logits_TV.device)
            found = logprobs_TV.gather(1, index_TK).cpu().numpy()
            self._target_logprobs[start - 1 : stop - 1] = np.where(asked == NOT_ASKED, np.nan, found)
        if self._request.prompt_alt_tokens_k:
            self._add_alternatives(start, stop, logits_TV, logprobs_TV)

    def _add_logprobs(self, start: int, stop: int, logprobs_TV: torch.Tensor) -> None:
        tokens_T1 = torch.tensor(self._plan.prompt[start:stop], device=logprobs_TV.device).unsqueeze(1)
        self._logprobs[start:stop] = logprobs_TV.gather(1, tokens_T1).squeeze(1).cpu().numpy()
        if self._request.topk_prompt_logprobs:
            tokens_TK, values_TK = topk(logprobs_TV, self._request.topk_prompt_logprobs)
            self._topk_tokens[start:stop, : tokens_TK.shape[1]] = tokens_TK.cpu().numpy()
            self._topk_logprobs[start:stop, : tokens_TK.shape[1]] = values_TK.cpu().numpy()

    def _add_alternatives(self, start: int, stop: int, logits_TV: torch.Tensor, logprobs_TV: torch.Tensor) -> None:
        """Draw alternatives for each position at the request's temperature, from the whole distribution."""
        count = stop - start
        numbers_TK = np.stack(
            [
                uniforms([self._seed] * count, [0] * count, range(start, stop), PROMPT_ALTERNATIVES, number)
                for number in range(self._request.prompt_alt_tokens_k)
            ],
            axis=1,
        )
        temperature = self._request.sampling_params.temperature
        tokens_TK, values_TK = draw_alternatives(logits_TV, logprobs_TV, temperature, numbers_TK)
        self._alt_tokens[start - 1 : stop - 1] = tokens_TK.cpu().numpy()
        self._alt_logprobs[start - 1 : stop - 1] = values_TK.cpu().numpy()

    def logprobs(self) -> Array | None:
        return self._logprobs if self._request.prompt_logprobs else None

    def topk(self) -> TopkLogprobs | None:
        if not self._request.topk_prompt_logprobs:
            return None
        return TopkLogprobs(self._topk_tokens, self._topk_logprobs)

    def targets(self) -> TensorData | None:
        """Return the logprobs in the form of the request: CSR for CSR, else dense with NaN where nothing was asked."""
        target = self._request.target_prompt_logprobs
        if target is None:
            return None
        if not target.is_sparse:
            return TensorData.from_numpy(self._target_logprobs)
        assert target.sparse_crow_indices is not None
        rows = np.repeat(np.arange(len(target.sparse_crow_indices) - 1), np.diff(target.sparse_crow_indices))
        listed = self._target_logprobs[rows, np.asarray(target.sparse_col_indices, np.int64)]
        return target.replace(data=listed, dtype="float32")

    def alternatives(self) -> PromptAltTokens | None:
        if not self._request.prompt_alt_tokens_k:
            return None
        return PromptAltTokens(TensorData.from_numpy(self._alt_tokens), TensorData.from_numpy(self._alt_logprobs))
