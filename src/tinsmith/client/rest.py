"""Runs, checkpoints, sessions and samplers: listing, publishing, deleting, downloading."""

from __future__ import annotations

import asyncio
import os
import uuid
import warnings
from collections.abc import Callable, Iterator
from datetime import date, datetime
from pathlib import Path
from typing import Any, TypeVar

from tinsmith.client.admin import AdminClient, SessionlessClient
from tinsmith.client.connection.downloads import DownloadProgress, download_files
from tinsmith.client.connection.operations import Operations
from tinsmith.client.runtime.futures import Future, awaited
from tinsmith.errors import ExperimentalWarning, InvalidInputError, TinkerError
from tinsmith.transport.base import Purpose
from tinsmith.wire.message import NOT_GIVEN
from tinsmith.wire.messages.admin import AuditEventType, AuditLogResponse, BillingUsageResponse
from tinsmith.wire.messages.admin import CurrentCheckpointStorageUsageResponse as StorageUsageResponse
from tinsmith.wire.messages.runs import (
    AccessQuery,
    AccessScope,
    Checkpoint,
    CheckpointsListResponse,
    ListCheckpointsQuery,
    ListTrainingRunsQuery,
    SetTtlRequest,
    TrainingRun,
    TrainingRunsResponse,
)
from tinsmith.wire.messages.sampling import GetSamplerResponse
from tinsmith.wire.messages.service import WhoamiResponse
from tinsmith.wire.messages.sessions import (
    AssignProjectRequest,
    GetSessionResponse,
    ListSessionsQuery,
    ListSessionsResponse,
    SessionSearchRequest,
    SessionSearchResponse,
)
from tinsmith.wire.messages.weights import (
    CopyWeightsRequest,
    ExternalWeightsUrlsResponse,
    ParsedCheckpointTinkerPath,
    WeightsInfoRequest,
    WeightsInfoResponse,
)
from tinsmith.wire.routes import table as routes

T = TypeVar("T")

TRACE_POLL_S = 5.0
PAGE = 100


class RestClient(SessionlessClient):
    """A client for the user's runs, checkpoints, sessions and samplers. It needs no session."""

    _not_raw = SessionlessClient._not_raw | {
        "copy_weights",
        "download_external_weights",
        "export_session_trace",
        "iter_checkpoints",
        "iter_sessions",
        "iter_training_runs",
        "whoami",
    }

    def get_training_run(self, training_run_id: str, access_scope: AccessScope = "owned") -> Future[TrainingRun]:
        """Return a training run."""
        return self._call(
            routes.GET_TRAINING_RUN,
            "get_training_run",
            path={"training_run_id": training_run_id},
            query=AccessQuery(access_scope=access_scope),
        )

    get_training_run_async = awaited(get_training_run)

    def get_training_run_by_tinker_path(
        self, tinker_path: str, access_scope: AccessScope = "owned"
    ) -> Future[TrainingRun]:
        """Return the training run that a checkpoint belongs to."""
        run_id = ParsedCheckpointTinkerPath.from_tinker_path(tinker_path).training_run_id
        return self._call(
            routes.GET_TRAINING_RUN,
            "get_training_run_by_tinker_path",
            path={"training_run_id": run_id},
            query=AccessQuery(access_scope=access_scope),
        )

    get_training_run_by_tinker_path_async = awaited(get_training_run_by_tinker_path)

    def get_weights_info_by_tinker_path(self, tinker_path: str) -> Future[WeightsInfoResponse]:
        """Return the base model, rank and trained parts of a checkpoint."""
        return self._call(
            routes.WEIGHTS_INFO, "get_weights_info_by_tinker_path", WeightsInfoRequest(tinker_path=tinker_path)
        )

    def list_training_runs(
        self, limit: int = 20, offset: int = 0, access_scope: AccessScope = "owned", project_id: str | None = None
    ) -> Future[TrainingRunsResponse]:
        """Return a page of training runs, newest first."""
        query = ListTrainingRunsQuery(
            limit=limit, offset=offset, access_scope=access_scope, project_id=_given(project_id)
        )
        return self._call(routes.LIST_TRAINING_RUNS, "list_training_runs", query=query)

    list_training_runs_async = awaited(list_training_runs)

    def iter_training_runs(
        self, access_scope: AccessScope = "owned", project_id: str | None = None
    ) -> Iterator[TrainingRun]:
        """Iterate over all training runs, fetched page by page."""
        return _pages(
            lambda offset: self.list_training_runs(PAGE, offset, access_scope, project_id),
            lambda page: page.training_runs,
        )

    def list_checkpoints(self, training_run_id: str) -> Future[CheckpointsListResponse]:
        """Return the checkpoints of a run."""
        return self._call(routes.LIST_CHECKPOINTS, "list_checkpoints", path={"training_run_id": training_run_id})

    list_checkpoints_async = awaited(list_checkpoints)

    def list_user_checkpoints(self, limit: int = 100, offset: int = 0) -> Future[CheckpointsListResponse]:
        """Return a page of all checkpoints of this user."""
        query = ListCheckpointsQuery(limit=limit, offset=offset)
        return self._call(routes.LIST_USER_CHECKPOINTS, "list_user_checkpoints", query=query)

    list_user_checkpoints_async = awaited(list_user_checkpoints)

    def iter_checkpoints(self) -> Iterator[Checkpoint]:
        """Iterate over all checkpoints of this user, fetched page by page."""
        return _pages(lambda offset: self.list_user_checkpoints(PAGE, offset), lambda page: page.checkpoints)

    def get_external_weights_urls(self, tinker_path: str) -> Future[ExternalWeightsUrlsResponse]:
        """Return signed URLs of the files of an external checkpoint."""
        return self._call(
            routes.GET_EXTERNAL_WEIGHTS_URLS, "get_external_weights_urls", path=_checkpoint_path(tinker_path)
        )

    get_external_weights_urls_async = awaited(get_external_weights_urls)

    def download_external_weights(
        self,
        tinker_path: str,
        folder: str | os.PathLike[str],
        progress: Callable[[DownloadProgress], None] | None = None,
    ) -> Future[list[Path]]:
        """Download an external checkpoint's files into a folder, resuming an interrupted download."""

        async def run() -> list[Path]:
            urls = await self.get_external_weights_urls(tinker_path)
            return await download_files(self.holder.connection, urls.urls, Path(folder), progress)

        return self.holder.submit("download_external_weights", run())

    download_external_weights_async = awaited(download_external_weights)

    def delete_checkpoint(self, training_run_id: str, checkpoint_id: str) -> Future[None]:
        """Delete a checkpoint, named by `<kind>/<name>`."""
        path = {"training_run_id": training_run_id, "checkpoint_id": checkpoint_id}
        return self._call(routes.DELETE_CHECKPOINT, "delete_checkpoint", path=path)

    delete_checkpoint_async = awaited(delete_checkpoint)

    def delete_checkpoint_from_tinker_path(self, tinker_path: str) -> Future[None]:
        """Delete a checkpoint."""
        return self._call(
            routes.DELETE_CHECKPOINT, "delete_checkpoint_from_tinker_path", path=_checkpoint_path(tinker_path)
        )

    delete_checkpoint_from_tinker_path_async = awaited(delete_checkpoint_from_tinker_path)

    def publish_checkpoint_from_tinker_path(self, tinker_path: str) -> Future[None]:
        """Publish a checkpoint, so that everyone can load it."""
        return self._call(
            routes.PUBLISH_CHECKPOINT, "publish_checkpoint_from_tinker_path", path=_checkpoint_path(tinker_path)
        )

    publish_checkpoint_from_tinker_path_async = awaited(publish_checkpoint_from_tinker_path)

    def unpublish_checkpoint_from_tinker_path(self, tinker_path: str) -> Future[None]:
        """Unpublish a checkpoint."""
        return self._call(
            routes.UNPUBLISH_CHECKPOINT, "unpublish_checkpoint_from_tinker_path", path=_checkpoint_path(tinker_path)
        )

    unpublish_checkpoint_from_tinker_path_async = awaited(unpublish_checkpoint_from_tinker_path)

    def set_checkpoint_ttl_from_tinker_path(self, tinker_path: str, ttl_seconds: int | None) -> Future[None]:
        """Set the seconds until a checkpoint expires; None: never."""
        return self._call(
            routes.SET_CHECKPOINT_TTL,
            "set_checkpoint_ttl_from_tinker_path",
            SetTtlRequest(ttl_seconds=ttl_seconds),
            path=_checkpoint_path(tinker_path),
        )

    set_checkpoint_ttl_from_tinker_path_async = awaited(set_checkpoint_ttl_from_tinker_path)

    def copy_weights(
        self,
        path: str,
        destination_project_id: str | None = None,
        *,
        ttl_seconds: int | None = None,
        weights_access_token: str | None = None,
    ) -> Future[str]:
        """Copy a checkpoint into a project and return the path of the copy."""
        project = destination_project_id or self.holder.connection.config.project_id
        if not project:
            raise InvalidInputError("copy_weights needs destination_project_id (or TINKER_PROJECT_ID)")
        request = CopyWeightsRequest(source_path=path, destination_project_id=project, ttl_seconds=_given(ttl_seconds))
        return copy_weights(self.holder, request, weights_access_token)

    copy_weights_async = awaited(copy_weights)

    def get_session(self, session_id: str, access_scope: AccessScope = "owned") -> Future[GetSessionResponse]:
        """Return the runs and samplers of a session."""
        return self._call(
            routes.GET_SESSION,
            "get_session",
            path={"session_id": session_id},
            query=AccessQuery(access_scope=access_scope),
        )

    get_session_async = awaited(get_session)

    def list_sessions(
        self, limit: int = 20, offset: int = 0, access_scope: AccessScope = "owned"
    ) -> Future[ListSessionsResponse]:
        """Return a page of session ids."""
        query = ListSessionsQuery(limit=limit, offset=offset, access_scope=access_scope)
        return self._call(routes.LIST_SESSIONS, "list_sessions", query=query)

    list_sessions_async = awaited(list_sessions)

    def iter_sessions(self, access_scope: AccessScope = "owned") -> Iterator[str]:
        """Iterate over all session ids, fetched page by page."""
        return _pages(lambda offset: self.list_sessions(PAGE, offset, access_scope), lambda page: page.sessions)

    def assign_session_project(self, session_id: str, project_id: str) -> Future[None]:
        """Move a session into a project."""
        return self._call(
            routes.ASSIGN_SESSION_PROJECT,
            "assign_session_project",
            AssignProjectRequest(project_id=project_id),
            path={"session_id": session_id},
        )

    assign_session_project_async = awaited(assign_session_project)

    def export_session_trace(self, session_id: str) -> Future[str]:
        """Return the URL of a trace of the session's requests, once the server has created it."""

        async def run() -> str:
            while True:
                answer = await self._answer(
                    routes.EXPORT_SESSION_TRACE, "export_session_trace", path={"session_id": session_id}
                )
                if answer.status == "ready":
                    return str(answer.url)
                if answer.status == "failed":
                    raise TinkerError(f"exporting the trace of {session_id} failed: {answer.error}")
                await asyncio.sleep(TRACE_POLL_S)

        return self.holder.submit("export_session_trace", run())

    export_session_trace_async = awaited(export_session_trace)

    def get_sampler(self, sampler_id: str) -> Future[GetSamplerResponse]:
        """Return the base model and checkpoint of a sampler."""
        return self._call(routes.GET_SAMPLER, "get_sampler", path={"sampler_id": sampler_id})

    get_sampler_async = awaited(get_sampler)

    def search_sessions(self, request: SessionSearchRequest) -> Future[SessionSearchResponse]:
        """Search sessions by name, metadata, owner or status, newest first."""
        warnings.warn("search_sessions is experimental", ExperimentalWarning, stacklevel=2)
        return self._call(routes.SEARCH_SESSIONS, "search_sessions", request)

    search_sessions_async = awaited(search_sessions)

    def whoami(self) -> Future[WhoamiResponse]:
        """Return the owner of the credential, from its token. Needs a server that issues tokens."""

        async def run() -> WhoamiResponse:
            connection = self.holder.connection
            await connection.ready()
            await connection.auth.header()
            claims = connection.auth.claims()
            if not claims or "sub" not in claims:
                raise RuntimeError(
                    "whoami needs a server that issues tokens; this server authenticates by API key only"
                )
            return WhoamiResponse(
                user_urn=str(claims["sub"]),
                org_urn=f"tml:organization:{claims.get('org_id')}",
                email=_given(claims.get("email")),
            )

        return self.holder.submit("whoami", run())

    def get_audit_log(self, event_type: AuditEventType = "all", day: date | None = None) -> Future[AuditLogResponse]:
        """Deprecated: `AdminClient.get_audit_log`."""
        return self._admin().get_audit_log(event_type, day)

    get_audit_log_async = awaited(get_audit_log)

    def get_billing_usage(
        self, starting_on: datetime | str, ending_before: datetime | str
    ) -> Future[BillingUsageResponse]:
        """Deprecated: `AdminClient.get_billing_usage`."""
        return self._admin().get_billing_usage(starting_on, ending_before)

    get_billing_usage_async = awaited(get_billing_usage)

    def get_current_checkpoint_storage_usage(self, project_id: str | None = None) -> Future[StorageUsageResponse]:
        """Deprecated: `AdminClient.get_current_checkpoint_storage_usage`."""
        return self._admin().get_current_checkpoint_storage_usage(project_id)

    get_current_checkpoint_storage_usage_async = awaited(get_current_checkpoint_storage_usage)

    def _admin(self) -> AdminClient:
        admin = AdminClient(self.holder)
        admin._is_raw = self._is_raw
        return admin


def copy_weights(holder: Operations, request: CopyWeightsRequest, token: str | None) -> Future[str]:
    """Copy a checkpoint. Another user's checkpoint needs an access token of its owner, sent in a header."""

    async def run() -> str:
        headers = {"x-idempotency-key": str(uuid.uuid4()), "x-sdk-method": "copy_weights"}
        if token is not None:
            headers["x-tinker-weights-access-token"] = token
        answer = await holder.connection.call(routes.COPY_WEIGHTS, request, headers=headers, purpose=Purpose.REST)
        path: str = answer.tinker_path
        return path

    return holder.submit("copy_weights", run())


def _checkpoint_path(tinker_path: str) -> dict[str, str]:
    parsed = ParsedCheckpointTinkerPath.from_tinker_path(tinker_path)
    return {"training_run_id": parsed.training_run_id, "checkpoint_id": parsed.checkpoint_id}


def _pages(fetch: Callable[[int], Future[Any]], items_of: Callable[[Any], list[T]]) -> Iterator[T]:
    """Iterate over the items of all pages; a server may return fewer at a time than requested."""
    offset = 0
    while True:
        page = fetch(offset).result()
        items = items_of(page)
        yield from items
        offset += len(items)
        cursor = getattr(page, "cursor", None)
        if not items or (cursor is not None and offset >= cursor.total_count):
            return


def _given(value: Any) -> Any:
    return NOT_GIVEN if value is None else value
