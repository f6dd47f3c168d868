"""The tables. Values that queries need have columns of their own; the record is JSON in one column.

They are stated here only. Servers get them through SQLAlchemy. SQLite files get them from `schema.sql`, which
`python -m scripts.schema` writes. A change of the tables needs another `HEAD` in `db/light/bootstrap.py`.
"""

from sqlalchemy import (
    Boolean,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    PrimaryKeyConstraint,
    String,
    Table,
    Text,
    UniqueConstraint,
)

METADATA = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "pk": "pk_%(table_name)s",
    }
)

# The schema's version, in the table that Alembic would use for migrations.
VERSION = Table(
    "alembic_version",
    METADATA,
    Column("version_num", String(32), nullable=False),
    PrimaryKeyConstraint("version_num", name="alembic_version_pkc"),
)

RECORDS = Table(
    "records",
    METADATA,
    Column("id", Integer, nullable=False),
    # Hash of `payload` without the time of compilation and the physical GPU: an equal record is stored once,
    # however often it is added, merged or imported.
    Column("content_hash", String(32), nullable=False),
    Column("created_at", String(32), nullable=False),
    Column("problem_key", String, nullable=False),
    Column("target", String, nullable=False),
    Column("family", String, nullable=False),
    # The config as one readable line, and its hash. Null for the baselines.
    Column("config", String),
    Column("config_hash", String(32)),
    Column("kernel", String(32)),
    Column("outcome", String, nullable=False),
    Column("provenance", String, nullable=False),
    Column("ms", Float),
    Column("triton", String, nullable=False),
    Column("template", String, nullable=False),
    Column("payload", Text, nullable=False),
    PrimaryKeyConstraint("id"),
    UniqueConstraint("content_hash"),
)
Index(None, RECORDS.c.problem_key, RECORDS.c.target, RECORDS.c.outcome)
Index(None, RECORDS.c.target, RECORDS.c.family)
Index(None, RECORDS.c.kernel)
Index(None, RECORDS.c.config_hash)

SELECTIONS = Table(
    "selections",
    METADATA,
    Column("problem_key", String, nullable=False),
    Column("target", String, nullable=False),
    Column("record_id", Integer, ForeignKey("records.id"), nullable=False),
    Column("pinned_at", String(32), nullable=False),
    PrimaryKeyConstraint("problem_key", "target"),
)

# Fallbacks of selections whose family cannot address every tensor.
FALLBACKS = Table(
    "fallbacks",
    METADATA,
    Column("problem_key", String, nullable=False),
    Column("target", String, nullable=False),
    Column("record_id", Integer, ForeignKey("records.id"), nullable=False),
    Column("pinned_at", String(32), nullable=False),
    PrimaryKeyConstraint("problem_key", "target"),
)

CHECKS = Table(
    "checks",
    METADATA,
    Column("digest", String(32), nullable=False),
    Column("target", String, nullable=False),
    Column("versions_hash", String(32), nullable=False),
    Column("passed", Boolean, nullable=False),
    Column("created_at", String(32), nullable=False),
    Column("payload", Text, nullable=False),
    PrimaryKeyConstraint("digest", "target", "versions_hash"),
)
