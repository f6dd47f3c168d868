"""Replaces a record by one of an equal kernel with another digest and template version."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from sqlalchemy import delete, select, update

from flashtune.db.codec import decode_check, raw_bytes
from flashtune.db.queries import insert_record, write_check
from flashtune.db.schema import CHECKS, RECORDS, SELECTIONS, STAND_INS
from flashtune.db.stored_rows import stored_text

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from flashtune.core.record import Record


def replace_record(connection: Connection, record_id: int, record: Record) -> None:
    """Replaces the record of a row, in selections too, and copies self-checks to the new kernel.

    A row that was deleted meanwhile is not inserted again.

    Raises:
        TableError: A field is outside its bounds.
    """
    query = select(RECORDS.c.created_at, RECORDS.c.kernel).where(RECORDS.c.id == record_id)
    row = connection.execute(query).one_or_none()
    if row is None:
        return
    new_id, _ = insert_record(connection, record, stored_text(row.created_at))
    if new_id == record_id:
        return
    for table in (SELECTIONS, STAND_INS):
        connection.execute(update(table).where(table.c.record_id == record_id).values(record_id=new_id))
    connection.execute(delete(RECORDS).where(RECORDS.c.id == record_id))
    if record.kernel is not None and row.kernel is not None:
        _copy_checks(connection, stored_text(row.kernel), record)


def _copy_checks(connection: Connection, digest: str, record: Record) -> None:
    """Copies self-checks of a digest to the record's kernel, which is the same machine code.

    The two kernels were compared only under the record's Triton and ptxas.
    """
    assert record.kernel is not None
    query = select(CHECKS.c.payload, CHECKS.c.created_at).where(
        CHECKS.c.digest == digest, CHECKS.c.target == record.target
    )
    for row in connection.execute(query).all():
        check = decode_check(raw_bytes(str(row.payload)))
        if digest != record.kernel and check.versions.compilers != record.versions.compilers:
            continue
        versions = msgspec.structs.replace(check.versions, template=record.versions.template)
        copied = msgspec.structs.replace(check, digest=record.kernel, versions=versions)
        write_check(connection, copied, stored_text(row.created_at), replace=False)
