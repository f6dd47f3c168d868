"""Verifies the machine code of a bundle on GPUs, in several processes, and writes receipts."""

import contextlib
import functools
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from flashtune.bundle.bundle_file import Bundle, bundle_of, joined, open_bundle, with_both
from flashtune.bundle.driver import Driver
from flashtune.bundle.records import Entry, Receipt
from flashtune.core.errors import MachineError
from flashtune.core.kernel import Specialization
from flashtune.core.machine import machine_errors
from flashtune.core.problem import Problem
from flashtune.core.record import Record, Verdict
from flashtune.core.target import Target, device_target
from flashtune.dispatch.tables import Tables
from flashtune.dispatch.versions import driver_version
from flashtune.launch.bundle_binding import BundledBinary, load_entry
from flashtune.launch.bundle_entries import TAIL
from flashtune.launch.bundles import bundled_kernel
from flashtune.launch.compilation import first_line
from flashtune.tuner.execution.cpus import available_cpus
from flashtune.tuner.execution.gpu_jobs import fatal_error, leave_if_broken
from flashtune.tuner.execution.processes import Workers, exit_code_of, lacked_memory
from flashtune.tuner.tables.bundles import choices
from flashtune.tuner.tables.table_files import write_file
from flashtune.tuner.tables.warm import Call, Watch
from flashtune.tuner.verify.verify_jobs import POLL_SECONDS, Runs, failure, with_memory
from flashtune.verification.check import check_rendered

# Time limit of a kernel. Processes share the GPU, and the first kernel of a process loads torch's kernels.
KERNEL_SECONDS = 90.0
# Interval between two writes of the file.
SAVE_SECONDS = 30.0
# Jobs for each process, the running one among them. So no process waits for the next job.
QUEUED = 2
# GPU memory of a process.
WORKER_BYTES = 8 * 2**30


class Use(NamedTuple):
    """A problem that a kernel serves, by its record."""

    kernel: str
    problem: Problem
    record: Record
    specialization: Specialization


# Kernels that one process verifies one after another.
Job = tuple[Use, ...]
# A receipt, or why a kernel has none.
Result = Receipt | str
Check = Callable[[Path, Job, int], list[Result]]


def unverified(bundle: Bundle, target: Target) -> set[str]:
    """Returns the kernels of a bundle that need a receipt of a GPU and have none."""
    return {
        entry.kernel
        for entry in bundle.entries()
        if entry.family != TAIL and target.name not in entry.verified_on
    }


def uses_of(
    bundle: Bundle,
    kernels: Collection[str],
    calls: Iterable[Call],
    target: Target,
    tables: Tables,
    watch: Watch = lambda phase, done, total: None,
) -> dict[str, Use]:
    """Returns a use of each of some kernels that dispatch chooses for calls, by the kernel's digest."""
    chosen, _ = choices(calls, target, tables, watch)
    uses: dict[str, Use] = {}
    for recipe, choice in chosen.items():
        kernel = bundle.index.recipes.get(recipe)
        if kernel in kernels and kernel is not None:
            same = msgspec.structs.replace(choice.problem, causal=choice.record.problem.causal)
            uses.setdefault(kernel, Use(kernel, same, choice.record, choice.specialization))
    return uses


def process_count(devices: Sequence[int]) -> int:
    """Returns the number of processes for each GPU. Checks mostly wait for their process."""
    free = min(torch.cuda.mem_get_info(device)[0] for device in devices)
    return max(1, min(available_cpus() // len(devices), free // WORKER_BYTES))


def receipt_of(
    bundle: Bundle,
    use: Use,
    target: Target,
    device: torch.device,
    driver: Driver,
    check: Callable[..., Verdict] = check_rendered,
) -> Result:
    """Verifies a kernel at the full level. Exits the process if the CUDA context broke."""
    entry, config = bundle.entry(use.kernel), use.record.config
    assert entry is not None
    assert config is not None
    try:
        binary = BundledBinary(entry, load_entry(entry, bundle.code, driver, device), driver)
        kernel = bundled_kernel(entry, use.record, use.specialization)
        verdict = with_memory(
            lambda: check(kernel, use.problem, config, target, device, compiled=binary), device
        )
    except MachineError:
        raise
    except Exception as error:  # noqa: BLE001 - one kernel must not end the verification of all others
        leave_if_broken(device, error)
        return first_line(error)
    if not verdict.passed:
        return f"its results are wrong: {verdict.failed}"
    return Receipt(entry.machine, target.name, driver_version(), verdict)


@machine_errors()
def check_kernels(path: Path, job: Job, index: int) -> list[Result]:
    """Verifies kernels of a file on a GPU, in a worker process."""
    device, target = torch.device("cuda", index), device_target(index)
    bundle, driver = _opened(path)
    with torch.cuda.device(device):
        return [receipt_of(bundle, use, target, device, driver) for use in job]


@functools.cache
def _opened(path: Path) -> tuple[Bundle, Driver]:
    return open_bundle(path), Driver()


def verify(
    path: Path,
    out: Path,
    uses: Mapping[str, Use],
    devices: Sequence[int],
    processes: int,
    runs: Runs,
    watch: Watch = lambda phase, done, total: None,
    check: Check = check_kernels,
) -> dict[str, Result]:
    """Verifies kernels of a bundle, and returns the result of each that was reached, by its digest.

    The bundle with all receipts so far is written at intervals and at the end, also after an error.

    Args:
        path: The bundle.
        out: The file to write, which may be the same.
        uses: The kernels with a use of each.
        devices: Indexes of the GPUs.
        processes: The number of processes for each GPU.
        runs: The limit. After its time, no kernel starts. After its `stop`, running kernels are dropped.
        watch: Called with the progress.
        check: Verifies kernels in a worker process. If the process dies, its kernels are verified apart.
    """
    results: dict[str, Result] = {}
    file, written, saved = open_bundle(path), 0, time.monotonic()

    def save() -> None:
        nonlocal file, written, saved
        content = joined([file], changed=_with_receipts(file, [*results.items()][written:]))
        write_file(out, content)
        file, written, saved = bundle_of(content, str(out)), len(results), time.monotonic()

    def reached(jobs: Collection[Job], processes: int) -> Iterator[tuple[Use, Result]]:
        with contextlib.closing(_results(jobs, path, devices, processes, runs, check)) as stream:
            for use, result in stream:
                yield use, result
                watch("verifying", len(results), len(uses))
                if time.monotonic() - saved > SAVE_SECONDS:
                    save()

    # Errors of writing come before the work.
    save()
    crowded: list[Job] = []
    try:
        for use, result in reached(_jobs(uses), processes):
            if isinstance(result, str) and lacked_memory(result):
                crowded.append((use,))
            else:
                results[use.kernel] = result
        # Other processes held the memory.
        for use, result in reached(crowded, 1):
            results[use.kernel] = result
    finally:
        save()
    return results


def _with_receipts(bundle: Bundle, results: Iterable[tuple[str, Result]]) -> Iterator[Entry]:
    """Yields the entries of kernels that passed, with their receipts."""
    for kernel, result in results:
        entry = bundle.entry(kernel)
        assert entry is not None
        if isinstance(result, Receipt):
            yield with_both(msgspec.structs.replace(entry, receipts=(result,)), entry)


def _jobs(uses: Mapping[str, Use]) -> list[Job]:
    """Returns the kernels of each problem as a job, because a process caches inputs and references."""
    jobs = defaultdict(list)
    for use in uses.values():
        jobs[use.problem, use.specialization.alignment].append(use)
    return [*map(tuple, jobs.values())]


def _results(
    jobs: Collection[Job],
    path: Path,
    devices: Sequence[int],
    processes: int,
    runs: Runs,
    check: Check,
) -> Generator[tuple[Use, Result]]:
    """Runs jobs in processes of all GPUs, and yields the results as they come."""
    if not jobs:
        return
    waiting, free = deque(jobs), deque([*devices] * processes * QUEUED)
    workers = {device: Workers(processes) for device in devices}
    running: dict[Future[list[Result]], tuple[int, Job]] = {}
    try:
        while True:
            while waiting and free and not runs.ended:
                device, job = free.popleft(), waiting.popleft()
                seconds = KERNEL_SECONDS * len(job)
                running[workers[device].schedule(check, (path, job, device), seconds)] = device, job
            if not running or runs.stopped:
                return
            for finished in wait(running, POLL_SECONDS, FIRST_COMPLETED).done:
                device, job = running.pop(finished)
                free.append(device)
                lost = fatal_error(exit_code_of(finished)) or failure(finished)
                if not lost:
                    yield from zip(job, finished.result(), strict=True)
                elif len(job) > 1:
                    waiting.extend((use,) for use in job)
                else:
                    yield job[0], lost
    finally:
        for pool in workers.values():
            pool.stop()
