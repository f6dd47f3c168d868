"""The bundles of this process: which kernels are loaded from them instead of compiled."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import torch

from flashtune.core import VERSION
from flashtune.core.errors import BundleError, KernelError, UsageError
from flashtune.core.kernel import Kernel, Specialization
from flashtune.core.machine import user_path, variable
from flashtune.core.notices import warn_once
from flashtune.core.record import Record
from flashtune.core.target import Target
from flashtune.templates.family import kernel_of_source
from flashtune.templates.registry import find_family, template_hash

# Imported when a bundle is used, so that other first calls do not wait for it.
if TYPE_CHECKING:
    from flashtune.bundle.bundle_file import Bundle
    from flashtune.bundle.driver import Driver
    from flashtune.bundle.records import Entry
    from flashtune.launch.bundle_binding import BundledBinary

VARIABLE = "FLASHTUNE_BUNDLE"
# A package of data for each architecture, with this file.
PACKAGE, FILE = "flashtune_kernels_sm{}", "kernels.bundle"
# The driver's words.
OUT_OF_MEMORY = "out of memory"


def bundle_paths(capability: int, database: Path | None) -> list[Path]:
    """Returns the bundles of a GPU that exist, in the order of look-up.

    First is the file of `FLASHTUNE_BUNDLE`, then that of the database, then that of an installed package.
    """
    named = variable(VARIABLE)
    paths = [user_path(named, VARIABLE)] if named else []
    if database is not None and database.exists():
        paths.append(database)
    package = importlib.util.find_spec(PACKAGE.format(capability))
    folders = package.submodule_search_locations if package else None
    return [*paths, *(Path(folder, FILE) for folder in (folders or ())[:1])]


def opened(target: Target, database: Path | None) -> Iterator[Bundle | UsageError]:
    """Yields the bundles of a GPU in the order of look-up, and in place of unusable ones their errors."""
    try:
        paths = bundle_paths(target.capability, database) if target.is_nvidia else []
    except UsageError as error:
        yield error
        return
    for path in paths:
        from flashtune.bundle.bundle_file import open_bundle

        try:
            bundle = open_bundle(path, own=path == database)
        except BundleError as error:
            yield error
            continue
        if bundle.index.arch == target.arch:
            yield bundle
        else:
            words = f"the bundle {path} is for {bundle.index.arch}, not for {target.arch}: use another"
            yield BundleError(words)


def recipe_of(record: Record, specialization: Specialization) -> str:
    """Returns a hash of all values on which a record's kernel depends, 32 hex digits. Renders nothing.

    Another release of flashtune may pass other arguments to a kernel, so its hashes differ.
    """
    parts = (
        VERSION, record.family, template_hash(record.family), record.problem.computation, record.config,
        specialization,
    )  # fmt: skip
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:32]


def bundled_kernel(entry: Entry, record: Record, specialization: Specialization) -> Kernel:
    """Returns the kernel of a record that an entry replaces, without its source."""
    assert record.config is not None
    family = find_family(record.family)
    kernel = kernel_of_source(family, record.problem, record.config, specialization, "")
    # The digest of the source that was compiled.
    kernel.__dict__["digest"] = entry.kernel
    return kernel


class Located(NamedTuple):
    """An entry and the bundle that has it."""

    entry: Entry
    bundle: Bundle


class Bundles:
    """Kernels of bundles, each loaded once. Only kernels with a receipt of this GPU are used.

    `FLASHTUNE_BUNDLE` comes first, then the bundle of the database, then that of an installed package.
    """

    def __init__(
        self, driver: Driver | None = None, of_database: Callable[[str], Path | None] = lambda arch: None
    ) -> None:
        """Opens nothing before the first look-up. Tests pass a driver.

        `of_database` returns the file of the database's bundle for an architecture.
        """
        self._given = driver
        self._of_database = of_database
        self._open: dict[str, list[Bundle]] = {}  # By architecture, in order. Without those with an error.
        self._loaded: dict[tuple[str, str, torch.device], BundledBinary] = {}

    @functools.cached_property
    def _driver(self) -> Driver:
        from flashtune.bundle.driver import Driver

        return self._given or Driver()

    def of(self, target: Target) -> list[Bundle]:
        """Returns the bundles for a GPU, in the order of look-up. Warns once of those with an error."""
        if target.arch not in self._open:
            usable = []
            for bundle in opened(target, self._of_database(target.arch)):
                if isinstance(bundle, UsageError):
                    _warn(bundle)
                else:
                    usable.append(bundle)
            self._open[target.arch] = usable
        return self._open[target.arch]

    def find(self, record: Record, specialization: Specialization, target: Target) -> Located | None:
        """Returns the verified entry of a record's kernel, or None.

        No driver compiles machine code again, so a receipt holds under all drivers.
        """
        if not self.of(target):
            return None
        for located in self.entries(recipe_of(record, specialization), target):
            if target.name in located.entry.verified_on:
                return located
        return None

    def entries(self, recipe: str, target: Target) -> Iterator[Located]:
        """Yields the entries of a recipe, verified or not."""
        for bundle in self.of(target):
            try:
                entry = bundle.entry_of_recipe(recipe)
            except BundleError as error:
                self._forget(target, bundle, error)
                continue
            if entry is not None:
                yield Located(entry, bundle)

    def load(self, located: Located, target: Target, device: torch.device) -> BundledBinary | None:
        """Returns the code of an entry on a device. None after an error, of which it warns.

        Raises:
            KernelError: The device has no memory for the code.
        """
        from flashtune.launch.bundle_binding import BundledBinary, load_entry

        entry, bundle = located
        key = bundle.where, entry.kernel, device
        binary = self._loaded.get(key)
        if binary is None:
            try:
                functions = load_entry(entry, bundle.code, self._driver, device)
            except (BundleError, KernelError) as error:
                if OUT_OF_MEMORY in str(error):
                    raise  # A compiled kernel would not fit either, and memory may be free later.
                self._forget(target, bundle, error)
                return None
            binary = self._loaded[key] = BundledBinary(entry, functions, self._driver)
        return binary

    def _forget(self, target: Target, bundle: Bundle, error: Exception) -> None:
        self._open[target.arch] = [other for other in self._open[target.arch] if other is not bundle]
        _warn(error)


def _warn(error: Exception) -> None:
    warn_once("bundle", f"{error} (until then kernels are compiled)")
