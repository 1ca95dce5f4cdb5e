"""The tables of docs/reference/limits.md, made from the settings, the limits of the wire and the table of errors."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from tinsmith.config import MB, ServerConfig
from tinsmith.errors import (
    ContextLengthError,
    InvalidInputError,
    LimitExceededError,
    RequestFailedError,
    TinkerError,
    WireError,
)
from tinsmith.server.data_dir import NAME
from tinsmith.server.http.errors import STATUSES
from tinsmith.server.refusals import NotReadyError, OverLimitError
from tinsmith.server.runs.model_spec import MAX_RANK
from tinsmith.wire import limits
from tinsmith.wire.messages.sampling import MAX_TOPK_CELLS
from tinsmith.wire.rules.sample_rules import MAX_TOPK

DEFAULTS = {spec.name: spec.default for spec in dataclasses.fields(ServerConfig)}
DAY_S, HOUR_S, MINUTE_S = 86_400, 3_600, 60


class Limit(NamedTuple):
    """A row: what is limited, by which setting or to which fixed value, and the error above it."""

    what: str
    setting: str | None
    fixed: str
    error: type[TinkerError] | str | None = None


def by(what: str, setting: str, error: type[TinkerError] | str | None = None) -> Limit:
    return Limit(what, setting, _shown(setting), error)


def fixed(what: str, value: float | str, error: type[TinkerError] = InvalidInputError) -> Limit:
    return Limit(what, None, value if isinstance(value, str) else f"{value:,}", error)


def _shown(setting: str) -> str:
    default = DEFAULTS[setting]
    if default is None:
        return "none"
    if not isinstance(default, (int, float)):
        return f"`{default}`"
    if setting.endswith("_bytes"):
        return f"{default // MB} MB"
    return _duration(default) if setting.endswith("_s") else f"{default:,}"


def _duration(seconds: float) -> str:
    for unit, name in ((DAY_S, "day"), (HOUR_S, "hour"), (MINUTE_S, "minute"), (1, "second")):
        if seconds >= 2 * unit or seconds == unit:
            return f"{seconds / unit:g} {name}{'' if seconds == unit else 's'}"
    return f"{seconds:g} seconds"


REQUEST = [
    by("Body as sent", "max_body_bytes", LimitExceededError),
    by("Body after decompression", "max_unpacked_bytes", LimitExceededError),
    by("Datums in one request of `forward_backward`", "max_datums", InvalidInputError),
    by("Tokens in one request of `forward_backward`", "max_request_tokens", InvalidInputError),
    by("Compute time of one `forward_backward`", "max_job_device_s", RequestFailedError),
    by("Compute time of an uploaded loss in it", "max_loss_device_s", RequestFailedError),
    by("Samples of one prompt", "max_samples", InvalidInputError),
    fixed("Prompt of a sample", "less than the model's context", ContextLengthError),
    fixed("Prompt and sample together; input of a datum", "the model's context"),
    fixed("Rank of an adapter", MAX_RANK),
    fixed("Stop sequences of a sample", limits.MAX_STOPS, WireError),
    fixed("Characters of a stop string", limits.MAX_STOP_CHARS, WireError),
    fixed("Bytes of all stop strings of a sample", limits.MAX_STOP_BYTES),
    fixed("Tokens with a bias", limits.MAX_BIASES, WireError),
    fixed("Bytes of an output format's schema, expression or grammar", limits.MAX_GRAMMAR_BYTES),
    fixed("Tokens listed for one position (`topk_...`)", MAX_TOPK),
    fixed("Cells of one such table", MAX_TOPK_CELLS),
    fixed("Tensors of a datum; settings of a loss", limits.MAX_LOSS_INPUTS, WireError),
    fixed("Characters of such a name", limits.MAX_NAME, WireError),
    fixed("Chunks of a model input", limits.MAX_CHUNKS, WireError),
    fixed("Metadata: levels of nesting", limits.MAX_DEPTH, WireError),
    fixed("Metadata: values", limits.MAX_VALUES, WireError),
    fixed("Metadata: characters", limits.MAX_CHARACTERS, WireError),
    fixed("Characters of a checkpoint's name", NAME.pattern.rpartition(",")[2].rstrip("}")),
]
HOLDER = [
    by("key: requests per minute", "requests_per_minute", OverLimitError),
    by("user: active sessions", "max_sessions", OverLimitError),
    by("user: live models", "max_models", OverLimitError),
    by("session: sampling sessions", "max_samplers", InvalidInputError),
    by("organisation: queued requests", "max_queued", OverLimitError),
    by("organisation: bytes of queued requests", "max_queued_bytes", OverLimitError),
    by("organisation: memory for incoming bodies and unread answers", "max_held_bytes", OverLimitError),
    by("organisation: open long polls and streams", "max_waits", OverLimitError),
    by("organisation: disk, for training and sampling", "disk_cap_per_org_bytes", OverLimitError),
    by("organisation: disk, for saves, copies and imports", "disk_cap_per_org_bytes", InvalidInputError),
    by("network address: connections", "max_connections", "429 `too_many_connections`"),
    by("server: disk for checkpoints", "disk_cap_bytes", InvalidInputError),
    by("server: free disk space, at least", "min_free_bytes", NotReadyError),
]
TIME = [
    by("A session without a heartbeat expires, and its models are unloaded", "session_timeout_s"),
    by("Results and journal after the end of a session", "result_grace_s"),
    by("The curve of a run after the end of its session, at least", "curve_grace_s"),
    by("A base model without work stays in memory", "idle_model_s"),
    by("A signed download URL", "download_ttl_s"),
    by("A token from `auth/token`", "token_ttl_s"),
    by("Pause of a client that sends a body", "body_timeout_s"),
    by("Time for a client to read 128 KB of an answer", "read_timeout_s"),
    by("Accepted work waits for an engine that keeps dying while it starts", "engine_start_deadline_s"),
]
OTHER_AMOUNTS = {
    "max_batch_sequences": "speed, not a limit for users",
    "max_replay_s": "recovery",
    "max_run_checkpoints": "retention; see how to run a server",
    "max_snapshot_share": "recovery",
    "max_telemetry_rows": "what the operator keeps",
}
"""Settings that begin with `max_` and bound nothing that a user does."""
OTHER_CONSTANTS = {
    "MAX_DATUMS": "the setting max_datums is lower",
    "MAX_SAMPLES": "the setting max_samples is lower",
    "MAX_GRAPH_NODES": "the engine allows fewer",
    "MAX_ID": "ids are made by the server",
    "MAX_SEQUENCE_ID": "names of sequences are made by programs",
    "MAX_LOCATION": "images are refused",
    "MAX_SPANS": "provenance is written by programs",
}
"""Constants of `wire/limits.py` that a user does not meet."""


def error_cell(error: type[TinkerError] | str | None) -> str:
    if error is None or isinstance(error, str):
        return error or ""
    if error is RequestFailedError:
        return f"`{error.__name__}`"
    status = next(STATUSES[kind] for kind in error.__mro__ if kind in STATUSES)
    return f"{status} `{error.code}`"


def rows_of(rows: list[Limit]) -> list[tuple[str, ...]]:
    return [(row.what, row.fixed, f"`{row.setting}`" if row.setting else "", error_cell(row.error)) for row in rows]
