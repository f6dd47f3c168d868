"""Tests of the verification on a GPU: correct kernels pass, and mutants do not."""

from __future__ import annotations

import msgspec
import pytest
import torch

from flashtune import testing
from flashtune.core.kernel import Alignment, Specialization
from flashtune.core.problem import Causal, Dtype, Problem
from flashtune.core.target import device_target
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render
from flashtune.verification.cases import Level
from flashtune.verification.check import check_kernel, check_rendered

pytestmark = pytest.mark.gpu

FAMILIES = ("forward_q_outer", "forward_kv_outer")


def make_problem(causal: Causal = Causal.NONE, dtype: Dtype = Dtype.BF16, head_dim: int = 64) -> Problem:
    return testing.problem(
        "heads=8,kv_heads=2,seqlen=1024,head_dim=64,batch=2", dtype=dtype, head_dim=head_dim, causal=causal
    )


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("causal", list(Causal))
@pytest.mark.parametrize("dtype", [Dtype.BF16, Dtype.FP16, Dtype.FP32])
@pytest.mark.parametrize("head_dim", [64, 96])
def test_defaults_pass_full_level(name: str, causal: Causal, dtype: Dtype, head_dim: int) -> None:
    family, target = find_family(name), device_target()
    problem = make_problem(causal, dtype, head_dim)
    config = family.default(problem, target)
    device = torch.device("cuda", 0)
    verdict = check_kernel(family, problem, config, Specialization(lse=True), target, device, Level.FULL)
    assert verdict.passed, verdict.failed
    assert verdict.device == torch.cuda.get_device_name(0)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("alignment", list(Alignment))
@pytest.mark.parametrize("index_bits", [32, 64])
def test_every_specialisation_passes(name: str, alignment: Alignment, index_bits: int) -> None:
    family, target = find_family(name), device_target()
    problem = make_problem(Causal.BOTTOM_RIGHT, head_dim=40)
    config = family.default(problem, target)
    device = torch.device("cuda", 0)
    specialization = Specialization(alignment, index_bits)
    verdict = check_kernel(family, problem, config, specialization, target, device, Level.QUICK)
    assert verdict.passed, verdict.failed


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("index_bits", [32, 64])
def test_strict_level_passes_beyond_2_31_elements(name: str, index_bits: int) -> None:
    family, target = find_family(name), device_target()
    problem = make_problem(Causal.BOTTOM_RIGHT)
    config = family.default(problem, target)
    device = torch.device("cuda", 0)
    specialization = Specialization(index_bits=index_bits)
    verdict = check_kernel(family, problem, config, specialization, target, device, Level.STRICT)
    assert verdict.passed, verdict.failed


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("accumulator * rescale[:, None]", "accumulator"),
        ("query_exists = queries < seqlen_q", "query_exists = queries < seqlen_q + 1"),
        ("head // group_size", "head % (heads // group_size)"),
        ("queries + diagonal + 1", "queries + diagonal"),
    ],
)
def test_mutants_are_refused_without_side_effects(old: str, new: str) -> None:
    family, target, device = find_family("forward_q_outer"), device_target(), torch.device("cuda", 0)
    problem = make_problem(Causal.BOTTOM_RIGHT)
    config = family.default(problem, target)
    kernel = render(family, problem, config, Specialization(lse=True))
    assert old in kernel.source
    broken = msgspec.structs.replace(kernel, source=kernel.source.replace(old, new))
    assert not check_rendered(broken, problem, config, target, device, Level.FULL, seed=4).passed
    verdict = check_rendered(kernel, problem, config, target, device, Level.FULL, seed=4)
    assert verdict.passed, verdict.failed
