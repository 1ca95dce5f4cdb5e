"""The backend of one machine: the models that a server's settings name, each in an engine process of its own.

Owns: from NAME=SOURCE to cards and engines. Models are prepared (fetched, converted) once, in a process of its own;
what was learnt is kept beside them. Loading into memory waits for the first job, except for a model that stands alone.
Does not know: how engines run (`process`), HTTP. Never imports torch.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tinsmith.config import ServerConfig
from tinsmith.engine.base import ModelCard
from tinsmith.engine.prepare import Prepared
from tinsmith.engine.process import ProcessBackend
from tinsmith.engine.supervisor import SupervisorOptions
from tinsmith.engine.torch_start import TorchOptions, torch_spec
from tinsmith.errors import TinkerError

logger = logging.getLogger(__name__)

DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""What is served when nothing is named; needs no hub."""
PREPARE_TIMEOUT_S = 1800.0


def local_backend(config: ServerConfig) -> LocalBackend:
    return LocalBackend(config)


def named_sources(models: Sequence[str]) -> dict[str, str]:
    """Names and sources of the models; an empty source is the default model."""
    sources: dict[str, str] = {}
    for text in models or (DEFAULT_MODEL,):
        name, has_source, source = text.partition("=")
        if not has_source:
            path = Path(text)
            is_local = path.exists()
            name, source = (path.stem if path.is_file() else path.name, text) if is_local else (text, text)
        if not name or (has_source and not source):
            raise TinkerError(f"--model {text!r} must be NAME or NAME=SOURCE")
        if name in sources:
            raise TinkerError(f"--model names {name!r} twice")
        sources[name] = "" if source == DEFAULT_MODEL else source
    return sources


class LocalBackend(ProcessBackend):
    """Engines of this machine, made from a server's settings when it opens."""

    def __init__(self, config: ServerConfig) -> None:
        super().__init__((), SupervisorOptions(idle_s=config.idle_model_s))
        self._config = config
        self._sources = named_sources(config.models)
        self._cache_dir = cache_dir(config)

    async def open(self) -> None:
        self._cache_dir.mkdir(parents=True, exist_ok=True)
        specs = []
        for name, source in self._sources.items():
            prepared = await self._prepared(name, source)
            card = ModelCard(
                name=name,
                vocab_size=prepared.vocab_size,
                max_context_length=prepared.max_context_length,
                arch=prepared.arch,
                tokenizer_id=name,
                tokenizer_directory=prepared.tokenizer_directory,
                lora_alpha=self._config.lora_alpha,
            )
            specs.append(torch_spec(engine_options(self._config, card, prepared.source, len(self._sources))))
        self._specs = tuple(specs)
        self._eager = frozenset(self._sources) if len(self._sources) == 1 else frozenset()
        await super().open()

    async def _prepared(self, name: str, source: str) -> Prepared:
        known = self._cache_dir / "prepared.json"
        kept = _read(known)
        found = kept.get(source)
        if found is not None and Path(found.source).exists() and Path(found.tokenizer_directory).exists():
            return found
        logger.info("preparing %s%s", name, f" from {source}" if source else "", extra={"event": "model_prepare"})
        prepared = await _prepare(source, self._cache_dir)
        known.write_bytes(msgspec.json.encode({**kept, source: prepared}))
        return prepared


def cache_dir(config: ServerConfig) -> Path:
    return config.models_dir or config.data_dir / "models"


def engine_options(config: ServerConfig, card: ModelCard, source: str, engines: int) -> TorchOptions:
    """What the engine of one model is told, out of `engines` that a server may run."""
    return TorchOptions(
        card=card,
        source=source,
        cache_dir=str(cache_dir(config)),
        spool_dir=str(config.data_dir / "spool"),
        device=config.device,
        dtype=config.dtype,
        threads=config.threads,
        adapter_bytes=config.adapter_bytes,
        sampler_adapter_bytes=config.sampler_adapter_bytes,
        cache_bytes=config.cache_bytes,
        engines=engines,
    )


def _read(path: Path) -> dict[str, Prepared]:
    """What earlier starts learnt; a file that cannot be read is as good as none."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Prepared])
    except (OSError, msgspec.DecodeError):
        return {}


async def _prepare(source: str, cache_dir: Path) -> Prepared:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tinsmith.engine.prepare", source, str(cache_dir)),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(PREPARE_TIMEOUT_S):
            output, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        raise TinkerError(f"preparing {source or DEFAULT_MODEL} took more than {PREPARE_TIMEOUT_S:g} s") from None
    answer = output.splitlines()[-1] if output.strip() else b"{}"
    if process.returncode != 0:
        raise TinkerError(f"preparing {source or DEFAULT_MODEL} failed; the log above has the cause")
    failure = msgspec.json.decode(answer)
    if "error" in failure:
        raise TinkerError(f"{source or DEFAULT_MODEL}: {failure['error']}")
    return msgspec.convert(failure, Prepared)
