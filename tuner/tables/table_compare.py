"""Comparison of two tables of one GPU: each problem's time relative to its baselines."""

import statistics
from collections.abc import Iterable

import msgspec
import torch

from flashtune.core.errors import TableError, UsageError
from flashtune.core.record import Measurement, Record
from flashtune.core.target import Target
from flashtune.db.eligibility import by_problem, serves_any_tensors
from flashtune.db.table import TunedTable, dump_table
from flashtune.dispatch.versions import current_versions
from flashtune.tuner.candidates import Candidate
from flashtune.tuner.tables.admission import digest_of
from flashtune.tuner.tables.table_receipts import without_strays

# A ratio may fall by this share before both kernels are timed again.
LIMIT = 0.02


class Change(msgspec.Struct, frozen=True):
    """The records of both tables that serve one problem, for the same tensors."""

    problem: str  # The problem's key.
    old: Record  # The record of the old table.
    new: Record | None  # The record of the new table; None if it has none.

    @property
    def ratio(self) -> float | None:
        """Returns the new speed over the old one; None if it is unknown.

        It is corrected for the speed of the machine in each run: the median ratio of the times of baselines
        that both records have.
        """
        before, after = self.old.measurement, self.new.measurement if self.new else None
        if before is None or after is None:
            return None
        if before == after:
            return 1.0
        old, new = ({peer.name: peer.ms for peer in measurement.peers} for measurement in (before, after))
        machine = [new[name] / ms for name, ms in old.items() if name in new]
        return statistics.median(machine) * before.ms / after.ms if machine else None

    @property
    def words(self) -> str:
        """Returns the ratio with three decimals, or why there is none."""
        if self.new is None:
            return "lost"
        return "not comparable" if self.ratio is None else f"{self.ratio:.3f}"


class Retimed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Interleaved times of the kernels of a change on the same inputs, in ms."""

    problem: str  # The problem's key.
    # Digests of the kernels.
    old: str
    new: str
    # Median times.
    old_ms: float
    new_ms: float


def compare(old: TunedTable, new: TunedTable) -> tuple[Change, ...]:
    """Returns the changes between two tables, in the order of the old one. Equal records are left out.

    Selections and their fallbacks for other tensors are both compared.
    """
    if old.target != new.target:
        raise TableError(f"the tables are of {old.target} and {new.target}: compare tables of one GPU")
    after = _serving(new)
    changes: list[Change] = []
    for key, before in _serving(old).items():
        change = Change(key[0], before, after.get(key))
        if change.new != before and change not in changes[-1:]:
            changes.append(change)
    return tuple(changes)


def losses(changes: Iterable[Change], limit: float = LIMIT) -> tuple[Change, ...]:
    """Returns the changes that lose a record, lose more than `limit` of its speed, or cannot be compared."""
    return tuple(change for change in changes if change.ratio is None or change.ratio < 1 - limit)


def retime(
    change: Change, target: Target, device: torch.device
) -> tuple[Retimed, tuple[Measurement, Measurement]]:
    """Times both kernels of a change interleaved, with their baselines."""
    from flashtune.tuner.execution.timed_runs import run_finals

    assert change.new is not None
    old, new = change.old, change.new
    if old.config is None or new.config is None:
        raise UsageError(f"a baseline serves {change.problem}, which has no kernel to time: leave it out")
    candidates = Candidate(old.family, old.config), Candidate(new.family, new.config)
    before, after = run_finals(old.problem, candidates, new.specialization, target, device)
    row = Retimed(change.problem, str(old.kernel), str(new.kernel), before.ms, after.ms)
    return row, (before, after)


def retime_losses(lost: Iterable[Change], table: TunedTable) -> tuple[tuple[Retimed, ...], bytes]:
    """Times the kernels of losses on this machine's GPU; also returns the table with the faster ones.

    A problem that the table lost gets its old record. The new time of the faster kernel is stored in its
    record if that has the versions here, and its config renders the same kernel.
    """
    lost = tuple(lost)
    records = {_place(record): record for record in table.records}
    rows = []
    gpu = _gpu(table) if any(change.new is not None for change in lost) else None
    for change in lost:
        if change.new is None or gpu is None:
            records[_place(change.old)] = change.old
            continue
        row, (before, after) = retime(change, *gpu)
        rows.append(row)
        if before.ms < after.ms:
            _put_back(change.old, change.new, records)
        faster, measurement = (change.old, before) if before.ms < after.ms else (change.new, after)
        if (
            faster.kernel is None
            or digest_of(faster) != faster.kernel
            or records.get(_place(faster)) != faster
        ):
            continue
        if faster.specialization != change.new.specialization:
            # Both were timed with the new record's specialization.
            continue
        if faster.versions.makers == current_versions(faster.family).makers:
            records[_place(faster)] = msgspec.structs.replace(faster, measurement=measurement)
    merged = msgspec.structs.replace(table, records=tuple(records.values()))
    return tuple(rows), dump_table(without_strays(merged))


def _gpu(table: TunedTable) -> tuple[Target, torch.device]:
    import torch

    from flashtune.core.target import device_target

    if not torch.cuda.is_available() or device_target(0).name != table.target:
        raise UsageError(f"timing needs the table's GPU, {table.target}: run this command there")
    return device_target(0), torch.device("cuda", 0)


def _put_back(old: Record, new: Record, records: dict[tuple[str, bool], Record]) -> None:
    """Replaces a new record by the old one. A new one that serves any tensors stays as the fallback."""
    if serves_any_tensors(old) and not serves_any_tensors(new):
        del records[_place(new)]
        # Another record for any tensors has a change of its own, which decides.
        records.setdefault(_place(old), old)
    else:
        records[_place(old)] = old


def _serving(table: TunedTable) -> dict[tuple[str, bool], Record]:
    """Returns the records of a table by problem and by whether they must serve any tensors."""
    serving = {}
    for key, records in by_problem(table.records).items():
        serving[key, False] = records[0]
        if serves_any_tensors(records[-1]):
            serving[key, True] = records[-1]
    return serving


def _place(record: Record) -> tuple[str, bool]:
    return record.problem.key, serves_any_tensors(record)
