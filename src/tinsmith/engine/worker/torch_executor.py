"""The executor that trains and samples with torch: one base model, many adapters.

It maps each kind of job to the adapters, optimizer, trainer and checkpoints; samples are in `torch_sampling`. Whatever
a job raises, its model is unchanged.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Mapping
from functools import partial
from pathlib import Path

import msgspec
import torch

from tinsmith.engine import protocol
from tinsmith.engine.checkpoints.format import CheckpointInfo, read_checkpoint, write_checkpoint
from tinsmith.engine.machine import fingerprint
from tinsmith.engine.models.load import built_in_bytes
from tinsmith.engine.protocol import Created, Done, ModelCard, Sample, SavedFiles, Usage
from tinsmith.engine.sampling.adapters import check_base
from tinsmith.engine.training.adamw import AdamW
from tinsmith.engine.training.adapter_pool import Adapters, Model
from tinsmith.engine.training.custom_loss.interpreter import LossProgram
from tinsmith.engine.training.trainer import Trainer
from tinsmith.engine.worker.executor import (
    Beside,
    SamplerStep,
    StateInDoubtError,
    TorchOptions,
    TrainingJob,
    as_job_failures,
)
from tinsmith.engine.worker.memory import MemoryCaps, chosen_caps, default_caps
from tinsmith.engine.worker.served_model import ServedModel, served_model
from tinsmith.engine.worker.torch_sampling import TorchSamples
from tinsmith.errors import InvalidInputError
from tinsmith.wire.codecs import json_codec
from tinsmith.wire.codecs.proto_outputs import encode_output
from tinsmith.wire.codecs.proto_training import decode_request
from tinsmith.wire.messages.training import (
    CreateCustomLossRequest,
    ForwardBackwardInput,
    ForwardBackwardRequest,
    ForwardRequest,
    OptimStepRequest,
    OptimStepResponse,
)
from tinsmith.wire.rules.adam_rules import adam_params
from tinsmith.wire.rules.loss_rules import check_loss

logger = logging.getLogger(__name__)

LARGE_BODY = 2**20
"""Bodies larger than this take long enough to decode and validate that other jobs get a turn in between."""


class TorchExecutor:
    """A loaded base model, the adapters that train on it, and its sampler."""

    def __init__(self, options: TorchOptions, dtype: str) -> None:
        torch.use_deterministic_algorithms(True)
        if options.threads:
            torch.set_num_threads(options.threads)
        model = served_model(options, getattr(torch, dtype))
        spool_dir = None if options.spool_dir is None else Path(options.spool_dir)
        self._card = _card(options.card, model.limits.vocab_size, model.tokenizer_dir)
        self._context_length = model.limits.max_context_length
        caps = memory_caps(options, model)
        self._adapters = Adapters(model.layout, model.device, caps.adapter_bytes, spool_dir)
        self._trainer = Trainer(model.trained, model.micro_batch_tokens)
        self._samples = TorchSamples(model, caps, options)
        self._fingerprint = fingerprint(
            model.device, dtype, model.micro_batch_tokens, Path(options.source), model.products
        )
        logger.info(
            "%s from %s: %s weights (%s), %s on %s, %d threads; %s",
            options.card.name,
            options.source,
            f"{model.parameters:,}",
            ", ".join(f"{size / 1e6:,.1f} MB in {name}" for name, size in model.bytes_by_format.items()),
            dtype,
            options.device,
            torch.get_num_threads(),
            caps,
        )

    def close(self) -> None:
        """Close open files, for a process that continues without the executor."""
        self._adapters.close()

    def describe(self) -> ModelCard:
        return self._card

    def train(self, job: TrainingJob) -> Generator[None, None, Done | Beside]:
        with as_job_failures():
            match job:
                case protocol.CreateModel():
                    return self._create(job)
                case protocol.ForwardBackward():
                    return (yield from self._pass(job))
                case protocol.OptimStep():
                    return self._optim_step(job)
                case protocol.SaveState():
                    return self._save(job)
                case protocol.LoadState():
                    with self._adapters.use(job.model_id) as model:
                        load_into(model, Path(job.directory), job.base_model, optimizer=job.optimizer)
                case protocol.Unload():
                    self._adapters.remove(job.model_id)
        return Done()

    def add_sample(self, job: Sample, stream: bool) -> None:
        with as_job_failures():
            self._samples.add(job, stream)

    def step(self, tenants: frozenset[str]) -> SamplerStep:
        return self._samples.step(tenants)

    def cancel_sample(self, job_id: str) -> None:
        self._samples.cancel(job_id)

    def _create(self, job: protocol.CreateModel) -> Done:
        model = self._adapters.fresh(job.lora)
        if job.directory is not None:
            load_into(model, Path(job.directory), job.base_model, optimizer=job.optimizer)
        self._adapters.add(job.model_id, job.lora, model, job.tenant)
        return Done(body=msgspec.json.encode(Created(fingerprint=self._fingerprint)))

    def _pass(self, job: protocol.ForwardBackward) -> Generator[None, None, Done]:
        request, is_forward = read_pass(job)
        if len(job.body) > LARGE_BODY:
            yield
        custom = None
        if job.custom_loss is not None:
            custom = LossProgram(json_codec.decode(job.custom_loss, CreateCustomLossRequest), job.max_loss_device_s)
        check_loss(
            request,
            vocab_size=self._card.vocab_size,
            max_context_length=self._context_length,
            custom_inputs=None if custom is None else custom.inputs,
        )
        if len(job.body) > LARGE_BODY:
            yield
        with self._adapters.use(job.model_id) as model:
            output = yield from self._trainer.steps(model.adapter, request, not is_forward, custom)
        tokens = sum(datum.model_input.length for datum in work_of(request).data)
        return Done(body=encode_output(output), encoding="protobuf", usage=Usage(training=tokens))

    def _optim_step(self, job: protocol.OptimStep) -> Done:
        settings = adam_params(json_codec.decode(job.body, OptimStepRequest))
        with self._adapters.use(job.model_id) as model:
            adapter, optimizer = model.adapter, model.optimizer
            planned = optimizer.plan(adapter.parameters(), adapter.gradients(), settings)
            done = Done(body=json_codec.encode(OptimStepResponse(metrics=planned.metrics)))
            try:  # everything that can be rejected was rejected above
                optimizer.commit(planned)
            except Exception as error:
                raise StateInDoubtError(f"an optimizer step failed halfway: {type(error).__name__}: {error}") from error
            adapter.zero_gradients()
        return done

    def _save(self, job: protocol.SaveState) -> Done | Beside:
        with self._adapters.use(job.model_id) as model:
            adapter = model.adapter
            info = CheckpointInfo(
                base_model=job.base_model,
                rank=adapter.rank,
                alpha=adapter.alpha,
                seed=adapter.seed,
                train_attn=adapter.train_attn,
                train_mlp=adapter.train_mlp,
                train_unembed=adapter.train_unembed,
            )
            weights, state = adapter.parameters(), model.optimizer.state() if job.optimizer else None
            if not job.beside:
                return written(Path(job.directory), info, weights, state)
            weights, state = copied(weights), None if state is None else copied(state)
        return Beside(partial(written, Path(job.directory), info, weights, state))


def memory_caps(options: TorchOptions, model: ServedModel) -> MemoryCaps:
    """Return an engine's memory limits, from its options or from the memory of its device."""
    return chosen_caps(
        default_caps(built_in_bytes(model.device), model.weights_bytes, model.device.type, options.engines),
        adapter_bytes=options.adapter_bytes,
        sampler_adapter_bytes=options.sampler_adapter_bytes,
        cache_bytes=options.cache_bytes,
    )


def copied(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return copies that later training does not change."""
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def written(
    directory: Path,
    info: CheckpointInfo,
    weights: Mapping[str, torch.Tensor],
    state: Mapping[str, torch.Tensor] | None,
) -> Done:
    """Write a checkpoint durably; return the result of the save."""
    with as_job_failures():
        manifest = write_checkpoint(directory, info, weights, state)
    size_bytes = sum(path.stat().st_size for path in directory.iterdir())
    return Done(body=msgspec.json.encode(SavedFiles(size_bytes=size_bytes, digest=manifest.digest)))


def load_into(model: Model, directory: Path, base_model: str, *, optimizer: bool) -> None:
    """Load a checkpoint's weights, with its optimizer state or a fresh one; all or nothing."""
    rank, own = check_base(directory, base_model).rank, model.adapter.rank
    if rank != own:
        raise InvalidInputError(
            f"checkpoint {directory.name!r} has rank {rank}, but the model has rank {own}; "
            f"create a model with rank {rank}"
        )
    checkpoint = read_checkpoint(directory, with_optimizer=optimizer)
    state = AdamW(model.adapter.parameters())
    if checkpoint.optimizer is not None:
        state.load_state(checkpoint.optimizer)
    model.adapter.load(checkpoint.weights)
    model.adapter.zero_gradients()
    model.optimizer = state


def read_pass(job: protocol.ForwardBackward) -> tuple[ForwardBackwardRequest | ForwardRequest, bool]:
    """Return the request of a job, and whether it is only a forward pass."""
    if job.encoding == "protobuf":
        request = decode_request(job.body)
    elif job.is_forward:
        return json_codec.decode(job.body, ForwardRequest), True
    else:
        request = json_codec.decode(job.body, ForwardBackwardRequest)
    return request, job.is_forward or bool(request.forward_only)


def work_of(request: ForwardBackwardRequest | ForwardRequest) -> ForwardBackwardInput:
    return request.forward_input if isinstance(request, ForwardRequest) else request.forward_backward_input


def _card(announced: ModelCard, vocab_size: int, tokenizer_dir: Path) -> ModelCard:
    return msgspec.structs.replace(announced, vocab_size=vocab_size, tokenizer_directory=str(tokenizer_dir))
