"""Tests on a GPU that random delays detect missing waits."""

import pytest
import torch

from flashtune.core.record import Outcome
from flashtune.core.target import device_target
from flashtune.tuner.candidates import SearchTask, contiguous_specialization, open_spaces
from flashtune.tuner.execution.gpu_worker import GpuWorker
from flashtune.verification.check import check_delayed
from tests.gpu.marks import ON_HOPPER
from tests.mutants.catalogue import gpu_mutants
from tests.mutants.core import Mutant, broken, rendered

pytestmark = [pytest.mark.gpu, ON_HOPPER]

# As the full level runs them, each is refused in two checks of five.
LUCKY = (
    "forward_hopper: values not waited for",
    "forward_hopper: later keys not waited for",
    "forward_hopper: last values not waited for",
)
MUTANTS = {mutant.id: mutant for mutant in gpu_mutants() if mutant.id in LUCKY}
SEEDS = (7, 8, 9)
WAIT = 120.0


@pytest.mark.parametrize("name", LUCKY)
@pytest.mark.parametrize("seed", SEEDS)
def test_missing_wait_is_detected_with_delays(name: str, seed: int) -> None:
    mutant: Mutant = MUTANTS[name]
    subject, target, device = mutant.subject, device_target(0), torch.device("cuda", 0)
    arguments = (subject.problem, subject.config, target, device)
    verdict = check_delayed(broken(mutant), *arguments, seed=seed)
    assert verdict is not None
    assert not verdict.passed
    assert verdict.failed.startswith("delayed ")
    right = check_delayed(rendered(subject), *arguments, seed=seed)
    assert right is not None
    assert right.passed, right.failed


@pytest.mark.alone
def test_search_verifies_kernels_with_barriers_with_delays() -> None:
    problem, target = MUTANTS[LUCKY[0]].subject.problem, device_target(0)
    assumed = contiguous_specialization(problem, lse=False)
    scope = SearchTask(problem, target, assumed, open_spaces(problem, target, ()))
    defaults = {candidate.family: candidate for candidate in scope.defaults()}
    with GpuWorker(0) as gpu:
        late = gpu.evaluate_delayed(scope, defaults["forward_hopper"]).result(WAIT)
        nothing = gpu.evaluate_delayed(scope, defaults["forward_q_outer"]).result(WAIT)
    assert late is not None
    assert late.outcome is Outcome.OK, late.message
    assert late.verdict is not None
    assert late.verdict.checks > 100
    assert nothing is None
