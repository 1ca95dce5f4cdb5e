"""Health, capabilities, the configuration handshake, keys and telemetry."""

from __future__ import annotations

import msgspec

from tinsmith.server.call import NOTHING, Answer, Call, Handlers, reply
from tinsmith.server.redaction import without_secrets
from tinsmith.server.services import Services
from tinsmith.store.base import statement
from tinsmith.store.rows import KeyRow, OrgRow, TelemetryRow
from tinsmith.wire.messages.service import (
    ApiKeyDetails,
    ApiKeyOrganization,
    ApiKeyResponse,
    ApiKeyUser,
    AuthTokenResponse,
    ClientDynamicConfigResponse,
    GetServerCapabilitiesResponse,
    HealthResponse,
    SupportedModel,
    TelemetryResponse,
)
from tinsmith.wire.routes.own import IMPORT_MULTIPART, SAMPLE_RESULTS, SAMPLES

MAX_TELEMETRY_BYTES = 256 * 1024
"""Limit of one telemetry batch; longer ones are truncated."""

OFFERED = (
    "sample_stream",
    SAMPLES.name,
    SAMPLE_RESULTS.name,
    "tokenizer",
    "quota",
    "run_metrics",
    "delete_run",
    "import_weights",
    "import_parts",
    IMPORT_MULTIPART,
    "usage",
)
"""Our own endpoints that clients may use."""

CLIENT_CONFIG = {
    "pjwt_auth_enabled": True,
    "proto_compress_fwdbwd": True,
    "proto_write_fwdbwd": True,
    "fwd_via_fwdbwd": True,
    "create_model_via_load_weights": True,
    "sample_use_retrieve_futures": True,
    "custom_loss_server_side": True,
    "sample_join_sampling_session": True,
    "use_pyqwest_transport": False,
    "tinsmith": dict.fromkeys(OFFERED, True),
}
"""How clients should use this server; `tinsmith` announces our own extensions. The plain transport is requested because
the other one leaks threads (measured: 244 threads at 1,000 samples)."""


async def healthz(_: Services, call: Call) -> Answer:
    return reply(HealthResponse(status="ok"))


async def get_server_capabilities(services: Services, call: Call) -> Answer:
    models = [
        SupportedModel(
            model_name=card.name,
            max_context_length=card.max_context_length,
            trainable=card.trainable,
            sampleable=card.sampleable,
        )
        for card in services.backend.cards()
    ]
    return reply(GetServerCapabilitiesResponse(supported_models=models))


async def client_config(services: Services, call: Call) -> Answer:
    return Answer(msgspec.json.encode({**CLIENT_CONFIG, **services.client_flags}))


async def client_dynamic_config(services: Services, call: Call) -> Answer:
    return reply(ClientDynamicConfigResponse(sample_cancel_enabled=True))


async def auth_token(services: Services, call: Call) -> Answer:
    return reply(AuthTokenResponse(jwt=services.authenticator.issue(call.caller)))


async def get_api_key(services: Services, call: Call) -> Answer:
    caller = call.caller
    rows = await services.store.read(KeyRow, "key", key_id=caller.key_id)
    orgs = await services.store.read(OrgRow, "org", org_id=caller.org_id)
    details = ApiKeyDetails(
        org_details=ApiKeyOrganization(name=orgs[0].name if orgs else caller.org_id),
        user_details=ApiKeyUser(email=caller.email or caller.user_id),
    )
    return reply(ApiKeyResponse(key_id=caller.key_id, name=rows[0].name, note=rows[0].note, details=details))


async def delete_api_key(services: Services, call: Call) -> Answer:
    await services.store.write(
        statement("revoke_key", key_id=call.caller.key_id, revoked_at=services.clock()),
    )
    services.authenticator.forget()
    return NOTHING


async def telemetry(services: Services, call: Call) -> Answer:
    """Store a batch, truncated and without anything that looks like a secret."""
    row = TelemetryRow(
        at=services.clock(),
        org_id=call.caller.org_id,
        session_id=call.message.session_id[:200].replace("\0", ""),
        body=without_secrets(call.body.decode(errors="replace"))[:MAX_TELEMETRY_BYTES],
    )
    services.activity.add_telemetry(row)
    return reply(TelemetryResponse(status="accepted"))


HANDLERS: Handlers = {
    "healthz": healthz,
    "get_server_capabilities": get_server_capabilities,
    "client_config": client_config,
    "client_dynamic_config": client_dynamic_config,
    "auth_token": auth_token,
    "get_api_key": get_api_key,
    "delete_api_key": delete_api_key,
    "telemetry": telemetry,
}
