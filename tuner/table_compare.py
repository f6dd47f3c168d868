"""Compares two tables of one GPU: each problem's time relative to its peers, before and after."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from flashtune.db.rules import serves_any_tensors
from flashtune.db.table import TunedTable, dump_table
from flashtune.errors import TableError, UsageError
from flashtune.record import Record
from flashtune.tuner.candidates import Candidate

if TYPE_CHECKING:
    import torch

    from flashtune.target import Target

# A ratio may fall by this share before both kernels are timed again.
LIMIT = 0.02


class Change(msgspec.Struct, frozen=True):
    """One problem in both tables.

    Attributes:
        problem: Its key.
        old: Its record in the old table.
        new: Its record in the new table, None where that has none.
    """

    problem: str
    old: Record
    new: Record | None

    @property
    def ratio(self) -> float | None:
        """Speed relative to peers in the new table over that in the old; None where one has no peers."""
        before = relative_speed(self.old)
        after = None if self.new is None else relative_speed(self.new)
        return after / before if before and after else None


class Retimed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The kernels of a change, timed in turn on the same inputs, in ms.

    Attributes:
        problem: The problem's key.
        old, new: Digests of the kernels.
        old_ms, new_ms: Median times.
    """

    problem: str
    old: str
    new: str
    old_ms: float
    new_ms: float


def relative_speed(record: Record) -> float | None:
    """The time of the fastest SDPA backend over the record's, from one run; None where none was timed."""
    if record.measurement is None or not record.measurement.ms:
        return None
    peers = [peer.ms for peer in record.measurement.peers if peer.name.startswith("sdpa-")]
    return min(peers) / record.measurement.ms if peers else None


def speed_text(record: Record | None) -> str:
    """The relative speed of a record with three decimals, `-` where there is none."""
    speed = None if record is None else relative_speed(record)
    return "-" if speed is None else f"{speed:.3f}"


def compare(old: TunedTable, new: TunedTable) -> tuple[Change, ...]:
    """The changes between two tables, in the order of the old one. Equal records are left out.

    A fallback, which serves tensors of any strides, is compared with the other table's fallback.

    Raises:
        TableError: The tables are of different GPUs.
    """
    if old.target != new.target:
        raise TableError(f"the tables are of {old.target} and {new.target}: compare tables of one GPU")
    after = {_place(record): record for record in new.records}
    pairs = ((record, after.get(_place(record))) for record in old.records)
    return tuple(Change(before.problem.key, before, now) for before, now in pairs if now != before)


def losses(changes: Iterable[Change], limit: float = LIMIT) -> tuple[Change, ...]:
    """The changes that lose a record, or more than `limit` of its speed relative to peers."""
    return tuple(
        change
        for change in changes
        if change.new is None or (change.ratio is not None and change.ratio < 1 - limit)
    )


def retime(change: Change, target: Target, device: torch.device) -> tuple[Retimed, Record]:
    """Times both kernels of a change in turn, with their peers; also returns the faster one's record.

    Raises:
        KernelError: A kernel does not compile or load.
    """
    from flashtune.tuner.finals import run_finals

    assert change.new is not None
    records = (change.old, change.new)
    candidates = tuple(Candidate(record.family, record.config) for record in records if record.config)
    assert len(candidates) == len(records), "baselines are not timed again"
    times = run_finals(change.old.problem, candidates, change.new.specialization, target, device)
    old, new = (
        msgspec.structs.replace(record, measurement=measurement)
        for record, measurement in zip(records, times, strict=True)
    )
    row = Retimed(change.problem, str(old.kernel), str(new.kernel), times[0].ms, times[1].ms)
    return row, old if times[0].ms < times[1].ms else new


def retime_losses(lost: Iterable[Change], table: TunedTable) -> tuple[tuple[Retimed, ...], bytes]:
    """Times the kernels of losses in turn on the GPU here; also returns the table with the faster ones.

    A problem that the table lost gets its old record back.

    Raises:
        UsageError: The GPU here is not the table's.
        KernelError: A kernel does not compile or load.
    """
    import torch

    from flashtune.target import device_target

    if not torch.cuda.is_available() or device_target(0).name != table.target:
        raise UsageError(f"timing needs the table's GPU, {table.target}: run this command there")
    device = torch.device("cuda", 0)
    records = {_place(record): record for record in table.records}
    rows = []
    for change in lost:
        faster = change.old
        if change.new is not None:
            row, faster = retime(change, device_target(0), device)
            rows.append(row)
        records[_place(faster)] = faster
    return tuple(rows), dump_table(msgspec.structs.replace(table, records=tuple(records.values())))


def _place(record: Record) -> tuple[str, bool]:
    return record.problem.key, serves_any_tensors(record)
