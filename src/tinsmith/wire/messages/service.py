"""Service-wide messages: health, capabilities, the configuration handshake, keys and telemetry."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal, TypeAlias

import msgspec

from tinsmith.wire.limits import Id, Int64, JsonObject, Name, Report, ShortText
from tinsmith.wire.message import NOT_GIVEN, Message, since


class HealthResponse(Message, frozen=True, kw_only=True):
    status: Literal["ok"]


class SupportedModel(Message, frozen=True, kw_only=True):
    model_name: str | None = NOT_GIVEN
    max_context_length: Annotated[int | None, since("0.18")] = NOT_GIVEN
    trainable: Annotated[bool | None, since("0.26")] = NOT_GIVEN
    sampleable: Annotated[bool | None, since("0.26")] = NOT_GIVEN


class GetServerCapabilitiesResponse(Message, frozen=True, kw_only=True):
    supported_models: list[SupportedModel]


class ClientConfigRequest(Message, frozen=True, kw_only=True):
    sdk_version: ShortText = ""


class ClientConfigResponse(Message, frozen=True, kw_only=True):
    """How clients should talk to this server; an empty object means all defaults."""

    pjwt_auth_enabled: bool = False
    credential_default_source: str = "api_key"
    sample_dispatch_bytes_semaphore_size: int = 10 * 1024 * 1024
    inflight_response_bytes_semaphore_size: int = 50 * 1024 * 1024
    parallel_fwdbwd_chunks: bool = True
    proto_compress_fwdbwd: bool = False
    fwdbwd_max_chunk_len: int = 1024
    fwdbwd_max_chunk_bytes_count: int = 5_000_000
    fwdbwd_dispatch_bytes_semaphore_size: int = 50_000_000
    billing_exception_max_pause_duration_sec: int = 3600
    sample_no_retries: bool = False
    sample_enable_stuck_detection: bool = True
    sample_max_concurrent_requests: int = 2000
    use_pyqwest_transport: bool = True
    create_model_via_load_weights: bool = False
    sample_use_retrieve_futures: bool = False
    custom_loss_server_side: bool = False
    sample_join_sampling_session: bool = False
    proto_write_fwdbwd: bool = False
    """Only 0.19 to 0.24 read this: send forward_backward as protobuf."""
    fwd_via_fwdbwd: bool = False
    """Only 0.23 and 0.24 read this: send forward as a forward_backward with forward_only set."""


class ClientDynamicConfigResponse(Message, frozen=True, kw_only=True):
    refresh_interval_sec: int = 300
    sample_cancel_enabled: bool = False
    sample_cancel_max_batch_size: int = 64


class AuthTokenRequest(Message, frozen=True, kw_only=True):
    """An empty object; the credential is in the header."""


class AuthTokenResponse(Message, frozen=True, kw_only=True):
    jwt: str


class ApiKeyOrganization(Message, frozen=True, kw_only=True):
    name: str


class ApiKeyUser(Message, frozen=True, kw_only=True):
    email: str


class ApiKeyDetails(Message, frozen=True, kw_only=True):
    org_details: ApiKeyOrganization
    user_details: ApiKeyUser


class ApiKeyResponse(Message, frozen=True, kw_only=True):
    """What the server knows about the key of the call."""

    key_id: int
    name: str
    note: str
    details: ApiKeyDetails


class WhoamiResponse(Message, frozen=True, kw_only=True):
    """Who a token belongs to; read from its claims, without a call to the server."""

    user_urn: str
    org_urn: str
    email: str | None = NOT_GIVEN


EventType: TypeAlias = Literal["SESSION_START", "SESSION_END", "UNHANDLED_EXCEPTION", "GENERIC_EVENT"]
Severity: TypeAlias = Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]


class _Event(Message, frozen=True, kw_only=True, tag_field="event"):
    event_id: Id
    event_session_index: Int64
    severity: Severity
    timestamp: datetime

    @property
    def event(self) -> str:
        return str(self.__struct_config__.tag)


class SessionStartEvent(_Event, frozen=True, kw_only=True, tag="SESSION_START"):
    """The start of a session."""


class SessionEndEvent(_Event, frozen=True, kw_only=True, tag="SESSION_END"):
    duration: ShortText


class UnhandledExceptionEvent(_Event, frozen=True, kw_only=True, tag="UNHANDLED_EXCEPTION"):
    error_type: Name
    error_message: Report
    traceback: Report | None = NOT_GIVEN


class GenericEvent(_Event, frozen=True, kw_only=True, tag="GENERIC_EVENT"):
    event_name: Name
    event_data: JsonObject = {}


TelemetryEvent: TypeAlias = SessionStartEvent | SessionEndEvent | UnhandledExceptionEvent | GenericEvent


class TelemetrySendRequest(Message, frozen=True, kw_only=True):
    events: Annotated[list[TelemetryEvent], msgspec.Meta(max_length=4096)]
    platform: Name
    sdk_version: ShortText
    session_id: Id
    process_uuid: Annotated[Id | None, since("0.24")] = NOT_GIVEN


TelemetryBatch = TelemetrySendRequest


class TelemetryResponse(Message, frozen=True, kw_only=True):
    status: Literal["accepted"]
