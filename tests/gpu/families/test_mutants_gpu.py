"""Tests on a GPU that mutants are refused and correct kernels are not.

`FLASHTUNE_SAMPLES` is the number of configs that are drawn of each family (12). `FLASHTUNE_SEED` selects
them and their inputs. `python -m tests.mutants` does the same and saves what it finds.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flashtune.core.target import device_target
from tests.mutants.catalogue import gpu_mutants, runs_on
from tests.mutants.core import Mutant
from tests.mutants.portable.pools import Plan
from tests.mutants.results import CAUGHT, Control, Fate, Found
from tests.mutants.right import sampled_subjects, verify_right
from tests.mutants.runner import run_mutants

SAMPLES = int(os.environ.get("FLASHTUNE_SAMPLES", "12"))
SEED = int(os.environ.get("FLASHTUNE_SEED", "7"))
SECONDS = 900.0
ROOT = Path(__file__).parents[3]

pytestmark = [pytest.mark.gpu, pytest.mark.alone, pytest.mark.slow, pytest.mark.timeout(int(SECONDS) + 300)]


@pytest.fixture(scope="module")
def plan(kernel_cache: Path) -> Iterator[Plan]:
    """Processes find the jobs on the path of this one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        yield Plan(device_target(0), SEED, time.monotonic() + SECONDS)


@pytest.fixture(scope="module")
def verified(plan: Plan) -> tuple[tuple[Control, ...], dict[str, Found]]:
    """All mutants that this GPU can run, verified at once: kernels compile and run side by side."""
    mutants = [mutant for mutant in gpu_mutants() if runs_on(mutant, plan.target)]
    controls, results = run_mutants(mutants, plan, lambda result: None)
    return controls, {mutant.id: result for mutant, result in zip(mutants, results, strict=True)}


@pytest.mark.parametrize("mutant", gpu_mutants(), ids=lambda mutant: mutant.id)
def test_mutant_is_detected_or_equivalent(
    mutant: Mutant, plan: Plan, verified: tuple[tuple[Control, ...], dict[str, Found]]
) -> None:
    if not runs_on(mutant, plan.target):
        pytest.skip("its family does not run here")
    result = verified[1][mutant.id]
    assert result.fate in {*CAUGHT, Fate.DELAYED, Fate.EQUIVALENT}, result.caught_by


def test_unmodified_kernels_are_accepted(
    verified: tuple[tuple[Control, ...], dict[str, Found]],
) -> None:
    assert [control for control in verified[0] if not control.passed] == []


def test_sampled_configs_are_not_refused_wrongly(plan: Plan) -> None:
    subjects = sampled_subjects(SAMPLES, SEED, plan.target)
    controls = verify_right(subjects, plan, lambda control: None)
    assert controls
    assert [control for control in controls if control.wrongly_refused] == []
