"""`flashtune warm`: the kernels that calls will need, compiled, loaded and proven ahead of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec

from flashtune.core.errors import FlashtuneError, KernelError, VerificationError
from flashtune.core.kernel import Kernel, Specialization
from flashtune.core.problem import Problem
from flashtune.core.record import Outcome, Selection
from flashtune.core.target import Target
from flashtune.db.eligibility import by_problem
from flashtune.db.table import TunedTable
from flashtune.dispatch.lookup import select
from flashtune.dispatch.tables import Tables, tuned_records
from flashtune.launch.source_cache import kernel_of
from flashtune.tuner.candidates import Candidate, Scope, contiguous_specialization
from flashtune.tuner.execution.compile_pool import Compiled, CompilePool
from flashtune.tuner.execution.processes import usable_cores
from flashtune.tuner.workloads.passes import saving_lse

# A phase, how many of its kernels are done, and how many there are.
Watch = Callable[[str, int, int], None]
# What a program asks for, and what may be assumed of its tensors.
Call = tuple[Problem, Specialization]


class Need(NamedTuple):
    """A kernel, and the first of the calls that it serves."""

    problem: Problem
    selection: Selection
    kernel: Kernel


class Needs(NamedTuple):
    """Distinct kernels by their digests, and why calls have none, one sentence each."""

    kernels: dict[str, Need]
    left_out: tuple[str, ...]


class Warmed(msgspec.Struct, frozen=True):
    """A kernel that was compiled ahead of its first call.

    Attributes:
        problem: Key of the first problem that it serves.
        target: Name of the GPU.
        family: Its family.
        config: Its config, in words.
        kernel: Its digest.
        lse: Whether it gives the log-sum-exp, or takes the gradient of it.
        seconds: What compiling took; next to nothing where Triton's cache had it.
        loaded: Whether it was loaded on the GPU here, and proven where no receipt covers it.
        failed: Why it cannot serve, empty if it can.
    """

    problem: str
    target: str
    family: str
    config: str
    kernel: str
    lse: bool
    seconds: float
    loaded: bool
    failed: str = ""


def calls_of(problems: Iterable[Problem]) -> tuple[Call, ...]:
    """Calls of problems on contiguous tensors.

    A forward pass is called with the log-sum-exp too where its gradients are among the problems.
    """
    listed = tuple(problems)
    plain = [(problem, contiguous_specialization(problem)) for problem in listed]
    trained = [(problem, contiguous_specialization(problem, lse=True)) for problem in saving_lse(listed)]
    return tuple(dict.fromkeys((*plain, *trained)))


def tables_with(target: Target, tables: Iterable[TunedTable]) -> Tables:
    """What dispatch would use on a target if some tables were imported."""
    usual = tuned_records(target.name)
    added = by_problem(record for table in tables for record in table.records)
    return Tables(database={**usual.database, **added}, shipped=usual.shipped)


def needs_of(calls: Iterable[Call], target: Target, tables: Tables) -> Needs:
    """The kernels that dispatch would choose for calls, each once."""
    kernels: dict[str, Need] = {}
    left_out: list[str] = []
    for problem, specialization in calls:
        try:
            selection = select(problem, target, tables, specialization, generated=True)
            kernel = kernel_of(selection.record, specialization)
        except FlashtuneError as error:
            left_out.append(str(error))
            continue
        kernels.setdefault(kernel.digest, Need(problem, selection, kernel))
    return Needs(kernels, tuple(left_out))


def compile_needs(
    needs: Needs, target: Target, watch: Watch = lambda phase, done, total: None
) -> dict[str, Compiled]:
    """Leaves kernels in Triton's cache, compiled on all cores; what compiling each gave, by its digest."""
    total = len(needs.kernels)
    if not total:
        return {}
    compiled: dict[str, Compiled] = {}
    with CompilePool(min(total, usable_cores())) as pool:
        jobs = {digest: pool.submit(*_job(need, target)) for digest, need in needs.kernels.items()}
        for digest, job in jobs.items():
            watch("compiling", len(compiled), total)
            compiled[digest] = job.result()
    watch("compiling", total, total)
    return compiled


def _job(need: Need, target: Target) -> tuple[Scope, Candidate]:
    record, specialization = need.selection.record, need.kernel.specialization
    assert record.config is not None
    return Scope(record.problem, target, specialization, ()), Candidate(record.family, record.config)


def warm(
    needs: Needs, target: Target, device: int | None, watch: Watch = lambda phase, done, total: None
) -> tuple[Warmed, ...]:
    """Compiles kernels, and loads and proves them where their GPU is here.

    Binaries stay in Triton's cache and verdicts in the database, so that a later process neither compiles
    nor proves them.

    Args:
        needs: The kernels.
        target: The GPU.
        device: Its index on this machine, None to compile alone.
        watch: Called with the progress.
    """
    compiled = compile_needs(needs, target, watch)
    results = []
    for number, (digest, need) in enumerate(needs.kernels.items()):
        if device is not None:
            watch("loading", number, len(needs.kernels))
        results.append(_warmed(need, target, device, compiled[digest]))
    if device is not None:
        watch("loading", len(results), len(results))
    return tuple(results)


def _warmed(need: Need, target: Target, device: int | None, compiled: Compiled) -> Warmed:
    record = need.selection.record
    assert record.config is not None
    failed = "" if compiled.outcome is Outcome.OK else f"{compiled.outcome.value}: {compiled.message}"
    if not failed and device is not None:
        failed = _why_not_loaded(need, target, device)
    return Warmed(
        problem=need.problem.key,
        target=target.name,
        family=record.family,
        config=record.config.label(),
        kernel=need.kernel.digest,
        lse=need.kernel.specialization.lse,
        seconds=compiled.resources.compile_seconds if compiled.resources else 0.0,
        loaded=device is not None and not failed,
        failed=failed,
    )


def _why_not_loaded(need: Need, target: Target, device: int) -> str:
    """Loads a kernel as its first call would: why that fails, empty if it does not."""
    import torch

    from flashtune.request.request import Prefer
    from flashtune.runtime.kernel_fallback import Asked, chosen

    place = torch.device("cuda", device)
    asked = Asked(need.problem, need.kernel.specialization, Prefer.GENERATED, place)
    try:
        chosen(need.selection, target, asked)
    except (KernelError, VerificationError) as error:
        return str(error)
    return ""
