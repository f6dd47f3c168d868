"""Preload for a self-check: runs it without launches while the kernel compiles.

The first check of a process imports modules and loads torch's CUDA kernels. This takes as long as the check
itself and does not depend on the kernel, so it can overlap with compilation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from flashtune.verification.cases import Level
from flashtune.verification.check import one_thread, read_figures
from flashtune.verification.comparison import Finding
from flashtune.verification.passes import case_findings, planned_cases
from flashtune.verification.probes import Probe

if TYPE_CHECKING:
    from flashtune.core.config import Config
    from flashtune.core.kernel import Kernel
    from flashtune.core.problem import Problem
    from flashtune.core.target import Target

# Seed of inputs that are discarded.
SEED = 0


def rehearse(
    kernel: Kernel,
    problem: Problem,
    config: Config,
    target: Target,
    device: torch.device,
    enough: Callable[[], bool],
) -> None:
    """Runs one case of each probe as a self-check does, without launches, and discards the findings.

    The kernel need not be compiled. `enough` is called before each case, and ends the run if it returns True.
    """
    found: list[Finding] = []
    met: set[Probe] = set()
    with one_thread():
        for case, _ in planned_cases(kernel, problem, config, Level.QUICK, SEED):
            if enough():
                return
            if case.probe not in met:
                met.add(case.probe)
                found += case_findings(kernel, None, case, SEED, target, device, keep=False, launched=False)
        read_figures(found)
