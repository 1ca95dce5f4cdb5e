-- What a run was computed on, and what its owner should know of it.
ALTER TABLE models ADD COLUMN fingerprint TEXT;
ALTER TABLE models ADD COLUMN notice TEXT;
