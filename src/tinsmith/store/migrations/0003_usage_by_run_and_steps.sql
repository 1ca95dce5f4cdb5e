-- Usage by run, all that is counted in one row, device time among it. What was used before belongs to no run.
CREATE TABLE usage_by_run (
    org_id TEXT NOT NULL,
    hour INTEGER NOT NULL,
    user_id TEXT NOT NULL,
    project_id TEXT NOT NULL,
    session_id TEXT NOT NULL,
    base_model TEXT NOT NULL,
    run_id TEXT NOT NULL,
    training INTEGER NOT NULL,
    prefill INTEGER NOT NULL,
    prefill_cached INTEGER NOT NULL,
    sampled INTEGER NOT NULL,
    checkpoints INTEGER NOT NULL,
    storage INTEGER NOT NULL,
    device_us INTEGER NOT NULL,
    jobs INTEGER NOT NULL,
    PRIMARY KEY (org_id, hour, user_id, project_id, session_id, base_model, run_id)
) STRICT;
INSERT INTO usage_by_run (org_id, hour, user_id, project_id, session_id, base_model, run_id, training, prefill,
    prefill_cached, sampled, checkpoints, storage, device_us, jobs)
SELECT org_id, hour, user_id, project_id, session_id, base_model, '',
    SUM(CASE WHEN kind = 'training' THEN amount ELSE 0 END),
    SUM(CASE WHEN kind = 'prefill' THEN amount ELSE 0 END),
    SUM(CASE WHEN kind = 'prefill_cached' THEN amount ELSE 0 END),
    SUM(CASE WHEN kind = 'sampled' THEN amount ELSE 0 END),
    SUM(CASE WHEN kind = 'checkpoint' THEN amount ELSE 0 END),
    SUM(CASE WHEN kind = 'storage' THEN amount ELSE 0 END),
    0, 0
FROM usage GROUP BY org_id, hour, user_id, project_id, session_id, base_model;
DROP TABLE usage;
ALTER TABLE usage_by_run RENAME TO usage;

-- Whose weights a sampler samples; none: the base model's.
ALTER TABLE samplers ADD COLUMN run_id TEXT;

-- What each step of a run measured. Results go some time after their session; these stay.
CREATE TABLE steps (
    model_id TEXT NOT NULL,
    seq INTEGER NOT NULL,
    step INTEGER NOT NULL,
    datums INTEGER NOT NULL,
    seconds REAL NOT NULL,
    finished_at REAL NOT NULL,
    metrics TEXT NOT NULL,
    PRIMARY KEY (model_id, seq)
) STRICT;
