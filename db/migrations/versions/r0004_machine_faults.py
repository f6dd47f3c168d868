"""Removes outcomes that the machine caused: full disks, missing tools, too little memory.

Earlier versions stored them, and then never tried these candidates again.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"

# Parts of the messages of such outcomes. A message is the last field of a record's JSON.
CAUSES = (
    # Name and number of an operating system's exception.
    "Error: [Errno ",
    '"message":"MemoryError',
    "No space left on device",
    "Disk quota exceeded",
    "Read-only file system",
    "Too many open files",
    "Cannot allocate memory",
    "can't start new thread",
    "Failed to find C compiler",
    "Cannot find ptxas",
    "failed to map segment",
    "(killed by signal 9)",
    "(killed by signal 15)",
    "failed (FileNotFoundError)",
    "failed (PermissionError)",
    "failed (OSError)",
    "cannot write the kernel cache",
)
FAILED = ("compile_error", "launch_error", "timeout")


def upgrade() -> None:
    """Deletes the rows; none of them can be a selection."""
    records = sa.table(
        "records", sa.column("id", sa.Integer), sa.column("outcome", sa.String), sa.column("payload", sa.Text)
    )
    named = sa.or_(*(records.c.payload.contains(cause, autoescape=True) for cause in CAUSES))
    kept = [
        sa.select(sa.column("record_id", sa.Integer)).select_from(sa.table(name))
        for name in ("selections", "stand_ins")
    ]
    op.execute(
        sa.delete(records).where(
            records.c.outcome.in_(FAILED), named, *(records.c.id.not_in(chosen) for chosen in kept)
        )
    )
