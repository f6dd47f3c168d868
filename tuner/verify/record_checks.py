"""Verifies a table: every selected kernel compiles, fits, and computes correct results.

A kernel runs on the GPU of its record if this machine has that GPU. Otherwise it runs in the interpreter, in
float32, which verifies only its source. Its binary then needs the record's receipt: the verdict of a GPU for
the kernel's digest, the template and the versions. Gluon kernels cannot be interpreted. Without their GPU
only the receipt is checked.
"""

import enum
from collections.abc import Hashable, Iterable, Mapping
from typing import NamedTuple

import msgspec

from flashtune.core.errors import FlashtuneError, MachineError
from flashtune.core.kernel import Kernel
from flashtune.core.problem import Dtype
from flashtune.core.record import Provenance, Record
from flashtune.core.target import Target
from flashtune.db.codec import Check
from flashtune.db.store import open_store
from flashtune.db.table import TunedTable
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render
from flashtune.tuner.execution.cpus import available_cpus
from flashtune.tuner.execution.processes import start_pool
from flashtune.tuner.tables.admission import (
    Receipt,
    facts_of,
    is_stale,
    never_verified,
    receipt_fault,
    receipt_of,
    why_refused,
)
from flashtune.tuner.verify import verify_jobs
from flashtune.tuner.verify.on_gpu import OnGpu, Outcome, check_on_gpu
from flashtune.tuner.verify.verify_jobs import Interpretable, Runs, Subject

# Fields of a config without a meaning in the interpreter. With fixed values, fewer kernels differ.
UNSEEN = {
    "num_warps": 4,
    "num_stages": 1,
    "maxnreg": 0,
    "dq_warps": 4,
    "dq_stages": 1,
    # The interpreter runs one launch after the other, and cannot wait for another kernel.
    "early_start": False,
}


class CheckMethod(enum.StrEnum):
    """The methods of comparison with the reference, best first."""

    GPU = "gpu"
    INTERPRETER = "interpreter"
    RECEIPT = "receipt"
    NONE = "none"


class Result(msgspec.Struct, frozen=True):
    """The result of one selected kernel."""

    problem: str  # The problem's key.
    target: str
    family: str
    kernel: str | None  # Digest of the kernel as rendered here; None if it cannot be rendered.
    # The method of the comparison; `none` if it was not run here and has no valid receipt.
    method: CheckMethod
    failed: str = ""  # Why it failed; empty if it passed.
    receipt: Receipt | None = None  # The record's receipt; None unless it is valid for this kernel.


class Report(msgspec.Struct, frozen=True):
    """All results, and the verdicts and times of this machine's GPU."""

    # One for each selected kernel that was checked, in the table's order.
    results: tuple[Result, ...]
    baselines: int  # Number of selected baselines.
    missed: int = 0  # Number of selected kernels that were not checked before the run ended.
    on_gpu: OnGpu = OnGpu()  # The verdicts and times of this machine's GPU.

    def count(self, method: CheckMethod) -> int:
        """Returns the number of results of a method, passed or failed."""
        return sum(result.method is method for result in self.results)

    @property
    def failures(self) -> tuple[Result, ...]:
        """Returns the failed results."""
        return tuple(result for result in self.results if result.failed)


def verify_records(
    records: Iterable[Record],
    *,
    gpu: tuple[tuple[int, ...], Target] | None,
    require_gpu: bool = False,
    allow_unproven: bool = False,
    table: TunedTable | None = None,
    timed: bool = False,
    runs: Runs | None = None,
) -> Report:
    """Verifies the selected kernels of a table.

    Args:
        records: The table's records; baselines among them are only counted.
        gpu: Indexes and target of this machine's GPUs; None without a GPU.
        require_gpu: Whether kernels fail that were not compared on this machine's GPU.
        allow_unproven: Whether kernels pass that compile and fit, but were not verified on a GPU as they
            render here.
        table: A table with receipts to reuse, if they are of the versions here.
        timed: Whether to time kernels on this machine's GPU if their records are of other versions, or lack
            times with shared masks.
        runs: Runs the jobs. None means no time limit and no progress.
    """
    runs = runs or Runs()
    listed = list(records)
    kernels = [record for record in listed if record.config is not None]
    subjects = [_subject(record) for record in kernels]
    sound = [subject for subject in subjects if isinstance(subject, Subject)]
    unfit = _compile(sound, runs)
    fit = [subject for subject in sound if unfit.get(_binary(subject)) == ""]
    name = gpu[1].name if gpu else None
    here = [subject for subject in fit if subject.record.target == name]
    on_gpu = check_on_gpu(here, gpu[0], runs, table, timed=timed) if gpu and here else OnGpu()
    interpreted = _interpret([subject for subject in fit if subject.record.target != name], runs)
    checks = _Checks(unfit, on_gpu, interpreted, require_gpu, allow_unproven)
    results = [checks.result(*pair) for pair in zip(kernels, subjects, strict=True)]
    judged = tuple(result for result in results if result is not None)
    return Report(judged, len(listed) - len(kernels), len(results) - len(judged), on_gpu)


class _Checks(NamedTuple):
    """The checks of a run, and the rules by which kernels pass."""

    # Why a kernel does not fit its target, by binary; empty if it fits.
    unfit: Mapping[Hashable, str]
    on_gpu: OnGpu  # The results of this machine's GPU.
    # Failures in the interpreter by source; empty if the kernel passed.
    interpreted: Mapping[Hashable, str]
    require_gpu: bool  # As in `verify_records`, as the next ones.
    allow_unproven: bool  # Whether kernels without a valid receipt pass.

    def result(self, record: Record, subject: Subject | str) -> Result | None:
        """Returns the result of a record, None if the run ended before it."""
        if isinstance(subject, str):
            return _result(record, None, CheckMethod.NONE, subject)
        misfit = self.unfit.get(_binary(subject))
        if misfit != "":
            return None if misfit is None else _result(record, subject.kernel, CheckMethod.NONE, misfit)
        outcome = self.on_gpu.outcomes.get(subject)
        result = self._by_receipt(subject) if outcome is None else _on_gpu(subject, outcome)
        if (
            self.require_gpu
            and result is not None
            and not result.failed
            and result.method is not CheckMethod.GPU
        ):
            return msgspec.structs.replace(result, failed=f"was not compared on {record.target} here")
        return result

    def _by_receipt(self, subject: Subject) -> Result | None:
        """Returns the result of a kernel that did not run on a GPU here, None if the run ended before it."""
        record, failed = subject.record, None
        if _is_interpreted(subject):
            failed = self.interpreted.get(_source(subject))
            if failed is None:
                return None
        method = CheckMethod.RECEIPT if failed is None else CheckMethod.INTERPRETER
        if failed:
            return _result(record, subject.kernel, method, failed)
        missing = receipt_fault(record, subject.kernel.digest)
        if not missing:
            return _result(record, subject.kernel, method, "", receipt_of(record))
        method = CheckMethod.NONE if failed is None else method
        # A predicted record needs no receipt: it has not run on a GPU, and dispatch treats it accordingly.
        excused = record.provenance is Provenance.PREDICTED and method is CheckMethod.INTERPRETER
        unproven = never_verified(record) or is_stale(record, subject.kernel.digest)
        excused = excused or (self.allow_unproven and unproven)
        return _result(record, subject.kernel, method, "" if excused else missing)


def _on_gpu(subject: Subject, outcome: Outcome) -> Result | None:
    """Returns the result of a kernel on the GPU, or by the receipt of a table."""
    if outcome.missed and not outcome.failed:
        return None
    method = CheckMethod.GPU if outcome.ran or outcome.failed else CheckMethod.RECEIPT
    return _result(subject.record, subject.kernel, method, outcome.failed)


def remember(checks: Iterable[Check], db: str | None) -> None:
    """Stores a GPU's verdicts in a database, so that dispatch does not check these kernels again."""
    with open_store(db) as store:
        # The last verdict of a kernel replaces earlier ones, so failures are stored last.
        for check in sorted(checks, key=lambda check: not check.verdict.passed):
            store.remember_check(check)


def _subject(record: Record) -> Subject | str:
    """Returns the record with its kernel as rendered here, or why the record cannot be used."""
    assert record.config is not None
    try:
        refused, target = why_refused(record), facts_of(record)
        if refused or target is None:
            return refused
        kernel = render(find_family(record.family), record.problem, record.config, record.specialization)
        return Subject(record, target, kernel)
    except MachineError:
        raise
    except FlashtuneError as error:
        return str(error)


def _result(
    record: Record, kernel: Kernel | None, method: CheckMethod, failed: str, receipt: Receipt | None = None
) -> Result:
    digest = kernel.digest if kernel else None
    return Result(record.problem.key, record.target, record.family, digest, method, failed, receipt)


def _compile(subjects: list[Subject], runs: Runs) -> dict[Hashable, str]:
    """Returns why each distinct binary does not fit its target; empty if it fits."""
    jobs = {_binary(subject): (subject.kernel, subject.target) for subject in subjects}
    done = runs.run(
        "compiling",
        lambda: start_pool(available_cpus()),
        verify_jobs.why_not_compiled,
        jobs,
        verify_jobs.COMPILE_SECONDS,
    )
    return {key: lost or unfit for key, (lost, unfit) in done.items()}


def _interpret(subjects: list[Subject], runs: Runs) -> dict[Hashable, str]:
    """Returns, by source, why it failed in the interpreter; empty if it passed."""
    tasks = {_source(subject): _task(subject) for subject in subjects if _is_interpreted(subject)}
    # The longest jobs start first, so that cores are not idle at the end.
    first = sorted(tasks, key=lambda source: _length(tasks[source]), reverse=True)
    done = runs.run(
        "under the interpreter",
        lambda: verify_jobs.start_interpreters(available_cpus()),
        verify_jobs.check_interpreted,
        {source: (tasks[source],) for source in first},
        verify_jobs.INTERPRETER_SECONDS,
    )
    return {key: lost or verdict.failed for key, (lost, verdict) in done.items()}


def _length(task: Interpretable) -> int:
    """Returns a sort key by interpreter time: larger head dims and more splits take longer."""
    return task.problem.head_dim * int(getattr(task.config, "num_splits", 1))


def _is_interpreted(subject: Subject) -> bool:
    return find_family(subject.record.family).interpreted


def _task(subject: Subject) -> Interpretable:
    """Returns the kernel for the interpreter: in float32, with fixed lengths and ignored options."""
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


def _source(subject: Subject) -> Hashable:
    task = _task(subject)
    return render(find_family(task.family), task.problem, task.config, task.specialization).digest


def _binary(subject: Subject) -> tuple[str, str]:
    return subject.kernel.digest, subject.target.name


def sample(records: Iterable[Record], here: str = "") -> tuple[Record, ...]:
    """Returns one record of each class of generated kernels, and every record without a config.

    Records of one class have the same architecture, family, dtype, head dims, mask and other features. The
    record with the first problem key represents its class, so that equal tables give equal samples. Records
    of the GPU named `here` come first.
    """
    listed = list(records)
    chosen: dict[Hashable, Record] = {}
    for record in sorted(listed, key=lambda record: (record.target != here, record.problem.key)):
        if record.config is not None:
            chosen.setdefault(_class(record), record)
    kept = {id(record) for record in chosen.values()}
    return tuple(record for record in listed if record.config is None or id(record) in kept)


def _class(record: Record) -> Hashable:
    problem, target = record.problem, facts_of(record)
    return (
        target.arch if target else record.target,
        record.family,
        problem.dtype,
        problem.head_dim,
        problem.value_head_dim,
        problem.causal,
        problem.features,
    )
