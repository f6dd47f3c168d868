"""A self-check without its launches, gone through while the kernel is compiled.

A process imports modules at their first use, and loads torch's kernels at theirs: for a check that takes as
long as the check itself. Neither hangs on the kernel, and a compiler leaves time for both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from flashtune.verification.cases import Level
from flashtune.verification.check import read_figures
from flashtune.verification.comparison import Finding
from flashtune.verification.passes import case_findings, planned_cases
from flashtune.verification.probes import Probe
from flashtune.verification.single_thread import one_thread

if TYPE_CHECKING:
    from flashtune.core.config import Config
    from flashtune.core.kernel import Kernel
    from flashtune.core.problem import Problem
    from flashtune.core.target import Target

# Of inputs that nobody keeps.
SEED = 0


def rehearse(
    kernel: Kernel,
    problem: Problem,
    config: Config,
    target: Target,
    device: torch.device,
    enough: Callable[[], bool],
) -> None:
    """Goes through one case of each probe as a self-check does, and drops what is found.

    Args:
        kernel: The kernel; it need not compile.
        problem: What it computes.
        config: Its config.
        target: The GPU.
        device: Where it will be checked.
        enough: Whether to leave it at that; asked before each case.
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
