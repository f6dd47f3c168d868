"""Adds kernels to a bundle that several processes write."""

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

from flashtune.bundle.bundle_file import bundle_of, dump_bundle, joined, open_bundle, united
from flashtune.bundle.records import Entry
from flashtune.core.errors import BundleError
from flashtune.core.files import alone_with, replace_file

LOCK_SECONDS = 10
# Larger files start anew.
MAX_BYTES = 256 * 1024 * 1024


def add_entries(
    path: Path,
    arch: str,
    version: str,
    entries: Iterable[Entry],
    codes: Mapping[str, bytes],
    recipes: Callable[[], Collection[str]],
) -> None:
    """Adds kernels to a file, and removes kernels that have none of some recipes.

    `recipes` is called when no other process can add kernels. Readers have the old or the new file. A file
    that is damaged, large, another user's or for another architecture is replaced by the new kernels.

    Raises:
        OSError: The folder cannot be written.
        TimeoutError: Another process holds the lock.
    """
    own = list(entries)
    with alone_with(Path(f"{path}.lock"), LOCK_SECONDS):
        try:
            earlier = [open_bundle(path, own=True)]
            if earlier[0].index.arch != arch or earlier[0].index.size > MAX_BYTES:
                earlier = []
            present = (bundle.entry(entry.kernel) for bundle in earlier for entry in own)
            own = united([*own, *filter(None, present)])
            added = bundle_of(dump_bundle(arch, version, own, codes), str(path))
            content = joined([added, *earlier], recipes())
        except (BundleError, LookupError):
            content = dump_bundle(arch, version, own, codes)
        replace_file(path, content, 0o644)
