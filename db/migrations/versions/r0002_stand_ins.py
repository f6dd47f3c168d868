"""Fallbacks of selections whose family cannot address every tensor."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Adds the table, and the view for the runtime's reader."""
    op.create_table(
        "stand_ins",
        sa.Column("problem_key", sa.String, nullable=False),
        sa.Column("target", sa.String, nullable=False),
        sa.Column("record_id", sa.Integer, nullable=False),
        sa.Column("pinned_at", sa.String(32), nullable=False),
        sa.PrimaryKeyConstraint("problem_key", "target", name="pk_stand_ins"),
        sa.ForeignKeyConstraint(["record_id"], ["records.id"], name="fk_stand_ins_record_id"),
    )
    op.execute(
        "CREATE VIEW stand_in_records AS "
        "SELECT stand_ins.problem_key, stand_ins.target, stand_ins.pinned_at, "
        "records.id AS record_id, records.created_at, records.payload "
        "FROM stand_ins JOIN records ON records.id = stand_ins.record_id"
    )
