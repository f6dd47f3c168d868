"""Verifies and times the kernels of a table's records on their GPU.

Each record has two kernels: its own and its sibling, which has the opposite setting of `lse`. Both are
verified at the same level.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from flashtune.core.kernel import Kernel
from flashtune.core.record import Measurement, Record, Resources, Verdict
from flashtune.core.target import names_gpu
from flashtune.db.codec import Check
from flashtune.db.table import Timing, TunedTable
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
_Place = tuple[str, tuple[str, str, str, str]]


class OnGpu(msgspec.Struct, frozen=True):
    """The results of a GPU.

    Attributes:
        outcomes: Outcomes by `id` of the record.
        checks: All verdicts.
        passed: Records with a passed kernel of their own, each with the check.
        receipts: A check for each kernel that passed at the shapes of all its records.
        times: Times of the kernels of records under the versions here.
        resources: Resources of kernels that differ from their records' kernels, by digest.
    """

    outcomes: Mapping[int, Outcome] = {}
    checks: tuple[Check, ...] = ()
    passed: tuple[tuple[Record, Check], ...] = ()
    receipts: tuple[Check, ...] = ()
    times: tuple[Timing, ...] = ()
    resources: Mapping[str, Resources] = {}


class Outcome(msgspec.Struct, frozen=True):
    """The result of a record.

    Attributes:
        failed: Why a check or the timing of its kernels failed; empty if none failed.
        missed: Whether the run ended before all of its checks.
        ran: Whether its own kernel was checked here. If not, the table has a receipt of it.
    """

    failed: str
    missed: bool
    ran: bool


class _Task(NamedTuple):
    """A check of a kernel at the shape of a record. `sibling` is its description if it is the sibling."""

    subject: Subject
    kernel: Kernel
    sibling: str = ""


class _Done(NamedTuple):
    """The result of a task: its verdict, and why it failed; empty if it passed, None if it did not end."""

    task: _Task
    failed: str | None
    check: Check | None


def check_on_gpu(
    subjects: list[Subject], index: int, runs: Runs, known: TunedTable | None = None, *, timed: bool = False
) -> OnGpu:
    """Verifies the kernels of records on their GPU, and times those that passed.

    Args:
        subjects: Records of the GPU with kernels that compile.
        index: The GPU's index on this machine.
        runs: Runs the jobs.
        known: A table with receipts and times to reuse, if they are of the versions here.
        timed: Whether to time kernels of records that are of other versions, or lack times with shared
            masks.
    """
    tasks = _tasks(subjects)
    if known is not None:
        receipts = {(one.digest, one.versions.makers): one.verdict for one in known.receipts}
        tasks = [task for task in tasks if not _has_receipt(task, receipts)]
    _compile(tasks, runs)
    done = _check(tasks, index, runs)
    own = {id(one.task.subject.record): one.failed for one in done if not one.task.sibling}
    right = [one for one in subjects if own.get(id(one.record), "") == ""]
    wanted = [one for one in right if timed and _wants_time(one, known)]
    times, resources = _time(wanted, index, runs)
    outcomes: dict[int, list[str | None]] = {id(one.record): [] for one in subjects}
    for one in done:
        outcomes[id(one.task.subject.record)].append(one.failed)
    for subject in wanted:
        lost, _ = times.get(id(subject.record), (None, None))
        outcomes[id(subject.record)].append(lost and f"cannot be timed: {lost}")
    return OnGpu(
        outcomes={
            key: Outcome(next(filter(None, said), ""), None in said, key in own)
            for key, said in outcomes.items()
        },
        checks=tuple(one.check for one in done if one.check is not None),
        passed=tuple(
            (one.task.subject.record, one.check)
            for one in done
            if one.check is not None and one.failed == "" and not one.task.sibling
        ),
        receipts=_receipts(done),
        times=tuple(
            _timing(one, times[id(one.record)][1])
            for one in wanted
            if times.get(id(one.record), ("lost", None))[0] == ""
        ),
        resources=resources,
    )


def _tasks(subjects: list[Subject]) -> list[_Task]:
    """Returns the checks of records, grouped by kernel, because a process caches the inputs of its cases."""
    tasks: list[_Task] = []
    for subject in sorted(subjects, key=lambda one: one.kernel.digest):
        record, specialization = subject.record, sibling(subject.record)
        assert record.config is not None
        kernel = render(find_family(record.family), record.problem, record.config, specialization)
        name = "its sibling with lse" if specialization.lse else "its sibling without lse"
        tasks += (_Task(subject, subject.kernel), _Task(subject, kernel, name))
    return tasks


def _has_receipt(task: _Task, receipts: Mapping[_Place, Verdict]) -> bool:
    """Returns whether a table has a passed verdict under the versions here, with all probes of a check."""
    record, target = task.subject.record, task.subject.target
    assert record.config is not None
    place = task.kernel.digest, current_versions(record.family).makers
    own = record.verdict if (record.kernel, record.versions.makers) == place else None
    needed = full_probes(task.kernel, record.problem, record.config, target)
    return any(
        one is not None
        and one.passed
        and names_gpu(target.name, one.device)
        and needed <= set(one.probes or ())
        for one in (own, receipts.get(place))
    )


def _compile(tasks: Iterable[_Task], runs: Runs) -> None:
    """Compiles the siblings and the kernels for schedule fuzzing into Triton's cache, on all cores.

    A kernel that does not compile fails later in its check, with a message that names it.
    """
    jobs = {}
    for task in tasks:
        further = (task.kernel if task.sibling else None, delayed(task.kernel))
        jobs.update({one.digest: (one, task.subject.target) for one in further if one is not None})
    runs.run(
        "compiling siblings",
        lambda: start_pool(available_cpus()),
        verify_jobs.why_not_compiled,
        jobs,
        verify_jobs.COMPILE_SECONDS,
    )


def _check(tasks: list[_Task], index: int, runs: Runs) -> list[_Done]:
    jobs = {place: (task.kernel, task.subject.record, index) for place, task in enumerate(tasks)}
    found = _checked("on the GPU", jobs, _workers(index), runs)
    # If other checks held the memory, an out-of-memory error is not a failure of the kernel.
    crowded = {place: jobs[place] for place, (lost, _) in found.items() if lacked_memory(lost)}
    for place in crowded:
        del found[place]
    found |= _checked("alone on the GPU", crowded, 1, runs)
    return [_done(task, found.get(place)) for place, task in enumerate(tasks)]


def _checked(
    phase: str, jobs: Mapping[int, tuple[Kernel, Record, int]], workers: int, runs: Runs
) -> dict[int, tuple[str, Any]]:
    return runs.run(
        phase, lambda: start_pool(workers), verify_jobs.check_on_gpu, jobs, verify_jobs.GPU_SECONDS
    )


def _done(task: _Task, result: tuple[str, Check | None] | None) -> _Done:
    if result is None:
        return _Done(task, None, None)
    lost, check = result
    failed = lost or (check.verdict.failed if check is not None else "")
    return _Done(task, f"{task.sibling}: {failed}" if failed and task.sibling else failed, check)


def _workers(index: int) -> int:
    """Returns the number of processes that verify kernels on a GPU at the same time."""
    import torch

    free, _ = torch.cuda.mem_get_info(index)
    return max(1, min(MAX_WORKERS, available_cpus() // 2, free // WORKER_BYTES))


def _receipts(done: list[_Done]) -> tuple[Check, ...]:
    """Returns one check for each kernel that passed at all of its records' shapes."""
    checks: dict[str, list[Check | None]] = {}
    for one in done:
        checks.setdefault(one.task.kernel.digest, []).append(None if one.failed else one.check)
    receipts = []
    for made in checks.values():
        passed = [one for one in made if one is not None]
        if len(passed) == len(made):
            verdict = joined([one.verdict for one in passed])
            receipts.append(msgspec.structs.replace(passed[0], verdict=verdict, seconds=None))
    return tuple(receipts)


def _wants_time(subject: Subject, known: TunedTable | None) -> bool:
    """Returns whether a record's kernel has no time under the versions here, or none with shared masks."""
    record, here = subject.record, current_versions(subject.record.family)
    if record.versions.builders == here.builders and not subject.renders_differently:
        return _lacks_shared_times(record)
    place = record.problem.key, subject.kernel.digest, here.makers
    times = known.times if known is not None else ()
    return all((one.problem, one.kernel, one.versions.makers) != place for one in times)


def _lacks_shared_times(record: Record) -> bool:
    timed = record.measurement
    return timed is not None and not timed.shared and bool(timed_ways(record.problem))


def _time(
    subjects: list[Subject], index: int, runs: Runs
) -> tuple[dict[int, tuple[str, Any]], dict[str, Resources]]:
    """Times the kernels of records one after another, with no other job on the GPU.

    Kernels that differ from their records' kernels are first compiled as in a search. They are timed only if
    a search would launch them.

    Returns:
        By `id` of the record: why its kernel was not timed, empty if it was, and the measurement. And the
        resources of the changed kernels, by digest.
    """
    changed = [one for one in subjects if one.renders_differently]
    read = runs.run(
        "reading resources",
        lambda: start_pool(available_cpus()),
        verify_jobs.read_compiled,
        {one.kernel.digest: (one.kernel, one.target) for one in changed},
        verify_jobs.COMPILE_SECONDS,
    )
    lost = {id(one.record): read.get(one.kernel.digest, (None, None))[0] for one in changed}
    timed = runs.run(
        "timing",
        lambda: start_pool(1),
        verify_jobs.time_on_gpu,
        {
            id(one.record): (one.record, index, one.renders_differently or _lacks_shared_times(one.record))
            for one in subjects
            if lost.get(id(one.record), "") == ""
        },
        verify_jobs.GPU_SECONDS,
    )
    unfit = {key: (why, None) for key, why in lost.items() if why}
    return unfit | timed, {digest: found for digest, (why, found) in read.items() if not why}


def _timing(subject: Subject, measurement: Measurement) -> Timing:
    return Timing(
        problem=subject.record.problem.key,
        kernel=subject.kernel.digest,
        versions=current_versions(subject.record.family),
        measurement=measurement,
    )
