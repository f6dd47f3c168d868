"""The self-check of kernels without a valid receipt, before their first use and once per machine."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from flashtune.core.caches import keep
from flashtune.core.config import Config
from flashtune.core.errors import FlashtuneError, StoreError, UsageError
from flashtune.core.files import alone_with
from flashtune.core.kernel import Kernel
from flashtune.core.notices import warn_once
from flashtune.core.problem import Direction, Dtype, Feature, Problem
from flashtune.core.record import Verdict
from flashtune.core.target import Target
from flashtune.dispatch.versions import current_versions
from flashtune.launch.binding import Binary
from flashtune.launch.compilation import kernel_folder

# A check takes a fraction of a second. A process that holds the lock longer than this is no longer checking.
LOCK_SECONDS = 30.0


class CheckTask(NamedTuple):
    """A kernel to check on a GPU. Only the static features of the problem matter."""

    kernel: Kernel
    problem: Problem
    config: Config
    target: Target
    device: torch.device


class SelfChecks:
    """The verdicts on kernels of a process, and the checks that find them.

    Verdicts are stored in the user's database. If that cannot be read or written, a warning is given, and
    only this process keeps the verdict.
    """

    def __init__(
        self,
        check: Callable[..., Verdict] | None = None,
        preload: Callable[..., None] | None = None,
        folder: Callable[[], Path] = kernel_folder,
    ) -> None:
        """Makes checks without any verdict.

        Args:
            check: As `check_rendered` of `flashtune.verification`, which is imported at the first check.
            preload: As `preload` of the same module.
            folder: Returns the folder of the locks of checks.
        """
        self._check, self._preload = check, preload
        self._folder = folder
        # Verdicts that this process computed or read, by (digest, target's name).
        self._verdicts: dict[tuple[str, str], Verdict] = {}
        # Kinds of checks whose modules and CUDA kernels this process has preloaded.
        self._preloaded: dict[tuple[Direction, Dtype, frozenset[Feature]], bool] = {}
        # The verdicts of the shipped table on kernels, by target's name, then by (digest, versions).
        self._receipts: dict[str, dict[tuple[str, tuple[str, ...]], Verdict]] = {}

    def known_verdict(self, kernel: Kernel, target: Target) -> bool | None:
        """Returns whether a kernel passed its self-check here, or verification for the shipped table.

        None if there is no verdict. Only verdicts with the installed versions count.
        """
        from flashtune.db.light.reader import open_reader

        key = (kernel.digest, target.name)
        verdict = self._verdicts.get(key)
        if verdict is None:
            here = current_versions(kernel.family)
            reader = open_reader()
            check = reader.remembered(kernel.digest, target.name, here) if reader else None
            # A failure on this machine overrides a pass on another one.
            if check:
                verdict = check.verdict
            else:
                verdict = self._shipped_receipts(target.name).get((kernel.digest, here.makers))
            if verdict is None:
                return None
            keep(self._verdicts, key, verdict)
        return verdict.passed

    def failed_comparison(self, kernel: Kernel, target: Target) -> str:
        """Returns the first failed comparison of a kernel that `passes` refused, with its error."""
        verdict = self._verdicts.get((kernel.digest, target.name))
        return verdict.failed if verdict and verdict.failed else "the comparison is not known"

    def _shipped_receipts(self, target_name: str) -> dict[tuple[str, tuple[str, ...]], Verdict]:
        from flashtune.db.table import shipped_table

        if target_name not in self._receipts:
            table = shipped_table(target_name)
            verdicts: dict[tuple[str, tuple[str, ...]], Verdict] = {}
            for receipt in table.receipts if table else ():
                verdicts[receipt.digest, receipt.versions.makers] = receipt.verdict
            keep(self._receipts, target_name, verdicts)
        return self._receipts[target_name]

    def known_seconds(self, kernel: Kernel, target: Target) -> float | None:
        """Returns the time of a kernel's self-check on this machine after loading, in s, or None."""
        from flashtune.db.light.reader import open_reader

        reader = open_reader()
        check = reader and reader.remembered(kernel.digest, target.name, current_versions(kernel.family))
        return check.seconds if check else None

    def passes(self, task: CheckTask, compiled: Binary | None = None) -> bool:
        """Returns whether a kernel is correct on this GPU, from the cache or by a check of less than 1 s.

        One process of this machine checks while the others wait for its verdict.
        """
        kernel, target = task.kernel, task.target
        verdict = self._stored_verdict(kernel, target)
        if verdict is not None:
            return verdict
        with self._one_of_many(kernel):
            verdict = self._stored_verdict(kernel, target)
            if verdict is not None:
                return verdict
            from flashtune.verification import check
            from flashtune.verification.cases import Level

            run = self._check or check.check_rendered
            start = time.perf_counter()
            result = run(*task, Level.QUICK, compiled=compiled)
            seconds = time.perf_counter() - start
            keep(self._verdicts, (kernel.digest, target.name), result)
            _remember(kernel, target, result, seconds)
        return result.passed

    @contextlib.contextmanager
    def preloading(self, task: CheckTask) -> Iterator[None]:
        """Prepares the check of a kernel without a verdict, in a thread that ends with the block.

        The block compiles and loads the kernel in the meantime. The thread imports the modules of a check and
        loads torch's CUDA kernels. In a fresh process this takes as long as the check. It is done once for
        each pass, type and set of features. After matrix products in the thread, torch keeps a cuBLAS handle
        with its workspace of 32 MiB on Hopper for the next thread.
        """
        problem, device = task.problem, task.device
        kind = (problem.direction, problem.dtype, problem.features)
        if kind in self._preloaded or self._stored_verdict(task.kernel, task.target) is not None:
            yield
            return
        keep(self._preloaded, kind, True)
        enough = threading.Event()
        # Memory freed on this stream can be reused by later work on it.
        stream = torch.cuda.current_stream(device)

        def run() -> None:
            from flashtune.verification import check

            # Errors are ignored here, because the check reports them. A new thread's device is the first one.
            # After the stream's block alone, torch would return to it and start to use it.
            with contextlib.suppress(RuntimeError), torch.cuda.device(device), torch.cuda.stream(stream):
                preload = self._preload or check.preload
                preload(*task, enough.is_set)

        thread = threading.Thread(target=run, name="flashtune-preload", daemon=True)
        thread.start()
        try:
            yield
        finally:
            enough.set()
            thread.join()

    def _stored_verdict(self, kernel: Kernel, target: Target) -> bool | None:
        """Returns `known_verdict`, or None with a warning if the database cannot be read."""
        try:
            return self.known_verdict(kernel, target)
        except (StoreError, UsageError) as error:
            _warn_of_database(error)
            return None

    @contextlib.contextmanager
    def _one_of_many(self, kernel: Kernel) -> Iterator[None]:
        """Runs the block in one process of this machine at a time, if the kernel cache is writable.

        The lock only saves work. A process that cannot get it runs its own check.
        """
        folder = self._folder()
        lock = folder / f"{kernel.family}_{kernel.digest}.lock"
        with contextlib.ExitStack() as held:
            with contextlib.suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)
                held.enter_context(alone_with(lock, LOCK_SECONDS))
            yield


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
    except (StoreError, UsageError) as error:
        _warn_of_database(error)


def _warn_of_database(error: FlashtuneError) -> None:
    warn_once("database", f"{error} (until then kernels are checked again in every process)")
