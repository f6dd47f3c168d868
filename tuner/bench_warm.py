"""Compiling the selected kernels of many problems at once, before they are timed one after another."""

from __future__ import annotations

from collections.abc import Sequence

from flashtune.dispatch import select
from flashtune.errors import FlashtuneError
from flashtune.problem import Problem
from flashtune.rendered import kernel_of
from flashtune.tables import tuned_records
from flashtune.target import Target
from flashtune.tuner.candidates import Candidate, Scope
from flashtune.tuner.chosen import contiguous_specialization
from flashtune.tuner.compile_pool import Compiled, CompilePool
from flashtune.tuner.processes import usable_cores


def compile_ahead(problems: Sequence[Problem], target: Target) -> tuple[Compiled, ...]:
    """Leaves the kernels that dispatch would select in Triton's cache, compiled on all cores.

    Whatever goes wrong here is told where the kernel is called.

    Args:
        problems: What will be computed, on contiguous tensors.
        target: The GPU.

    Returns:
        What compiling each distinct kernel gave.
    """
    jobs: dict[str, tuple[Scope, Candidate]] = {}
    for problem in problems:
        try:
            _add(jobs, problem, target)
        except FlashtuneError:
            continue
    if not jobs:
        return ()
    with CompilePool(min(len(jobs), usable_cores())) as pool:
        futures = [pool.submit(scope, candidate) for scope, candidate in jobs.values()]
        return tuple(future.result() for future in futures)


def _add(jobs: dict[str, tuple[Scope, Candidate]], problem: Problem, target: Target) -> None:
    """Puts a problem's kernel among the jobs, by its digest."""
    specialization = contiguous_specialization(problem)
    tables = tuned_records(target.name)
    record = select(problem, target, tables, specialization, generated=True).record
    assert record.config is not None
    kernel = kernel_of(record, specialization)
    scope = Scope(record.problem, target, specialization, ())
    jobs[kernel.digest] = scope, Candidate(record.family, record.config)
