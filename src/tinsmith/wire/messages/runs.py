"""Training runs and checkpoints, as the REST routes list them."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal, TypeAlias

from tinsmith.wire.limits import Id
from tinsmith.wire.message import NOT_GIVEN, Count, Message, since
from tinsmith.wire.messages.weights import CheckpointType

AccessScope: TypeAlias = Literal["owned", "accessible"]


class Cursor(Message, frozen=True, kw_only=True):
    """The position of a page in the whole list."""

    offset: int
    limit: int
    total_count: int


class Checkpoint(Message, frozen=True, kw_only=True):
    checkpoint_id: str
    checkpoint_type: CheckpointType
    time: datetime
    tinker_path: str
    size_bytes: Annotated[int | None, since("0.4")] = NOT_GIVEN
    public: Annotated[bool, since("0.4")] = False
    user_metadata: Annotated[dict[str, str] | None, since("0.28")] = NOT_GIVEN
    expires_at: Annotated[datetime | None, since("0.9")] = NOT_GIVEN


class CheckpointsListResponse(Message, frozen=True, kw_only=True):
    checkpoints: list[Checkpoint]
    cursor: Cursor | None = NOT_GIVEN


class TrainingRun(Message, frozen=True, kw_only=True):
    training_run_id: str
    base_model: str
    model_owner: str
    is_lora: bool
    last_request_time: datetime
    corrupted: bool = False
    lora_rank: int | None = NOT_GIVEN
    last_checkpoint: Checkpoint | None = NOT_GIVEN
    last_sampler_checkpoint: Checkpoint | None = NOT_GIVEN
    user_metadata: dict[str, str] | None = NOT_GIVEN


class TrainingRunsResponse(Message, frozen=True, kw_only=True):
    training_runs: list[TrainingRun]
    cursor: Cursor


class ListTrainingRunsQuery(Message, frozen=True, kw_only=True):
    limit: Count = 20
    offset: Count = 0
    access_scope: Annotated[AccessScope, since("0.15")] = "owned"
    project_id: Annotated[Id | None, since("0.15")] = NOT_GIVEN


class ListCheckpointsQuery(Message, frozen=True, kw_only=True):
    limit: Count = 100
    offset: Count = 0


class AccessQuery(Message, frozen=True, kw_only=True):
    access_scope: AccessScope = "owned"


class SetTtlRequest(Message, frozen=True, kw_only=True):
    """Sets how long a checkpoint is kept; None keeps it without limit."""

    ttl_seconds: Count | None
