"""Tests of the default config of every family: it is in the search space and fits the SRAM of the GPU."""

import random
from collections.abc import Iterator
from typing import Any

import pytest

from flashtune.core.errors import ProblemError
from flashtune.core.kernel import Specialization
from flashtune.core.problem import Bias, Causal, Dtype, Feature, KvDtype, Problem
from flashtune.core.target import TARGETS, Target, find_target
from flashtune.launch.compilation import compile_kernel
from flashtune.templates.decode_split_kv.perf_model import expected_sram
from flashtune.templates.decode_split_kv.space import DecodeConfig
from flashtune.templates.family import Family, unsupported_reason
from flashtune.templates.registry import families
from flashtune.templates.rendering import render
from tests.gpu.random.random_problems import DRAWN
from tests.problems.decode import FAMILY, LATENT, a_problem
from tests.problems.function_cases import FUNCTIONS

# Draws of a problem for each family and GPU; a family may not compute some of them.
DRAWS = 1000
# Common ones, and all that kernels take.
WIDTHS = (*(64, 128, 256) * 4, *range(16, 257, 8))
LATENT_WIDTHS = ((96, 64), (320, 256), (544, 512), (576, 512), (640, 512))
GROUPS = (1, 2, 4, 5, 8, 16, 64, 128)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.short_name)
@pytest.mark.parametrize("family", families(), ids=lambda family: family.name)
def test_defaults_are_in_the_space_and_fit(family: Family, target: Target) -> None:
    for problem in problems_of(family, target):
        config = family.default(problem, target)
        space = family.space(problem, target)
        assert space.contains(config), (problem.key, config.label())
        variants = list(family.schedule_variants(problem, config, target))
        assert all(space.contains(variant) for variant in variants), (problem.key, config.label())
        columns = family.tensor_memory_columns(problem, config, target)
        assert columns <= target.tensor_memory_columns, (problem.key, config.label())
        items = family.sram_items(problem, config, target, Specialization())
        bytes_ = sum(item.bytes for item in items)
        if isinstance(config, DecodeConfig):
            assert bytes_ <= expected_sram(problem, config, target), (problem.key, config.label())
            bytes_ = expected_sram(problem, config, target)
        assert bytes_ <= target.sram_per_block, (problem.key, config.label())


def problems_of(family: Family, target: Target) -> Iterator[Problem]:
    """Random problems that a family computes, the same in every run."""
    chance = random.Random(f"{family.name} {target.name}")
    for _ in range(DRAWS):
        problem = draw_problem(chance, family)
        if problem is not None and unsupported_reason(family, problem, target, Specialization()) is None:
            yield problem


def draw_problem(chance: random.Random, family: Family) -> Problem | None:
    """Returns a problem with up to two features of a family, or None if they exclude each other."""
    supported = sorted(family.features & DRAWN.keys())
    asked = chance.sample(supported, min(len(supported), chance.randrange(3)))
    if Feature.MLA in asked:
        head_dim, value_head_dim = chance.choice(LATENT_WIDTHS)
    else:
        head_dim = chance.choice(WIDTHS)
        value_head_dim = chance.choice((head_dim, head_dim, *WIDTHS))
    kv_heads = 1 if Feature.MLA in asked else chance.choice((1, 2, 8))
    fields: dict[str, Any] = {
        "direction": family.direction,
        "dtype": chance.choice((Dtype.BF16, Dtype.FP16, Dtype.FP32, Dtype.E4M3)),
        "head_dim": head_dim,
        "value_head_dim": value_head_dim,
        "heads": kv_heads * chance.choice(GROUPS),
        "kv_heads": kv_heads,
        "batch": chance.choice((1, 2, 16, 128)),
        "seqlen_q": chance.choice((1, 1, 4, 16, 1024)),
        "seqlen_kv": chance.choice((1, 100, 1024, 8192, 131072)),
        "causal": chance.choice(tuple(Causal)),
    }
    for feature in asked:
        fields |= DRAWN[feature](chance, fields)
    try:
        return Problem(**fields)
    except ProblemError:
        return None


# Problems with usual tiles that exceed the SRAM of the GPU or do not compile for it.
REDUCED: dict[str, tuple[str, dict[str, Any]]] = {
    "pages": ("rtx-4090", {"page_size": 64}),
    "wide": ("rtx-4090", {"head_dim": 256, "value_head_dim": 256, "heads": 512}),
    "int8": ("rtx-4090", {"kv_dtype": KvDtype.INT8, "heads": 512}),
    "latent": ("b200", {**LATENT, "heads": 64}),
    "int8 in tensor memory": ("b200", {"kv_dtype": KvDtype.INT8, "heads": 512}),
    "wide latent": ("h200", {**LATENT, "head_dim": 640, "heads": 64}),
    "elements of pairs": ("h200", {"heads": 512, "functions": FUNCTIONS["relative bias"]}),
    "bias": ("h200", {"head_dim": 256, "value_head_dim": 256, "heads": 512, "bias": Bias.ADDITIVE}),
}


@pytest.mark.slow
@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("name", REDUCED)
def test_reduced_decode_defaults_compile_and_fit(name: str) -> None:
    gpu, changes = REDUCED[name]
    problem, target = a_problem(**changes), find_target(gpu)
    config = FAMILY.default(problem, target)
    assert isinstance(config, DecodeConfig)
    shared = compile_kernel(render(FAMILY, problem, config, Specialization()), target).metadata.shared
    assert shared <= target.sram_per_block
    assert expected_sram(problem, config, target) <= target.sram_per_block


EXACT = [("rtx-4090", {}), ("rtx-4090", {"kv_dtype": KvDtype.INT8}), ("h200", {}), ("b200", {})]


@pytest.mark.slow
@pytest.mark.parametrize(("gpu", "changes"), EXACT)
@pytest.mark.parametrize("rows", [16, 64])
def test_expected_sram_is_exact_for_plain_keys(gpu: str, changes: dict[str, Any], rows: int) -> None:
    problem, target = a_problem(heads=8 * rows, **changes), find_target(gpu)
    config = FAMILY.default(problem, target)
    assert isinstance(config, DecodeConfig)
    shared = compile_kernel(render(FAMILY, problem, config, Specialization()), target).metadata.shared
    assert 0 <= expected_sram(problem, config, target) - shared <= 2048
