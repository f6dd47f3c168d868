"""Full contents of self-checks for the runtime's reader."""

from __future__ import annotations

from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Adds the view. The view that says only whether a check passed stays unchanged."""
    op.execute("CREATE VIEW check_payloads AS SELECT digest, target, versions_hash, payload FROM checks")
