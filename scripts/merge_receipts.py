"""Splits a tuned table for verification by several processes, and merges the verified parts.

    python -m scripts.merge_receipts split TABLE COUNT FOLDER
    flashtune verify --table FOLDER/part-0.json --missing --time --write verified-0.json    # for each part
    python -m scripts.merge_receipts merge BASE TABLE verified-*.json

BASE is the table that was split. TABLE may have changed since, by searches. It is overwritten.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from flashtune.core.errors import FlashtuneError
from flashtune.core.problem import Problem
from flashtune.core.record import Record
from flashtune.db.codec import Check
from flashtune.db.eligibility import serves_any_tensors
from flashtune.db.table import Timing, TunedTable, dump_table, load_table
from flashtune.tuner.tables.table_files import write_file
from flashtune.tuner.tables.table_receipts import part_of, rendered_digests, without_strays
from flashtune.verification.check import joined

# The digest of a kernel and the versions that compiled it.
_Binary = tuple[str, tuple[str, ...]]


def parts_of(table: TunedTable, count: int) -> list[TunedTable]:
    """Returns at most `count` parts of a table with similar numbers of problems.

    Records that share a kernel or a sibling stay together, because a receipt needs a pass at the shapes of
    all of them. Records of one problem stay together too.
    """
    groups: dict[str, set[str]] = {}
    for record in table.records:
        names = {record.problem.key, *rendered_digests((record,))}
        group = names.union(*(groups.get(name, ()) for name in names))
        groups.update(dict.fromkeys(group, group))
    problems: dict[int, set[Problem]] = {}
    for record in table.records:
        problems.setdefault(id(groups[record.problem.key]), set()).add(record.problem)
    parts: list[set[Problem]] = [set() for _ in range(count)]
    for together in sorted(problems.values(), key=len, reverse=True):
        min(parts, key=len).update(together)
    return [part_of(table, part) for part in parts if part]


def merged(
    base: TunedTable, table: TunedTable, parts: Sequence[TunedTable]
) -> tuple[TunedTable, list[Record]]:
    """Returns a table with the changes of verified parts of `base`, and the records that were skipped.

    - A changed record of a part replaces that of the table if the table still has the record of `base`.
    - A changed receipt is taken if all parts with the kernel have a pass of it. Records of the table that
      `base` lacks must have a pass too.
    - A receipt that a part of `base` had and the verified part has not is of a kernel that failed. It is
      left out.
    """
    before = {_place(record): record for record in base.records}
    records = {_place(record): record for record in table.records}
    times = _times(table)
    failed: set[_Binary] = set()
    changed: dict[_Binary, Check] = {}
    skipped: list[Record] = []
    newer = tuple(record for record in table.records if record != before.get(_place(record)))
    passes = [_Passes(part) for part in (*parts, msgspec.structs.replace(table, records=newer))]
    for part, passed in zip(parts, passes, strict=False):
        for record in part.records:
            place = _place(record)
            if record == before.get(place):
                continue
            if place in before and records.get(place) == before[place]:
                records[place] = record
            else:
                skipped.append(record)
        earlier = part_of(base, {record.problem for record in part.records})
        receipts, times_before = _receipts(earlier), _times(earlier)
        failed |= {binary for binary in receipts if passed.lacks(binary)}
        changed |= {
            binary: receipt for binary, receipt in passed.receipts.items() if receipt != receipts.get(binary)
        }
        times |= {key: timing for key, timing in _times(part).items() if timing != times_before.get(key)}
    kept = _receipts(table)
    for binary, receipt in changed.items():
        if not any(passed.lacks(binary) for passed in passes):
            verdicts = [each.receipts[binary].verdict for each in passes[:-1] if binary in each.receipts]
            kept[binary] = msgspec.structs.replace(receipt, verdict=joined(verdicts))
    # Records with the time need no entry in the table's times.
    own = {(record.problem.key, record.kernel, record.versions.makers) for record in records.values()}
    result = msgspec.structs.replace(
        table,
        records=tuple(records.values()),
        receipts=tuple(receipt for binary, receipt in kept.items() if binary not in failed),
        times=tuple(timing for key, timing in times.items() if key not in own),
    )
    return without_strays(result), skipped


class _Passes:
    """The passed kernels of a part."""

    def __init__(self, part: TunedTable) -> None:
        self.receipts = _receipts(part)
        self._rendered = rendered_digests(part.records)
        self._own: dict[str | None, set[tuple[str, ...] | None]] = {}
        for record in part.records:
            is_passed = record.verdict is not None and record.verdict.passed
            self._own.setdefault(record.kernel, set()).add(record.versions.makers if is_passed else None)

    def lacks(self, binary: _Binary) -> bool:
        """Returns whether the part has a kernel without a pass. Records with the verdict need no receipt."""
        digest, makers = binary
        return digest in self._rendered and binary not in self.receipts and self._own.get(digest) != {makers}


def _receipts(table: TunedTable) -> dict[_Binary, Check]:
    return {(receipt.digest, receipt.versions.makers): receipt for receipt in table.receipts}


def _times(table: TunedTable) -> dict[tuple[str, str, tuple[str, ...]], Timing]:
    return {(timing.problem, timing.kernel, timing.versions.makers): timing for timing in table.times}


def _place(record: Record) -> tuple[str, bool]:
    return record.problem.key, serves_any_tensors(record)


def main(arguments: list[str] | None = None) -> None:
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
    options = parser.parse_args(arguments)
    try:
        table = load_table(options.table)
        if options.command == "split":
            for index, part in enumerate(parts_of(table, options.count)):
                write_file(options.folder / f"part-{index}.json", dump_table(part))
            return
        parts = [load_table(path) for path in options.parts]
        result, skipped = merged(load_table(options.base), table, parts)
        write_file(options.table, dump_table(result))
    except FlashtuneError as error:
        sys.exit(f"error: {error}")
    for record in skipped:
        print(f"skipped {record.problem.key}: the table has another record now")
    renewed = len(set(result.records) - set(table.records))
    print(f"{renewed} records were renewed; {len(result.receipts)} receipts, {len(table.receipts)} before")


if __name__ == "__main__":
    main()
