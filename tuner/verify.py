"""Verifies a table: every selected kernel compiles, fits, and computes what it should.

On the GPU that a record is of, its kernel runs there. Elsewhere it runs under the interpreter, which
proves its source, in float32; that its binary is right is then a matter of the record's receipt: the
verdict of a GPU, bound to the kernel's digest, the template and the versions that made it. Of families
that no interpreter runs the receipt is all there is without their GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from concurrent.futures import Future, as_completed
from typing import Any, TypeVar

import msgspec
from pebble import ProcessPool

from flashtune.db.checks import Check
from flashtune.db.store import open_store
from flashtune.errors import FlashtuneError
from flashtune.kernel import Kernel
from flashtune.problem import Dtype
from flashtune.record import Provenance, Record
from flashtune.target import Target
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render
from flashtune.tuner import verify_jobs
from flashtune.tuner.admission import facts_of, why_refused
from flashtune.tuner.processes import start_pool, stop_pool, usable_cores
from flashtune.tuner.receipts import Receipt, never_verified, receipt_fault, receipt_of
from flashtune.tuner.verify_jobs import Interpretable
from flashtune.tuner.verify_report import Means, Report, Result

# What the interpreter does not see of a config, set to one value so that fewer kernels differ.
UNSEEN = {"num_warps": 4, "num_stages": 1, "max_registers": 0, "dq_warps": 4, "dq_stages": 1}

Progress = Callable[[str, int, int], None]
Key = TypeVar("Key", bound=Hashable)


class _Subject(msgspec.Struct, frozen=True):
    record: Record
    target: Target
    kernel: Kernel


def verify_records(
    records: Iterable[Record],
    *,
    gpu: tuple[int, Target] | None,
    require_gpu: bool = False,
    same_triton: bool = False,
    allow_unproven: bool = False,
    progress: Progress = lambda phase, done, total: None,
) -> Report:
    """Verifies the selected kernels of a table.

    Args:
        records: The table's records; baselines among them are only counted.
        gpu: Index and facts of the GPU of this machine, None without one.
        require_gpu: Whether what was not compared on a GPU here fails.
        same_triton: Whether receipts of another Triton than the one installed here fail.
        allow_unproven: Whether what compiles and fits passes where no GPU ever verified it.
        progress: Told of each finished job: its phase, how many are done, of how many.
    """
    listed = list(records)
    kernels = [record for record in listed if record.config is not None]
    subjects = {id(record): _subject(record) for record in kernels}
    sound = [subject for subject in subjects.values() if isinstance(subject, _Subject)]
    unfit = _compile(sound, progress)
    fit = [subject for subject in sound if not unfit[_binary(subject)]]
    name = gpu[1].name if gpu else None
    here = [subject for subject in fit if subject.record.target == name]
    if here:
        _compile_further(here, progress)
    checked = _run_on_gpu(here, gpu[0], progress) if gpu and here else {}
    interpreted = _interpret([subject for subject in fit if subject.record.target != name], progress)

    def judge(record: Record) -> Result:
        subject = subjects[id(record)]
        if isinstance(subject, str):
            return _result(record, None, Means.NONE, subject)
        misfit = unfit[_binary(subject)]
        if misfit:
            return _result(record, subject.kernel, Means.NONE, misfit)
        if id(record) in checked:
            return _result(record, subject.kernel, Means.GPU, checked[id(record)][0])
        verdict = interpreted[_source(subject)] if _is_interpreted(subject) else None
        result = _by_receipt(subject, verdict, same_triton, allow_unproven)
        if require_gpu and not result.failed:
            return msgspec.structs.replace(result, failed=f"was not compared on {record.target} here")
        return result

    checks = tuple(check for _, made in checked.values() for check in made)
    results = tuple(judge(record) for record in kernels)
    passed = tuple((record, checked[id(record)][1]) for record in kernels if not _fault(checked, record))
    return Report(results, len(listed) - len(kernels), checks, passed)


def _fault(checked: Mapping[int, tuple[str, tuple[Check, ...]]], record: Record) -> bool:
    """Whether a record has no passed checks of a GPU here."""
    return id(record) not in checked or bool(checked[id(record)][0])


def remember(checks: Iterable[Check], db: str | None) -> None:
    """Keeps a GPU's verdicts in a database, so that dispatch need not check these kernels again.

    Raises:
        StoreError: The database cannot be written.
    """
    with open_store(db) as store:
        for check in checks:
            store.remember_check(check)


def _subject(record: Record) -> _Subject | str:
    """The record's kernel as it renders here, or why the record cannot be used."""
    assert record.config is not None
    try:
        refused, target = why_refused(record), facts_of(record)
        if refused or target is None:
            return refused
        kernel = render(find_family(record.family), record.problem, record.config, record.specialization)
        return _Subject(record, target, kernel)
    except FlashtuneError as error:
        return str(error)


def _result(
    record: Record, kernel: Kernel | None, means: Means, failed: str, receipt: Receipt | None = None
) -> Result:
    digest = kernel.digest if kernel else None
    return Result(record.problem.key, record.target, record.family, digest, means, failed, receipt)


def _by_receipt(
    subject: _Subject, interpreted: str | None, same_triton: bool, allow_unproven: bool
) -> Result:
    """The result of a kernel that no GPU ran here; `interpreted` is None where no interpreter could."""
    record = subject.record
    means = Means.RECEIPT if interpreted is None else Means.INTERPRETER
    if interpreted:
        return _result(record, subject.kernel, means, interpreted)
    missing = receipt_fault(record, subject.kernel.digest, same_triton)
    if not missing:
        return _result(record, subject.kernel, means, "", receipt_of(record))
    means = Means.NONE if interpreted is None else means
    # A predicted record never claimed to have run, and is never dispatched as if it had.
    excused = record.provenance is Provenance.PREDICTED and means is Means.INTERPRETER
    excused = excused or (allow_unproven and never_verified(record))
    return _result(record, subject.kernel, means, "" if excused else missing)


def _compile(subjects: list[_Subject], progress: Progress) -> dict[Hashable, str]:
    """Why each distinct binary is unfit for its target, empty where it is fit."""
    distinct = {_binary(subject): subject for subject in subjects}
    pool = start_pool(usable_cores())
    jobs = {
        key: pool.schedule(
            verify_jobs.why_not_compiled,
            args=(subject.kernel, subject.target),
            timeout=verify_jobs.COMPILE_SECONDS,
        )
        for key, subject in distinct.items()
    }
    return {key: lost or done for key, (lost, done) in _collect(pool, jobs, "compiling", progress).items()}


def _compile_further(subjects: list[_Subject], progress: Progress) -> None:
    """Fills the compiler's cache with the further kernels of GPU checks, on all cores.

    A kernel that does not compile fails in its check, where the sentence names it.
    """
    pairs = [(kernel, one.target) for one in subjects for kernel in _further(one)]
    distinct = {(kernel.digest, target.name): (kernel, target) for kernel, target in pairs}
    pool = start_pool(usable_cores())
    jobs = {
        key: pool.schedule(verify_jobs.why_not_compiled, args=pair, timeout=verify_jobs.COMPILE_SECONDS)
        for key, pair in distinct.items()
    }
    _collect(pool, jobs, "compiling siblings", progress)


def _further(subject: _Subject) -> tuple[Kernel, ...]:
    return verify_jobs.gpu_kernels(subject.record, subject.kernel)


def _run_on_gpu(
    subjects: list[_Subject], index: int, progress: Progress
) -> dict[int, tuple[str, tuple[Check, ...]]]:
    """By record: why it failed on the GPU, empty if it passed, and the verdicts made."""
    pool = start_pool(1)
    jobs = {
        id(subject.record): pool.schedule(
            verify_jobs.check_on_gpu, args=(subject.record, index), timeout=verify_jobs.GPU_SECONDS
        )
        for subject in subjects
    }
    outcomes = {}
    for key, (lost, checks) in _collect(pool, jobs, "on the GPU", progress).items():
        made = checks or ()
        outcomes[key] = lost or next((c.verdict.failed for c in made if not c.verdict.passed), ""), made
    return outcomes


def _interpret(subjects: list[_Subject], progress: Progress) -> dict[Hashable, str]:
    """By source: why it failed under the interpreter, empty if it passed."""
    tasks = {_source(subject): _task(subject) for subject in subjects if _is_interpreted(subject)}
    if not tasks:
        return {}
    pool = verify_jobs.start_interpreters(usable_cores())
    jobs = {
        key: pool.schedule(
            verify_jobs.check_interpreted, args=(task,), timeout=verify_jobs.INTERPRETER_SECONDS
        )
        for key, task in tasks.items()
    }
    collected = _collect(pool, jobs, "under the interpreter", progress)
    return {key: lost or verdict.failed for key, (lost, verdict) in collected.items()}


def _is_interpreted(subject: _Subject) -> bool:
    return find_family(subject.record.family).interpreted


def _task(subject: _Subject) -> Interpretable:
    """The kernel as the interpreter meets it: in float32, at no particular size or option."""
    record = subject.record
    assert record.config is not None
    seen = {name: value for name, value in UNSEEN.items() if hasattr(record.config, name)}
    return Interpretable(
        family=record.family,
        problem=msgspec.structs.replace(
            record.problem, dtype=Dtype.FP32, batch=1, heads=1, kv_heads=1, seqlen_q=1, seqlen_kv=1
        ),
        config=msgspec.structs.replace(record.config, **seen),
        specialization=record.specialization,
        target=subject.target,
    )


def _source(subject: _Subject) -> Hashable:
    task = _task(subject)
    return render(find_family(task.family), task.problem, task.config, task.specialization).digest


def _binary(subject: _Subject) -> tuple[str, str]:
    return subject.kernel.digest, subject.target.name


def _collect(
    pool: ProcessPool, jobs: Mapping[Key, Future[Any]], phase: str, progress: Progress
) -> dict[Key, tuple[str, Any]]:
    """Waits for all jobs: for each, why it gave nothing (or nothing), and what it gave. Ends the pool."""
    try:
        for done, _ in enumerate(as_completed(jobs.values()), start=1):
            progress(phase, done, len(jobs))
        lost = {key: verify_jobs.failure(job) for key, job in jobs.items()}
        return {key: (lost[key], None if lost[key] else job.result()) for key, job in jobs.items()}
    finally:
        stop_pool(pool)
