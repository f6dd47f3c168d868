CREATE TABLE alembic_version (
    version_num VARCHAR(32) NOT NULL,
    CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
CREATE TABLE checks (
    digest VARCHAR(32) NOT NULL,
    target VARCHAR NOT NULL,
    versions_hash VARCHAR(32) NOT NULL,
    passed BOOLEAN NOT NULL,
    created_at VARCHAR(32) NOT NULL,
    payload TEXT NOT NULL,
    CONSTRAINT pk_checks PRIMARY KEY (digest, target, versions_hash)
);
CREATE TABLE fallbacks (
    problem_key VARCHAR NOT NULL,
    target VARCHAR NOT NULL,
    record_id INTEGER NOT NULL,
    pinned_at VARCHAR(32) NOT NULL,
    CONSTRAINT pk_fallbacks PRIMARY KEY (problem_key, target),
    CONSTRAINT fk_fallbacks_record_id FOREIGN KEY(record_id) REFERENCES records (id)
);
CREATE TABLE records (
    id INTEGER NOT NULL,
    content_hash VARCHAR(32) NOT NULL,
    created_at VARCHAR(32) NOT NULL,
    problem_key VARCHAR NOT NULL,
    target VARCHAR NOT NULL,
    family VARCHAR NOT NULL,
    config VARCHAR,
    config_hash VARCHAR(32),
    kernel VARCHAR(32),
    outcome VARCHAR NOT NULL,
    provenance VARCHAR NOT NULL,
    ms FLOAT,
    triton VARCHAR NOT NULL,
    template VARCHAR NOT NULL,
    payload TEXT NOT NULL,
    CONSTRAINT pk_records PRIMARY KEY (id),
    CONSTRAINT uq_records_content_hash UNIQUE (content_hash)
);
CREATE TABLE selections (
    problem_key VARCHAR NOT NULL,
    target VARCHAR NOT NULL,
    record_id INTEGER NOT NULL,
    pinned_at VARCHAR(32) NOT NULL,
    CONSTRAINT pk_selections PRIMARY KEY (problem_key, target),
    CONSTRAINT fk_selections_record_id FOREIGN KEY(record_id) REFERENCES records (id)
);
CREATE INDEX ix_records_config_hash ON records (config_hash);
CREATE INDEX ix_records_kernel ON records (kernel);
CREATE INDEX ix_records_problem_key_target_outcome ON records (problem_key, target, outcome);
CREATE INDEX ix_records_target_family ON records (target, family);
