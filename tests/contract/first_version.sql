-- A database as the first version wrote it: its schema, then one row of each table. SQLite's words.

CREATE TABLE migrations (number INTEGER NOT NULL PRIMARY KEY, name TEXT NOT NULL) STRICT;

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

INSERT INTO migrations VALUES (1, 'first');
INSERT INTO orgs (org_id, name, created_at) VALUES
    ('org-1', 'Tin & Söhne', 1.5);
INSERT INTO users (user_id, org_id, name, email, created_at) VALUES
    ('user-1', 'org-1', 'Ada', 'ada@example.org', 2.5);
INSERT INTO projects (project_id, org_id, name, created_at) VALUES
    ('project-1', 'org-1', 'P', 3.5);
INSERT INTO keys (key_id, digest, hint, org_id, user_id, project_id, name, note, scopes, created_at, expires_at, revoked_at, requests_per_minute, tokens_per_day) VALUES
    (1, 'digest-1', 'tml-ab', 'org-1', 'user-1', 'project-1', 'laptop', 'for trying', '["sample"]', 4.0, 4000000000.0, NULL, 60, 1099511627776);
INSERT INTO sessions (session_id, org_id, user_id, project_id, display_name, tags, user_metadata, sdk_version, created_at, heartbeat_at, status, status_detail, detail, ended_at, pruned) VALUES
    ('session-1', 'org-1', 'user-1', 'project-1', 'first try', '["a"]', '{"k": "v"}', '0.36.0', 5.0, 6.0, 'active', 'success', 'all went well', NULL, 0);
INSERT INTO models (model_id, session_id, org_id, user_id, project_id, base_model, lora, optimizer, user_metadata, created_at, used_at, state, fault, snapshot_directory, snapshot_seq) VALUES
    ('model-1', 'session-1', 'org-1', 'user-1', 'project-1', 'stub/model', '{"rank": 8}', 'adamw', '{}', 7.0, 8.0, 'live', NULL, NULL, -1);
INSERT INTO samplers (sampler_id, session_id, org_id, user_id, base_model, model_path, directory, adapter_key, clones, created_at) VALUES
    ('sampler-1', 'session-1', 'org-1', 'user-1', 'stub/model', 'tinker://model-1/sampler_weights/a', '/data/a', 'key-a', 0, 9.0);
INSERT INTO jobs (request_id, lane, seq, kind, session_id, org_id, user_id, digest, state, created_at, context, job) VALUES
    ('model-1:1', 'model-1', 1, 'forward_backward', 'session-1', 'org-1', 'user-1', 'd', 'queued', 11.0, '{}', X'000102030405060708090A0B0C0D0E0F101112131415161718191A1B1C1D1E1F202122232425262728292A2B2C2D2E2F303132333435363738393A3B3C3D3E3F404142434445464748494A4B4C4D4E4F505152535455565758595A5B5C5D5E5F606162636465666768696A6B6C6D6E6F707172737475767778797A7B7C7D7E7F808182838485868788898A8B8C8D8E8F909192939495969798999A9B9C9D9E9FA0A1A2A3A4A5A6A7A8A9AAABACADAEAFB0B1B2B3B4B5B6B7B8B9BABBBCBDBEBFC0C1C2C3C4C5C6C7C8C9CACBCCCDCECFD0D1D2D3D4D5D6D7D8D9DADBDCDDDEDFE0E1E2E3E4E5E6E7E8E9EAEBECEDEEEFF0F1F2F3F4F5F6F7F8F9FAFBFCFDFEFF');
INSERT INTO results (request_id, encoding, digest, started_at, finished_at, body) VALUES
    ('model-1:1', 'protobuf', 'd', 11.0, 12.0, X'00726573756C74FF');
INSERT INTO checkpoints (path, model_id, kind, name, session_id, org_id, user_id, project_id, base_model, lora, optimizer, directory, size_bytes, digest, public, user_metadata, created_at, expires_at) VALUES
    ('tinker://model-1/weights/a', 'model-1', 'weights', 'a', 'session-1', 'org-1', 'user-1', 'project-1', 'stub/model', '{}', 'adamw', '/data/a', 8589934592, 'd', 0, '{}', 13.0, 14.0);
INSERT INTO custom_losses (loss_id, session_id, org_id, user_id, name, request, created_at) VALUES
    ('loss-1', 'session-1', 'org-1', 'user-1', 'mine', X'7B7D', 15.0);
INSERT INTO usage (org_id, hour, user_id, project_id, session_id, base_model, kind, amount) VALUES
    ('org-1', 100, 'user-1', 'project-1', 'session-1', 'stub/model', 'training', 7);
INSERT INTO audit (at, org_id, user_id, event, group_name, details, model_id, tinker_path, purpose) VALUES
    (16.0, 'org-1', 'user-1', 'checkpoint.deleted', 'checkpoints', '{"by": "hand"}', 'model-1', 'tinker://model-1/weights/a', 'tidying');
INSERT INTO telemetry (at, org_id, session_id, body) VALUES
    (17.0, 'org-1', 'session-1', '{}');
