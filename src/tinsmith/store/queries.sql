-- Every statement that the server runs, by name. One text serves SQLite and PostgreSQL: parameters are written :name,
-- sums are cast to BIGINT (PostgreSQL widens them otherwise), and only what both engines have is used.
-- Lists are newest first, with the key as the second order, so that pages do not overlap. A list without a project_id is
-- of all projects.

-- Installation ---------------------------------------------------------------------------------------------------

-- One row, made once.
-- name: insert_installation
INSERT INTO installation (installation_id, generation, created_at)
SELECT :installation_id, :generation, :created_at WHERE NOT EXISTS (SELECT 1 FROM installation);

-- name: installation
SELECT installation_id, generation FROM installation;

-- name: set_generation
UPDATE installation SET generation = :generation
WHERE installation_id = :installation_id AND generation < :generation;

-- Organisations, users, projects ---------------------------------------------------------------------------------

-- name: insert_org
INSERT INTO orgs (org_id, name, created_at) VALUES (:org_id, :name, :created_at) ON CONFLICT (org_id) DO NOTHING;

-- name: org
SELECT * FROM orgs WHERE org_id = :org_id;

-- name: orgs
SELECT * FROM orgs ORDER BY created_at, org_id;

-- name: insert_user
INSERT INTO users (user_id, org_id, name, email, created_at) VALUES (:user_id, :org_id, :name, :email, :created_at)
ON CONFLICT (user_id) DO NOTHING;

-- name: user
SELECT * FROM users WHERE user_id = :user_id;

-- name: insert_project
INSERT INTO projects (project_id, org_id, name, created_at) VALUES (:project_id, :org_id, :name, :created_at)
ON CONFLICT (org_id, project_id) DO NOTHING;

-- name: project
SELECT * FROM projects WHERE org_id = :org_id AND project_id = :project_id;

-- Keys -----------------------------------------------------------------------------------------------------------

-- name: insert_key
INSERT INTO keys (key_id, digest, hint, org_id, user_id, project_id, name, note, scopes, created_at, expires_at,
    revoked_at, requests_per_minute, tokens_per_day)
VALUES (:key_id, :digest, :hint, :org_id, :user_id, :project_id, :name, :note, :scopes, :created_at, :expires_at,
    :revoked_at, :requests_per_minute, :tokens_per_day);

-- name: key_by_digest
SELECT * FROM keys WHERE digest = :digest;

-- name: key
SELECT * FROM keys WHERE key_id = :key_id;

-- name: keys
SELECT * FROM keys ORDER BY key_id;

-- name: revoke_key
UPDATE keys SET revoked_at = :revoked_at WHERE key_id = :key_id AND revoked_at IS NULL;

-- name: restore_key
UPDATE keys SET revoked_at = NULL WHERE key_id = :key_id;

-- name: set_key_note
UPDATE keys SET note = :note WHERE key_id = :key_id;

-- name: delete_key
DELETE FROM keys WHERE key_id = :key_id;

-- Sessions -------------------------------------------------------------------------------------------------------

-- name: insert_session
INSERT INTO sessions (session_id, org_id, user_id, project_id, display_name, tags, user_metadata, sdk_version,
    created_at, heartbeat_at, status, status_detail, detail, ended_at, pruned)
VALUES (:session_id, :org_id, :user_id, :project_id, :display_name, :tags, :user_metadata, :sdk_version,
    :created_at, :heartbeat_at, :status, :status_detail, :detail, :ended_at, :pruned);

-- name: session
SELECT * FROM sessions WHERE session_id = :session_id;

-- One statement per session; many go into one write.
-- name: set_session_heartbeat
UPDATE sessions SET heartbeat_at = :heartbeat_at WHERE session_id = :session_id AND heartbeat_at < :heartbeat_at;

-- name: set_session_status
UPDATE sessions SET status = :status, status_detail = :status_detail, detail = :detail, ended_at = :ended_at
WHERE session_id = :session_id;

-- name: set_session_project
UPDATE sessions SET project_id = :project_id WHERE session_id = :session_id;

-- name: sessions_active
SELECT * FROM sessions WHERE status = 'active' ORDER BY heartbeat_at, session_id;

-- name: sessions_of_org
SELECT * FROM sessions WHERE org_id = :org_id AND (CAST(:project_id AS TEXT) IS NULL OR project_id = :project_id)
ORDER BY created_at DESC, session_id DESC LIMIT :limit OFFSET :offset;

-- name: sessions_before
SELECT * FROM sessions WHERE org_id = :org_id AND created_at < :before
    AND (CAST(:project_id AS TEXT) IS NULL OR project_id = :project_id)
ORDER BY created_at DESC, session_id DESC LIMIT :limit OFFSET :offset;

-- name: sessions_of_user
SELECT * FROM sessions WHERE org_id = :org_id AND user_id = :user_id
    AND (CAST(:project_id AS TEXT) IS NULL OR project_id = :project_id)
ORDER BY created_at DESC, session_id DESC LIMIT :limit OFFSET :offset;

-- Models ---------------------------------------------------------------------------------------------------------

-- name: insert_model
INSERT INTO models (model_id, session_id, org_id, user_id, project_id, base_model, lora, optimizer, user_metadata,
    created_at, used_at, state, fault, notice, snapshot_directory, snapshot_seq, fingerprint)
VALUES (:model_id, :session_id, :org_id, :user_id, :project_id, :base_model, :lora, :optimizer, :user_metadata,
    :created_at, :used_at, :state, :fault, :notice, :snapshot_directory, :snapshot_seq, :fingerprint);

-- name: insert_model_if_absent
INSERT INTO models (model_id, session_id, org_id, user_id, project_id, base_model, lora, optimizer, user_metadata,
    created_at, used_at, state, fault, notice, snapshot_directory, snapshot_seq, fingerprint)
VALUES (:model_id, :session_id, :org_id, :user_id, :project_id, :base_model, :lora, :optimizer, :user_metadata,
    :created_at, :used_at, :state, :fault, :notice, :snapshot_directory, :snapshot_seq, :fingerprint)
ON CONFLICT (model_id) DO NOTHING;

-- name: model
SELECT * FROM models WHERE model_id = :model_id;

-- name: models_of_session
SELECT * FROM models WHERE session_id = :session_id ORDER BY created_at, model_id;

-- name: models_live
SELECT * FROM models WHERE state = 'live' ORDER BY used_at, model_id;

-- name: set_model_used
UPDATE models SET used_at = :used_at WHERE model_id = :model_id AND used_at < :used_at;

-- name: set_model_state
UPDATE models SET state = :state WHERE model_id = :model_id;

-- Changes no row of a run that takes work. One that is parked does not come back with its session afterwards.
-- name: close_model
UPDATE models SET state = 'unloaded' WHERE model_id = :model_id AND state <> 'live';

-- name: delete_model
DELETE FROM models WHERE model_id = :model_id;

-- The first fault is kept: later ones usually follow from it.
-- name: set_model_fault
UPDATE models SET fault = :fault WHERE model_id = :model_id AND fault IS NULL;

-- name: set_model_notice
UPDATE models SET notice = :notice WHERE model_id = :model_id;

-- name: set_model_fingerprint
UPDATE models SET fingerprint = :fingerprint WHERE model_id = :model_id;

-- Changes no row if something that the snapshot contains has no result yet: a replay would apply it a second time.
-- name: set_model_snapshot
UPDATE models SET snapshot_directory = :snapshot_directory, snapshot_seq = :snapshot_seq
WHERE model_id = :model_id AND snapshot_seq < :snapshot_seq AND NOT EXISTS (
    SELECT 1 FROM jobs WHERE lane = :model_id AND seq <= :snapshot_seq AND state = 'queued');

-- For the cleanup at start: which snapshots are in use.
-- name: snapshot_directories
SELECT model_id, snapshot_directory FROM models ORDER BY model_id;

-- name: set_models_project
/* many rows */ UPDATE models SET project_id = :project_id WHERE session_id = :session_id;

-- name: revive_models
/* many rows */ UPDATE models SET state = 'live' WHERE session_id = :session_id AND state = 'parked';

-- name: unload_models_of_session
/* many rows */ UPDATE models SET state = 'parked' WHERE session_id = :session_id AND state = 'live';

-- name: models_of_org
SELECT * FROM models WHERE org_id = :org_id AND (CAST(:project_id AS TEXT) IS NULL OR project_id = :project_id)
ORDER BY created_at DESC, model_id DESC LIMIT :limit OFFSET :offset;

-- name: count_models_of_org
SELECT COUNT(*) AS count FROM models WHERE org_id = :org_id
    AND (CAST(:project_id AS TEXT) IS NULL OR project_id = :project_id);

-- name: models_of_user
SELECT * FROM models WHERE org_id = :org_id AND user_id = :user_id
    AND (CAST(:project_id AS TEXT) IS NULL OR project_id = :project_id)
ORDER BY created_at DESC, model_id DESC LIMIT :limit OFFSET :offset;

-- name: count_models_of_user
SELECT COUNT(*) AS count FROM models WHERE org_id = :org_id AND user_id = :user_id
    AND (CAST(:project_id AS TEXT) IS NULL OR project_id = :project_id);

-- Samplers -------------------------------------------------------------------------------------------------------

-- name: insert_sampler
INSERT INTO samplers (sampler_id, session_id, org_id, user_id, base_model, model_path, directory, adapter_key, clones,
    created_at, run_id)
VALUES (:sampler_id, :session_id, :org_id, :user_id, :base_model, :model_path, :directory, :adapter_key, :clones,
    :created_at, :run_id);

-- name: insert_sampler_if_absent
INSERT INTO samplers (sampler_id, session_id, org_id, user_id, base_model, model_path, directory, adapter_key, clones,
    created_at, run_id)
VALUES (:sampler_id, :session_id, :org_id, :user_id, :base_model, :model_path, :directory, :adapter_key, :clones,
    :created_at, :run_id)
ON CONFLICT (sampler_id) DO NOTHING;

-- name: sampler
SELECT * FROM samplers WHERE sampler_id = :sampler_id;

-- name: count_samplers_of_session
SELECT COUNT(*) AS count FROM samplers WHERE session_id = :session_id;

-- name: samplers_of_session
SELECT * FROM samplers WHERE session_id = :session_id ORDER BY created_at, sampler_id;

-- For write_returning: the sampler with its new number of clones.
-- name: add_sampler_clone
UPDATE samplers SET clones = clones + 1 WHERE sampler_id = :sampler_id RETURNING *;

-- Jobs -----------------------------------------------------------------------------------------------------------

-- Fails with ConstraintError if the number is taken. A refused request takes its number with state 'refused'.
-- name: insert_job
INSERT INTO jobs (request_id, lane, seq, kind, session_id, org_id, user_id, digest, state, created_at, context,
    job)
VALUES (:request_id, :lane, :seq, :kind, :session_id, :org_id, :user_id, :digest, :state, :created_at, :context,
    :job);

-- Like insert_job, but changes no row if the number is taken.
-- name: insert_job_if_absent
INSERT INTO jobs (request_id, lane, seq, kind, session_id, org_id, user_id, digest, state, created_at, context,
    job)
VALUES (:request_id, :lane, :seq, :kind, :session_id, :org_id, :user_id, :digest, :state, :created_at, :context,
    :job)
ON CONFLICT (lane, seq) DO NOTHING;

-- name: job
SELECT * FROM jobs WHERE request_id = :request_id;

-- name: job_by_number
SELECT * FROM jobs WHERE lane = :lane AND seq = :seq;

-- name: job_head_by_number
SELECT request_id, lane, seq, kind, session_id, org_id, user_id, digest, state, created_at, length(job) AS size_bytes
FROM jobs WHERE lane = :lane AND seq = :seq;

-- name: job_heads_of_session
SELECT request_id, lane, seq, kind, session_id, org_id, user_id, digest, state, created_at, length(job) AS size_bytes
FROM jobs WHERE session_id = :session_id ORDER BY created_at DESC, lane DESC, seq DESC LIMIT :limit;

-- What a restarted server resumes.
-- name: jobs_queued
SELECT * FROM jobs WHERE state = 'queued' ORDER BY lane, seq;

-- The journal; the last seq gives the next page.
-- name: jobs_of_lane_after
SELECT * FROM jobs WHERE lane = :lane AND seq > :seq ORDER BY seq LIMIT :limit;

-- What a replay applies: finished jobs in order, with the digest of each result. Those that failed or were cancelled
-- changed nothing, so they are left out.
-- name: journal
SELECT jobs.seq AS seq, jobs.job AS job, results.digest AS digest
FROM jobs JOIN results ON results.request_id = jobs.request_id
WHERE jobs.lane = :lane AND jobs.seq > :after AND jobs.state = 'done' ORDER BY jobs.seq LIMIT :limit;

-- name: journal_length
SELECT COUNT(*) AS count FROM jobs WHERE lane = :lane AND seq > :after AND state = 'done';

-- name: lane_numbers
SELECT seq, state FROM jobs WHERE lane = :lane ORDER BY seq;

-- name: queued_of_lane
SELECT * FROM jobs WHERE lane = :lane AND state = 'queued' ORDER BY seq;

-- Completions of a sampling client, for batch polls that ask for older ones than memory holds.
-- name: completions
SELECT jobs.request_id AS request_id, results.encoding AS encoding, results.finished_at AS finished_at,
    length(results.body) AS size_bytes
FROM jobs JOIN results ON results.request_id = jobs.request_id
WHERE jobs.lane = :lane AND jobs.seq >= :first AND jobs.seq < :last AND results.finished_at > :after
ORDER BY results.finished_at LIMIT :limit;

-- name: highest_seq_of_lane
SELECT COALESCE(MAX(seq), -1) AS seq FROM jobs WHERE lane = :lane;

-- name: count_queued_of_lane
SELECT COUNT(*) AS count FROM jobs WHERE lane = :lane AND state = 'queued';

-- name: count_jobs_queued
SELECT COUNT(*) AS count FROM jobs WHERE state = 'queued';

-- Only a queued job can change its state, so a second outcome of a job changes no row. The two spaces after the JSON make
-- up for the shorter state: SQLite overwrites a row of the same length in place, and would otherwise write a large payload
-- again.
-- name: set_job_state
UPDATE jobs SET state = :state, context = CASE :state WHEN 'done' THEN context || ' ' || ' ' ELSE context END
WHERE request_id = :request_id AND state = 'queued';

-- Deletes the payloads that a snapshot contains. Numbers, digests and results stay, so that repetitions are recognised.
-- name: prune_journal
/* many rows */ UPDATE jobs SET job = substr(job, 1, 0)
WHERE lane = :lane AND seq <= :seq AND state <> 'queued' AND length(job) > 0;

-- Payloads of the same rows and one of them: `server/jobs/pruning.py` deletes them in pieces.
-- name: payloads_of_lane
SELECT request_id AS name, length(job) AS size_bytes FROM jobs
WHERE lane = :lane AND seq > :after AND seq <= :seq AND state <> 'queued' AND length(job) > 0 ORDER BY seq LIMIT :limit;

-- name: delete_payload
/* many rows */ UPDATE jobs SET job = substr(job, 1, 0) WHERE request_id = :name AND length(job) > 0;

-- name: journal_bytes_of_lane
SELECT CAST(COALESCE(SUM(length(job)), 0) AS BIGINT) AS size_bytes FROM jobs WHERE lane = :lane AND seq > :seq;

-- Requests with the size of their payloads and results, to be deleted in pieces.
-- name: stored_of_lane
SELECT jobs.request_id AS name, CAST(length(jobs.job) + COALESCE(length(results.body), 0) AS BIGINT) AS size_bytes
FROM jobs LEFT JOIN results ON results.request_id = jobs.request_id WHERE jobs.lane = :lane LIMIT :limit;

-- name: stored_of_session
SELECT jobs.request_id AS name, CAST(length(jobs.job) + COALESCE(length(results.body), 0) AS BIGINT) AS size_bytes
FROM jobs LEFT JOIN results ON results.request_id = jobs.request_id WHERE jobs.session_id = :session_id LIMIT :limit;

-- name: losses_of_session
SELECT loss_id AS name, length(request) AS size_bytes FROM custom_losses WHERE session_id = :session_id LIMIT :limit;

-- name: delete_job
DELETE FROM jobs WHERE request_id = :name;

-- name: delete_result
DELETE FROM results WHERE request_id = :name;

-- name: delete_custom_loss
DELETE FROM custom_losses WHERE loss_id = :name;

-- Sessions whose results and journal nobody can ask for any more. `pruned` marks those whose deletion has begun.
-- name: sessions_to_prune
SELECT session_id FROM sessions WHERE ended_at < :before AND pruned = 0 ORDER BY ended_at LIMIT :limit;

-- name: sessions_unpruned
SELECT * FROM sessions WHERE pruned = 0 ORDER BY created_at, session_id;

-- name: set_session_pruned
UPDATE sessions SET pruned = 1 WHERE session_id = :session_id;

-- Sessions whose pruning began and did not end, because the server was killed.
-- name: sessions_half_pruned
SELECT session_id FROM sessions WHERE pruned = 1 AND (
    EXISTS (SELECT 1 FROM jobs WHERE jobs.session_id = sessions.session_id)
    OR EXISTS (SELECT 1 FROM custom_losses WHERE custom_losses.session_id = sessions.session_id));

-- Results --------------------------------------------------------------------------------------------------------

-- The first result stays: a client may have it.
-- name: insert_result
INSERT INTO results (request_id, encoding, digest, started_at, finished_at, body)
VALUES (:request_id, :encoding, :digest, :started_at, :finished_at, :body) ON CONFLICT (request_id) DO NOTHING;

-- name: result
SELECT * FROM results WHERE request_id = :request_id;

-- name: result_heads_of_session
SELECT results.request_id, results.encoding, results.digest, results.started_at, results.finished_at,
    length(results.body) AS size_bytes
FROM results JOIN jobs ON jobs.request_id = results.request_id
WHERE jobs.session_id = :session_id ORDER BY jobs.created_at DESC, jobs.lane DESC, jobs.seq DESC LIMIT :limit;

-- name: result_bytes
SELECT CAST(COALESCE(SUM(length(body)), 0) AS BIGINT) AS size_bytes FROM results;

-- Results of passes and steps of a run, for curves; the last seq gives the next page.
-- name: measured_of_lane_after
SELECT jobs.seq AS seq, jobs.kind AS kind, jobs.context AS context, results.encoding AS encoding,
    results.started_at AS started_at, results.finished_at AS finished_at, results.body AS body
FROM jobs JOIN results ON results.request_id = jobs.request_id
WHERE jobs.lane = :lane AND jobs.seq > :after AND jobs.state = 'done'
AND jobs.kind IN ('forward_backward', 'optim_step') ORDER BY jobs.seq LIMIT :limit;

-- name: count_steps_of_lane_after
SELECT COUNT(*) AS count FROM jobs WHERE lane = :lane AND seq > :after AND state = 'done' AND kind = 'optim_step';

-- Steps of runs --------------------------------------------------------------------------------------------------

-- name: insert_step
INSERT INTO steps (model_id, seq, step, datums, seconds, finished_at, metrics)
VALUES (:model_id, :seq, :step, :datums, :seconds, :finished_at, :metrics) ON CONFLICT (model_id, seq) DO NOTHING;

-- Keeps the first step, every `stride`-th after it, and the last one.
-- name: thin_steps
DELETE FROM steps WHERE model_id = :model_id AND (step - 1) % :stride <> 0 AND step < :step;

-- name: steps_after
SELECT * FROM steps WHERE model_id = :model_id AND seq > :after ORDER BY seq LIMIT :limit;

-- name: last_step
SELECT * FROM steps WHERE model_id = :model_id ORDER BY seq DESC LIMIT 1;

-- Runs whose steps can be deleted: their session ended long ago, and none of their checkpoints is left.
-- name: runs_to_forget
SELECT models.model_id AS model_id FROM models JOIN sessions ON sessions.session_id = models.session_id
WHERE sessions.ended_at < :before AND sessions.pruned = 1
AND EXISTS (SELECT 1 FROM steps WHERE steps.model_id = models.model_id)
AND NOT EXISTS (SELECT 1 FROM checkpoints WHERE checkpoints.model_id = models.model_id)
ORDER BY sessions.ended_at, models.model_id LIMIT :limit;

-- name: delete_steps
DELETE FROM steps WHERE model_id = :model_id;

-- Checkpoints ----------------------------------------------------------------------------------------------------

-- Saving under a taken name replaces it. It stays public only if the new row says so.
-- name: put_checkpoint
INSERT INTO checkpoints (path, model_id, kind, name, session_id, org_id, user_id, project_id, base_model, lora,
    optimizer, directory, size_bytes, digest, public, user_metadata, created_at, expires_at)
VALUES (:path, :model_id, :kind, :name, :session_id, :org_id, :user_id, :project_id, :base_model, :lora,
    :optimizer, :directory, :size_bytes, :digest, :public, :user_metadata, :created_at, :expires_at)
ON CONFLICT (path) DO UPDATE SET
    model_id = excluded.model_id, kind = excluded.kind, name = excluded.name, session_id = excluded.session_id,
    org_id = excluded.org_id, user_id = excluded.user_id, project_id = excluded.project_id,
    base_model = excluded.base_model, lora = excluded.lora, optimizer = excluded.optimizer,
    directory = excluded.directory, size_bytes = excluded.size_bytes, digest = excluded.digest,
    public = excluded.public, user_metadata = excluded.user_metadata, created_at = excluded.created_at,
    expires_at = excluded.expires_at;

-- name: checkpoint
SELECT * FROM checkpoints WHERE path = :path;

-- name: checkpoints_of_model
SELECT * FROM checkpoints WHERE model_id = :model_id ORDER BY created_at, path;

-- name: first_checkpoints_of_model
SELECT * FROM checkpoints WHERE model_id = :model_id ORDER BY created_at, path LIMIT :limit;

-- name: first_checkpoints
SELECT * FROM checkpoints ORDER BY created_at, path LIMIT :limit;

-- name: newest_checkpoint
SELECT * FROM checkpoints WHERE model_id = :model_id AND kind = :kind ORDER BY created_at DESC, path DESC LIMIT 1;

-- name: checkpoint_metadata_bytes
SELECT CAST(COALESCE(SUM(length(user_metadata)), 0) AS BIGINT) AS size_bytes FROM checkpoints WHERE model_id = :model_id;

-- name: checkpoints_of_session
SELECT * FROM checkpoints WHERE session_id = :session_id ORDER BY created_at, path;

-- name: checkpoints_of_user
SELECT * FROM checkpoints WHERE org_id = :org_id AND user_id = :user_id
    AND (CAST(:project_id AS TEXT) IS NULL OR project_id = :project_id)
ORDER BY created_at DESC, path DESC LIMIT :limit OFFSET :offset;

-- name: count_checkpoints_of_user
SELECT COUNT(*) AS count FROM checkpoints WHERE org_id = :org_id AND user_id = :user_id
    AND (CAST(:project_id AS TEXT) IS NULL OR project_id = :project_id);

-- A user's checkpoints for sampling that exist after a time, and those that the organisation published.
-- name: checkpoints_to_sample
SELECT * FROM checkpoints WHERE org_id = :org_id AND (user_id = :user_id OR public = 1) AND kind = 'sampler_weights'
    AND (CAST(:project_id AS TEXT) IS NULL OR project_id = :project_id) AND (expires_at IS NULL OR expires_at > :after)
ORDER BY created_at DESC, path DESC LIMIT :limit;

-- name: set_checkpoint_public
UPDATE checkpoints SET public = :public WHERE path = :path;

-- name: set_checkpoint_expires_at
UPDATE checkpoints SET expires_at = :expires_at WHERE path = :path;

-- name: set_checkpoints_project
/* many rows */ UPDATE checkpoints SET project_id = :project_id WHERE session_id = :session_id;

-- name: delete_checkpoint
DELETE FROM checkpoints WHERE path = :path AND directory = :directory;

-- name: checkpoints_expired
SELECT * FROM checkpoints WHERE expires_at < :before ORDER BY expires_at, path LIMIT :limit;

-- Training checkpoints that may be deleted, oldest first: unpublished, without a ttl, never the newest of a run;
-- beyond the newest :keep, or made before a time.
-- name: checkpoints_beyond
SELECT * FROM (
    SELECT *, ROW_NUMBER() OVER (PARTITION BY model_id ORDER BY created_at DESC, path DESC) AS place
    FROM checkpoints WHERE kind = 'weights' AND expires_at IS NULL) AS ranked
WHERE place > 1 AND public = 0 AND (place > :keep OR created_at < :before) ORDER BY created_at, path LIMIT :limit;

-- Changes no row if the checkpoint was saved again, published, or given another expiry (-1: none) since it was read.
-- name: delete_checkpoint_as_it_was
DELETE FROM checkpoints WHERE path = :path AND directory = :directory AND public = :public
AND COALESCE(expires_at, -1) = :ends_at;

-- name: checkpoint_bytes
SELECT CAST(COALESCE(SUM(size_bytes), 0) AS BIGINT) AS size_bytes FROM checkpoints;

-- Bytes stored for each organisation, as far as the database knows: rows with their payloads, and checkpoint files.
-- name: bytes_by_org
SELECT org_id, CAST(SUM(size_bytes) AS BIGINT) AS size_bytes FROM (
    SELECT org_id, size_bytes + 1000 AS size_bytes FROM checkpoints
    UNION ALL SELECT org_id, length(job) + 500 AS size_bytes FROM jobs
    UNION ALL SELECT jobs.org_id AS org_id, length(results.body) AS size_bytes
        FROM results JOIN jobs ON jobs.request_id = results.request_id
    UNION ALL SELECT org_id, length(request) AS size_bytes FROM custom_losses
    UNION ALL SELECT org_id, length(user_metadata) + length(tags) + 500 AS size_bytes FROM sessions
    UNION ALL SELECT org_id, CASE WHEN directory IS NULL THEN 500 ELSE 8692 END AS size_bytes FROM samplers
) AS kept GROUP BY org_id ORDER BY org_id;

-- name: storage_of_org
SELECT project_id, user_id, COUNT(*) AS count, CAST(SUM(size_bytes) AS BIGINT) AS size_bytes
FROM checkpoints WHERE org_id = :org_id GROUP BY project_id, user_id ORDER BY project_id IS NULL, project_id, user_id;

-- name: storage_of_project
SELECT project_id, user_id, COUNT(*) AS count, CAST(SUM(size_bytes) AS BIGINT) AS size_bytes
FROM checkpoints WHERE org_id = :org_id AND project_id = :project_id GROUP BY project_id, user_id ORDER BY user_id;

-- name: storage_of_runs
SELECT model_id AS run_id, session_id, base_model, COALESCE(project_id, '') AS project_id, user_id,
    CAST(SUM(size_bytes) AS BIGINT) AS size_bytes
FROM checkpoints WHERE org_id = :org_id GROUP BY model_id, session_id, base_model, project_id, user_id
ORDER BY model_id, user_id, project_id;

-- name: storage_by_owner
SELECT org_id, user_id, project_id, CAST(SUM(size_bytes) AS BIGINT) AS size_bytes
FROM checkpoints GROUP BY org_id, user_id, project_id ORDER BY org_id, user_id, project_id;

-- name: storage_of_session
SELECT COUNT(*) AS count, CAST(COALESCE(SUM(size_bytes), 0) AS BIGINT) AS size_bytes
FROM checkpoints WHERE session_id = :session_id;

-- Custom losses --------------------------------------------------------------------------------------------------

-- name: insert_custom_loss
INSERT INTO custom_losses (loss_id, session_id, org_id, user_id, name, request, created_at)
VALUES (:loss_id, :session_id, :org_id, :user_id, :name, :request, :created_at) ON CONFLICT (loss_id) DO NOTHING;

-- name: custom_loss
SELECT * FROM custom_losses WHERE loss_id = :loss_id;

-- Usage ----------------------------------------------------------------------------------------------------------

-- name: add_usage
INSERT INTO usage (org_id, hour, user_id, project_id, session_id, base_model, run_id, training, prefill,
    prefill_cached, sampled, checkpoints, storage, device_us, jobs)
VALUES (:org_id, :hour, :user_id, :project_id, :session_id, :base_model, :run_id, :training, :prefill,
    :prefill_cached, :sampled, :checkpoints, :storage, :device_us, :jobs)
ON CONFLICT (org_id, hour, user_id, project_id, session_id, base_model, run_id) DO UPDATE SET
    training = usage.training + excluded.training, prefill = usage.prefill + excluded.prefill,
    prefill_cached = usage.prefill_cached + excluded.prefill_cached, sampled = usage.sampled + excluded.sampled,
    checkpoints = usage.checkpoints + excluded.checkpoints, storage = usage.storage + excluded.storage,
    device_us = usage.device_us + excluded.device_us, jobs = usage.jobs + excluded.jobs;

-- The same for a job, and before its state is set: a result that is written a second time is not counted again.
-- name: add_job_usage
INSERT INTO usage (org_id, hour, user_id, project_id, session_id, base_model, run_id, training, prefill,
    prefill_cached, sampled, checkpoints, storage, device_us, jobs)
SELECT :org_id, :hour, :user_id, :project_id, :session_id, :base_model, :run_id, :training, :prefill,
    :prefill_cached, :sampled, :checkpoints, :storage, :device_us, :jobs
WHERE EXISTS (SELECT 1 FROM jobs WHERE request_id = :request_id AND state = 'queued')
ON CONFLICT (org_id, hour, user_id, project_id, session_id, base_model, run_id) DO UPDATE SET
    training = usage.training + excluded.training, prefill = usage.prefill + excluded.prefill,
    prefill_cached = usage.prefill_cached + excluded.prefill_cached, sampled = usage.sampled + excluded.sampled,
    checkpoints = usage.checkpoints + excluded.checkpoints, storage = usage.storage + excluded.storage,
    device_us = usage.device_us + excluded.device_us, jobs = usage.jobs + excluded.jobs;

-- From the first hour to before the last.
-- name: count_usage
SELECT COUNT(*) AS count FROM usage WHERE org_id = :org_id AND hour >= :since_hour AND hour < :until_hour;

-- name: usage_by_run
SELECT * FROM usage WHERE org_id = :org_id AND hour >= :since_hour AND hour < :until_hour
ORDER BY hour, user_id, project_id, session_id, base_model, run_id;

-- The same without runs, which the protocol's usage does not have.
-- name: usage_of_org
SELECT org_id, hour, user_id, project_id, session_id, base_model, '' AS run_id,
    CAST(SUM(training) AS BIGINT) AS training, CAST(SUM(prefill) AS BIGINT) AS prefill,
    CAST(SUM(prefill_cached) AS BIGINT) AS prefill_cached, CAST(SUM(sampled) AS BIGINT) AS sampled,
    CAST(SUM(checkpoints) AS BIGINT) AS checkpoints, CAST(SUM(storage) AS BIGINT) AS storage,
    CAST(SUM(device_us) AS BIGINT) AS device_us, CAST(SUM(jobs) AS BIGINT) AS jobs
FROM usage WHERE org_id = :org_id AND hour >= :since_hour AND hour < :until_hour
GROUP BY org_id, hour, user_id, project_id, session_id, base_model
ORDER BY hour, user_id, project_id, session_id, base_model;

-- What one user spent from an hour on, for daily caps.
-- name: tokens_of_user
SELECT CAST(COALESCE(SUM(training + prefill + prefill_cached + sampled), 0) AS BIGINT) AS count FROM usage
WHERE org_id = :org_id AND user_id = :user_id AND hour >= :since_hour;

-- Audit ----------------------------------------------------------------------------------------------------------

-- name: insert_audit
INSERT INTO audit (at, org_id, user_id, event, group_name, details, model_id, tinker_path, purpose, project_id)
VALUES (:at, :org_id, :user_id, :event, :group_name, :details, :model_id, :tinker_path, :purpose, :project_id);

-- A day is from its first second (since) to before the next day's (until).
-- name: audit_of_org
SELECT * FROM audit WHERE org_id = :org_id AND at >= :since AND at < :until ORDER BY at DESC, audit_id DESC
LIMIT :limit;

-- name: audit_of_group
SELECT * FROM audit WHERE org_id = :org_id AND group_name = :group_name AND at >= :since AND at < :until
ORDER BY at DESC, audit_id DESC LIMIT :limit;

-- Telemetry ------------------------------------------------------------------------------------------------------

-- name: insert_telemetry
INSERT INTO telemetry (at, org_id, session_id, body) VALUES (:at, :org_id, :session_id, :body);

-- name: telemetry_newest
SELECT * FROM telemetry ORDER BY telemetry_id DESC LIMIT :limit;

-- Keeps the newest `keep` rows.
-- name: prune_telemetry
DELETE FROM telemetry WHERE telemetry_id < (
    SELECT MIN(telemetry_id) FROM (SELECT telemetry_id FROM telemetry ORDER BY telemetry_id DESC LIMIT :keep) AS newest);
