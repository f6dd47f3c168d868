"""Cases, inputs and launches of a check, for the forward and the backward pass.

The modules of `gradients` are imported only for a backward pass, so that the first call of a forward kernel
does not load them.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING

import msgspec
import torch

from flashtune.core.config import Config
from flashtune.core.kernel import Kernel
from flashtune.core.problem import Problem
from flashtune.core.target import Target
from flashtune.launch.binding import Binary
from flashtune.launch.compilation import interpreting
from flashtune.verification import cases
from flashtune.verification.cases import Case, Level
from flashtune.verification.comparison import Finding, forward_pass, launch_findings
from flashtune.verification.inputs import prepared
from flashtune.verification.inputs.prepared import STEPS_PER_SEED

if TYPE_CHECKING:
    from flashtune.launch.bundle_binding import BundledBinary

STRICT_REPEATS = 50
# Number of cases with block tables whose unused entries fault when they are used.
FAULTY_CASES = 4


def planned_cases(
    kernel: Kernel, problem: Problem, config: Config, level: Level, seed: int
) -> Iterator[tuple[Case, int]]:
    """Yields the cases of a level, each with the seed of its inputs."""
    own = _cases(problem)
    reduced = interpreting()
    small = own.companions(problem, config, level, reduced=reduced)
    if reduced:
        # An interpreter runs programs one after the other, so there are no races.
        small = tuple(msgspec.structs.replace(case, repeats=1) for case in small)
    if level is not Level.QUICK and not reduced:
        yield from ((case, seed) for case in own.main_cases(problem))
    yield from ((case, seed) for case in small)
    if level is not Level.STRICT or reduced:
        return
    for step in range(1, STEPS_PER_SEED):
        yield from ((case, seed + step) for case in small)
    for case in own.main_cases(problem):
        yield msgspec.structs.replace(case, repeats=STRICT_REPEATS), seed + 1
    if problem.page_size:
        tables = [case for case in small if case.problem.page_size][:FAULTY_CASES]
        yield from ((msgspec.structs.replace(case, faulty=True), seed) for case in tables)
    if kernel.specialization.index_bits == 64:
        yield from ((case, seed) for case in cases.far_cases(problem, config))


def _cases(problem: Problem) -> ModuleType:
    """Returns the module with the cases of the problem's pass."""
    if not problem.is_backward:
        return cases
    from flashtune.verification.gradients import cases as gradient_cases

    return gradient_cases


def case_findings(
    kernel: Kernel,
    binary: Binary | BundledBinary | None,
    case: Case,
    seed: int,
    target: Target,
    device: torch.device,
    *,
    keep: bool,
    launched: bool = True,
) -> Iterator[Finding]:
    """Prepares a case, launches the kernel on it and yields the findings.

    `binary` is None under the interpreter. `keep` caches inputs and reference for later kernels, and flushes
    the L2 cache between launches. A self-check must not hold a user's memory. Without `launched` there is no
    launch, and the findings report that nothing was written.
    """
    alignment = kernel.specialization.alignment
    cold = target.l2_bytes if keep else 0
    if case.problem.is_backward:
        from flashtune.verification.gradients import inputs as prepared_gradients
        from flashtune.verification.gradients.comparison import backward_pass

        make = prepared_gradients.prepare_and_keep if keep else prepared_gradients.prepare
        gradients = make(case, alignment, device, seed, kernel.specialization.lse)
        pass_ = backward_pass(kernel, case, gradients)
    else:
        ready = (prepared.prepare_and_keep if keep else prepared.prepare)(case, alignment, device, seed)
        pass_ = forward_pass(kernel, case, ready)
    return launch_findings(kernel, binary, case, pass_, target, cold, launched=launched)


def forget() -> None:
    """Clears the cached cases, because a wrong kernel may have written anywhere."""
    from flashtune.verification.gradients import inputs as prepared_gradients

    prepared.prepare_and_keep.forget()
    prepared_gradients.prepare_and_keep.forget()
