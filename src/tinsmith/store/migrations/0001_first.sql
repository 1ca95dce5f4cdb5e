-- The first schema. Written in SQLite's words; schema.py says how PostgreSQL reads them.

CREATE TABLE orgs (
    org_id TEXT NOT NULL PRIMARY KEY,
    name TEXT NOT NULL,
    created_at REAL NOT NULL
) STRICT;

CREATE TABLE users (
    user_id TEXT NOT NULL PRIMARY KEY,
    org_id TEXT NOT NULL,
    name TEXT NOT NULL,
    email TEXT,
    created_at REAL NOT NULL
) STRICT;
CREATE INDEX users_org ON users (org_id, created_at);

CREATE TABLE projects (
    project_id TEXT NOT NULL PRIMARY KEY,
    org_id TEXT NOT NULL,
    name TEXT NOT NULL,
    created_at REAL NOT NULL
) STRICT;
CREATE INDEX projects_org ON projects (org_id, created_at);

CREATE TABLE keys (
    key_id INTEGER NOT NULL PRIMARY KEY,
    digest TEXT NOT NULL UNIQUE,
    hint TEXT NOT NULL,
    org_id TEXT NOT NULL,
    user_id TEXT NOT NULL,
    project_id TEXT,
    name TEXT NOT NULL,
    note TEXT NOT NULL,
    scopes TEXT NOT NULL,
    created_at REAL NOT NULL,
    expires_at REAL,
    revoked_at REAL,
    requests_per_minute INTEGER,
    tokens_per_day INTEGER
) STRICT;
CREATE INDEX keys_org ON keys (org_id, key_id);

CREATE TABLE sessions (
    session_id TEXT NOT NULL PRIMARY KEY,
    org_id TEXT NOT NULL,
    user_id TEXT NOT NULL,
    project_id TEXT,
    display_name TEXT,
    tags TEXT NOT NULL,
    user_metadata TEXT NOT NULL,
    sdk_version TEXT NOT NULL,
    created_at REAL NOT NULL,
    heartbeat_at REAL NOT NULL,
    status TEXT NOT NULL,
    status_detail TEXT,
    detail TEXT,
    ended_at REAL,
    pruned INTEGER NOT NULL
) STRICT;
CREATE INDEX sessions_org ON sessions (org_id, created_at, session_id);
CREATE INDEX sessions_user ON sessions (user_id, created_at, session_id);
CREATE INDEX sessions_active ON sessions (heartbeat_at) WHERE status = 'active';
CREATE INDEX sessions_ended ON sessions (ended_at) WHERE ended_at IS NOT NULL;

CREATE TABLE models (
    model_id TEXT NOT NULL PRIMARY KEY,
    session_id TEXT NOT NULL,
    org_id TEXT NOT NULL,
    user_id TEXT NOT NULL,
    project_id TEXT,
    base_model TEXT NOT NULL,
    lora TEXT NOT NULL,
    optimizer TEXT NOT NULL,
    user_metadata TEXT,
    created_at REAL NOT NULL,
    used_at REAL NOT NULL,
    state TEXT NOT NULL,
    fault TEXT,
    snapshot_directory TEXT,
    snapshot_seq INTEGER NOT NULL
) STRICT;
CREATE INDEX models_session ON models (session_id, created_at);
CREATE INDEX models_org ON models (org_id, created_at, model_id);
CREATE INDEX models_user ON models (user_id, created_at, model_id);
CREATE INDEX models_project ON models (project_id, created_at, model_id);
CREATE INDEX models_live ON models (used_at) WHERE state = 'live';

CREATE TABLE samplers (
    sampler_id TEXT NOT NULL PRIMARY KEY,
    session_id TEXT NOT NULL,
    org_id TEXT NOT NULL,
    user_id TEXT NOT NULL,
    base_model TEXT NOT NULL,
    model_path TEXT,
    directory TEXT,
    adapter_key TEXT,
    clones INTEGER NOT NULL,
    created_at REAL NOT NULL
) STRICT;
CREATE INDEX samplers_session ON samplers (session_id, created_at);

CREATE TABLE jobs (
    request_id TEXT NOT NULL PRIMARY KEY,
    lane TEXT NOT NULL,
    seq INTEGER NOT NULL,
    kind TEXT NOT NULL,
    session_id TEXT NOT NULL,
    org_id TEXT NOT NULL,
    user_id TEXT NOT NULL,
    digest TEXT NOT NULL,
    state TEXT NOT NULL,
    created_at REAL NOT NULL,
    context TEXT NOT NULL,
    job BLOB NOT NULL
) STRICT;
CREATE UNIQUE INDEX jobs_number ON jobs (lane, seq);
CREATE INDEX jobs_session ON jobs (session_id);
CREATE INDEX jobs_queued ON jobs (org_id, lane, seq) WHERE state = 'queued';

CREATE TABLE results (
    request_id TEXT NOT NULL PRIMARY KEY,
    encoding TEXT NOT NULL,
    digest TEXT NOT NULL,
    started_at REAL NOT NULL,
    finished_at REAL NOT NULL,
    body BLOB NOT NULL
) STRICT;

CREATE TABLE checkpoints (
    path TEXT NOT NULL PRIMARY KEY,
    model_id TEXT NOT NULL,
    kind TEXT NOT NULL,
    name TEXT NOT NULL,
    session_id TEXT NOT NULL,
    org_id TEXT NOT NULL,
    user_id TEXT NOT NULL,
    project_id TEXT,
    base_model TEXT NOT NULL,
    lora TEXT NOT NULL,
    optimizer TEXT NOT NULL,
    directory TEXT NOT NULL,
    size_bytes INTEGER NOT NULL,
    digest TEXT NOT NULL,
    public INTEGER NOT NULL,
    user_metadata TEXT,
    created_at REAL NOT NULL,
    expires_at REAL
) STRICT;
CREATE INDEX checkpoints_model ON checkpoints (model_id, created_at);
CREATE INDEX checkpoints_session ON checkpoints (session_id, created_at);
CREATE INDEX checkpoints_org ON checkpoints (org_id, created_at, path);
CREATE INDEX checkpoints_user ON checkpoints (user_id, created_at, path);
CREATE INDEX checkpoints_public ON checkpoints (created_at, path) WHERE public = 1;
CREATE INDEX checkpoints_expiring ON checkpoints (expires_at) WHERE expires_at IS NOT NULL;

CREATE TABLE custom_losses (
    loss_id TEXT NOT NULL PRIMARY KEY,
    session_id TEXT NOT NULL,
    org_id TEXT NOT NULL,
    user_id TEXT NOT NULL,
    name TEXT NOT NULL,
    request BLOB NOT NULL,
    created_at REAL NOT NULL
) STRICT;

CREATE TABLE usage (
    org_id TEXT NOT NULL,
    hour INTEGER NOT NULL,
    user_id TEXT NOT NULL,
    project_id TEXT NOT NULL,
    session_id TEXT NOT NULL,
    base_model TEXT NOT NULL,
    kind TEXT NOT NULL,
    amount INTEGER NOT NULL,
    PRIMARY KEY (org_id, hour, user_id, project_id, session_id, base_model, kind)
) STRICT;

CREATE TABLE audit (
    audit_id INTEGER NOT NULL PRIMARY KEY,
    at REAL NOT NULL,
    org_id TEXT NOT NULL,
    user_id TEXT NOT NULL,
    event TEXT NOT NULL,
    group_name TEXT NOT NULL,
    details TEXT NOT NULL,
    model_id TEXT,
    tinker_path TEXT,
    purpose TEXT
) STRICT;
CREATE INDEX audit_org ON audit (org_id, at);

CREATE TABLE telemetry (
    telemetry_id INTEGER NOT NULL PRIMARY KEY,
    at REAL NOT NULL,
    org_id TEXT NOT NULL,
    session_id TEXT NOT NULL,
    body TEXT NOT NULL
) STRICT;
