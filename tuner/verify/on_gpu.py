"""Verifies and times the kernels of a table's records on their GPU.

Each record has two kernels: its own and its sibling, which has the opposite setting of `lse`. Both are
verified at the same level.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from flashtune.core.kernel import Kernel
from flashtune.core.record import Measurement, Record, Resources, Verdict
from flashtune.core.target import names_gpu
from flashtune.db.codec import Check
from flashtune.db.table import TunedTable
from flashtune.dispatch.masked_sdpa import timed_ways
from flashtune.dispatch.versions import current_versions
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render
from flashtune.tuner.execution.cpus import available_cpus
from flashtune.tuner.execution.processes import lacked_memory, start_pool
from flashtune.tuner.tables.table_receipts import sibling
from flashtune.tuner.verify import verify_jobs
from flashtune.tuner.verify.verify_jobs import Runs, Subject
from flashtune.verification.check import full_probes, joined
from flashtune.verification.schedule_fuzzing import delayed

# Checks wait for the CPU most of the time, so several processes share the GPU.
MAX_WORKERS = 8
# A check holds the inputs and references of two large problems, of up to 2 GiB each.
WORKER_BYTES = 16 * 2**30


# The digest of a kernel and the versions that compiled it.
_Binary = tuple[str, tuple[str, str, str, str]]


class OnGpu(msgspec.Struct, frozen=True):
    """The results of a GPU."""

    outcomes: Mapping[Subject, Outcome] = {}
    checks: tuple[Check, ...] = ()  # All verdicts.
    # Records with a passed kernel of their own, each with the check.
    passed: tuple[tuple[Record, Check], ...] = ()
    # A check for each kernel that passed at the shapes of all its records.
    receipts: tuple[Check, ...] = ()
    times: Mapping[Record, Measurement] = {}  # Times of the kernels of records under the versions here.
    # Resources of timed kernels that differ from those of their records, by digest.
    resources: Mapping[str, Resources] = {}


class Outcome(msgspec.Struct, frozen=True):
    """The result of a record."""

    failed: str  # Why a check or the timing of its kernels failed; empty if none failed.
    missed: bool  # Whether the run ended before all of its checks.
    ran: bool  # Whether its own kernel was checked here. If not, the table has a receipt of it.


class _Task(NamedTuple):
    """A check of a kernel at the shape of a record. `sibling` is its description if it is the sibling."""

    subject: Subject
    kernel: Kernel
    sibling: str = ""


class _Result(NamedTuple):
    """The result of a task: its verdict, and why it failed; empty if it passed, None if it did not end."""

    task: _Task
    failed: str | None
    check: Check | None

    @property
    def is_own(self) -> bool:
        """Whether the kernel is that of the record, and not its sibling."""
        return not self.task.sibling


def check_on_gpu(
    subjects: list[Subject],
    devices: Sequence[int],
    runs: Runs,
    table: TunedTable | None = None,
    *,
    timed: bool = False,
) -> OnGpu:
    """Verifies the kernels of records on their GPU, and times those that passed.

    The kernels of `subjects` compile. `devices` are the indexes of such GPUs. `table` has receipts to
    reuse, if they are of the versions here. With `timed`, also times kernels of records of other versions, or
    without times with shared masks.
    """
    tasks = _tasks(subjects, table)
    _compile(tasks, runs)
    results = _check(tasks, devices, runs)
    own = {result.task.subject: result for result in results if result.is_own}
    right = [subject for subject in subjects if subject not in own or own[subject].failed == ""]
    times, resources = _time([subject for subject in right if timed and _wants_time(subject)], devices, runs)
    failures: dict[Subject, list[str | None]] = {subject: [] for subject in subjects}
    for result in results:
        failures[result.task.subject].append(result.failed)
    for subject, (why, _) in times.items():
        failures[subject].append(why and f"cannot be timed: {why}")
    return OnGpu(
        outcomes={
            subject: Outcome(next(filter(None, reasons), ""), None in reasons, subject in own)
            for subject, reasons in failures.items()
        },
        checks=tuple(result.check for result in results if result.check is not None),
        passed=tuple(
            (subject.record, result.check)
            for subject, result in own.items()
            if result.check is not None and result.failed == ""
        ),
        receipts=_receipts(results),
        times={
            subject.record: measurement
            for subject, (_, measurement) in times.items()
            if measurement is not None
        },
        resources=resources,
    )


def _tasks(subjects: list[Subject], table: TunedTable | None) -> list[_Task]:
    """Returns the checks of records that a table has no receipt of.

    They are grouped by kernel, because a process caches the inputs of its cases.
    """
    tasks: list[_Task] = []
    for subject in sorted(subjects, key=lambda subject: subject.kernel.digest):
        record, specialization = subject.record, sibling(subject.record)
        assert record.config is not None
        kernel = render(find_family(record.family), record.problem, record.config, specialization)
        name = "its sibling with lse" if specialization.lse else "its sibling without lse"
        tasks += (_Task(subject, subject.kernel), _Task(subject, kernel, name))
    if table is None:
        return tasks
    receipts = {(check.digest, check.versions.makers): check.verdict for check in table.receipts}
    return [task for task in tasks if not _has_receipt(task, receipts)]


def _has_receipt(task: _Task, receipts: Mapping[_Binary, Verdict]) -> bool:
    """Returns whether a table has a passed verdict under the versions here, with all probes of a check."""
    record, target = task.subject.record, task.subject.target
    assert record.config is not None
    binary = task.kernel.digest, current_versions(record.family).makers
    own = record.verdict if (record.kernel, record.versions.makers) == binary else None
    needed = full_probes(task.kernel, record.problem, record.config, target)
    return any(
        verdict is not None
        and verdict.passed
        and names_gpu(target.name, verdict.device)
        and needed <= set(verdict.probes or ())
        for verdict in (own, receipts.get(binary))
    )


def _compile(tasks: Iterable[_Task], runs: Runs) -> None:
    """Compiles the siblings and the kernels for schedule fuzzing into Triton's cache, on all cores.

    A kernel that does not compile fails later in its check, with a message that names it.
    """
    jobs = {}
    for task in tasks:
        kernels = (task.kernel if task.sibling else None, delayed(task.kernel))
        jobs.update(
            {kernel.digest: (kernel, task.subject.target) for kernel in kernels if kernel is not None}
        )
    runs.run(
        "compiling siblings",
        lambda: start_pool(available_cpus()),
        verify_jobs.why_not_compiled,
        jobs,
        verify_jobs.COMPILE_SECONDS,
    )


def _check(tasks: list[_Task], devices: Sequence[int], runs: Runs) -> list[_Result]:
    jobs = {number: (task.kernel, task.subject.record) for number, task in enumerate(tasks)}
    checked = _checked("on the GPU", jobs, _workers(devices), devices, runs)
    # If other checks held the memory, an out-of-memory error is not a failure of the kernel.
    crowded = {number: jobs[number] for number, (lost, _) in checked.items() if lacked_memory(lost)}
    for number in crowded:
        del checked[number]
    checked |= _checked("alone on the GPU", crowded, 1, devices, runs)
    return [_done(task, checked.get(number)) for number, task in enumerate(tasks)]


def _checked(
    phase: str,
    jobs: Mapping[int, tuple[Kernel, Record]],
    workers: int,
    devices: Sequence[int],
    runs: Runs,
) -> dict[int, tuple[str, Any]]:
    pool, check = (lambda: start_pool(workers)), verify_jobs.check_on_gpu
    return runs.run(phase, pool, check, jobs, verify_jobs.GPU_SECONDS, devices)


def _done(task: _Task, result: tuple[str, Check | None] | None) -> _Result:
    if result is None:
        return _Result(task, None, None)
    lost, check = result
    failed = lost or (check.verdict.failed if check is not None else "")
    return _Result(task, f"{task.sibling}: {failed}" if failed and task.sibling else failed, check)


def _workers(devices: Sequence[int]) -> int:
    """Returns the number of processes that verify kernels on each GPU at the same time."""
    import torch

    free = min(torch.cuda.mem_get_info(index)[0] for index in devices)
    return max(1, min(MAX_WORKERS, available_cpus() // 2 // len(devices), free // WORKER_BYTES))


def _receipts(results: list[_Result]) -> tuple[Check, ...]:
    """Returns one check for each kernel that passed at all of its records' shapes."""
    checks: dict[str, list[Check | None]] = {}
    for result in results:
        checks.setdefault(result.task.kernel.digest, []).append(None if result.failed else result.check)
    receipts = []
    for made in checks.values():
        passed = [check for check in made if check is not None]
        if len(passed) == len(made):
            verdict = joined([check.verdict for check in passed])
            receipts.append(msgspec.structs.replace(passed[0], verdict=verdict, seconds=None))
    return tuple(receipts)


def _wants_time(subject: Subject) -> bool:
    """Returns whether a record's kernel has no time under the versions here, or none with shared masks."""
    return _is_of_others(subject) or _lacks_shared_times(subject.record)


def _is_of_others(subject: Subject) -> bool:
    """Returns whether a record is of another kernel, Triton, ptxas or driver than those here."""
    record = subject.record
    here = subject.kernel.digest, current_versions(record.family).builders
    return (record.kernel, record.versions.builders) != here


def _lacks_shared_times(record: Record) -> bool:
    timed = record.measurement
    return timed is not None and not timed.shared and bool(timed_ways(record.problem))


def _time(
    subjects: list[Subject], devices: Sequence[int], runs: Runs
) -> tuple[dict[Subject, tuple[str | None, Measurement | None]], dict[str, Resources]]:
    """Times the kernels of records one after another, with no other job on the GPU.

    Kernels that differ from those of their records are first compiled as in a search. They are timed only if
    a search would launch them.

    Returns:
        Why each kernel was not timed, None if the run did not reach it, and its time; and, by digest, the
        resources of kernels that differ from those of their records.
    """
    changed = [subject for subject in subjects if _is_of_others(subject)]
    compiled = runs.run(
        "reading resources",
        lambda: start_pool(available_cpus()),
        verify_jobs.read_compiled,
        {subject.kernel.digest: (subject.kernel, subject.target) for subject in changed},
        verify_jobs.COMPILE_SECONDS,
    )
    lost = {subject: compiled.get(subject.kernel.digest, (None, None))[0] for subject in changed}
    timed = runs.run(
        "timing",
        lambda: start_pool(1),
        verify_jobs.time_on_gpu,
        {subject: (subject.record,) for subject in subjects if lost.get(subject, "") == ""},
        verify_jobs.GPU_SECONDS,
        devices,
    )
    times: dict[Subject, tuple[str | None, Measurement | None]] = {
        subject: timed.get(subject, (lost.get(subject) or None, None)) for subject in subjects
    }
    return times, {digest: resources for digest, (why, resources) in compiled.items() if not why}
