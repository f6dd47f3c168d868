"""Records, selections and checks."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Creates everything."""
    op.create_table(
        "records",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("content_hash", sa.String(32), nullable=False),
        sa.Column("created_at", sa.String(32), nullable=False),
        sa.Column("problem_key", sa.String, nullable=False),
        sa.Column("target", sa.String, nullable=False),
        sa.Column("family", sa.String, nullable=False),
        sa.Column("config", sa.String),
        sa.Column("config_hash", sa.String(32)),
        sa.Column("kernel", sa.String(32)),
        sa.Column("outcome", sa.String, nullable=False),
        sa.Column("provenance", sa.String, nullable=False),
        sa.Column("ms", sa.Float),
        sa.Column("triton", sa.String, nullable=False),
        sa.Column("template", sa.String, nullable=False),
        sa.Column("payload", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_records"),
        sa.UniqueConstraint("content_hash", name="uq_records_content_hash"),
    )
    op.create_index("ix_records_problem_key_target_outcome", "records", ["problem_key", "target", "outcome"])
    op.create_index("ix_records_target_family", "records", ["target", "family"])
    op.create_index("ix_records_kernel", "records", ["kernel"])
    op.create_index("ix_records_config_hash", "records", ["config_hash"])
    op.create_table(
        "selections",
        sa.Column("problem_key", sa.String, nullable=False),
        sa.Column("target", sa.String, nullable=False),
        sa.Column("record_id", sa.Integer, nullable=False),
        sa.Column("pinned_at", sa.String(32), nullable=False),
        sa.PrimaryKeyConstraint("problem_key", "target", name="pk_selections"),
        sa.ForeignKeyConstraint(["record_id"], ["records.id"], name="fk_selections_record_id"),
    )
    op.create_table(
        "checks",
        sa.Column("digest", sa.String(32), nullable=False),
        sa.Column("target", sa.String, nullable=False),
        sa.Column("versions_hash", sa.String(32), nullable=False),
        sa.Column("passed", sa.Boolean, nullable=False),
        sa.Column("created_at", sa.String(32), nullable=False),
        sa.Column("payload", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("digest", "target", "versions_hash", name="pk_checks"),
    )
    # Read by the runtime's reader. It must stay unchanged, even if the tables change.
    op.execute(
        "CREATE VIEW selected_records AS "
        "SELECT selections.problem_key, selections.target, selections.pinned_at, "
        "records.id AS record_id, records.created_at, records.payload "
        "FROM selections JOIN records ON records.id = selections.record_id"
    )
    op.execute("CREATE VIEW known_checks AS SELECT digest, target, versions_hash, passed FROM checks")
