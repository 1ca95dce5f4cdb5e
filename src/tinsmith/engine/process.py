"""`ProcessBackend`: base models on this machine, each in a supervised process of its own.

An engine is started when its first job comes. torch is loaded in those processes alone.
Does not know: how an engine is supervised (`supervisor`), what it says (`frames`), how it computes (`executor`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence

from tinsmith.engine.base import AnyJob, BackendLostError, Done, JobFailedError, ModelCard, OnTokens, Position, Status
from tinsmith.engine.child import EngineSpec
from tinsmith.engine.supervisor import Supervisor, SupervisorOptions


class ProcessBackend:
    """A backend of local processes, one per base model. `eager` ones are started at once, not on first use."""

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
        """The worst state of any engine; one that nobody has needed yet counts as ready."""
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
            future.set_exception(BackendLostError("the backend is closed" if self._is_closed else "not opened yet"))
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
            return Position(ahead=0, reason="not under way")
        return self._owners[job_id].position(job_id)

    def processes(self) -> dict[str, int]:
        """The engines that run now, with their process ids."""
        found = {name: supervisor.pid for name, supervisor in self._supervisors.items()}
        return {name: pid for name, pid in found.items() if pid is not None}
