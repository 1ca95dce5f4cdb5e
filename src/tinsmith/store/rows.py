"""The rows of the server's tables. Times are seconds since the epoch (UTC); JSON columns hold strings.

`queries.sql` has the statements that write and read them.
"""

from __future__ import annotations

from tinsmith.store.base import Row


class KeyRow(Row, frozen=True, kw_only=True):
    """An API key. The key itself is not stored, only its digest."""

    key_id: int
    digest: str
    hint: str
    org_id: str
    user_id: str
    project_id: str | None = None
    name: str
    note: str = ""
    scopes: str = '["all"]'
    created_at: float
    expires_at: float | None = None
    revoked_at: float | None = None
    requests_per_minute: int | None = None
    tokens_per_day: int | None = None


class OrgRow(Row, frozen=True, kw_only=True):
    org_id: str
    name: str
    created_at: float


class UserRow(Row, frozen=True, kw_only=True):
    user_id: str
    org_id: str
    name: str
    email: str | None = None
    created_at: float


class ProjectRow(Row, frozen=True, kw_only=True):
    project_id: str
    org_id: str
    name: str
    created_at: float


class SessionRow(Row, frozen=True, kw_only=True):
    session_id: str
    org_id: str
    user_id: str
    project_id: str | None = None
    display_name: str | None = None
    tags: str = "[]"
    user_metadata: str = "{}"
    sdk_version: str = ""
    created_at: float
    heartbeat_at: float
    status: str = "active"
    """active, finished (by its client), expired (no heartbeat), failed."""
    status_detail: str | None = None
    """For a finished session: success, errored or interrupted."""
    detail: str | None = None
    ended_at: float | None = None
    pruned: bool = False
    """Whether its results and journal were deleted."""


class ModelRow(Row, frozen=True, kw_only=True):
    model_id: str
    session_id: str
    org_id: str
    user_id: str
    project_id: str | None = None
    base_model: str
    lora: str
    optimizer: str
    user_metadata: str | None = None
    created_at: float
    used_at: float
    state: str = "live"
    """live, unloaded (by its client), or parked (its session has expired; reviving the session revives it)."""
    fault: str | None = None
    """Why the run must not be trusted, if there is a reason."""
    notice: str | None = None
    """A notice for its owner that is not a fault."""
    snapshot_directory: str | None = None
    snapshot_seq: int = -1
    """The journal up to this number is contained in the snapshot."""
    fingerprint: str | None = None
    """The fingerprint of the engine that computed the snapshot, or of the first one if there is none, as JSON."""


class SamplerRow(Row, frozen=True, kw_only=True):
    sampler_id: str
    session_id: str
    org_id: str
    user_id: str
    base_model: str
    model_path: str | None = None
    directory: str | None = None
    adapter_key: str | None = None
    clones: int = 0
    created_at: float
    run_id: str | None = None
    """The training run whose weights it samples; None: the base model's."""


class JobRow(Row, frozen=True, kw_only=True):
    """An accepted (or refused) request. `lane` is the model or the sampling session it is numbered in."""

    request_id: str
    lane: str
    seq: int
    kind: str
    session_id: str
    org_id: str
    user_id: str
    digest: str
    """The digest of the body as sent; tells a repetition from another request under the same number."""
    job: bytes
    """The job as the backend gets it, encoded."""
    context: str = "{}"
    """What the server needs to finish it, as JSON."""
    state: str = "queued"
    """queued, done, failed, cancelled, refused."""
    created_at: float


class ResultRow(Row, frozen=True, kw_only=True):
    request_id: str
    body: bytes
    encoding: str
    """json, protobuf, or error (then the body is the JSON that says so)."""
    digest: str
    started_at: float
    finished_at: float


class CheckpointRow(Row, frozen=True, kw_only=True):
    path: str
    """tinker://<model>/<kind>/<name>"""
    model_id: str
    kind: str
    name: str
    session_id: str
    org_id: str
    user_id: str
    project_id: str | None = None
    base_model: str
    lora: str
    optimizer: str
    directory: str
    size_bytes: int
    digest: str
    public: bool = False
    user_metadata: str | None = None
    created_at: float
    expires_at: float | None = None


class CustomLossRow(Row, frozen=True, kw_only=True):
    loss_id: str
    session_id: str
    org_id: str
    user_id: str
    name: str
    request: bytes
    created_at: float


class StepRow(Row, frozen=True, kw_only=True):
    """The metrics of one step of a run: an optim_step and the passes before it, combined."""

    model_id: str
    seq: int
    """The number of the optim_step."""
    step: int
    """Counted from 1; some are missing if a long curve was thinned."""
    datums: int
    seconds: float
    """Device time."""
    finished_at: float
    metrics: str
    """Numbers by name, as JSON."""


class UsageRow(Row, frozen=True, kw_only=True):
    """What was used in one hour by one run; rows with the same key add up."""

    hour: int
    org_id: str
    user_id: str
    project_id: str
    session_id: str
    base_model: str
    run_id: str
    """The run that was trained or sampled, or the sampling session of a base model; empty if unknown."""
    training: int = 0
    """Tokens, as are the next three."""
    prefill: int = 0
    prefill_cached: int = 0
    sampled: int = 0
    checkpoints: int = 0
    """How many were created."""
    storage: int = 0
    """Byte hours."""
    device_us: int = 0
    """Device time in microseconds; an integer, so that sums do not depend on their order."""
    jobs: int = 0
    """How many finished."""


class AuditRow(Row, frozen=True, kw_only=True):
    at: float
    org_id: str
    user_id: str
    event: str
    group_name: str
    """checkpoints, projects, teams, organizations."""
    details: str = "{}"
    model_id: str | None = None
    tinker_path: str | None = None
    purpose: str | None = None
    project_id: str | None = None


class TelemetryRow(Row, frozen=True, kw_only=True):
    at: float
    org_id: str
    session_id: str
    body: str


class JobHeadRow(Row, frozen=True, kw_only=True):
    """A job without its payload."""

    request_id: str
    lane: str
    seq: int
    kind: str
    session_id: str
    org_id: str
    user_id: str
    digest: str
    state: str
    created_at: float
    size_bytes: int


class ResultHeadRow(Row, frozen=True, kw_only=True):
    """A result without its body."""

    request_id: str
    encoding: str
    digest: str
    started_at: float
    finished_at: float
    size_bytes: int


class StorageRow(Row, frozen=True, kw_only=True):
    """How many bytes a user's checkpoints in a project use."""

    project_id: str | None = None
    user_id: str = ""
    count: int
    size_bytes: int


class SeqRow(Row, frozen=True, kw_only=True):
    """The answer of highest_seq_of_lane; -1 for a lane without jobs."""

    seq: int


class CountRow(Row, frozen=True, kw_only=True):
    """The answer of the count_ queries."""

    count: int


class SizeRow(Row, frozen=True, kw_only=True):
    """The answer of the queries about bytes."""

    size_bytes: int
