"""Tests, without a GPU, of the problems and configs of the GPU tests of features."""

import itertools

import msgspec
import pytest
import torch

from flashtune.core.kernel import Alignment, Specialization
from flashtune.core.problem import Bias
from flashtune.templates.family import unsupported_reason
from flashtune.templates.forward_hopper.family import SPARE_BYTES
from flashtune.templates.forward_hopper.space import has_one_list
from flashtune.verification.cases import Level, companions, main_cases
from flashtune.verification.inputs import side_inputs
from flashtune.verification.inputs.prepared import prepare
from flashtune.verification.inputs.side_inputs import make_side
from flashtune.verification.lengths import equal_lengths
from flashtune.verification.probes import Probe
from tests.gpu.families.test_features_gpu import BLOCKS, SCHEDULES, scheduled, tuned
from tests.problems.hopper import FAMILY, H200, a_config, sram_bytes
from tests.problems.kernel_cases import TUNED

SERVED = [name for name in TUNED if tuned(name).seqlen_q > 2]
MASKS = [name for name in SERVED if tuned(name).bias is not Bias.NONE]
CPU = torch.device("cpu")
# Most pairs of a query and a key in problems that are computed on the CPU.
SMALL = 2**17


@pytest.mark.parametrize("name", SERVED)
def test_hopper_computes_the_problem_with_its_default(name: str) -> None:
    problem = tuned(name)
    config = a_config(problem)
    assert unsupported_reason(FAMILY, problem, H200, Specialization(lse=True)) is None
    assert FAMILY.space(problem, H200).admits(config)
    assert sram_bytes(problem, config) + SPARE_BYTES <= H200.sram_per_block
    assert [case.problem.features for case in main_cases(problem)] == [problem.features] * 2


@pytest.mark.parametrize(("name", "schedule"), list(itertools.product(BLOCKS, SCHEDULES)))
def test_schedules_of_block_masks_are_in_the_space(name: str, schedule: str) -> None:
    problem = tuned(name)
    config = scheduled(problem, H200, schedule)
    assert FAMILY.space(problem, H200).admits(config)
    assert sram_bytes(problem, config) + SPARE_BYTES <= H200.sram_per_block
    assert has_one_list(problem, config) is (schedule != "own lists")
    assert config.dynamic_schedule is (schedule == "dynamic")


@pytest.mark.parametrize("name", MASKS)
def test_masks_have_full_empty_and_partial_tiles(name: str) -> None:
    problem = msgspec.structs.replace(tuned(name), heads=1, kv_heads=1, batch=1)
    config = a_config(problem)
    block = main_cases(problem)[0].block
    generator = torch.Generator().manual_seed(1)
    bias = make_side(Probe.RANDOM, problem, equal_lengths(problem), block, generator).bias
    assert bias is not None
    is_boolean = problem.bias is Bias.BOOLEAN
    hidden, is_free = (~bias, bias) if is_boolean else (bias == -torch.inf, bias == 0)

    def tiles(elements: torch.Tensor) -> torch.Tensor:
        """Whether all elements of each whole tile of a group are set."""
        rows, columns = config.rows_per_group, config.block_n
        of_rows = elements[0, 0].unfold(0, rows, rows)
        return of_rows.unfold(1, columns, columns).flatten(2).all(-1)

    is_empty, is_full = tiles(hidden), tiles(is_free)
    assert is_empty.any()
    assert is_full.any()
    assert not (is_empty | is_full).all()


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.9, 1.0])
def test_rows_of_empty_lists_have_no_output(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_inputs, "EMPTY_LISTS", share)
    problem = tuned("small blocks")
    checked = 0
    for case in companions(problem, a_config(problem), Level.QUICK, reduced=False):
        if case.problem.seqlen_q * case.problem.seqlen_kv > SMALL:
            continue
        checked += 1
        ready = prepare(case, Alignment.SIXTEEN, CPU, 1)
        counts = ready.side.block_counts
        assert counts is not None
        assert bool((counts == 0).any())
        assert bool(ready.expected.out.isfinite().all())
        if share == 1.0:
            assert not counts.any()
            assert not ready.expected.out.any()
            assert bool((ready.expected.lse == -torch.inf).all())
    assert checked
