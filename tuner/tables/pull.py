"""Copies the selections of one GPU from another database, checked as imported tables are."""

from __future__ import annotations

import warnings
from pathlib import Path

import msgspec

from flashtune.bundle.additions import add_entries
from flashtune.bundle.bundle_file import open_bundle
from flashtune.bundle.records import Entry
from flashtune.core import VERSION
from flashtune.core.errors import BundleError, FlashtuneError, StoreError, UsageError
from flashtune.core.notices import FlashtuneWarning
from flashtune.core.record import Record
from flashtune.core.target import device_target
from flashtune.db.eligibility import serves_any_tensors
from flashtune.db.location import bundle_file, database_url, describe
from flashtune.db.store import MergeCounts, Store, open_store
from flashtune.db.table import TunedTable
from flashtune.tuner.search.machine_code import selected_recipes
from flashtune.tuner.tables.admission import facts_of, why_refused
from flashtune.tuner.tables.lookup import existing_store, resolved_target
from flashtune.tuner.tables.table_files import Watch, counted, unwatched


class Pulled(msgspec.Struct, frozen=True):
    """Result of a pull: the GPU, the counts of rows, and the number of kernels with new machine code."""

    target: str
    counts: MergeCounts
    kernels: int


def pull(source: str, target_name: str | None, db: str | None, watch: Watch = unwatched) -> Pulled:
    """Copies selections, fallbacks and their machine code into a database.

    Records that an import would refuse are left out, with a warning. Conflicting selections are resolved as
    by an import.

    Args:
        source: The other database, a path or a URL.
        target_name: The GPU, None for this machine's.
        db: The database that is written.
        watch: Called with the progress.

    Raises:
        StoreError: There is no such database, or one of both cannot be used.
        FlashtuneError: The other database has no selections of the GPU.
    """
    address, own = database_url(source), database_url(db)
    where = describe(address)
    if address == own:
        raise UsageError(f"{where} is the database itself: name the one to write, with --db")
    with existing_store(source) as other:
        if other is None:
            raise StoreError(f"there is no database {where}: check its name")
        if target_name is None:
            target = device_target().name
        else:
            targets = {row.record.target for row in other.selections()}
            target = resolved_target(target_name, targets) or target_name
        chosen = [row.record for row in other.selections(target)]
        partial = {record.problem for record in chosen if not serves_any_tensors(record)}
        chosen += [row.record for row in other.fallbacks(target) if row.record.problem in partial]
    if not chosen:
        raise FlashtuneError(f"{where} has no selections of {target}: search there first")
    records = _admissible(tuple(chosen), where, watch)

    def stored(number: int) -> None:
        watch("storing records", number, len(records))

    with open_store(db) as store:
        counts = store.merge_tables(TunedTable(target=target, records=records), progress=stored)
        kernels = 0
        gpu = facts_of(chosen[0])
        if gpu is not None and gpu.is_nvidia:
            files = bundle_file(address, gpu.arch), bundle_file(own, gpu.arch)
            kernels = _copy_code(*files, gpu.arch, target, store)
    return Pulled(target, counts, kernels)


def _admissible(records: tuple[Record, ...], where: str, watch: Watch) -> tuple[Record, ...]:
    reasons = [why_refused(record) for record in counted(records, "checking records", watch)]
    refused = [reason for reason in reasons if reason]
    if refused:
        message = f"{len(refused)} selections of {where} were left out: {refused[0]}"
        warnings.warn(message, FlashtuneWarning, stacklevel=3)
    return tuple(record for record, reason in zip(records, reasons, strict=True) if not reason)


def _copy_code(source: Path, path: Path, arch: str, target: str, store: Store) -> int:
    """Copies verified machine code of a database's selections, and returns the number of new kernels."""
    if source == path or not source.exists():
        return 0
    try:
        bundle = open_bundle(source, own=True)
        if bundle.index.arch != arch:
            return 0
        bundle.check_all()
        wanted = map(bundle.entry_of_recipe, sorted(selected_recipes(store)))
        entries = [entry for entry in wanted if entry is not None and target in entry.verified_on]
        entries = [entry for entry in entries if not _has(path, entry, target)]
        codes = {stage.code: bundle.code(stage.code) for entry in entries for stage in entry.stages}
        if entries:
            add_entries(path, arch, VERSION, entries, codes, lambda: selected_recipes(store))
        return len(entries)
    except BundleError as error:
        warnings.warn(f"machine code was left out: {error}", FlashtuneWarning, stacklevel=3)
    except OSError as error:
        message = f"machine code cannot be stored in {path}: {error.strerror or error}"
        warnings.warn(message, FlashtuneWarning, stacklevel=3)
    return 0


def _has(path: Path, entry: Entry, target: str) -> bool:
    """Returns whether a file has verified machine code of a kernel."""
    try:
        present = open_bundle(path, own=True).entry(entry.kernel)
    except BundleError:
        return False
    return present is not None and target in present.verified_on and {*entry.recipes} <= {*present.recipes}
