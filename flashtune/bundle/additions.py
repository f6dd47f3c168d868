"""Adds kernels to a bundle that several processes write."""

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from flashtune.bundle.bundle_file import (
    Bundle,
    Frames,
    assembled,
    bundle_of,
    dump_bundle,
    open_bundle,
    with_both,
)
from flashtune.bundle.index import Frame, Index, Piece
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
            own = [_with_earlier(entry, earlier) for entry in own]
            added = bundle_of(dump_bundle(arch, version, own, codes), str(path))
            content = joined([added, *earlier], recipes())
        except (BundleError, LookupError):
            content = dump_bundle(arch, version, own, codes)
        replace_file(path, content, 0o644)


def _with_earlier(entry: Entry, earlier: Sequence[Bundle]) -> Entry:
    """Returns an entry with the recipes and receipts that earlier entries of equal machine code have."""
    present = (bundle.entry(entry.kernel) for bundle in earlier)
    same = (other for other in present if other is not None and other.machine == entry.machine)
    return functools.reduce(with_both, same, entry)


def joined(bundles: Sequence[Bundle], recipes: Collection[str]) -> bytes:
    """Returns the file of all kernels that have one of some recipes. Frames are copied as they are.

    If several bundles have a recipe or a kernel, the first one's kernel serves it.
    """
    entries: dict[str, Frame] = {}
    groups: list[Frame] = []
    codes: dict[str, Piece] = {}
    kernels: dict[str, str] = {}  # By recipe.
    frames = Frames()
    for bundle in bundles:
        index = bundle.index
        numbers: dict[int, int] = {}  # Of copied groups, by their numbers in this bundle.
        for kernel in sorted(index.entries.keys() - entries.keys()):
            entry = bundle.entry(kernel)
            assert entry is not None
            fresh = {recipe: kernel for recipe in entry.recipes if recipe in recipes} | kernels
            if len(fresh) == len(kernels):
                continue
            kernels = fresh
            entries[kernel] = frames.copy(bundle, index.entries[kernel])
            for code in sorted({stage.code for stage in entry.stages} - codes.keys()):
                piece = index.codes[code]
                if piece.group not in numbers:
                    numbers[piece.group] = len(groups)
                    groups.append(frames.copy(bundle, index.groups[piece.group]))
                codes[code] = msgspec.structs.replace(piece, group=numbers[piece.group])
    first = bundles[0].index
    index = Index(first.arch, first.flashtune, frames.size, tuple(groups), entries, codes, kernels)
    return assembled(index, frames.packed)
