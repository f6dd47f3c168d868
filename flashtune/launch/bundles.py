"""The bundles of this process: which kernels are loaded from them instead of compiled."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

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


def bundle_path(capability: int) -> Path | None:
    """Returns the file of `FLASHTUNE_BUNDLE`, otherwise that of an installed package, otherwise None."""
    named = variable(VARIABLE)
    if named:
        return user_path(named, VARIABLE)
    package = importlib.util.find_spec(PACKAGE.format(capability))
    if package is None or not package.submodule_search_locations:
        return None
    return Path(package.submodule_search_locations[0], FILE)


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


class Bundles:
    """Kernels of a bundle, each loaded once. Only kernels with a receipt of this GPU are used."""

    def __init__(self, driver: Driver | None = None) -> None:
        """Opens nothing before the first look-up. Tests pass a driver."""
        self._given = driver
        self._open: dict[str, Bundle | None] = {}  # By architecture. None after an error or without a file.
        self._loaded: dict[tuple[str, torch.device], BundledBinary] = {}

    @functools.cached_property
    def _driver(self) -> Driver:
        from flashtune.bundle.driver import Driver

        return self._given or Driver()

    def find(self, record: Record, specialization: Specialization, target: Target) -> Entry | None:
        """Returns the verified entry of a record's kernel, or None.

        No driver compiles machine code again, so a receipt holds under all drivers. Warns once of a bundle
        that cannot be used.
        """
        entry = self.entry(lambda: recipe_of(record, specialization), target)
        if entry is None:
            return None
        machine = entry.machine
        held = ((receipt.machine, receipt.target) for receipt in entry.receipts)
        return entry if (machine, target.name) in held else None

    def entry(self, recipe: Callable[[], str], target: Target) -> Entry | None:
        """Returns the entry of a recipe, verified or not, or None. Warns once of an unusable bundle."""
        bundle = self._bundle(target)
        if bundle is None:
            return None
        try:
            return bundle.entry_of_recipe(recipe())
        except BundleError as error:
            self._forget(target, error)
            return None

    def load(self, entry: Entry, target: Target, device: torch.device) -> BundledBinary | None:
        """Returns the code of an entry on a device. None after an error, of which it warns."""
        from flashtune.launch.bundle_binding import BundledBinary, load_entry

        bundle = self._open[target.arch]
        binary = self._loaded.get((entry.kernel, device))
        if binary is None and bundle is not None:
            try:
                functions = load_entry(entry, bundle.code, self._driver, device)
            except (BundleError, KernelError) as error:
                self._forget(target, error)
                return None
            binary = self._loaded[entry.kernel, device] = BundledBinary(entry, functions, self._driver)
        return binary

    def is_open(self, target: Target) -> bool:
        """Whether there is a bundle for a GPU."""
        return self._bundle(target) is not None

    def _bundle(self, target: Target) -> Bundle | None:
        if target.arch not in self._open:
            self._open[target.arch] = self._opened(target)
        return self._open[target.arch]

    def _opened(self, target: Target) -> Bundle | None:
        try:
            path = bundle_path(target.capability) if target.is_nvidia else None
            if path is None:
                return None
            from flashtune.bundle.bundle_file import open_bundle

            bundle = open_bundle(path)
            if bundle.index.arch != target.arch:
                raise BundleError(
                    f"the bundle {path} is for {bundle.index.arch}, not for {target.arch}: name another one"
                )
        except UsageError as error:
            self._forget(target, error)
            return None
        return bundle

    def _forget(self, target: Target, error: Exception) -> None:
        self._open[target.arch] = None
        warn_once("bundle", f"{error} (until then kernels are compiled)")
