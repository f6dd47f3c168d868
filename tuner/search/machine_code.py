"""The machine code of selected kernels in the bundle of a database, which later processes load."""

from collections.abc import Sequence

import msgspec

from flashtune.bundle.additions import add_entries
from flashtune.bundle.records import Entry, Receipt
from flashtune.core import VERSION
from flashtune.core.notices import warn_once
from flashtune.db.location import bundle_file
from flashtune.db.store import Store, StoredRecord
from flashtune.launch.bundles import recipe_of
from flashtune.tuner.candidates import SearchTask
from flashtune.tuner.execution.backend import SearchWorkers
from flashtune.tuner.search.selection import candidate_of


def store_machine_code(
    scope: SearchTask, rows: Sequence[StoredRecord], tools: SearchWorkers, store: Store
) -> None:
    """Adds the machine code of selected records to the bundle of a database, with their verdicts as receipts.

    Code of kernels that the database no longer selects is removed. Warns if the file cannot be written.
    """
    entries: list[Entry] = []
    codes: dict[str, bytes] = {}
    for record in (row.record for row in rows):
        job = tools.measurer.machine_code(scope, candidate_of(record))
        tools.clock.wait_for_all((job,))
        for entry, own in job.result():
            if entry.kernel != record.kernel or record.verdict is None:
                continue  # The verdict holds for one specialization only.
            receipt = Receipt(entry.machine, record.target, record.versions.driver, record.verdict)
            recipe = recipe_of(record, record.specialization)
            entries.append(msgspec.structs.replace(entry, recipes=(recipe,), receipts=(receipt,)))
            codes |= own
    if not entries:
        return
    path = bundle_file(store.url, scope.target.arch)
    try:
        add_entries(path, scope.target.arch, VERSION, entries, codes, lambda: selected_recipes(store))
    except OSError as error:  # A lock that is held too long is one too.
        warn_once("bundle file", f"machine code cannot be stored in {path}: {error.strerror or error}")


def selected_recipes(store: Store) -> set[str]:
    """Returns the recipes of the kernels that a database selects."""
    chosen = (row.record for row in (*store.selections(), *store.fallbacks()))
    return {recipe_of(record, record.specialization) for record in chosen if record.config is not None}
