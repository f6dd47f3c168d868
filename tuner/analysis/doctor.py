"""Checks this machine's libraries, GPUs, compilers, caches and database."""

import enum
import os
import platform
import sys
from collections.abc import Callable, Iterator

import msgspec

from flashtune.core.errors import FlashtuneError, MachineError, TargetError
from flashtune.core.machine import WRITTEN_FOLDERS, folder_fault
from flashtune.core.record import Record, VerificationStatus
from flashtune.core.target import TARGETS, Target, device_target, find_target
from flashtune.dispatch.versions import NO_DRIVER, current_versions

OLDEST_TORCH = (2, 10)
OLDEST_TRITON, NEWEST_TRITON = (3, 6), (3, 9)
# Target if there is neither a GPU nor --target: compilers need no GPU.
OFFLINE_TARGET = "h100"


class Level(enum.StrEnum):
    """Result of a check."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


class Finding(msgspec.Struct, frozen=True):
    """One line of the report."""

    name: str  # Subject of the check.
    level: Level  # Result.
    message: str  # The finding as text.
    advice: str = ""  # The remedy; empty if none is needed.


def examine(
    target: Target | None, db: str | None, watch: Callable[[str], None] = lambda step: None
) -> Iterator[Finding]:
    """Returns all findings in order.

    Without a target, this machine's GPU is checked, or `OFFLINE_TARGET` if it has none. `watch` is called
    with each step before it begins.
    """
    yield Finding("python", Level.OK, f"{platform.python_version()} at {sys.executable}")
    watch("importing torch and triton")
    libraries = [library("torch", OLDEST_TORCH, None), library("triton", OLDEST_TRITON, NEWEST_TRITON)]
    yield from libraries
    watch("trying the caches and the database")
    yield from caches()
    yield database(db)
    if any(finding.level is Level.FAIL for finding in libraries):
        return
    watch("asking for GPUs")
    yield from gpus()
    chosen = target or _target_here()
    yield interpreter()
    yield from compilers(chosen, watch)
    yield from bundles(chosen)
    yield shipped(chosen)


def library(name: str, oldest: tuple[int, int], newest: tuple[int, int] | None) -> Finding:
    """Returns whether a library can be imported, in a tested version."""
    import importlib

    try:
        version = str(importlib.import_module(name).__version__)
    except (ImportError, OSError) as error:
        return Finding(name, Level.FAIL, f"cannot be imported: {error}", f"install it: pip install {name}")
    number = _numbers(version)
    if number < oldest:
        advice = "flashtune needs {}.{} or newer: upgrade it".format(*oldest)
        return Finding(name, Level.FAIL, version, advice)
    if newest and number > newest:
        advice = "flashtune is tested up to {}.{}: run flashtune verify".format(*newest)
        return Finding(name, Level.WARN, version, advice)
    return Finding(name, Level.OK, version)


def bundles(target: Target) -> Iterator[Finding]:
    """Returns the bundles whose kernels are loaded instead of compiled, and why others are not used."""
    from flashtune.db.location import database_bundle
    from flashtune.launch.bundles import opened

    results = [*opened(target, database_bundle(target.arch))]
    if not results:
        yield Finding("bundle", Level.OK, f"none for {target.arch}: first calls compile their kernels")
    for bundle in results:
        if isinstance(bundle, FlashtuneError):
            yield Finding("bundle", Level.WARN, str(bundle), "until then kernels are compiled")
        else:
            number = len(bundle.index.entries)
            yield Finding("bundle", Level.OK, f"{bundle.where}, {number:,} kernels for {target.arch}")


def _numbers(version: str) -> tuple[int, int]:
    first, _, rest = version.partition(".")
    second = rest.partition(".")[0]
    return (int(first), int(second)) if first.isdigit() and second.isdigit() else (0, 0)


def gpus() -> Iterator[Finding]:
    """Returns the GPUs that torch sees, their driver, and whether their properties match the table."""
    import torch

    from flashtune.dispatch.versions import driver_version

    driver = driver_version()
    if not torch.cuda.is_available():
        advice = "searches work offline with --target, and nothing is timed"
        if driver != "none":
            advice = (
                f"driver {driver} is loaded, so install a torch built for GPUs, or check CUDA_VISIBLE_DEVICES"
            )
        yield Finding("gpu", Level.WARN, "torch sees none", advice)
        return
    yield Finding("driver", Level.OK, driver)
    for index in range(torch.cuda.device_count()):
        try:
            yield gpu(index, device_target(index))
        except FlashtuneError as error:
            yield Finding(
                f"gpu {index}", Level.FAIL, str(error), "it cannot be searched: use another --device"
            )


def gpu(index: int, target: Target) -> Finding:
    """Compares one GPU with the table's entry of its name."""
    facts = (
        f"{target.name}, {target.arch}, {target.sm_count} multiprocessors, "
        f"{target.sram_per_block:,} B of SRAM a block"
    )
    name = f"gpu {index}"
    listed = next((entry for entry in TARGETS if entry.name == target.name), None)
    if listed is None:
        advice = "not in the table of GPUs: capacities are the device's, peak rates are estimates"
        return Finding(name, Level.WARN, facts, advice)
    fields = ("arch", "sram_per_block", "sram_per_sm", "registers_per_sm", "sm_count")
    differing = [
        f"{field} {getattr(target, field)} instead of {getattr(listed, field)}"
        for field in fields
        if getattr(target, field) != getattr(listed, field)
    ]
    if differing:
        advice = "the device's own facts are used; results are not comparable with a whole GPU's"
        return Finding(name, Level.WARN, f"{facts}; unlike the table: {', '.join(differing)}", advice)
    return Finding(name, Level.OK, facts)


def _target_here() -> Target:
    try:
        return device_target(0)
    except TargetError:
        return find_target(OFFLINE_TARGET)


def interpreter() -> Finding:
    """Returns whether kernels run in the interpreter on the CPU."""
    import numpy as np
    import triton

    from flashtune.launch.compilation import interpreting

    if not interpreting():
        return Finding("interpreter", Level.OK, "off (TRITON_INTERPRET=1 runs kernels on the CPU, slowly)")
    if _numbers(triton.__version__) == (3, 6) and _numbers(np.__version__) >= (2, 4):
        advice = "Triton 3.6 interprets with numpy below 2.4 only: pip install 'numpy<2.4'"
        return Finding("interpreter", Level.FAIL, f"on, with numpy {np.__version__}", advice)
    advice = "16-bit problems are computed in fp32 and nothing is timed: unset TRITON_INTERPRET for a GPU"
    return Finding("interpreter", Level.WARN, "on: kernels run on the CPU", advice)


def caches() -> Iterator[Finding]:
    """Returns whether the compilers' cache folders can be written and have free space."""
    for written in WRITTEN_FOLDERS:
        name = written.what.removeprefix("the ").lower()
        fault = folder_fault(*written)
        if fault is None:
            yield Finding(name, Level.OK, str(written.where()))
        else:
            yield Finding(name, Level.FAIL, fault)


def database(db: str | None) -> Finding:
    """Returns whether the database can be read, and its contents."""
    from flashtune.db.location import database_url, describe, read_write_uri, sqlite_path
    from flashtune.tuner.tables.lookup import existing_store

    try:
        url = database_url(db)
        where, file = describe(url), sqlite_path(url)
        if file is not None:
            read_write_uri(file)
        with existing_store(db) as store:
            if store is None:
                return Finding("database", Level.OK, f"{where}: none yet, the first search creates it")
            count = len(store.selections())
    except FlashtuneError as error:
        return Finding("database", Level.FAIL, str(error), "or name another one by --db or FLASHTUNE_DB")
    said = f"{where}: {count} selections"
    if file is not None and not os.access(file, os.W_OK):
        return Finding("database", Level.WARN, f"{said}, read-only", "a search needs another --db")
    return Finding("database", Level.OK, said)


def shipped(target: Target) -> Finding:
    """Returns whether a tuned table ships for the target, and how many of its kernels dispatch must check."""
    from flashtune.db.table import shipped_table
    from flashtune.dispatch.platform import PLATFORM
    from flashtune.tuner.tables.listing import standing

    name = "shipped table"
    try:
        table = shipped_table(target.name)
    except FlashtuneError as error:
        return Finding(name, Level.FAIL, str(error), "reinstall flashtune")
    if table is None:
        return Finding(
            name, Level.WARN, f"none for {target.name}", "run flashtune search for the shapes in use"
        )
    records = table.records
    shapes = {record.problem for record in records}
    kernels = {record.kernel for record in records} - {None}
    unproven = {
        record.kernel
        for record in records
        if standing(record) is VerificationStatus.UNPROVEN
        and PLATFORM.bundles.find(record, record.specialization, target) is None
    }
    summary = f"{len(shapes)} shapes for {target.name} with {len(kernels)} kernels"
    here = current_versions(records[0].family) if records else None
    if not unproven or here is None:
        return Finding(name, Level.OK, f"{summary}, all verified")
    driver = "" if here.driver == NO_DRIVER else f" and driver {here.driver}"
    advice = "run flashtune verify to check them now, or they are checked before their first use"
    return Finding(
        name,
        Level.WARN,
        f"{summary}, {len(unproven)} not verified under Triton {here.triton}{driver}",
        advice,
    )


def compilers(target: Target, watch: Callable[[str], None] = lambda step: None) -> Iterator[Finding]:
    """Compiles a small kernel of each pass, in Triton and in Gluon, for a target.

    `watch` is called with each kernel before it is compiled.
    """
    from flashtune.launch.compilation import interpreting

    if interpreting():
        yield Finding("compiler", Level.WARN, "not tried", "the interpreter is on: unset TRITON_INTERPRET")
        return
    from flashtune.core.kernel import Specialization
    from flashtune.dispatch.lookup import default_selections
    from flashtune.templates.registry import find_family
    from flashtune.tuner.workloads.shapes import parse_shape

    for problem in parse_shape("heads=1,seqlen=128,head_dim=64,dtype=fp16,direction=forward|backward"):
        tried: set[bool] = set()
        for selection in default_selections(problem, target, Specialization()):
            portable = find_family(selection.record.family).interpreted
            if portable not in tried:
                watch(f"compiling a kernel of {selection.record.family} for {target.name}")
                yield compiler(selection.record, target, portable)
            tried.add(portable)


def compiler(record: Record, target: Target, portable: bool) -> Finding:
    """Returns whether one kernel compiles.

    Otherwise portable kernels compute the outputs, and torch the gradients.
    """
    from flashtune.launch.kernel_cache import kernel_of
    from flashtune.tuner.binary.resources import read_resources

    basic = portable and not record.problem.is_backward
    name = "compiler" if basic else f"compiler of {record.family}"
    try:
        resources = read_resources(kernel_of(record, record.specialization), target)
    except MachineError as error:
        return Finding(name, Level.FAIL, f"{target.name}: {error}")
    except FlashtuneError as error:
        said = f"{target.name}: {error}"
        if basic:
            return Finding(name, Level.FAIL, said, "reinstall triton, or upgrade it")
        instead = "torch computes gradients" if portable else "portable kernels serve"
        return Finding(
            name, Level.WARN, said, f"{instead} instead, slower: use a Triton that it is tested with"
        )
    said = f"compiles for {target.name} ({target.arch}) in {resources.compile_seconds:.1f} s"
    return Finding(name, Level.OK, said)
