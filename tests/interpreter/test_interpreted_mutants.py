"""Tests that verification refuses mutants and accepts correct kernels, in the interpreter."""

import random
from collections.abc import Mapping

import msgspec
import pytest
import torch

from flashtune import testing
from flashtune.core.config import Config
from flashtune.core.kernel import Alignment, Specialization
from flashtune.core.problem import Causal, Dtype, Problem
from flashtune.core.target import find_target
from flashtune.launch.compilation import interpreting
from flashtune.templates.family import Family
from flashtune.templates.registry import find_family
from flashtune.verification.cases import Level
from flashtune.verification.check import check_kernel
from tests.mutants.catalogue import interpreted_mutants
from tests.mutants.core import Mutant
from tests.mutants.interpreted import interpreted
from tests.mutants.results import Fate

pytestmark = pytest.mark.skipif(not interpreting(), reason="runs kernels under TRITON_INTERPRET=1")

TARGET = find_target("h200")
CPU = torch.device("cpu")
SEED = 7


def _config(family: Family, fields: Mapping[str, object]) -> Config:
    small = {"block_m": 16, "block_n": 16, "num_warps": 4, "num_stages": 2}
    return msgspec.convert({**small, **fields}, family.config_type)


@pytest.mark.sampled(every=16)
@pytest.mark.parametrize("mutant", interpreted_mutants(), ids=lambda mutant: mutant.id)
def test_mutant_is_refused(mutant: Mutant) -> None:
    result = interpreted(mutant, SEED)
    assert result.fate is Fate.REFUSED
    assert result.caught_by


def _right_kernels(count: int) -> list[tuple[str, Problem, Config, Specialization]]:
    """A fixed draw over families, problems, small tiles and specialisations."""
    draw = random.Random(20)
    drawn = []
    for index in range(count):
        family = find_family(("forward_q_outer", "forward_kv_outer")[index % 2])
        problem = testing.problem(
            "heads=2,kv_heads=1,seqlen=100,head_dim=64",
            dtype=draw.choice([Dtype.BF16, Dtype.FP16, Dtype.FP32]),
            head_dim=draw.choice([1, 8, 16, 40, 64, 96]),
            value_head_dim=draw.choice([8, 16, 33, 64]),
            causal=draw.choice(list(Causal)),
        )
        fields: dict[str, object] = {
            "block_m": draw.choice([16, 32, 64]),
            "block_n": draw.choice([16, 32]),
            "num_stages": draw.choice([1, 2, 3]),
            "split_head_dim": draw.random() < 0.5,
        }
        if family.name == "forward_q_outer":
            fields |= {
                "loads": draw.choice(["pointer", "descriptor"]),
                "overlap_qk": draw.random() < 0.5,
                "split_masked_loop": draw.random() < 0.5,
                "lpt": draw.random() < 0.5,
                "heads_innermost": draw.random() < 0.5,
            }
        specialization = Specialization(
            draw.choice(list(Alignment)), draw.choice([32, 64]), draw.random() < 0.5
        )
        drawn.append((family.name, problem, _config(family, fields), specialization))
    return drawn


@pytest.mark.sampled(every=3)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("name", "problem", "config", "specialization"), _right_kernels(10))
def test_correct_kernels_are_accepted(
    name: str, problem: Problem, config: Config, specialization: Specialization
) -> None:
    verdict = check_kernel(find_family(name), problem, config, specialization, TARGET, CPU, Level.QUICK)
    assert verdict.passed, verdict.failed
    assert verdict.device == "interpreter"
    assert 0 < verdict.worst_ratio <= 1


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_full_level_has_more_checks() -> None:
    family = find_family("forward_q_outer")
    problem = testing.problem("heads=2,kv_heads=1,seqlen=100,head_dim=16,dtype=fp32,causal=bottom_right")
    quick, full = (
        check_kernel(family, problem, _config(family, {}), Specialization(lse=True), TARGET, CPU, level)
        for level in (Level.QUICK, Level.FULL)
    )
    assert quick.passed, quick.failed
    assert full.passed, full.failed
    assert full.checks > 3 * quick.checks
