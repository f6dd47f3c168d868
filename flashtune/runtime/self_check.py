"""A kernel that nobody proved here is proven before its first use, once per machine."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from flashtune.core.errors import StoreError, TableError
from flashtune.core.file_lock import alone_with
from flashtune.core.notices import warn_once
from flashtune.dispatch.versions import current_versions
from flashtune.launch.compilation import kernel_folder

if TYPE_CHECKING:
    from flashtune.core.config import Config
    from flashtune.core.kernel import Kernel
    from flashtune.core.problem import Direction, Dtype, Feature, Problem
    from flashtune.core.record import Verdict
    from flashtune.core.target import Target
    from flashtune.launch.forward import Binary

# A check takes a part of a second; whoever holds the lock for so long is not checking any more.
LOCK_SECONDS = 30.0

# What this process found or read, by (digest, target's name).
_known: dict[tuple[str, str], bool] = {}
# What checks of this process have been rehearsed: each loads what others of its kind need.
_rehearsed: set[tuple[Direction, Dtype, frozenset[Feature]]] = set()


def known_verdict(kernel: Kernel, target: Target) -> bool | None:
    """Whether a kernel passed its self-check here, or verification for the shipped table; None if unknown.

    Only verdicts under the installed versions count.

    Raises:
        StoreError: The database is damaged, locked or out of reach.
    """
    from flashtune.db.light.reader import open_reader

    key = (kernel.digest, target.name)
    if key not in _known:
        here = current_versions(kernel.family)
        reader = open_reader()
        passed = reader.check(kernel.digest, target.name, here) if reader else None
        # A failure on this machine outweighs a pass on another.
        if passed is None and (kernel.digest, here.makers) in _shipped_receipts(target.name):
            passed = True
        if passed is None:
            return None
        _known[key] = passed
    return _known[key]


@functools.cache
def _shipped_receipts(target_name: str) -> frozenset[tuple[str, tuple[str, ...]]]:
    """The kernels that passed verification for the shipped table: digest and versions."""
    from flashtune.db.table import shipped_table

    table = shipped_table(target_name)
    receipts = table.receipts if table else ()
    return frozenset((one.digest, one.versions.makers) for one in receipts)


def known_seconds(kernel: Kernel, target: Target) -> float | None:
    """What the self-check of a kernel, once loaded, took on this machine; None where that is not known.

    Raises:
        StoreError: The database is damaged, locked or out of reach.
    """
    from flashtune.db.light.reader import open_reader

    reader = open_reader()
    try:
        check = reader and reader.remembered(kernel.digest, target.name, current_versions(kernel.family))
    except TableError:
        return None  # a row of whatever origin: whether the kernel passed is another column
    return check.seconds if check else None


def passes_self_check(
    kernel: Kernel,
    problem: Problem,
    config: Config,
    target: Target,
    device: torch.device,
    compiled: Binary | None = None,
) -> bool:
    """Whether a kernel is right on this GPU, by memory or by a check of a part of a second.

    Of the processes of this machine one checks and the others wait for what it finds. The verdict is
    remembered in the user's database; where that cannot be read or written, a warning says so and
    this process alone remembers.

    Args:
        kernel: The kernel.
        problem: What it computes: of this its static features count.
        config: Its config.
        target: The GPU.
        device: The GPU as torch names it.
        compiled: Its binary, where it is at hand.

    Raises:
        KernelError: It does not compile, load or launch.
    """
    known = _remembered(kernel, target)
    if known is not None:
        return known
    with _one_of_many(kernel):
        known = _remembered(kernel, target)
        if known is not None:
            return known
        start = time.perf_counter()
        verdict = _verdict(kernel, problem, config, target, device, compiled)
        seconds = time.perf_counter() - start
        _known[kernel.digest, target.name] = verdict.passed
        _remember(kernel, target, verdict, seconds)
    return verdict.passed


@contextlib.contextmanager
def rehearsing(
    kernel: Kernel, problem: Problem, config: Config, target: Target, device: torch.device
) -> Iterator[None]:
    """Gets ready to check a kernel that is unknown here, in a thread that ends with the block.

    The block compiles and loads the kernel meanwhile. What a check then no longer has to do, importing its
    modules and loading torch's kernels, takes a fresh process as long as the check itself. Once does for each
    pass, type and set of features. Of a thread that multiplied matrices torch keeps a handle of cuBLAS, with
    its workspace, for the next one: 32 MiB on Hopper.
    """
    kind = (problem.direction, problem.dtype, problem.features)
    if kind in _rehearsed or _remembered(kernel, target) is not None:
        yield
        return
    _rehearsed.add(kind)
    enough = threading.Event()
    # Memory that is freed there is found again by whoever computes on the same stream.
    stream = torch.cuda.current_stream(device)

    def rehearsed() -> None:
        from flashtune.verification.warmup import rehearse

        # Nothing is decided here: what torch cannot do, for want of memory say, shows in the check. A new
        # thread's device is the first, which a stream alone would go back to, and begin to use.
        with contextlib.suppress(RuntimeError), torch.cuda.device(device), torch.cuda.stream(stream):
            rehearse(kernel, problem, config, target, device, enough.is_set)

    thread = threading.Thread(target=rehearsed, name="flashtune-rehearsal", daemon=True)
    thread.start()
    try:
        yield
    finally:
        enough.set()
        thread.join()


def forget_verdicts() -> None:
    """The database is asked again."""
    _known.clear()


def _remembered(kernel: Kernel, target: Target) -> bool | None:
    """As `known_verdict`, for a process that goes on without a database."""
    try:
        return known_verdict(kernel, target)
    except StoreError as error:
        _tell_of_database(error)
        return None


@contextlib.contextmanager
def _one_of_many(kernel: Kernel) -> Iterator[None]:
    """Of the processes of this machine one at a time, where the kernel cache can be written.

    The lock saves work and nothing hangs on it: whoever cannot have it checks for itself.
    """
    folder = kernel_folder()
    lock = folder / f"{kernel.family}_{kernel.digest}.lock"
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            held.enter_context(alone_with(lock, LOCK_SECONDS))
        yield


def _verdict(
    kernel: Kernel,
    problem: Problem,
    config: Config,
    target: Target,
    device: torch.device,
    compiled: Binary | None,
) -> Verdict:
    from flashtune.verification.cases import Level
    from flashtune.verification.check import check_rendered

    return check_rendered(kernel, problem, config, target, device, Level.QUICK, compiled=compiled)


def _remember(kernel: Kernel, target: Target, verdict: Verdict, seconds: float) -> None:
    from flashtune.db.codec import Check
    from flashtune.db.light.self_checks import remember_check

    check = Check(
        digest=kernel.digest,
        target=target.name,
        versions=current_versions(kernel.family),
        verdict=verdict,
        seconds=seconds,
    )
    try:
        remember_check(check)
    except StoreError as error:
        _tell_of_database(error)


def _tell_of_database(error: StoreError) -> None:
    warn_once("database", f"{error} (until then kernels are checked again in every process)")
