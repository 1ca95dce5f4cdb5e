"""Carries out jobs on the test arithmetic, one call each.

Owns: the models that are alive, and the weights of checkpoints that were sampled from.
Does not know: order, concurrency, processes. A job that fails leaves everything as it was.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import msgspec

from tinsmith.engine import base
from tinsmith.engine.base import AnyJob, Done, JobFailedError, ModelCard, TokenEvent, Usage
from tinsmith.errors import InvalidInputError, WireError
from tinsmith.testing import arithmetic, files, losses, sampling
from tinsmith.testing.arithmetic import Adapter
from tinsmith.wire import json_codec
from tinsmith.wire.numbers import Array
from tinsmith.wire.proto_outputs import encode_output
from tinsmith.wire.proto_sampling import encode_response
from tinsmith.wire.proto_training import decode_request
from tinsmith.wire.sampling import SampleRequest, SampleResponse
from tinsmith.wire.training import (
    AdamParams,
    ForwardBackwardInput,
    ForwardBackwardRequest,
    ForwardRequest,
    OptimStepRequest,
    OptimStepResponse,
)

MAX_FROZEN = 1024
"""Sampled checkpoints whose weights are kept."""
MAX_TOGETHER = 2**15
"""Tokens that are drawn at once, or those of one sample if they are more."""
TOKEN_S = 1e-6
"""Device time is a count of tokens here, so that results are the same again."""


class ArithmeticEngine:
    """The models of some base models, and what can be done with them."""

    def __init__(self, cards: Sequence[ModelCard]) -> None:
        self._cards = {card.name: card for card in cards}
        self._models: dict[str, Adapter] = {}
        self._frozen: dict[str, Array] = {}

    def execute(self, job: AnyJob) -> Done:
        """Carry out a job; what is wrong with it is a JobFailedError."""
        if isinstance(job, base.Sample):
            return self.sample(job)[0]
        card = self._card(job)
        try:
            if isinstance(job, base.CreateModel):
                return self._create(job)
            adapter = self._model(job.model_id)
            if isinstance(job, base.ForwardBackward):
                return _forward_backward(job, adapter, card)
            if isinstance(job, base.OptimStep):
                return _optim_step(job, adapter)
            if isinstance(job, base.SaveState):
                saved = files.write(Path(job.directory), adapter, optimizer=job.optimizer)
                return Done(body=msgspec.json.encode(saved))
            if isinstance(job, base.LoadState):
                _load(adapter, Path(job.directory), optimizer=job.optimizer)
                return Done()
            del self._models[job.model_id]
            return Done()
        except (InvalidInputError, WireError) as error:
            raise JobFailedError(str(error), "user") from error

    def sample(self, job: base.Sample) -> tuple[Done, SampleResponse]:
        """Carry out a sample; its response also before encoding."""
        try:
            drawing = self._drawing(job)
            sampling.draw([drawing])
            return _sampled(drawing)
        except (InvalidInputError, WireError) as error:
            raise JobFailedError(str(error), "user") from error

    def samples(self, jobs: Sequence[base.Sample]) -> list[Done]:
        """Carry out samples that can all be carried out. Together they cost less, and give what each gives alone."""
        drawings = [self._drawing(job) for job in jobs]
        for group in _groups(drawings):
            sampling.draw(group)
        return [_sampled(drawing)[0] for drawing in drawings]

    def _drawing(self, job: base.Sample) -> sampling.Drawing:
        card = self._card(job)
        request = json_codec.decode(job.body, SampleRequest)
        return sampling.Drawing.of(self._weights(job), request, job.seed, card)

    def forget(self, base_models: Collection[str]) -> None:
        """Lose the models of some base models."""
        self._frozen.clear()
        for model_id, adapter in list(self._models.items()):
            if adapter.base_model in base_models:
                del self._models[model_id]

    def _card(self, job: AnyJob) -> ModelCard:
        if job.base_model not in self._cards:
            known = ", ".join(self._cards)
            raise JobFailedError(f"base model {job.base_model!r} is not served here (served: {known})", "user")
        return self._cards[job.base_model]

    def _model(self, model_id: str) -> Adapter:
        if model_id not in self._models:
            raise JobFailedError(f"model {model_id!r} is not loaded: it was never created here, or was unloaded")
        return self._models[model_id]

    def _create(self, job: base.CreateModel) -> Done:
        if job.model_id in self._models:
            raise JobFailedError(f"model {job.model_id!r} is there already; unload it first")
        adapter = Adapter.fresh(job.lora, job.base_model)
        if job.directory is not None:
            _load(adapter, Path(job.directory), optimizer=job.optimizer)
        self._models[job.model_id] = adapter
        return Done()

    def _weights(self, job: base.Sample) -> Array:
        """The weights that a sample is drawn from."""
        base_D = arithmetic.base_weights(job.base_model)
        if job.directory is None:
            return base_D
        key = job.adapter_key
        if key is not None and key in self._frozen:
            return self._frozen[key]
        directory = Path(job.directory)
        manifest = files.read_manifest(directory)
        _check_base(directory, manifest, job.base_model)
        parameters = files.read_parameters(directory, manifest)
        weights_D = arithmetic.merged(base_D, parameters, manifest.lora.alpha / manifest.lora.rank)
        if key is not None:
            if len(self._frozen) >= MAX_FROZEN:
                del self._frozen[next(iter(self._frozen))]
            self._frozen[key] = weights_D
        return weights_D


def _groups(drawings: Sequence[sampling.Drawing]) -> Iterator[list[sampling.Drawing]]:
    """In groups that do not need much memory."""
    group: list[sampling.Drawing] = []
    size = 0
    for drawing in drawings:
        group.append(drawing)
        size += drawing.size
        if size > MAX_TOGETHER:
            yield group
            group, size = [], 0
    if group:
        yield group


def _sampled(drawing: sampling.Drawing) -> tuple[Done, SampleResponse]:
    response = drawing.response()
    prompt_tokens = len(drawing.prompt)
    sampled = sum(0 if row.tokens_np is None else row.tokens_np.size for row in response.sequences)
    usage = Usage(prefill=prompt_tokens, sampled=sampled)
    device_s = (prompt_tokens + sampled) * TOKEN_S
    return Done(body=encode_response(response), encoding="protobuf", usage=usage, device_s=device_s), response


def token_events(response: SampleResponse) -> list[TokenEvent]:
    """What a stream of this response shows: one token at a time, the samples side by side."""
    events = []
    rows = [(row.stop_reason, row.tokens, row.logprobs or []) for row in response.sequences]
    for position in range(max((len(tokens) for _, tokens, _ in rows), default=0)):
        for index, (reason, tokens, logprobs) in enumerate(rows):
            if position < len(tokens):
                end = reason if position == len(tokens) - 1 else None
                event = TokenEvent(
                    sample=index, tokens=(tokens[position],), logprobs=(logprobs[position],), stop_reason=end
                )
                events.append(event)
    return events


def _forward_backward(job: base.ForwardBackward, adapter: Adapter, card: ModelCard) -> Done:
    work, is_forward = _read_pass(job)
    result = losses.run(adapter.weights(), work, card)
    body = encode_output(result.output)
    if not is_forward:
        adapter.add_gradient(result.gradient_D)
    usage = Usage(training=result.tokens)
    return Done(body=body, encoding="protobuf", usage=usage, device_s=result.tokens * TOKEN_S)


def _read_pass(job: base.ForwardBackward) -> tuple[ForwardBackwardInput, bool]:
    if job.encoding == "protobuf":
        request = decode_request(job.body)
        return request.forward_backward_input, job.is_forward or bool(request.forward_only)
    if job.is_forward:
        return json_codec.decode(job.body, ForwardRequest).forward_input, True
    request = json_codec.decode(job.body, ForwardBackwardRequest)
    return request.forward_backward_input, bool(request.forward_only)


def _optim_step(job: base.OptimStep, adapter: Adapter) -> Done:
    request = json_codec.decode(job.body, OptimStepRequest)
    params = request.adam_params
    if not isinstance(params, AdamParams):
        raise JobFailedError("optimizer_params: only AdamW is computed by the test backend", "user")
    return Done(body=json_codec.encode(OptimStepResponse(metrics=adapter.optimize(params))))


def _load(adapter: Adapter, directory: Path, *, optimizer: bool) -> None:
    manifest = files.read_manifest(directory)
    _check_base(directory, manifest, adapter.base_model)
    if manifest.lora.rank != adapter.lora.rank:
        raise InvalidInputError(
            f"{directory} has rank {manifest.lora.rank}, the model {adapter.lora.rank}; create one of that rank"
        )
    parameters = files.read_parameters(directory, manifest)
    state = files.read_optimizer(directory, manifest) if optimizer else None
    adapter.parameters = parameters
    adapter.reset_optimizer()
    if state is not None:
        adapter.first_moments, adapter.second_moments, adapter.step = state


def _check_base(directory: Path, manifest: files.Manifest, base_model: str) -> None:
    if manifest.base_model != base_model:
        raise InvalidInputError(f"{directory} belongs to base model {manifest.base_model!r}, not to {base_model!r}")
