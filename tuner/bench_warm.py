"""Compiling the selected kernels of many problems at once, before they are timed one after another."""

from __future__ import annotations

from collections.abc import Sequence

from flashtune.problem import Problem
from flashtune.tables import tuned_records
from flashtune.target import Target
from flashtune.tuner.candidates import contiguous_specialization
from flashtune.tuner.compile_pool import Compiled
from flashtune.tuner.warming import compile_needs, needs_of


def compile_ahead(problems: Sequence[Problem], target: Target) -> tuple[Compiled, ...]:
    """Leaves the kernels that dispatch would select in Triton's cache, compiled on all cores.

    Whatever goes wrong here is told where the kernel is called.

    Args:
        problems: What will be computed, on contiguous tensors.
        target: The GPU.

    Returns:
        What compiling each distinct kernel gave.
    """
    calls = [(problem, contiguous_specialization(problem)) for problem in problems]
    return tuple(compile_needs(needs_of(calls, target, tuned_records(target.name)), target).values())
