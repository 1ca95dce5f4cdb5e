"""Service, keys and administration, and the tokenizer files of our own extension."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from support.server_answers import Answer, RefusedError
from support.server_core import MAX_CONTEXT, MODELS, Call, Core, Handler, Result
from support.server_recording import Recorded
from support.server_state import START
from tinsmith.wire.messages.admin import AuditLogResponse, BillingUsageResponse, CurrentCheckpointStorageUsageResponse
from tinsmith.wire.messages.service import (
    ApiKeyResponse,
    AuthTokenResponse,
    GetServerCapabilitiesResponse,
    HealthResponse,
    SupportedModel,
    TelemetryResponse,
)
from tinsmith.wire.routes import table as routes

TOKENIZER_PATH = "/tinsmith/v1/tokenizer"
GIGABYTE = 10**9


async def healthz(core: Core, call: Call) -> HealthResponse:
    return HealthResponse(status="ok")


async def get_server_capabilities(core: Core, call: Call) -> GetServerCapabilitiesResponse:
    models = [
        SupportedModel(model_name=name, max_context_length=MAX_CONTEXT, trainable=True, sampleable=True)
        for name in MODELS
    ]
    return GetServerCapabilitiesResponse(supported_models=models)


async def client_config(core: Core, call: Call) -> Mapping[str, Any]:
    if core.vintage.has_plain_ids:
        return {"pjwt_auth_enabled": core.has_flag("pjwt_auth_enabled")}
    return core.settings.flags


async def client_dynamic_config(core: Core, call: Call) -> Mapping[str, Any]:
    return core.settings.dynamic_flags


async def auth_token(core: Core, call: Call) -> AuthTokenResponse:
    token = make_jwt(call.user, core.settings.jwt_lifetime_s, len(core.users))
    core.users[token] = call.user
    return AuthTokenResponse(jwt=token)


def make_jwt(user: str, lifetime_s: float, number: int) -> str:
    """A token that reads like a real one; its signature is a fixed text that nobody checks."""
    claims = {
        "iss": "passport-test",
        "sub": user,
        "org_id": "test-organization",
        "email": "owner@example.com",
        "jti": str(number),
        "exp": int(time.time() + lifetime_s),
    }
    parts = ({"alg": "none", "typ": "JWT"}, claims)
    encoded = [base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=").decode() for part in parts]
    return ".".join([*encoded, "signature"])


async def get_api_key(core: Core, call: Call) -> ApiKeyResponse:
    details = {"org_details": {"name": "Test"}, "user_details": {"email": "owner@example.com"}}
    return ApiKeyResponse.model_validate({"key_id": 1, "name": "test", "note": "", "details": details})


async def delete_api_key(core: Core, call: Call) -> Result:
    del core.users[call.recorded.key]
    return None


async def telemetry(core: Core, call: Call) -> TelemetryResponse:
    if core.key in call.content.decode(errors="replace"):
        core.state.telemetry_leaks.append(call.content)
    return TelemetryResponse(status="accepted")


async def get_billing_usage(core: Core, call: Call) -> BillingUsageResponse:
    if call.query.ending_before - call.query.starting_on > timedelta(days=14):
        raise RefusedError(400, "at most 14 days can be asked for")
    state = core.state
    data, sessions = [], {}
    for (session_id, kind), amount in state.usage.items():
        session = state.session(session_id)
        if session.owner != call.user:
            continue
        info: dict[str, Any] = {"type": kind, "count" if kind == "checkpoint" else "token_count": amount}
        if kind == "sampling_prefill":
            info["cached"] = False
        data.append(
            {
                "bucket_start": START,
                "bucket_end": START + timedelta(hours=1),
                "base_model": MODELS[0],
                "user_id": session.owner,
                "session_id": session_id,
                "event_info": info,
                "estimated_cost_usd": 0.0,
            }
        )
        sessions[session_id] = {"user_metadata": session.request.user_metadata or {}}
    return BillingUsageResponse.model_validate({"data": data, "sessions": sessions, "cost_data_through": START})


async def get_checkpoint_storage_usage(core: Core, call: Call) -> CurrentCheckpointStorageUsageResponse:
    kept = [c for c in core.state.checkpoints.values() if c.owner == call.user and not c.is_ephemeral]
    if call.query.project_id is not None:
        kept = [checkpoint for checkpoint in kept if checkpoint.project_id == call.query.project_id]
    size = sum(checkpoint.size_bytes for checkpoint in kept)
    item = {"checkpoint_count": len(kept), "size_bytes": size, "size_gigabytes": size / GIGABYTE}
    owner = {"org_user_urn": call.user, "user_email": "owner@example.com", "estimated_monthly_cost_usd": 0.0}
    return CurrentCheckpointStorageUsageResponse.model_validate(
        {"data": [item | owner] if kept else [], "effective_rate_usd_per_gigabyte_month": 0.0}
    )


async def get_audit_log(core: Core, call: Call) -> AuditLogResponse:
    prefixes = {"all": "", "checkpoints": "checkpoint", "projects": "project"}
    prefix = prefixes.get(call.query.event_type, call.query.event_type)
    entries = [
        entry
        for entry in core.state.audit
        if entry["event"].startswith(prefix)
        and (call.query.day is None or entry["timestamp"].date().isoformat() == call.query.day)
    ]
    return AuditLogResponse.model_validate({"entries": entries})


def tokenizer(core: Core, recorded: Recorded) -> Answer:
    """GET /tinsmith/v1/tokenizer?model=...: the files of a tokenizer that the test has configured."""
    files = core.settings.tokenizers.get(recorded.query.get("model", ""))
    if not core.has_extensions.get("tokenizer") or files is None:
        return Answer.of_json({"detail": "Not Found"}, 404)
    return Answer.of_json(files)


HANDLERS: Mapping[str, Handler] = {
    routes.HEALTHZ.name: healthz,
    routes.GET_SERVER_CAPABILITIES.name: get_server_capabilities,
    routes.CLIENT_CONFIG.name: client_config,
    routes.CLIENT_DYNAMIC_CONFIG.name: client_dynamic_config,
    routes.AUTH_TOKEN.name: auth_token,
    routes.GET_API_KEY.name: get_api_key,
    routes.DELETE_API_KEY.name: delete_api_key,
    routes.TELEMETRY.name: telemetry,
    routes.GET_BILLING_USAGE.name: get_billing_usage,
    routes.GET_CHECKPOINT_STORAGE_USAGE.name: get_checkpoint_storage_usage,
    routes.GET_AUDIT_LOG.name: get_audit_log,
}
