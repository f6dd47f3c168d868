"""Splits a tuned table for verification by several processes, and merges the verified parts.

    python -m scripts.merge_receipts split TABLE COUNT FOLDER
    flashtune verify --table FOLDER/part-0.json --missing --time --write verified-0.json    # for each part
    python -m scripts.merge_receipts merge BASE TABLE verified-*.json

BASE is the table that was split. TABLE may have changed since, by searches. It is overwritten.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from flashtune.core.errors import FlashtuneError
from flashtune.core.record import Record
from flashtune.db.eligibility import serves_any_tensors
from flashtune.db.table import TunedTable, dump_table, load_table
from flashtune.tuner.tables.table_receipts import part_of, without_strays


def parts_of(table: TunedTable, count: int) -> list[TunedTable]:
    """Returns parts of a table with similar numbers of problems. Records of one problem stay together."""
    problems = list(dict.fromkeys(record.problem for record in table.records))
    return [part_of(table, set(problems[index::count])) for index in range(count)]


def merged(
    base: TunedTable, table: TunedTable, parts: Sequence[TunedTable]
) -> tuple[TunedTable, list[Record]]:
    """Returns a table with the changes of verified parts of `base`, and the records that were skipped.

    A record of a part replaces that of the table if both have the same config. A receipt that a part of
    `base` had and the verified part has not is of a kernel that failed. It is left out.
    """
    before = {_place(record): record for record in base.records}
    records = {_place(record): record for record in table.records}
    receipts = {(receipt.digest, receipt.versions.makers): receipt for receipt in table.receipts}
    times = {(timing.problem, timing.kernel, timing.versions.makers): timing for timing in table.times}
    failed: set[tuple[str, tuple[str, ...]]] = set()
    skipped: list[Record] = []
    for part in parts:
        for record in part.records:
            if record == before.get(_place(record)):
                continue
            current = records.get(_place(record))
            if current is None or current.config != record.config:
                skipped.append(record)
            else:
                records[_place(record)] = record
        proven = {(receipt.digest, receipt.versions.makers): receipt for receipt in part.receipts}
        # Records with the verdict need no receipt.
        passed = (record for record in part.records if record.verdict and record.verdict.passed)
        own = {(record.kernel, record.versions.makers) for record in passed}
        earlier = part_of(base, {record.problem for record in part.records}).receipts
        failed |= {(receipt.digest, receipt.versions.makers) for receipt in earlier} - proven.keys() - own
        receipts |= proven
        times |= {(timing.problem, timing.kernel, timing.versions.makers): timing for timing in part.times}
    result = msgspec.structs.replace(
        table,
        records=tuple(records.values()),
        receipts=tuple(receipt for key, receipt in receipts.items() if key not in failed),
        times=tuple(times.values()),
    )
    return without_strays(result), skipped


def _place(record: Record) -> tuple[str, bool]:
    return record.problem.key, serves_any_tensors(record)


def main() -> None:
    """Splits or merges, by the command line."""
    parser = argparse.ArgumentParser(description="Splits a table, and merges its verified parts.")
    commands = parser.add_subparsers(dest="command", required=True)
    split = commands.add_parser("split")
    split.add_argument("table", type=Path)
    split.add_argument("count", type=int)
    split.add_argument("folder", type=Path)
    merge = commands.add_parser("merge")
    for name in ("base", "table"):
        merge.add_argument(name, type=Path)
    merge.add_argument("parts", type=Path, nargs="+")
    options = parser.parse_args()
    try:
        table = load_table(options.table)
        if options.command == "split":
            options.folder.mkdir(parents=True, exist_ok=True)
            for index, part in enumerate(parts_of(table, options.count)):
                (options.folder / f"part-{index}.json").write_bytes(dump_table(part))
            return
        parts = [load_table(path) for path in options.parts]
        result, skipped = merged(load_table(options.base), table, parts)
    except FlashtuneError as error:
        sys.exit(f"error: {error}")
    options.table.write_bytes(dump_table(result))
    for record in skipped:
        print(f"skipped {record.problem.key}: the table has another config now")
    renewed = len(set(result.records) - set(table.records))
    print(f"{renewed} records were renewed; {len(result.receipts)} receipts, {len(table.receipts)} before")


if __name__ == "__main__":
    main()
