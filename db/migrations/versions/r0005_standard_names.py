"""Gives stored fields the standard names of the field, and the table of fallbacks too.

`flashtune.core.earlier_names` has the names. A row without a readable record is not changed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import sqlalchemy as sa
from alembic import op

from flashtune.core.earlier_names import BASELINES, present_record

revision = "0005"
down_revision = "0004"

MAX_PAYLOAD = 256 * 1024
# Rows read and written at a time.
CHUNK = 500
RECORDS = sa.table(
    "records",
    sa.column("id", sa.Integer),
    sa.column("family", sa.String),
    sa.column("config", sa.String),
    sa.column("config_hash", sa.String),
    sa.column("content_hash", sa.String),
    sa.column("payload", sa.Text),
)
COPY = "INSERT INTO fallbacks SELECT problem_key, target, record_id, pinned_at FROM stand_ins"


def upgrade() -> None:
    """Converts the records and moves the fallbacks."""
    connection = op.get_bind()
    ids = connection.scalars(sa.select(RECORDS.c.id).order_by(RECORDS.c.id)).all()
    for start in range(0, len(ids), CHUNK):
        _each_if_needed(connection, ids[start : start + CHUNK], _convert)
    _move_fallbacks(connection)


def _each_if_needed(
    connection: sa.Connection, keys: Sequence[int], change: Callable[[sa.Connection, Sequence[int]], None]
) -> None:
    """Changes rows together. If one of them cannot be changed, it is left out and the others change alone."""
    try:
        with connection.begin_nested():
            change(connection, keys)
    except (sa.exc.DataError, sa.exc.IntegrityError):
        if len(keys) > 1:
            for key in keys:
                _each_if_needed(connection, [key], change)


def _convert(connection: sa.Connection, ids: Sequence[int]) -> None:
    """Renames the fields of some records, and computes the columns that depend on them."""
    payload = sa.case((sa.func.length(RECORDS.c.payload) <= MAX_PAYLOAD, RECORDS.c.payload))
    query = sa.select(RECORDS.c.id, RECORDS.c.family, payload.label("payload")).where(RECORDS.c.id.in_(ids))
    changed = [
        values
        for row in connection.execute(query)
        if isinstance(row.payload, str) and (values := _columns(row.id, row.family, row.payload))
    ]
    if changed:
        update = sa.update(RECORDS).where(RECORDS.c.id == sa.bindparam("row"))
        names = ("family", "config", "config_hash", "content_hash", "payload")
        connection.execute(update.values({name: sa.bindparam(f"new_{name}") for name in names}), changed)


def _columns(row: int, family: str, payload: str) -> dict[str, Any] | None:
    """Returns a row's new values, None if nothing changes."""
    raw = payload.encode(errors="surrogateescape")
    present = present_record(raw)
    if present == raw:
        return None
    config = msgspec.json.decode(present).get("config")
    return {
        "row": row,
        "new_family": BASELINES.get(family, family),
        "new_config": _label(config) if isinstance(config, dict) else None,
        "new_config_hash": _hash(msgspec.json.encode(config)) if isinstance(config, dict) else None,
        "new_content_hash": _hash(present),
        "new_payload": present.decode(),
    }


def _label(config: dict[str, Any]) -> str:
    values = ((name, int(value) if isinstance(value, bool) else value) for name, value in config.items())
    return " ".join(f"{name}={value}" for name, value in values)


def _hash(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()[:32]


def _move_fallbacks(connection: sa.Connection) -> None:
    """Creates the table of fallbacks and its view from those of the earlier name.

    The view of the earlier name remains for the light readers of earlier versions.
    """
    op.execute("DROP VIEW IF EXISTS stand_in_records")
    op.create_table(
        "fallbacks",
        sa.Column("problem_key", sa.String, nullable=False),
        sa.Column("target", sa.String, nullable=False),
        sa.Column("record_id", sa.Integer, nullable=False),
        sa.Column("pinned_at", sa.String(32), nullable=False),
        sa.PrimaryKeyConstraint("problem_key", "target", name="pk_fallbacks"),
        sa.ForeignKeyConstraint(["record_id"], ["records.id"], name="fk_fallbacks_record_id"),
    )
    if connection.dialect.name == "sqlite":
        rows = connection.scalars(sa.text("SELECT rowid FROM stand_ins")).all()
        for start in range(0, len(rows), CHUNK):
            _each_if_needed(connection, rows[start : start + CHUNK], _copy)
    else:
        op.execute(COPY)
    op.drop_table("stand_ins")
    op.execute(
        "CREATE VIEW fallback_records AS "
        "SELECT fallbacks.problem_key, fallbacks.target, fallbacks.pinned_at, "
        "records.id AS record_id, records.created_at, records.payload "
        "FROM fallbacks JOIN records ON records.id = fallbacks.record_id"
    )
    op.execute("CREATE VIEW stand_in_records AS SELECT * FROM fallback_records")


def _copy(connection: sa.Connection, rows: Sequence[int]) -> None:
    some = sa.text(f"{COPY} WHERE rowid IN :rows").bindparams(sa.bindparam("rows", expanding=True))
    connection.execute(some, {"rows": rows})
