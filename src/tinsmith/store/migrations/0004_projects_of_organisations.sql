-- A project's name belongs to its organisation: two may have the same. The audit log knows projects.

CREATE TABLE projects_of_orgs (
    org_id TEXT NOT NULL,
    project_id TEXT NOT NULL,
    name TEXT NOT NULL,
    created_at REAL NOT NULL,
    PRIMARY KEY (org_id, project_id)
) STRICT;
INSERT INTO projects_of_orgs (org_id, project_id, name, created_at)
SELECT org_id, project_id, name, created_at FROM projects;
DROP TABLE projects;
ALTER TABLE projects_of_orgs RENAME TO projects;
CREATE INDEX projects_org ON projects (org_id, created_at);

ALTER TABLE audit ADD COLUMN project_id TEXT;
