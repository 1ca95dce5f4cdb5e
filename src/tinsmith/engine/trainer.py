"""Trainer: a forward or forward_backward request on one adapter, from datums to logprobs, metrics and gradients.

Owns: the way of a request through packing, layers, unembedding and loss. Everything that decides the order of the
arithmetic comes from the request and the settings: the same request on the same weights gives the same bits.
Does not know: validation (`wire/losses.py` has refused bad requests before), optimizers, queues, tenants.

Shapes: T tokens of a batch, N of a chunk or datum, K targets per position, D hidden.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from tinsmith.engine.backprop import TrainingPass
from tinsmith.engine.lora import LoraAdapter, LoraGroups
from tinsmith.engine.losses import LOSSES, Evaluation, Loss, MetricTotals, evaluate
from tinsmith.engine.models.decoder import Decoder
from tinsmith.engine.packing import pack
from tinsmith.engine.unembedding import Unembedding
from tinsmith.wire.inputs import Datum
from tinsmith.wire.losses import loss_options
from tinsmith.wire.tensors import TensorData
from tinsmith.wire.training import ForwardBackwardInput, ForwardBackwardOutput, ForwardBackwardRequest, ForwardRequest

OUTPUT_TYPE = "TorchLossReturn"
DEFAULT_MICRO_BATCH_TOKENS = 512
DEFAULT_MAX_RECORDED_TOKENS = 2048


class DatumLoss(Protocol):
    """An uploaded loss (`engine/custom_graph.py`): it sees one datum at a time."""

    def evaluate(
        self,
        logprobs: torch.Tensor,
        inputs: Mapping[str, torch.Tensor],
        *,
        with_gradient: bool = True,
        where: str = "datum",
    ) -> Evaluation: ...


@dataclass(frozen=True, slots=True)
class _Example:
    """One datum as tensors; targets are [N] or [N, K], and the other inputs as the datum has them."""

    tokens_N: torch.Tensor
    targets: torch.Tensor
    inputs: Mapping[str, torch.Tensor]

    @property
    def layout(self) -> tuple[object, ...]:
        """What examples of one batch have in common."""
        return (tuple(self.targets.shape[1:]), tuple(sorted(self.inputs)))


@dataclass(frozen=True, slots=True)
class _Batch:
    """Examples that run together, one after another."""

    first: int
    examples: Sequence[_Example]

    @property
    def lengths(self) -> list[int]:
        return [len(example.tokens_N) for example in self.examples]

    def tokens_T(self) -> torch.Tensor:
        return torch.cat([example.tokens_N for example in self.examples])

    def targets(self) -> torch.Tensor:
        return torch.cat([example.targets for example in self.examples])

    def inputs(self) -> dict[str, torch.Tensor]:
        """Each input of all examples, as float32."""
        names = self.examples[0].inputs
        return {name: torch.cat([example.inputs[name] for example in self.examples]).float() for name in names}


class Trainer:
    """Runs requests on adapters of one decoder.

    `micro_batch_tokens` bounds what runs together; a longer datum runs alone. A replay needs the same number, since
    another one adds in another order. Batches of more than `max_recorded_tokens` have their activations computed
    twice instead of kept, to the same bits, so that number may follow the free memory (`backprop.recorded_bytes`).
    """

    def __init__(
        self,
        decoder: Decoder,
        micro_batch_tokens: int = DEFAULT_MICRO_BATCH_TOKENS,
        max_recorded_tokens: int = DEFAULT_MAX_RECORDED_TOKENS,
    ) -> None:
        self._decoder = decoder
        self._micro_batch_tokens = micro_batch_tokens
        self._max_recorded_tokens = max_recorded_tokens

    def forward_backward(
        self,
        adapter: LoraAdapter,
        request: ForwardBackwardRequest | ForwardRequest,
        backward: bool,
        custom: DatumLoss | None = None,
    ) -> ForwardBackwardOutput:
        """Run a checked request; with `backward` its gradients are added to the adapter's, all of them or none.

        `custom` is the uploaded loss that a request with `loss_fn` custom names.
        """
        steps = self.steps(adapter, request, backward, custom)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                output: ForwardBackwardOutput = end.value
                return output

    def steps(
        self,
        adapter: LoraAdapter,
        request: ForwardBackwardRequest | ForwardRequest,
        backward: bool,
        custom: DatumLoss | None = None,
    ) -> Generator[None, None, ForwardBackwardOutput]:
        """The same in steps, one micro-batch each: between them other work may have the device."""
        work = request.forward_input if isinstance(request, ForwardRequest) else request.forward_backward_input
        run = _RequestRun(self._decoder, adapter, work, custom, adapter.empty_gradients() if backward else None)
        examples = [_example(datum, self._decoder.device) for datum in work.data]
        outputs: list[torch.Tensor] = []
        for number, batch in enumerate(self._batches(examples)):
            if number:
                yield
            is_checkpointed = sum(batch.lengths) > self._max_recorded_tokens
            outputs.extend(run.batch(batch, is_checkpointed))
        if run.grads is not None:
            adapter.accumulate(run.grads)
        return ForwardBackwardOutput(
            OUTPUT_TYPE, [{"logprobs": _tensor_data(output)} for output in outputs], run.totals.result()
        )

    def _batches(self, examples: Sequence[_Example]) -> list[_Batch]:
        lengths = [len(example.tokens_N) for example in examples]
        runs = pack(lengths, self._micro_batch_tokens, [example.layout for example in examples])
        return [_Batch(run.start, examples[run.start : run.stop]) for run in runs]


class _RequestRun:
    """One request under way."""

    def __init__(
        self,
        decoder: Decoder,
        adapter: LoraAdapter,
        work: ForwardBackwardInput,
        custom: DatumLoss | None,
        grads: LoraGroups | None,
    ) -> None:
        self._decoder = decoder
        self._adapter = adapter
        self._loss: Loss | None = LOSSES[work.loss_fn] if work.loss_fn != "custom" else None
        self._options = loss_options(work.loss_fn, work.loss_fn_config)
        self._custom = custom
        self._unembedding = Unembedding(decoder, adapter)
        self.grads = grads
        self.totals = MetricTotals()

    def batch(self, batch: _Batch, is_checkpointed: bool) -> list[torch.Tensor]:
        """Logprobs of each example; gradients and metrics are added to those of the request."""
        layers = TrainingPass(
            self._decoder,
            self._adapter,
            batch.lengths,
            is_recording=self.grads is not None,
            is_checkpointed=is_checkpointed,
        )
        hidden_TD = layers.forward(batch.tokens_T())
        targets = batch.targets()
        targets_TK = targets if targets.ndim == 2 else targets.unsqueeze(1)
        if self._loss is not None and self._loss.is_token_wise:
            logprobs_TK, hidden_grad_TD = self._token_wise(self._loss, batch, hidden_TD, targets_TK)
        else:
            logprobs_TK, hidden_grad_TD = self._datum_wise(batch, hidden_TD, targets_TK)
        if hidden_grad_TD is not None and self.grads is not None:
            layers.backward(hidden_grad_TD, self.grads)
        logprobs = logprobs_TK.view(targets.shape)
        return list(torch.split_with_sizes(logprobs, batch.lengths))

    def _token_wise(
        self, loss: Loss, batch: _Batch, hidden_TD: torch.Tensor, targets_TK: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Loss and gradient of each chunk while its logits are there."""
        inputs = batch.inputs()
        shape = batch.examples[0].targets.shape[1:]

        def gradient_of(rows: slice, logprobs_NK: torch.Tensor) -> torch.Tensor | None:
            result = evaluate(
                loss,
                logprobs_NK.view(-1, *shape),
                {name: tensor[rows] for name, tensor in inputs.items()},
                self._options,
                with_gradient=self.grads is not None,
            )
            self.totals.add(result.metrics)
            return None if result.gradient_N is None else result.gradient_N.view(logprobs_NK.shape)

        return self._unembedding.fused(hidden_TD, targets_TK, gradient_of, self.grads)

    def _datum_wise(
        self, batch: _Batch, hidden_TD: torch.Tensor, targets_TK: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """First all logprobs, then the loss of each datum, then the unembedding again where there is a gradient."""
        logprobs_TK = self._unembedding.logprobs(hidden_TD, targets_TK)
        gradient_TK = torch.zeros_like(logprobs_TK)
        start = 0
        for offset, example in enumerate(batch.examples):
            rows = slice(start, start + len(example.tokens_N))
            gradient = self._datum(example, logprobs_TK[rows].view(example.targets.shape), batch.first + offset)
            if gradient is not None:
                gradient_TK[rows] = gradient.view(-1, targets_TK.shape[1])
            start = rows.stop
        if self.grads is None:
            return logprobs_TK, None
        return logprobs_TK, self._unembedding.backward(hidden_TD, targets_TK, gradient_TK, self.grads)

    def _datum(self, example: _Example, logprobs: torch.Tensor, index: int) -> torch.Tensor | None:
        wants_gradient = self.grads is not None
        if self._loss is not None:
            inputs = {name: tensor.float() for name, tensor in example.inputs.items()}
            result = evaluate(self._loss, logprobs, inputs, self._options, with_gradient=wants_gradient)
        else:
            assert self._custom is not None, "a custom loss was not passed on"
            inputs = {"target_tokens": example.targets, **example.inputs}
            result = self._custom.evaluate(logprobs, inputs, with_gradient=wants_gradient, where=f"data[{index}]")
        self.totals.add(result.metrics)
        return result.gradient_N


def _example(datum: Datum, device: torch.device) -> _Example:
    tensors = {name: _dense(tensor, device) for name, tensor in datum.loss_fn_inputs.items()}
    tokens_N = torch.tensor(datum.model_input.to_ints(), dtype=torch.int64, device=device)
    return _Example(tokens_N, tensors.pop("target_tokens"), tensors)


def _dense(tensor: TensorData, device: torch.device) -> torch.Tensor:
    array = tensor.to_numpy()
    return torch.from_numpy(np.array(array.reshape(tensor.shape or array.shape))).to(device)


def _tensor_data(logprobs: torch.Tensor) -> TensorData:
    array = np.ascontiguousarray(logprobs.cpu().numpy())
    return TensorData.of_array(array, "float32", list(array.shape))
