"""The executor that trains and samples with torch: one base model, many adapters.

Owns: what each job means for adapters, optimizer, trainer and checkpoints, and which error a user sees; samples are in
`torch_samples`. Does not know: sockets, order, fairness. Whatever a job raises, its model is as it was before.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import msgspec
import torch

from tinsmith.engine import base
from tinsmith.engine.adapters import Adapters, Model
from tinsmith.engine.base import Created, Done, JobFailedError, ModelCard, Sample, SavedFiles, Usage
from tinsmith.engine.checkpoints import CheckpointInfo, read_checkpoint, write_checkpoint
from tinsmith.engine.custom_graph import CustomLoss
from tinsmith.engine.executor import Beside, StateInDoubtError, Step, TrainingJob
from tinsmith.engine.fingerprint import fingerprint
from tinsmith.engine.memory_caps import MemoryCaps, chosen_caps, default_caps
from tinsmith.engine.models.load import LoadedModel, built_in_bytes, load_model, memory_needed
from tinsmith.engine.optim import AdamW, check_optimizer
from tinsmith.engine.torch_samples import TorchSamples, check_base
from tinsmith.engine.torch_start import TorchOptions
from tinsmith.engine.trainer import Trainer
from tinsmith.errors import DamagedCheckpointError, InvalidInputError, NonFiniteError, TinkerError, WireError
from tinsmith.wire import json_codec
from tinsmith.wire.losses import check_loss
from tinsmith.wire.proto_outputs import encode_output
from tinsmith.wire.proto_training import decode_request
from tinsmith.wire.training import (
    CreateCustomLossRequest,
    ForwardBackwardInput,
    ForwardBackwardRequest,
    ForwardRequest,
    OptimStepRequest,
    OptimStepResponse,
)

logger = logging.getLogger(__name__)


class TorchExecutor:
    """A loaded base model, the adapters that train on it, and its sampler."""

    def __init__(self, options: TorchOptions, dtype: str) -> None:
        torch.use_deterministic_algorithms(True)
        if options.threads:
            torch.set_num_threads(options.threads)
        source, cache_dir = options.source, Path(options.cache_dir)
        loaded = load_model(source, options.device, getattr(torch, dtype), cache_dir=cache_dir)
        spool_dir = None if options.spool_dir is None else Path(options.spool_dir)
        device = torch.device(options.device)
        self._card = _card(options.card, loaded.config.vocab_size, loaded.tokenizer_dir)
        self._context_length = loaded.config.max_context_length
        caps = memory_caps(options, loaded)
        self._adapters = Adapters(loaded.config, device, caps.adapter_bytes, spool_dir)
        self._trainer = Trainer(loaded.decoder, options.micro_batch_tokens)
        self._samples = TorchSamples(loaded, caps, cache_dir)
        self._fingerprint = fingerprint(
            device, dtype, options.micro_batch_tokens, Path(source), loaded.decoder.products
        )
        logger.info(
            "%s from %s: %s weights, %s on %s, %d threads; %s",
            options.card.name,
            source,
            f"{loaded.config.parameter_count():,}",
            dtype,
            options.device,
            torch.get_num_threads(),
            caps,
        )

    def close(self) -> None:
        """Let go of files; for owners that go on without the executor."""
        self._adapters.close()

    def describe(self) -> ModelCard:
        return self._card

    def train(self, job: TrainingJob) -> Generator[None, None, Done | Beside]:
        with told_to_the_user():
            match job:
                case base.CreateModel():
                    return self._create(job)
                case base.ForwardBackward():
                    return (yield from self._pass(job))
                case base.OptimStep():
                    return self._optim_step(job)
                case base.SaveState():
                    return self._save(job)
                case base.LoadState():
                    with self._adapters.use(job.model_id) as model:
                        load_into(model, Path(job.directory), job.base_model, optimizer=job.optimizer)
                case base.Unload():
                    self._adapters.remove(job.model_id)
        return Done()

    def add_sample(self, job: Sample, stream: bool) -> None:
        with told_to_the_user():
            self._samples.add(job, stream)

    def step(self, tenants: frozenset[str]) -> Step:
        return self._samples.step(tenants)

    def cancel_sample(self, job_id: str) -> None:
        self._samples.cancel(job_id)

    def _create(self, job: base.CreateModel) -> Done:
        model = self._adapters.fresh(job.lora)
        if job.directory is not None:
            load_into(model, Path(job.directory), job.base_model, optimizer=job.optimizer)
        self._adapters.add(job.model_id, job.lora, model)
        return Done(body=msgspec.json.encode(Created(fingerprint=self._fingerprint)))

    def _pass(self, job: base.ForwardBackward) -> Generator[None, None, Done]:
        request, is_forward = read_pass(job)
        custom = None
        if job.custom_loss is not None:
            custom = CustomLoss(json_codec.decode(job.custom_loss, CreateCustomLossRequest))
        check_loss(
            request,
            vocab_size=self._card.vocab_size,
            max_context_length=self._context_length,
            custom_inputs=None if custom is None else custom.inputs,
        )
        with self._adapters.use(job.model_id) as model:
            output = yield from self._trainer.steps(model.adapter, request, not is_forward, custom)
        tokens = sum(datum.model_input.length for datum in work_of(request).data)
        return Done(body=encode_output(output), encoding="protobuf", usage=Usage(training=tokens))

    def _optim_step(self, job: base.OptimStep) -> Done:
        request = json_codec.decode(job.body, OptimStepRequest)
        if request.optimizer_params is not None:
            check_optimizer(request.optimizer_params)
        assert request.adam_params is not None
        with self._adapters.use(job.model_id) as model:
            adapter = model.adapter
            try:
                metrics = model.optimizer.step(adapter.parameters(), adapter.gradients(), request.adam_params)
            except TinkerError:
                raise  # refused before anything was changed
            except Exception as error:
                raise StateInDoubtError(f"a step failed half way: {type(error).__name__}: {error}") from error
            adapter.zero_gradients()
        return Done(body=json_codec.encode(OptimStepResponse(metrics=metrics)))

    def _save(self, job: base.SaveState) -> Done | Beside:
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


def memory_caps(options: TorchOptions, model: LoadedModel) -> MemoryCaps:
    """What an engine keeps at most: as its options say, or by the memory of its device."""
    device = model.decoder.device
    weights_bytes = memory_needed(model.config, model.decoder.dtype, device)
    return chosen_caps(
        default_caps(built_in_bytes(device), weights_bytes, device.type, options.engines),
        adapter_bytes=options.adapter_bytes,
        sampler_adapter_bytes=options.sampler_adapter_bytes,
        cache_bytes=options.cache_bytes,
    )


@contextmanager
def told_to_the_user() -> Iterator[None]:
    """Errors that have a cause which somebody can mend become a JobFailedError that says who."""
    try:
        yield
    except (InvalidInputError, WireError, NonFiniteError) as error:
        raise JobFailedError(str(error), "user") from error
    except JobFailedError:
        raise
    except (DamagedCheckpointError, TinkerError) as error:
        raise JobFailedError(str(error), "server") from error
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        text = f"the engine's memory is not enough for this: {error}; send fewer or shorter sequences at a time"
        raise JobFailedError(text, "server") from error


def is_out_of_memory(error: Exception) -> bool:
    """Whether a computation failed for want of memory; torch says so on the CPU in words only."""
    is_typed = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    return is_typed or "can't allocate memory" in str(error) or "not enough memory" in str(error)


def copied(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As they are now, whatever becomes of them."""
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def written(
    directory: Path,
    info: CheckpointInfo,
    weights: Mapping[str, torch.Tensor],
    state: Mapping[str, torch.Tensor] | None,
) -> Done:
    """Write a checkpoint that lasts; what its client is told."""
    with told_to_the_user():
        manifest = write_checkpoint(directory, info, weights, state)
    size_bytes = sum(path.stat().st_size for path in directory.iterdir())
    return Done(body=msgspec.json.encode(SavedFiles(size_bytes=size_bytes, digest=manifest.digest)))


def load_into(model: Model, directory: Path, base_model: str, *, optimizer: bool) -> None:
    """Take over a checkpoint's weights, with its optimizer state or a fresh one; all or nothing."""
    rank, own = check_base(directory, base_model).rank, model.adapter.rank
    if rank != own:
        raise InvalidInputError(
            f"checkpoint {directory.name!r} has rank {rank}, the model {own}; create one with {rank}"
        )
    checkpoint = read_checkpoint(directory, with_optimizer=optimizer)
    state = AdamW(model.adapter.parameters())
    if checkpoint.optimizer is not None:
        state.load_state(checkpoint.optimizer)
    model.adapter.load(checkpoint.weights)
    model.adapter.zero_gradients()
    model.optimizer = state


def read_pass(job: base.ForwardBackward) -> tuple[ForwardBackwardRequest | ForwardRequest, bool]:
    """The request in a job, and whether it is a forward pass only."""
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
