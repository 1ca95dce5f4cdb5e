"""Usage, storage and audit, for administrators."""

from __future__ import annotations

from datetime import UTC, date, datetime
from typing import Any

from tinsmith.client.connection import Connection
from tinsmith.client.embedded import client_config
from tinsmith.client.futures import Future, awaited
from tinsmith.client.operations import Operations
from tinsmith.client.session import Session
from tinsmith.errors import InvalidInputError
from tinsmith.version import PROTOCOL_VERSION
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
from tinsmith.wire.routes import Route


class AdminClient:
    """Needs no session."""

    def __init__(
        self, _holder: Operations | None = None, *, base_url: str | None = None, api_key: str | None = None
    ) -> None:
        if _holder is None:
            connection = Connection(client_config(base_url=base_url, api_key=api_key))
            _holder = Operations(connection, Session(connection))
        self.holder = _holder

    def get_audit_log(self, event_type: AuditEventType = "all", day: date | None = None) -> Future[AuditLogResponse]:
        """Who did what, on one day or lately."""
        query = AuditLogQuery(event_type=event_type, day=NOT_GIVEN if day is None else day.isoformat())
        return self._call(routes.GET_AUDIT_LOG, "get_audit_log", query)

    get_audit_log_async = awaited(get_audit_log)

    def get_billing_usage(
        self, starting_on: datetime | str, ending_before: datetime | str
    ) -> Future[BillingUsageResponse]:
        """Usage by hour; whole UTC hours, at most 14 days."""
        query = GetBillingUsageRequest(
            starting_on=_moment(starting_on, "starting_on"), ending_before=_moment(ending_before, "ending_before")
        )
        return self._call(routes.GET_BILLING_USAGE, "get_billing_usage", query)

    get_billing_usage_async = awaited(get_billing_usage)

    def get_current_checkpoint_storage_usage(
        self, project_id: str | None = None
    ) -> Future[CurrentCheckpointStorageUsageResponse]:
        """What checkpoints take up now."""
        query = GetCurrentCheckpointStorageUsageRequest(project_id=NOT_GIVEN if project_id is None else project_id)
        return self._call(routes.GET_CHECKPOINT_STORAGE_USAGE, "get_current_checkpoint_storage_usage", query)

    get_current_checkpoint_storage_usage_async = awaited(get_current_checkpoint_storage_usage)

    def get_telemetry(self) -> Any:
        return self.holder.telemetry

    def _call(self, route: Route, method: str, query: Any) -> Future[Any]:
        headers = {"x-sdk-version": PROTOCOL_VERSION, "x-sdk-method": method}
        return self.holder.submit(method, self.holder.connection.call(route, query=query, headers=headers))


def _moment(value: datetime | str, name: str) -> datetime:
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value)
        except ValueError:
            raise InvalidInputError(f"{name}: {value!r} is not an ISO date and time", field=name) from None
    return value.astimezone(UTC) if value.tzinfo is not None else value.replace(tzinfo=UTC)
