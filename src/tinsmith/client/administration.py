"""Usage, storage and audit, for administrators."""

from __future__ import annotations

from datetime import UTC, date, datetime

from tinsmith.client.futures import Future, awaited
from tinsmith.client.sessionless import SessionlessClient
from tinsmith.errors import InvalidInputError
from tinsmith.wire import routes
from tinsmith.wire.admin import (
    AuditEventType,
    AuditLogQuery,
    AuditLogResponse,
    BillingUsageResponse,
    CurrentCheckpointStorageUsageResponse,
    GetBillingUsageRequest,
    GetCurrentCheckpointStorageUsageRequest,
)
from tinsmith.wire.message import NOT_GIVEN


class AdminClient(SessionlessClient):
    """Figures of an organisation, or of one's own part of it. Needs no session."""

    def get_audit_log(self, event_type: AuditEventType = "all", day: date | None = None) -> Future[AuditLogResponse]:
        """Who did what, on one day or lately."""
        query = AuditLogQuery(event_type=event_type, day=NOT_GIVEN if day is None else day.isoformat())
        return self._call(routes.GET_AUDIT_LOG, "get_audit_log", query=query)

    get_audit_log_async = awaited(get_audit_log)

    def get_billing_usage(
        self, starting_on: datetime | str, ending_before: datetime | str
    ) -> Future[BillingUsageResponse]:
        """Usage by hour; whole UTC hours, at most 14 days."""
        query = GetBillingUsageRequest(
            starting_on=_moment(starting_on, "starting_on"), ending_before=_moment(ending_before, "ending_before")
        )
        return self._call(routes.GET_BILLING_USAGE, "get_billing_usage", query=query)

    get_billing_usage_async = awaited(get_billing_usage)

    def get_current_checkpoint_storage_usage(
        self, project_id: str | None = None
    ) -> Future[CurrentCheckpointStorageUsageResponse]:
        """What checkpoints take up now."""
        query = GetCurrentCheckpointStorageUsageRequest(project_id=NOT_GIVEN if project_id is None else project_id)
        return self._call(routes.GET_CHECKPOINT_STORAGE_USAGE, "get_current_checkpoint_storage_usage", query=query)

    get_current_checkpoint_storage_usage_async = awaited(get_current_checkpoint_storage_usage)


def _moment(value: datetime | str, name: str) -> datetime:
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value)
        except ValueError:
            raise InvalidInputError(f"{name}: {value!r} is not an ISO date and time", field=name) from None
    return value.astimezone(UTC) if value.tzinfo is not None else value.replace(tzinfo=UTC)
