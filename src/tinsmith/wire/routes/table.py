"""The route table: every path of the protocol once, with its request, its response, and the releases that use it.

Client, server, reference documentation and contract tests all read this table. Each route declares its door
(`door.py`): the scopes it needs, whose data it touches, how large a body may be, and what a call costs. Routes that
only tinsmith has are in `own.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias
from urllib.parse import quote

from tinsmith.errors import InvalidInputError
from tinsmith.wire.messages import admin, futures, runs, sampling, service, sessions, training, weights
from tinsmith.wire.routes.door import BULK, IDS, LARGE, MEDIUM, Door, any_key, everybody, needs

Method: TypeAlias = Literal["GET", "POST", "PUT", "DELETE"]
Dialect: TypeAlias = Literal["tinker", "openai", "anthropic"]
Encoding: TypeAlias = Literal["json", "protobuf", "msgpack", "bytes", "multipart"]

PREFIX = "/api/v1/"

_PARAMETER = re.compile(r"{(\w+)}")
_UNSAFE = re.compile(r"[\x00-\x20\x7f\ud800-\udfff]|(^|/)\.{0,2}(/|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One endpoint.

    `response` is the body of the immediate answer; a route with a `result` answers with a promise, and the result comes
    from retrieve_future. None means no body is needed. `until` is the last release that calls it; None: still used.
    """

    name: str
    method: Method
    path: str
    request: type[Any] | None = None
    query: type[Any] | None = None
    response: type[Any] | None = None
    result: type[Any] | None = None
    request_type: str | None = None
    """The `x-tinker-request-type` header of clients that ask for the result."""
    body_encodings: tuple[Encoding, ...] = ("json",)
    result_encodings: tuple[Encoding, ...] = ("json",)
    since: str = "0.3"
    until: str | None = None
    door: Door
    """Who may call it, whose data it touches, how large a body may be, and what it costs."""
    dialect: Dialect = "tinker"
    """Whose clients call it, which decides the form of its errors."""

    @property
    def is_future(self) -> bool:
        return self.result is not None

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(_PARAMETER.findall(self.path))

    def url_path(self, **values: str) -> str:
        """Return the path with its parameters filled in. Run ids keep their colons, checkpoint ids their slash."""
        if set(values) != set(self.parameters):
            raise InvalidInputError(f"{self.name} needs the parameters {self.parameters}, got {tuple(values)}")
        for name, value in values.items():
            if not isinstance(value, str) or not value or _UNSAFE.search(value):
                raise InvalidInputError(f"{name}: {value!r} is not allowed in a path", field=name)
        return _PARAMETER.sub(
            lambda match: quote(values[match[1]], safe=":/" if "checkpoint" in match[1] else ":"), self.path
        )


def _get(name: str, path: str, response: type[Any], *, door: Door, **rest: Any) -> Route:
    return Route(name=name, method="GET", path=PREFIX + path, response=response, door=door, **rest)


def _post(
    name: str, path: str, request: type[Any] | None, response: type[Any] | None, *, door: Door, **rest: Any
) -> Route:
    return Route(name=name, method="POST", path=PREFIX + path, request=request, response=response, door=door, **rest)


def _submit(path: str, request: type[Any], result: type[Any], request_type: str, *, door: Door, **rest: Any) -> Route:
    """Declare a POST whose answer is a promise."""
    answer = futures.UntypedAPIFuture
    return _post(path, path, request, answer, result=result, request_type=request_type, door=door, **rest)


_BOTH: tuple[Encoding, ...] = ("json", "protobuf")
_CHECKPOINT = "training_runs/{training_run_id}/checkpoints/{checkpoint_id}"

# Service
HEALTHZ = _get("healthz", "healthz", service.HealthResponse, door=everybody("nothing", "memory"))
GET_SERVER_CAPABILITIES = _get(
    "get_server_capabilities",
    "get_server_capabilities",
    service.GetServerCapabilitiesResponse,
    door=any_key("nothing", "memory"),
)
CLIENT_CONFIG = _post(
    "client_config",
    "client/config",
    service.ClientConfigRequest,
    service.ClientConfigResponse,
    since="0.18",
    door=any_key("nothing", "memory"),
)
CLIENT_DYNAMIC_CONFIG = _post(
    "client_dynamic_config",
    "client/dynamic_config",
    service.ClientConfigRequest,
    service.ClientDynamicConfigResponse,
    since="0.25",
    door=any_key("nothing", "memory"),
)
AUTH_TOKEN = _post(
    "auth_token",
    "auth/token",
    service.AuthTokenRequest,
    service.AuthTokenResponse,
    since="0.18",
    door=any_key("caller", "memory"),
)
GET_API_KEY = _get(
    "get_api_key", "auth/apikey/me", service.ApiKeyResponse, since="0.26", door=any_key("caller", "rows")
)
DELETE_API_KEY = Route(
    name="delete_api_key", method="DELETE", path=PREFIX + "auth/apikey/me", since="0.26", door=any_key("caller", "rows")
)
TELEMETRY = _post(
    "telemetry",
    "telemetry",
    service.TelemetrySendRequest,
    service.TelemetryResponse,
    door=any_key("caller", "memory", body=MEDIUM),
)

# Sessions
CREATE_SESSION = _post(
    "create_session",
    "create_session",
    sessions.CreateSessionRequest,
    sessions.CreateSessionResponse,
    door=needs("train", "sample", owner="caller", cost="rows"),
)
SESSION_HEARTBEAT = _post(
    "session_heartbeat",
    "session_heartbeat",
    sessions.SessionHeartbeatRequest,
    sessions.SessionHeartbeatResponse,
    door=needs("train", "sample", owner="session", cost="memory"),
)
FINISH_SESSION = _post(
    "finish_session",
    "sessions/{session_id}/finish",
    sessions.FinishSessionRequest,
    None,
    since="0.28",
    door=needs("train", "sample", owner="session", cost="rows"),
)
GET_SESSION = _get(
    "get_session",
    "sessions/{session_id}",
    sessions.GetSessionResponse,
    query=runs.AccessQuery,
    since="0.5",
    door=needs("read", owner="session", cost="rows"),
)
LIST_SESSIONS = _get(
    "list_sessions",
    "sessions",
    sessions.ListSessionsResponse,
    query=sessions.ListSessionsQuery,
    since="0.5",
    door=needs("read", owner="caller", cost="scan"),
)
ASSIGN_SESSION_PROJECT = Route(
    name="assign_session_project",
    method="PUT",
    path=PREFIX + "sessions/{session_id}/project",
    request=sessions.AssignProjectRequest,
    since="0.22",
    door=needs("train", owner="session", cost="rows"),
)
EXPORT_SESSION_TRACE = _get(
    "export_session_trace",
    "sessions/{session_id}/trace_export",
    sessions.TraceExportResponse,
    since="0.24",
    door=needs("read", owner="session", cost="files"),
)
SEARCH_SESSIONS = _post(
    "search_sessions",
    "sessions/search",
    sessions.SessionSearchRequest,
    sessions.SessionSearchResponse,
    since="0.36",
    door=needs("read", owner="caller", cost="scan"),
)

# Models and training
CREATE_MODEL = _submit(
    "create_model",
    training.CreateModelRequest,
    training.CreateModelResponse,
    "CreateModel",
    door=needs("train", owner="session", cost="work"),
)
GET_INFO = _post(
    "get_info",
    "get_info",
    training.GetInfoRequest,
    training.GetInfoResponse,
    door=needs("train", "read", owner="model", cost="rows"),
)
FORWARD_BACKWARD = _submit(
    "forward_backward",
    training.ForwardBackwardRequest,
    training.ForwardBackwardOutput,
    "ForwardBackward",
    body_encodings=_BOTH,
    result_encodings=_BOTH,
    door=needs("train", owner="model", cost="work", body=BULK),
)
FORWARD = _submit(
    "forward",
    training.ForwardRequest,
    training.ForwardBackwardOutput,
    "Forward",
    result_encodings=_BOTH,
    until="0.24",
    door=needs("train", owner="model", cost="work", body=BULK),
)
OPTIM_STEP = _submit(
    "optim_step",
    training.OptimStepRequest,
    training.OptimStepResponse,
    "OptimStep",
    door=needs("train", owner="model", cost="work"),
)
UNLOAD_MODEL = _submit(
    "unload_model",
    training.UnloadModelRequest,
    training.UnloadModelResponse,
    "UnloadModel",
    until="0.25",
    door=needs("train", owner="model", cost="work"),
)
CREATE_CUSTOM_LOSS = _submit(
    "create_custom_loss",
    training.CreateCustomLossRequest,
    training.CreateCustomLossResponse,
    "CreateCustomLoss",
    since="0.36",
    door=needs("train", owner="session", cost="rows", body=MEDIUM),
)

# Weights
SAVE_WEIGHTS = _submit(
    "save_weights",
    weights.SaveWeightsRequest,
    weights.SaveWeightsResponse,
    "SaveWeights",
    door=needs("train", owner="model", cost="work"),
)
LOAD_WEIGHTS = _submit(
    "load_weights",
    weights.LoadWeightsRequest,
    weights.LoadWeightsResponse,
    "LoadWeights",
    door=needs("train", owner="checkpoint", cost="files"),
)
SAVE_WEIGHTS_FOR_SAMPLER = _submit(
    "save_weights_for_sampler",
    weights.SaveWeightsForSamplerRequest,
    weights.SaveWeightsForSamplerResponseInternal,
    "SaveWeightsForSampler",
    door=needs("train", owner="model", cost="work"),
)
SAVE_WEIGHTS_EXTERNAL = _submit(
    "save_weights_external",
    weights.SaveWeightsExternalRequest,
    weights.SaveWeightsExternalResponseInternal,
    "SaveWeightsExternal",
    since="0.28",
    door=needs("train", owner="model", cost="work"),
)
WEIGHTS_INFO = _post(
    "weights_info",
    "weights_info",
    weights.WeightsInfoRequest,
    weights.WeightsInfoResponse,
    since="0.6",
    door=needs("train", "sample", "read", owner="checkpoint", cost="rows"),
)
COPY_WEIGHTS = _post(
    "copy_weights",
    "copy_weights",
    weights.CopyWeightsRequest,
    weights.CopyWeightsResponse,
    since="0.27",
    door=needs("train", owner="checkpoint", cost="files"),
)

# Sampling
CREATE_SAMPLING_SESSION = _post(
    "create_sampling_session",
    "create_sampling_session",
    sampling.CreateSamplingSessionRequest,
    sampling.CreateSamplingSessionResponse,
    door=needs("sample", owner="session", cost="files"),
)
JOIN_SAMPLING_SESSION = _post(
    "join_sampling_session",
    "join_sampling_session",
    sampling.JoinSamplingSessionRequest,
    sampling.JoinSamplingSessionResponse,
    since="0.32",
    door=needs("sample", owner="sampler", cost="rows"),
)
ASAMPLE = _submit(
    "asample",
    sampling.SampleRequest,
    sampling.SampleResponse,
    "Sample",
    result_encodings=_BOTH,
    door=needs("sample", owner="sampler", cost="work", body=LARGE),
)
GET_SAMPLER = _get(
    "get_sampler",
    "samplers/{sampler_id}",
    sampling.GetSamplerResponse,
    since="0.6",
    door=needs("train", "sample", "read", owner="sampler", cost="rows"),
)

# Futures. The answer to retrieve_future depends on the promise: its result, or one of the forms in `futures`.
RETRIEVE_FUTURE = _post(
    "retrieve_future",
    "retrieve_future",
    futures.FutureRetrieveRequest,
    None,
    door=needs("train", "sample", owner="request", cost="wait"),
)
RETRIEVE_FUTURES = _post(
    "retrieve_futures",
    "retrieve_futures",
    futures.FuturesRetrieveRequest,
    futures.FuturesRetrieveResponse,
    since="0.27",
    door=needs("sample", owner="sampler", cost="wait", body=IDS),
)
CANCEL_FUTURE = _post(
    "cancel_future",
    "cancel_future",
    futures.CancelFutureRequest,
    None,
    since="0.26",
    door=needs("train", "sample", owner="request", cost="rows"),
)

# Runs and checkpoints
LIST_TRAINING_RUNS = _get(
    "list_training_runs",
    "training_runs",
    runs.TrainingRunsResponse,
    query=runs.ListTrainingRunsQuery,
    door=needs("read", owner="caller", cost="scan"),
)
GET_TRAINING_RUN = _get(
    "get_training_run",
    "training_runs/{training_run_id}",
    runs.TrainingRun,
    query=runs.AccessQuery,
    door=needs("read", owner="model", cost="rows"),
)
LIST_CHECKPOINTS = _get(
    "list_checkpoints",
    "training_runs/{training_run_id}/checkpoints",
    runs.CheckpointsListResponse,
    since="0.4",
    door=needs("read", owner="model", cost="scan"),
)
LIST_MODEL_CHECKPOINTS = _get(
    "list_model_checkpoints",
    "models/{training_run_id}/checkpoints",
    runs.CheckpointsListResponse,
    until="0.3",
    door=needs("read", owner="model", cost="scan"),
)
LIST_USER_CHECKPOINTS = _get(
    "list_user_checkpoints",
    "checkpoints",
    runs.CheckpointsListResponse,
    query=runs.ListCheckpointsQuery,
    since="0.4",
    door=needs("read", owner="caller", cost="scan"),
)
DELETE_CHECKPOINT = Route(
    name="delete_checkpoint",
    method="DELETE",
    path=PREFIX + _CHECKPOINT,
    door=needs("train", owner="checkpoint", cost="files"),
)
PUBLISH_CHECKPOINT = _post(
    "publish_checkpoint",
    _CHECKPOINT + "/publish",
    None,
    None,
    since="0.4",
    door=needs("train", owner="checkpoint", cost="rows"),
)
UNPUBLISH_CHECKPOINT = Route(
    name="unpublish_checkpoint",
    method="DELETE",
    path=PREFIX + _CHECKPOINT + "/publish",
    since="0.4",
    door=needs("train", owner="checkpoint", cost="rows"),
)
SET_CHECKPOINT_TTL = Route(
    name="set_checkpoint_ttl",
    method="PUT",
    path=PREFIX + _CHECKPOINT + "/ttl",
    request=runs.SetTtlRequest,
    since="0.13",
    door=needs("train", owner="checkpoint", cost="rows"),
)
GET_EXTERNAL_WEIGHTS_URLS = _get(
    "get_external_weights_urls",
    _CHECKPOINT + "/external_weights_urls",
    weights.ExternalWeightsUrlsResponse,
    since="0.28",
    door=needs("read", owner="checkpoint", cost="files"),
)
GET_CHECKPOINT_ARCHIVE = _get(
    "get_checkpoint_archive",
    _CHECKPOINT + "/archive",
    weights.CheckpointArchiveUrlResponse,
    until="0.35",
    door=needs("read", owner="checkpoint", cost="files"),
)

# Administration
GET_BILLING_USAGE = _get(
    "get_billing_usage",
    "billing/usage/events",
    admin.BillingUsageResponse,
    query=admin.GetBillingUsageRequest,
    since="0.24",
    door=needs("read", owner="caller", cost="scan"),
)
GET_CHECKPOINT_STORAGE_USAGE = _get(
    "get_current_checkpoint_storage_usage",
    "billing/usage/checkpoints/current",
    admin.CurrentCheckpointStorageUsageResponse,
    query=admin.GetCurrentCheckpointStorageUsageRequest,
    since="0.32",
    door=needs("read", owner="caller", cost="scan"),
)
GET_AUDIT_LOG = _get(
    "get_audit_log",
    "audit",
    admin.AuditLogResponse,
    query=admin.AuditLogQuery,
    since="0.20",
    door=needs("read", owner="caller", cost="scan"),
)

ROUTES: tuple[Route, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Route))
BY_NAME: Mapping[str, Route] = {route.name: route for route in ROUTES}
