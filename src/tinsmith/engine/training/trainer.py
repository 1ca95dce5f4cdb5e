"""Runs a forward or forward_backward request on one adapter: from datums to logprobs, metrics and gradients.

A request is packed into micro-batches of neighbouring datums; each goes through the layers, the unembedding and the
loss, and back. Everything that decides the order of the arithmetic comes from the request and the settings, so the same
request on the same weights gives the same bits, which is what a replay relies on. Requests have been validated before
(`wire/rules/loss_rules.py`).

Shapes: T tokens of a batch, N of a chunk or datum, K targets per position, D hidden.
"""

from __future__ import annotations

from collections.abc import Generator, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from tinsmith.config import MICRO_BATCH_TOKENS
from tinsmith.engine.lora import LoraAdapter, LoraGroups
from tinsmith.engine.models.decoder import Decoder
from tinsmith.engine.training.layers import TrainingPass
from tinsmith.engine.training.losses import LOSSES, Evaluation, Loss, MetricTotals, evaluate
from tinsmith.engine.training.pauses import finished
from tinsmith.engine.training.unembedding import Unembedding
from tinsmith.wire.messages.training import (
    ForwardBackwardInput,
    ForwardBackwardOutput,
    ForwardBackwardRequest,
    ForwardRequest,
)
from tinsmith.wire.rules.loss_rules import loss_options
from tinsmith.wire.values.inputs import Datum
from tinsmith.wire.values.tensors import TensorData


def pack(lengths: Sequence[int], budget: int, kinds: Sequence[Hashable] | None = None) -> list[range]:
    """Return runs of neighbouring datums of one kind, of at most `budget` tokens each; a longer datum runs alone."""
    runs: list[range] = []
    start, tokens = 0, 0
    for index, length in enumerate(lengths):
        is_other = kinds is not None and kinds[index] != kinds[start]
        if index > start and (is_other or tokens + length > budget):
            runs.append(range(start, index))
            start, tokens = index, 0
        tokens += length
    if start < len(lengths):
        runs.append(range(start, len(lengths)))
    return runs


OUTPUT_TYPE = "TorchLossReturn"
MAX_RECORDED_TOKENS = 2048
"""Batches of more tokens are recomputed in the backward pass; see `layers.recorded_bytes` for what a token takes."""


class DatumLoss(Protocol):
    """An uploaded loss (`custom_loss/interpreter.py`), which sees one datum at a time."""

    def evaluate_steps(
        self,
        logprobs: torch.Tensor,
        inputs: Mapping[str, torch.Tensor],
        *,
        with_gradient: bool = True,
        where: str = "datum",
    ) -> Generator[None, None, Evaluation]: ...


class ModelPass(Protocol):
    """One batch on its way through a model; `layers.TrainingPass` says what each method does."""

    def forward_steps(self, tokens_T: torch.Tensor) -> Generator[None, None, torch.Tensor]: ...

    def backward_steps(self, grad_TD: torch.Tensor, grads: LoraGroups) -> Generator[None, None, None]: ...


class TrainableModel(Protocol):
    """A model to train on. `engine/general` implements it for models that run through transformers."""

    @property
    def device(self) -> torch.device: ...

    def training_pass(
        self, adapter: LoraAdapter, lengths: Sequence[int], *, is_recording: bool, is_checkpointed: bool
    ) -> ModelPass:
        """Return a pass over sequences of these lengths; the arguments are those of `TrainingPass`."""

    def unembedding(self, adapter: LoraAdapter) -> Unembedding:
        """Return what makes logprobs of the output of `forward_steps`."""


class TrainedDecoder:
    """Our own decoder."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self.device = decoder.device

    def training_pass(
        self, adapter: LoraAdapter, lengths: Sequence[int], *, is_recording: bool, is_checkpointed: bool
    ) -> TrainingPass:
        return TrainingPass(self._decoder, adapter, lengths, is_recording=is_recording, is_checkpointed=is_checkpointed)

    def unembedding(self, adapter: LoraAdapter) -> Unembedding:
        return Unembedding(self._decoder, adapter)


@dataclass(frozen=True, slots=True)
class _Example:
    """One datum as tensors. Targets are [N] or [N, K]; the other inputs have the shapes that the datum gives them."""

    tokens_N: torch.Tensor
    targets: torch.Tensor
    inputs: Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Batch:
    """Examples that run together, concatenated."""

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
        """Return each input, concatenated over all examples, as float32."""
        names = self.examples[0].inputs
        return {name: torch.cat([example.inputs[name] for example in self.examples]).float() for name in names}


class Trainer:
    """Runs requests on adapters of one model.

    `micro_batch_tokens` limits how many tokens run together; a longer datum runs alone. A replay needs the same number,
    since another one adds in another order. Batches of more than `max_recorded_tokens` compute their activations twice
    instead of keeping them; that gives the same bits, so this number is free to change.
    """

    def __init__(
        self,
        model: Decoder | TrainableModel,
        micro_batch_tokens: int = MICRO_BATCH_TOKENS,
        max_recorded_tokens: int = MAX_RECORDED_TOKENS,
    ) -> None:
        self._model = TrainedDecoder(model) if isinstance(model, Decoder) else model
        self._micro_batch_tokens = micro_batch_tokens
        self._max_recorded_tokens = max_recorded_tokens

    def forward_backward(
        self,
        adapter: LoraAdapter,
        request: ForwardBackwardRequest | ForwardRequest,
        backward: bool,
        custom: DatumLoss | None = None,
    ) -> ForwardBackwardOutput:
        """Run a validated request; with `backward`, add its gradients to the adapter's, all of them or none.

        `custom` is the uploaded loss of a request whose `loss_fn` is custom.
        """
        return finished(self.steps(adapter, request, backward, custom))

    def steps(
        self,
        adapter: LoraAdapter,
        request: ForwardBackwardRequest | ForwardRequest,
        backward: bool,
        custom: DatumLoss | None = None,
    ) -> Generator[None, None, ForwardBackwardOutput]:
        """Run `forward_backward` with pauses, in which other work may use the device.

        A step is a micro-batch, a layer of a datum that is longer than one, or a datum (or part of one) of an uploaded
        loss. Dropped between two steps, the request leaves no trace: gradients are added at the very end.
        """
        work = request.forward_input if isinstance(request, ForwardRequest) else request.forward_backward_input
        run = _RequestRun(self._model, adapter, work, custom, adapter.empty_gradients() if backward else None)
        outputs: list[torch.Tensor] = []
        for number, indices in enumerate(self._batches(work.data)):
            if number:
                yield
            # Not earlier: tensors that were sent as CSR may be far larger than the request.
            batch = _Batch(indices.start, [_example(work.data[index], self._model.device) for index in indices])
            tokens = sum(batch.lengths)
            steps = run.batch(batch, tokens > self._max_recorded_tokens)
            outputs.extend((yield from steps) if tokens > self._micro_batch_tokens or custom else finished(steps))
        if run.grads is not None:
            adapter.accumulate(run.grads)
        return ForwardBackwardOutput(
            OUTPUT_TYPE, [{"logprobs": _tensor_data(output)} for output in outputs], run.totals.result()
        )

    def _batches(self, data: Sequence[Datum]) -> list[range]:
        lengths = [datum.model_input.length for datum in data]
        return pack(lengths, self._micro_batch_tokens, [_layout(datum) for datum in data])


class _RequestRun:
    """The state of one request while it runs."""

    def __init__(
        self,
        model: TrainableModel,
        adapter: LoraAdapter,
        work: ForwardBackwardInput,
        custom: DatumLoss | None,
        grads: LoraGroups | None,
    ) -> None:
        self._model = model
        self._adapter = adapter
        self._loss: Loss | None = LOSSES[work.loss_fn] if work.loss_fn != "custom" else None
        self._options = loss_options(work.loss_fn, work.loss_fn_config)
        self._custom = custom
        self._unembedding = model.unembedding(adapter)
        self.grads = grads
        self.totals = MetricTotals()

    def batch(self, batch: _Batch, is_checkpointed: bool) -> Generator[None, None, list[torch.Tensor]]:
        """Return the logprobs of each example; add gradients and metrics to those of the request."""
        layers = self._model.training_pass(
            self._adapter,
            batch.lengths,
            is_recording=self.grads is not None,
            is_checkpointed=is_checkpointed,
        )
        hidden_TD = yield from layers.forward_steps(batch.tokens_T())
        targets = batch.targets()
        targets_TK = targets if targets.ndim == 2 else targets.unsqueeze(1)
        if self._loss is not None and self._loss.is_token_wise:
            logprobs_TK, hidden_grad_TD = yield from self._token_wise(self._loss, batch, hidden_TD, targets_TK)
        else:
            logprobs_TK, hidden_grad_TD = yield from self._datum_wise(batch, hidden_TD, targets_TK)
        if hidden_grad_TD is not None and self.grads is not None:
            yield from layers.backward_steps(hidden_grad_TD, self.grads)
        logprobs = logprobs_TK.view(targets.shape)
        return list(torch.split_with_sizes(logprobs, batch.lengths))

    def _token_wise(
        self, loss: Loss, batch: _Batch, hidden_TD: torch.Tensor, targets_TK: torch.Tensor
    ) -> Generator[None, None, tuple[torch.Tensor, torch.Tensor | None]]:
        """Compute loss and gradient chunk by chunk, while the chunk's logits exist."""
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

        return (yield from self._unembedding.fused(hidden_TD, targets_TK, gradient_of, self.grads))

    def _datum_wise(
        self, batch: _Batch, hidden_TD: torch.Tensor, targets_TK: torch.Tensor
    ) -> Generator[None, None, tuple[torch.Tensor, torch.Tensor | None]]:
        """Compute all logprobs, then each datum's loss, then the unembedding again where there is a gradient."""
        logprobs_TK = yield from self._unembedding.logprobs(hidden_TD, targets_TK)
        gradient_TK = torch.zeros_like(logprobs_TK)
        start = 0
        for offset, example in enumerate(batch.examples):
            rows = slice(start, start + len(example.tokens_N))
            logprobs = logprobs_TK[rows].view(example.targets.shape)
            gradient = yield from self._datum(example, logprobs, batch.first + offset)
            if gradient is not None:
                gradient_TK[rows] = gradient.view(-1, targets_TK.shape[1])
            start = rows.stop
        if self.grads is None:
            return logprobs_TK, None
        steps = self._unembedding.backward(hidden_TD, targets_TK, gradient_TK, self.grads)
        return logprobs_TK, (yield from steps)

    def _datum(
        self, example: _Example, logprobs: torch.Tensor, index: int
    ) -> Generator[None, None, torch.Tensor | None]:
        wants_gradient = self.grads is not None
        if self._loss is not None:
            inputs = {name: tensor.float() for name, tensor in example.inputs.items()}
            result = evaluate(self._loss, logprobs, inputs, self._options, with_gradient=wants_gradient)
        else:
            assert self._custom is not None, "a custom loss was not passed on"
            inputs = {"target_tokens": example.targets, **example.inputs}
            where = f"data[{index}]"
            yield
            result = yield from self._custom.evaluate_steps(logprobs, inputs, with_gradient=wants_gradient, where=where)
        self.totals.add(result.metrics)
        return result.gradient_N


def _layout(datum: Datum) -> tuple[object, ...]:
    """Return what all examples of a batch must have in common: targets per position, and the names of the inputs."""
    targets = datum.loss_fn_inputs["target_tokens"]
    return tuple((targets.shape or targets.array.shape)[1:]), tuple(sorted(datum.loss_fn_inputs))


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
