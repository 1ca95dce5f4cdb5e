"""Usage, storage and audit, for administrators."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal, TypeAlias

from tinsmith.wire.limits import Id, ShortText
from tinsmith.wire.message import NOT_GIVEN, Message, Tagged, since


class TrainingBillingEvent(Tagged, frozen=True, kw_only=True, tag="training"):
    token_count: int


class SamplingPrefillBillingEvent(Tagged, frozen=True, kw_only=True, tag="sampling_prefill"):
    cached: bool
    token_count: int


class SamplingSampleBillingEvent(Tagged, frozen=True, kw_only=True, tag="sampling_sample"):
    token_count: int


class CheckpointBillingEvent(Tagged, frozen=True, kw_only=True, tag="checkpoint"):
    count: int


class StorageBillingEvent(Tagged, frozen=True, kw_only=True, tag="storage"):
    gigabyte_hours: float


BillingEventInfo: TypeAlias = (
    TrainingBillingEvent
    | SamplingPrefillBillingEvent
    | SamplingSampleBillingEvent
    | CheckpointBillingEvent
    | StorageBillingEvent
)


class BillingUsageEvent(Message, frozen=True, kw_only=True):
    bucket_start: datetime
    bucket_end: datetime
    event_info: BillingEventInfo
    base_model: str | None = NOT_GIVEN
    user_id: str | None = NOT_GIVEN
    user_name: str | None = NOT_GIVEN
    session_id: str | None = NOT_GIVEN
    project_id: str | None = NOT_GIVEN
    estimated_cost_usd: Annotated[float | None, since("0.31")] = NOT_GIVEN
    effective_rate_usd_per_million_tokens: Annotated[float | None, since("0.31")] = NOT_GIVEN
    effective_rate_usd_per_gigabyte_month: Annotated[float | None, since("0.31")] = NOT_GIVEN


class BillingUsageSession(Message, frozen=True, kw_only=True):
    user_metadata: dict[str, str] | None = NOT_GIVEN


class BillingUsageResponse(Message, frozen=True, kw_only=True):
    data: list[BillingUsageEvent]
    sessions: dict[str, BillingUsageSession] = {}
    cost_data_through: Annotated[datetime | None, since("0.31")] = NOT_GIVEN


class GetBillingUsageRequest(Message, frozen=True, kw_only=True):
    """A period of whole UTC hours, at most 14 days long."""

    starting_on: datetime
    ending_before: datetime


class GetCurrentCheckpointStorageUsageRequest(Message, frozen=True, kw_only=True):
    project_id: Id | None = NOT_GIVEN


class CurrentCheckpointStorageUsageItem(Message, frozen=True, kw_only=True):
    checkpoint_count: int
    size_bytes: int
    size_gigabytes: float
    project_id: str | None = NOT_GIVEN
    org_user_urn: str | None = NOT_GIVEN
    user_email: str | None = NOT_GIVEN
    user_name: str | None = NOT_GIVEN
    estimated_monthly_cost_usd: float | None = NOT_GIVEN


class CurrentCheckpointStorageUsageResponse(Message, frozen=True, kw_only=True):
    data: list[CurrentCheckpointStorageUsageItem]
    effective_rate_usd_per_gigabyte_month: float | None = NOT_GIVEN


AuditEventType: TypeAlias = Literal["all", "checkpoints", "projects", "teams", "organizations"]


class AuditLogQuery(Message, frozen=True, kw_only=True):
    event_type: AuditEventType = "all"
    day: ShortText | None = NOT_GIVEN


class AuditLogEntry(Message, frozen=True, kw_only=True):
    timestamp: datetime
    event: str
    event_details: Annotated[dict[str, Any], since("0.26")] = {}
    model_id: str | None = NOT_GIVEN
    tinker_path: str | None = NOT_GIVEN
    purpose: str | None = NOT_GIVEN


class AuditLogResponse(Message, frozen=True, kw_only=True):
    entries: list[AuditLogEntry]
