"""Resuming a lost run from its last checkpoint, and never silently.

When the server no longer has the model, a new one is created from the checkpoint and the program learns how many steps
were lost. Repeating them is up to the program, which has the data.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from tinsmith.client.runtime.futures import Future, submitted
from tinsmith.client.training import TrainingClient
from tinsmith.errors import APIStatusError, RetryableException, RunRecoveredError, TinkerError
from tinsmith.wire.losses import LossFnType
from tinsmith.wire.messages.training import ForwardBackwardOutput, OptimParams, OptimStepResponse
from tinsmith.wire.messages.weights import SaveWeightsResponse
from tinsmith.wire.values.inputs import Datum

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RecoveryEvent:
    """A run that was lost and resumed."""

    lost_model_id: str
    new_model_id: str
    checkpoint: str
    steps_lost: int
    """Optimizer steps since the checkpoint, to be repeated."""
    cause: BaseException


class RecoveringTrainingClient:
    """A training client that survives the loss of its run. Created by `ServiceClient.with_recovery`.

    When the server no longer has the model (404, 410, a lost promise), a new one is created from the latest
    `save_state` with its optimizer, `on_recovery` is called, and the operation raises RunRecoveredError: catch it, go
    back to the step of the checkpoint, and continue with this same client.
    """

    def __init__(
        self,
        client: TrainingClient,
        resume: Callable[[str], Awaitable[TrainingClient]],
        *,
        on_recovery: Callable[[RecoveryEvent], None] | None = None,
        checkpoint: str | None = None,
        max_recoveries: int = 3,
    ) -> None:
        self._client = client
        self._resume = resume
        self._on_recovery = on_recovery
        self._checkpoint = checkpoint
        self._left = max_recoveries
        self._counting = threading.Lock()
        self._called = 0
        """Optimizer steps called so far; `_done` and `_saved_at` count the same steps."""
        self._done = 0
        self._saved_at = 0
        self._lock: asyncio.Lock | None = None

    @property
    def current(self) -> TrainingClient:
        """The client of the current run."""
        return self._client

    @property
    def model_id(self) -> str:
        return self._client.model_id

    def forward(
        self, data: list[Datum], loss_fn: LossFnType, loss_fn_config: Any = None
    ) -> Future[ForwardBackwardOutput]:
        return self._guard(self._client, self._client.forward(data, loss_fn, loss_fn_config))

    forward_async = submitted(forward)

    def forward_backward(
        self, data: list[Datum], loss_fn: LossFnType, loss_fn_config: Any = None
    ) -> Future[ForwardBackwardOutput]:
        return self._guard(self._client, self._client.forward_backward(data, loss_fn, loss_fn_config))

    forward_backward_async = submitted(forward_backward)

    def forward_backward_custom(self, data: list[Datum], loss_fn: Any) -> Future[ForwardBackwardOutput]:
        return self._guard(self._client, self._client.forward_backward_custom(data, loss_fn))

    forward_backward_custom_async = submitted(forward_backward_custom)

    def optim_step(self, optim_params: OptimParams) -> Future[OptimStepResponse]:
        with self._counting:
            stepped = self._client.optim_step(optim_params)
            self._called += 1
            number = self._called
        return self._guard(self._client, stepped, lambda _: self._stepped(number))

    optim_step_async = submitted(optim_step)

    def save_state(
        self,
        name: str,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        user_metadata: dict[str, str] | None = None,
    ) -> Future[SaveWeightsResponse]:
        """Save weights and optimizer; a lost run resumes from here."""
        with self._counting:
            saved = self._client.save_state(name, ttl_seconds, overwrite, user_metadata)
            number = self._called
        return self._guard(self._client, saved, lambda answer: self._saved(answer, number))

    save_state_async = submitted(save_state)

    def _stepped(self, number: int) -> None:
        self._done = max(self._done, number)

    def _saved(self, answer: SaveWeightsResponse, number: int) -> None:
        """Note a checkpoint. It contains the steps called before it, in whatever order the results arrive."""
        if number >= self._saved_at:
            self._checkpoint, self._saved_at = answer.path, number

    def _guard(
        self, client: TrainingClient, future: Future[Any], note: Callable[[Any], None] = lambda _: None
    ) -> Future[Any]:
        return client.holder.connection.runner.submit(self._watch(client, future, note), cancellable=False)

    async def _watch(self, client: TrainingClient, future: Future[Any], note: Callable[[Any], None]) -> Any:
        try:
            result = await future
        except (TinkerError, RetryableException) as error:
            if not _means_lost(error):
                raise
            raise await self._recover(client, error) from error
        note(result)
        return result

    async def _recover(self, lost: TrainingClient, cause: Exception) -> Exception:
        """Resume the run, once for all operations that failed, and return the error to raise."""
        self._lock = self._lock or asyncio.Lock()
        async with self._lock:
            if self._client is not lost:
                return RunRecoveredError(
                    "the run was lost while this operation was in progress, and has been recovered since"
                )
            if self._checkpoint is None:
                cause.add_note("The run cannot be recovered: it has no checkpoint. Call save_state from time to time.")
                return cause
            if self._left == 0:
                cause.add_note("The run was lost again, and max_recoveries has been reached.")
                return cause
            self._left -= 1
            logger.warning("run %s is lost (%s); resuming from %s", lost.model_id, cause, self._checkpoint)
            self._client = await self._resume(self._checkpoint)
            steps_lost = max(0, self._done - self._saved_at)
            event = RecoveryEvent(lost.model_id, self._client.model_id, self._checkpoint, steps_lost, cause)
            with self._counting:
                self._done = self._saved_at = self._called
            if self._on_recovery is not None:
                await asyncio.to_thread(self._on_recovery, event)
            return RunRecoveredError(
                f"run {event.lost_model_id} was lost and resumed as {event.new_model_id} from {event.checkpoint}; "
                f"repeat the last {event.steps_lost} optimizer steps"
            )


def _means_lost(error: BaseException) -> bool:
    if isinstance(error, RetryableException):
        return True
    return isinstance(error, APIStatusError) and error.status_code in (404, 410)
