"""Loads a base model for the executor: on our own decoder, or on transformers if that is what computes it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from tinsmith.engine.general.architecture import GeneralConfig, general_config, transformers_version
from tinsmith.engine.lora import ModuleLayout
from tinsmith.engine.models import sources
from tinsmith.engine.models.config import ModelConfig
from tinsmith.engine.models.decoder import Decoder
from tinsmith.engine.models.load import load_model
from tinsmith.engine.sampling.plan import TokenLimits
from tinsmith.engine.sampling.sampled_model import SampledModel, SamplerLimits
from tinsmith.engine.training.trainer import TrainableModel
from tinsmith.engine.worker.executor import TorchOptions

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A loaded base model, in the forms that the parts of the executor need."""

    limits: TokenLimits
    layout: ModelConfig | ModuleLayout
    """Which linears adapters cover."""
    trained: Decoder | TrainableModel
    sampled: Callable[[SamplerLimits], Decoder | SampledModel]
    tokenizer_dir: Path
    device: torch.device
    parameters: int
    weights_bytes: int
    """What the weights need at most, also while they are laid out."""
    bytes_by_format: Mapping[str, int]
    products: str
    """Which kernels the bits of results depend on."""
    micro_batch_tokens: int


def served_model(options: TorchOptions, dtype: torch.dtype) -> ServedModel:
    """Load the model that the options name."""
    path = Path(options.source)
    if not (path.is_file() and path.suffix == ".gguf"):
        directory = path if path.is_dir() else sources.fetch(options.source)
        general = general_config(directory)
        if general is not None:
            return _general(directory, general, options, dtype)
    loaded = load_model(options.source, options.device, dtype, cache_dir=Path(options.cache_dir))
    decoder, config = loaded.decoder, loaded.config
    return ServedModel(
        limits=config,
        layout=config,
        trained=decoder,
        sampled=lambda limits: decoder,
        tokenizer_dir=loaded.tokenizer_dir,
        device=decoder.device,
        parameters=config.parameter_count(),
        weights_bytes=loaded.memory_bytes,
        bytes_by_format=decoder.bytes_by_format,
        products=decoder.products,
        micro_batch_tokens=options.micro_batch_tokens,
    )


def _general(directory: Path, config: GeneralConfig, options: TorchOptions, dtype: torch.dtype) -> ServedModel:
    from tinsmith.engine.general.model import GeneralModel
    from tinsmith.engine.general.sampling import GeneralSampling
    from tinsmith.engine.general.training import ONE_DATUM, GeneralTraining

    model = GeneralModel(directory, config, options.device, dtype)
    logger.info(
        "architecture %s runs through transformers %s, more slowly than those of our own: a forward pass has one "
        "datum, or one token of one sample%s; no prefix is reused; exports are PEFT adapters only",
        config.architecture,
        transformers_version(),
        "" if model.has_cache else ", which computes the whole sequence again because the model has no working cache",
    )
    for what, paths in (("linears", model.modules.unadapted), ("experts", model.modules.experts)):
        if paths:
            logger.info("adapters do not change %d %s of it: %s", len(paths), what, ", ".join(paths[:8]))
    return ServedModel(
        limits=config,
        layout=model.modules,
        trained=GeneralTraining(model),
        sampled=lambda limits: GeneralSampling(model, limits),
        tokenizer_dir=directory,
        device=model.device,
        parameters=model.parameters,
        weights_bytes=model.parameters * dtype.itemsize,
        bytes_by_format={str(dtype).removeprefix("torch."): model.parameters * dtype.itemsize},
        products=model.kind,
        micro_batch_tokens=ONE_DATUM,
    )
