"""Runs jobs on the test arithmetic, one call per job. A job that fails changes nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import msgspec

from tinsmith.engine import protocol
from tinsmith.engine.protocol import AnyJob, Done, JobFailedError, ModelCard, TokenEvent, Usage
from tinsmith.errors import InvalidInputError, WireError
from tinsmith.testing import arithmetic, files, losses, sampling
from tinsmith.testing.arithmetic import ArithmeticAdapter
from tinsmith.wire.codecs import json_codec
from tinsmith.wire.codecs.proto_outputs import encode_output
from tinsmith.wire.codecs.proto_sampling import encode_response
from tinsmith.wire.codecs.proto_training import decode_request
from tinsmith.wire.messages.sampling import SampleRequest, SampleResponse
from tinsmith.wire.messages.training import (
    ForwardBackwardRequest,
    ForwardRequest,
    OptimStepRequest,
    OptimStepResponse,
)
from tinsmith.wire.rules.adam_rules import adam_params
from tinsmith.wire.rules.loss_rules import check_loss
from tinsmith.wire.values.numbers import Array

MAX_FROZEN = 1024
"""Checkpoints whose weights are cached for sampling."""
MAX_TOGETHER = 2**15
"""Tokens that are drawn together, at most (a single sample may have more)."""
TOKEN_S = 1e-6
"""Device time is counted in tokens here, so that results are reproducible."""


class ArithmeticEngine:
    """The live models of some base models, and the weights of sampled checkpoints."""

    def __init__(self, cards: Sequence[ModelCard]) -> None:
        self._cards = {card.name: card for card in cards}
        self._models: dict[str, ArithmeticAdapter] = {}
        self._frozen: dict[str, Array] = {}

    def execute(self, job: AnyJob) -> Done:
        """Run a job, or raise JobFailedError."""
        if isinstance(job, protocol.Sample):
            return self.sample(job)[0]
        card = self._card(job)
        try:
            if isinstance(job, protocol.CreateModel):
                return self._create(job)
            adapter = self._model(job.model_id)
            if isinstance(job, protocol.ForwardBackward):
                return _forward_backward(job, adapter, card)
            if isinstance(job, protocol.OptimStep):
                return _optim_step(job, adapter)
            if isinstance(job, protocol.SaveState):
                saved = files.write(Path(job.directory), adapter, optimizer=job.optimizer)
                return Done(body=msgspec.json.encode(saved))
            if isinstance(job, protocol.LoadState):
                _load(adapter, Path(job.directory), optimizer=job.optimizer)
                return Done()
            del self._models[job.model_id]
            return Done()
        except (InvalidInputError, WireError) as error:
            raise JobFailedError(str(error), "user") from error

    def sample(self, job: protocol.Sample) -> tuple[Done, SampleResponse]:
        """Run a sample; return the result, and the response before it was encoded."""
        try:
            drawing = self._drawing(job)
            sampling.draw([drawing])
            return _sampled(drawing)
        except (InvalidInputError, WireError) as error:
            raise JobFailedError(str(error), "user") from error

    def samples(self, jobs: Sequence[protocol.Sample]) -> list[Done]:
        """Run several samples together, which is faster and gives the same results. Raise if any of them fails."""
        drawings = [self._drawing(job) for job in jobs]
        for group in _groups(drawings):
            sampling.draw(group)
        return [_sampled(drawing)[0] for drawing in drawings]

    def _drawing(self, job: protocol.Sample) -> sampling.Drawing:
        card = self._card(job)
        request = json_codec.decode(job.body, SampleRequest)
        return sampling.Drawing.of(self._weights(job), request, job.seed, card)

    def forget(self, base_models: Collection[str]) -> None:
        """Drop the models of some base models."""
        self._frozen.clear()
        for model_id, adapter in list(self._models.items()):
            if adapter.base_model in base_models:
                del self._models[model_id]

    def _card(self, job: AnyJob) -> ModelCard:
        if job.base_model not in self._cards:
            known = ", ".join(self._cards)
            raise JobFailedError(f"base model {job.base_model!r} is not served here (served: {known})", "user")
        return self._cards[job.base_model]

    def _model(self, model_id: str) -> ArithmeticAdapter:
        if model_id not in self._models:
            raise JobFailedError(f"model {model_id!r} is not loaded: it was never created here, or it was unloaded")
        return self._models[model_id]

    def _create(self, job: protocol.CreateModel) -> Done:
        if job.model_id in self._models:
            raise JobFailedError(f"model {job.model_id!r} already exists; unload it first")
        adapter = ArithmeticAdapter.fresh(job.lora, job.base_model)
        if job.directory is not None:
            _load(adapter, Path(job.directory), optimizer=job.optimizer)
        self._models[job.model_id] = adapter
        return Done()

    def _weights(self, job: protocol.Sample) -> Array:
        """Return the weights to sample from."""
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
    """Yield groups that do not need much memory."""
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
    """Return the events of a stream of this response: one token at a time, the samples in turns."""
    events = []
    rows = [(row.stop_reason, row.tokens, row.logprobs or [], row.topk_logprobs) for row in response.sequences]
    for position in range(max((len(tokens) for _, tokens, _, _ in rows), default=0)):
        for index, (reason, tokens, logprobs, topk) in enumerate(rows):
            if position < len(tokens):
                listed = (topk[position] if topk is not None else None) or []
                event = TokenEvent(
                    sample=index,
                    tokens=(tokens[position],),
                    logprobs=(logprobs[position],),
                    stop_reason=reason if position == len(tokens) - 1 else None,
                    topk_tokens=tuple(token for token, _ in listed),
                    topk_logprobs=tuple(logprob for _, logprob in listed),
                )
                events.append(event)
    return events


def _forward_backward(job: protocol.ForwardBackward, adapter: ArithmeticAdapter, card: ModelCard) -> Done:
    request, is_forward = _read_pass(job)
    check_loss(request, vocab_size=card.vocab_size, max_context_length=card.max_context_length)
    work = request.forward_input if isinstance(request, ForwardRequest) else request.forward_backward_input
    result = losses.run(adapter.weights(), work)
    body = encode_output(result.output)
    if not is_forward:
        adapter.add_gradient(result.gradient_D)
    usage = Usage(training=result.tokens)
    return Done(body=body, encoding="protobuf", usage=usage, device_s=result.tokens * TOKEN_S)


def _read_pass(job: protocol.ForwardBackward) -> tuple[ForwardBackwardRequest | ForwardRequest, bool]:
    if job.encoding == "protobuf":
        request = decode_request(job.body)
    elif job.is_forward:
        return json_codec.decode(job.body, ForwardRequest), True
    else:
        request = json_codec.decode(job.body, ForwardBackwardRequest)
    return request, job.is_forward or bool(request.forward_only)


def _optim_step(job: protocol.OptimStep, adapter: ArithmeticAdapter) -> Done:
    params = adam_params(json_codec.decode(job.body, OptimStepRequest))
    return Done(body=json_codec.encode(OptimStepResponse(metrics=adapter.optimize(params))))


def _load(adapter: ArithmeticAdapter, directory: Path, *, optimizer: bool) -> None:
    manifest = files.read_manifest(directory)
    _check_base(directory, manifest, adapter.base_model)
    if manifest.lora.rank != adapter.lora.rank:
        raise InvalidInputError(
            f"{directory} has rank {manifest.lora.rank}, but the model has rank {adapter.lora.rank}; "
            f"create a model with rank {manifest.lora.rank}"
        )
    parameters = files.read_parameters(directory, manifest)
    state = files.read_optimizer(directory, manifest) if optimizer else None
    adapter.parameters = parameters
    adapter.reset_optimizer()
    if state is not None:
        adapter.first_moments, adapter.second_moments, adapter.step = state


def _check_base(directory: Path, manifest: files.ArithmeticManifest, base_model: str) -> None:
    if manifest.base_model != base_model:
        raise InvalidInputError(f"{directory} belongs to base model {manifest.base_model!r}, not {base_model!r}")
