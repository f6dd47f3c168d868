"""Tuned tables: the selections of one target as JSON for review and for git merges.

Each line holds one field of a record, so a diff shows the changed fields of a problem.
"""

import functools
import re
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Annotated

import msgspec

from flashtune.core.decoders import json_decoder
from flashtune.core.errors import TableError
from flashtune.core.files import read_bounded
from flashtune.core.record import Record
from flashtune.core.target import TargetName, names_gpu
from flashtune.db.codec import (
    UNDECODABLE,
    Check,
    brief,
    decode_record,
    encode_record,
    fingerprint,
    without_gpu,
)
from flashtune.db.eligibility import serves_any_tensors, why_not_selectable

SCHEMA = 5
MAX_TABLE_BYTES = 64 * 1024 * 1024
MAX_RECEIPTS = 100_000
# The shipped tables are `tuned/<target>.json` in this package.
PACKAGE = "flashtune.db"
FOLDER = "tuned"

_Receipts = Annotated[tuple[Check, ...], msgspec.Meta(max_length=MAX_RECEIPTS)]
_TARGET_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,99}")


class TunedTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The selected records of one target: for each problem the selection and perhaps a fallback.

    The fallback serves the tensors that the selection's family cannot address.
    """

    schema: int = SCHEMA  # The layout's number.
    target: TargetName  # Name of the GPU.
    records: tuple[Record, ...]  # In any order; tables are written in the order of the problems.
    # Passes on the GPU of sources under a Triton, `source_receipts` in a file: of the records' kernels under
    # further versions, and of the same kernels with (or without) the log-sum-exp. A kernel has one for each
    # set of versions.
    receipts: tuple[Check, ...] = ()


class _Head(msgspec.Struct, frozen=True):
    """The field that tables of every schema share."""

    schema: int


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    schema: int
    target: TargetName
    records: list[msgspec.Raw]
    source_receipts: _Receipts = ()


class _Schema4(_File, frozen=True, forbid_unknown_fields=True):
    source_receipts: _Receipts = msgspec.field(default=(), name="receipts")
    times: tuple[msgspec.Raw, ...] = ()  # Times under other versions, which are not used.


_FILES: dict[int, type[_File]] = {4: _Schema4, SCHEMA: _File}


def load_table(path: str | Path) -> TunedTable:
    """Returns the table of a file."""
    where = str(path)
    try:
        raw = read_bounded(Path(path), MAX_TABLE_BYTES + 1)
    except OSError as error:
        raise TableError(f"cannot read the table {where}: {error.strerror}") from error
    return parse_table(raw, where)


def parse_table(raw: bytes, where: str) -> TunedTable:
    """Returns the table in a file's bytes, after a check. `where` names it in errors."""
    table = _decoded(raw, where)
    check_table(table, where)
    return table


def _decoded(raw: bytes, where: str) -> TunedTable:
    if len(raw) > MAX_TABLE_BYTES:
        raise TableError(
            f"{where} is over {MAX_TABLE_BYTES // 2**20} MiB, the limit for tuned tables: export it again"
        )
    try:
        schema = json_decoder(_Head).decode(raw).schema
        if schema not in _FILES:
            raise TableError(
                f"{where} has table schema {schema} and this flashtune reads schemas 4 and {SCHEMA}: search "
                "again, or export a table with this version"
            )
        file = json_decoder(_FILES[schema]).decode(raw)
    except UNDECODABLE as error:
        raise TableError(f"{where} is not a tuned table ({brief(error)}): export it again") from error
    entries = map(bytes, file.records)
    records = tuple(_record(entry, f"{where}, record {at}") for at, entry in enumerate(entries, 1))
    return TunedTable(target=file.target, records=records, receipts=file.source_receipts)


def dump_table(table: TunedTable) -> bytes:
    """Returns the table as a file's bytes, the same for every order of its records."""
    check_table(table, "the table")
    lists = {
        "records": [_block(record) for record in _ordered(table)],
        "source_receipts": _lines(table.receipts),
    }
    parts = [f'  "schema": {table.schema}', f'  "target": {_text(table.target)}']
    parts += [f'  "{name}": {_list(items)}' for name, items in lists.items() if items or name == "records"]
    return ("{\n" + ",\n".join(parts) + "\n}\n").encode()


def _lines(items: Iterable[Check]) -> list[str]:
    """Returns one item a line, sorted."""
    return sorted(f"    {msgspec.json.encode(item).decode()}" for item in items)


def _list(items: list[str]) -> str:
    return "[\n" + ",\n".join(items) + "\n  ]" if items else "[]"


def table_hash(table: TunedTable) -> str:
    """Returns a hash over the table's content, 32 hex digits, for any layout and order of records."""
    head = f"{table.schema} {_text(table.target)}".encode()
    evidence = (line.encode() for line in _lines(table.receipts))
    return fingerprint(b"\n".join((head, *(encode_record(record) for record in _ordered(table)), *evidence)))


@functools.cache
def shipped_table(target: str) -> TunedTable | None:
    """Returns the table that ships for a GPU, None if none does. Cached."""
    if not _TARGET_NAME.fullmatch(target):
        return None
    file = resources.files(PACKAGE).joinpath(FOLDER, f"{target}.json")
    if not file.is_file():
        return None
    # Tests check these tables, which takes longer than a first call should.
    return _decoded(file.read_bytes(), f"the shipped table of {target}")


def _record(raw: bytes, where: str) -> Record:
    try:
        return decode_record(raw)
    except TableError as error:
        raise TableError(f"{where}: {error}") from error


def check_table(table: TunedTable, where: str) -> None:
    """Rejects a table that dispatch could not use. `where` names the table in errors."""
    seen: set[tuple[str, bool]] = set()
    for position, record in enumerate(table.records, start=1):
        key = record.problem.key, serves_any_tensors(record)
        if record.target != table.target:
            reason: str | None = f"it is of {record.target} in a table of {table.target}"
        elif key in seen:
            reason = f"{key[0]} has a record before it: keep one of them"
        else:
            reason = why_not_selectable(record)
        if reason:
            raise TableError(f"{where}, record {position} cannot be used: {reason}")
        seen.add(key)
    proven: set[tuple[str, tuple[str, ...], str]] = set()
    for position, receipt in enumerate(table.receipts, start=1):
        # Receipts of two drivers of one branch are equal in dispatch.
        identity = receipt.digest, receipt.versions.makers, receipt.versions.driver
        on_gpu = receipt.target == table.target and names_gpu(table.target, receipt.verdict.device)
        if not on_gpu or not receipt.verdict.passed:
            raise TableError(
                f"{where}, receipt {position} cannot be used: it is not a passed verdict on {table.target}"
            )
        if identity in proven:
            raise TableError(
                f"{where}, receipt {position} cannot be used: an earlier receipt has the same kernel"
            )
        proven.add(identity)


def _ordered(table: TunedTable) -> list[Record]:
    """Sorts by computation, then by size: neighbours in the file have similar shapes. Omits physical GPUs.

    A selection precedes its fallback.
    """
    return sorted(map(without_gpu, table.records), key=_order)


def _order(record: Record) -> tuple[str | int | bool, ...]:
    problem = record.problem
    return (
        problem.direction.value,
        problem.dtype.value,
        problem.head_dim,
        problem.causal.value,
        problem.heads,
        problem.seqlen_q,
        problem.key,
        serves_any_tensors(record),
    )


def _block(record: Record) -> str:
    """Returns one record, one field a line."""
    raw = encode_record(record)
    fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    lines = (f"      {_text(name)}: {bytes(value).decode()}" for name, value in fields.items())
    return "    {\n" + ",\n".join(lines) + "\n    }"


def _text(value: str) -> str:
    return msgspec.json.encode(value).decode()
