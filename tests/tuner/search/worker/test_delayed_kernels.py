"""Tests of building kernels with delays in the GPU process."""

import pytest

from flashtune import testing
from flashtune.core.kernel import Kernel, Specialization
from flashtune.core.record import Outcome
from flashtune.core.target import Target, find_target
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render
from flashtune.tuner.candidates import Candidate
from flashtune.tuner.execution import gpu_jobs
from flashtune.tuner.execution.compile_pool import Compiled
from flashtune.verification.schedule_fuzzing import delayed

H200 = find_target("h200")
PROBLEM = testing.problem("heads=4,seqlen=512,head_dim=128,dtype=bf16")
ASSUMED = Specialization()


def default(family: str) -> Candidate:
    return Candidate(family, find_family(family).default(PROBLEM, H200))


@pytest.mark.parametrize(
    ("outcome", "family", "judged"),
    [
        (Outcome.OK, "forward_hopper", True),
        (Outcome.INFEASIBLE, "forward_hopper", False),
        (Outcome.COMPILE_ERROR, "forward_hopper", False),
        (Outcome.OK, "forward_q_outer", False),
    ],
)
def test_kernels_that_can_be_launched_with_delays(
    monkeypatch: pytest.MonkeyPatch, outcome: Outcome, family: str, judged: bool
) -> None:
    seen: list[Kernel] = []

    def compiled(kernel: Kernel, target: Target) -> Compiled:
        seen.append(kernel)
        return Compiled(outcome)

    monkeypatch.setattr(gpu_jobs, "compile_kernel", compiled)
    candidate = default(family)
    assert gpu_jobs.build_late(PROBLEM, candidate, ASSUMED, H200) == judged
    late = delayed(render(find_family(family), PROBLEM, candidate.config, ASSUMED))
    assert seen == ([] if late is None else [late])
