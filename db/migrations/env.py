"""Alembic enters here; the caller hands over its connection, inside a transaction of its own."""

from __future__ import annotations

from alembic import context

context.configure(connection=context.config.attributes["connection"])
with context.begin_transaction():
    context.run_migrations()
