-- The tables of the queue. db/queue_schema.py creates them, and has their version too.
CREATE TABLE queue_version (version_num varchar(32) PRIMARY KEY);
INSERT INTO queue_version VALUES ('0001');
CREATE TABLE jobs (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    batch varchar(16) NOT NULL,
    -- Hash of the problem, the GPU and the versions: only one such job is open.
    job_key varchar(32) NOT NULL,
    problem_key varchar NOT NULL,
    target varchar NOT NULL,
    provenance varchar(16) NOT NULL,
    -- Versions of flashtune, Triton and the templates that a worker must have.
    versions varchar(200) NOT NULL,
    -- ptxas and the driver of the first attempt, which later attempts must have too.
    build varchar(200),
    priority integer NOT NULL,
    state varchar(16) NOT NULL DEFAULT 'queued',
    attempts integer NOT NULL DEFAULT 0,
    -- The number of claims. A worker without the latest one stores nothing.
    token integer NOT NULL DEFAULT 0,
    worker varchar(200),
    lease_until timestamptz,
    reason varchar(400) NOT NULL DEFAULT '',
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    started_at timestamptz,
    ended_at timestamptz,
    payload text NOT NULL
);
-- Files of kernels of open jobs, or none while a worker compiles them.
CREATE TABLE compiled (
    job bigint NOT NULL REFERENCES jobs (id),
    kernel varchar(32) NOT NULL,
    digest varchar(64),
    files bytea,
    PRIMARY KEY (job, kernel)
);
CREATE UNIQUE INDEX uq_jobs_open ON jobs (job_key) WHERE state IN ('queued', 'running');
CREATE INDEX ix_jobs_open ON jobs (target, priority DESC, id) WHERE state IN ('queued', 'running');
CREATE INDEX ix_jobs_batch ON jobs (batch);
