"""Copies the selections of one GPU from another database, checked as imported tables are."""

from __future__ import annotations

import warnings

import msgspec

from flashtune.bundle.additions import add_entries
from flashtune.bundle.bundle_file import open_bundle
from flashtune.core import VERSION
from flashtune.core.errors import BundleError, FlashtuneError, StoreError, UsageError
from flashtune.core.notices import FlashtuneWarning
from flashtune.core.record import Record
from flashtune.core.target import Target, device_target
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
    """Copies the selections and fallbacks of a GPU, and their machine code, from the database `source`.

    Records that an import would refuse are left out, with a warning. Conflicting selections are resolved as
    by an import. Without `target_name`, they are those of this machine's GPU.
    """
    address = database_url(source)
    where = describe(address)
    if address == database_url(db):
        raise UsageError(f"{where} is the database itself: name the one to write, with --db")
    with existing_store(source) as other:
        if other is None:
            raise StoreError(f"there is no database {where}: check its name")
        stored = {row.record.target for row in other.selections()} if target_name else set[str]()
        target = resolved_target(target_name, stored) or device_target().name
        chosen = [row.record for row in other.selections(target)]
        partial = {record.problem for record in chosen if not serves_any_tensors(record)}
        chosen += [row.record for row in other.fallbacks(target) if row.record.problem in partial]
    if not chosen:
        raise FlashtuneError(f"{where} has no selections of {target}: search there first")
    records = _admissible(tuple(chosen), where, watch)
    with open_store(db) as store:
        counts = store.merge_tables(TunedTable(target=target, records=records))
        gpu = facts_of(chosen[0])
        kernels = _copy_code(address, gpu, store) if gpu is not None and gpu.is_nvidia else 0
    return Pulled(target, counts, kernels)


def _admissible(records: tuple[Record, ...], where: str, watch: Watch) -> tuple[Record, ...]:
    reasons = [why_refused(record) for record in counted(records, "checking records", watch)]
    if refused := [*filter(None, reasons)]:
        message = f"{len(refused)} selections of {where} were left out: {refused[0]}"
        warnings.warn(message, FlashtuneWarning, stacklevel=3)
    return tuple(record for record, reason in zip(records, reasons, strict=True) if not reason)


def _copy_code(url: str, target: Target, store: Store) -> int:
    """Copies verified machine code of a database's selections, and returns the number of new kernels."""
    source, path = bundle_file(url, target.arch), bundle_file(store.url, target.arch)
    if source == path or not source.exists():
        return 0
    try:
        bundle = open_bundle(source, own=True)
        bundle.check_all()
        known = open_bundle(path, own=True).index.recipes if path.exists() else {}
        found = map(bundle.entry_of_recipe, sorted(selected_recipes(store) - known.keys()))
        entries = [entry for entry in found if entry is not None and target.name in entry.verified_on]
        codes = {stage.code: bundle.code(stage.code) for entry in entries for stage in entry.stages}
        if entries and bundle.index.arch == target.arch:
            add_entries(path, target.arch, VERSION, entries, codes, lambda: selected_recipes(store))
            return len(entries)
    except (BundleError, OSError) as error:
        warnings.warn(f"machine code was not copied: {error}", FlashtuneWarning, stacklevel=3)
    return 0
