"""Tests of the prologues of `forward_hopper` that list blocks, in the interpreter."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from flashtune.core.expressions.text import parse_functions
from flashtune.core.features.functions import has_full_lists
from flashtune.core.features.records import NUMBERS
from flashtune.core.kernel import Kernel
from flashtune.core.problem import Bias, Causal, Problem
from flashtune.launch.compilation import load_module
from flashtune.templates.forward_hopper.space import HopperConfig
from tests.emulator.block_lists import block_lists, lists_of_blocks
from tests.mutants.core import Subject, broken, rendered
from tests.mutants.forward_hopper.hopper_blocks import block_listings
from tests.mutants.forward_hopper.hopper_pairs import listings
from tests.problems.hopper import a_config
from tests.problems.kernel_cases import HOPPER_BLOCKS, HOPPER_MASKED
from tests.templates.hopper.emulated.test_hopper_emulated import (
    CONFIGS,
    a_bias,
    a_small,
    kernel_of,
    score_inputs,
)
from tests.templates.hopper.emulated.test_hopper_emulated_features import BLOCK_CONFIGS, a_block_mask

Check = Callable[[Kernel, Subject], bool]


@pytest.mark.slow
@pytest.mark.sampled(every=5)
@CONFIGS
@pytest.mark.parametrize("bias", [Bias.ADDITIVE, Bias.BOOLEAN])
@pytest.mark.parametrize("name", [name for name in HOPPER_MASKED if "alibi" not in name])
def test_lists_and_words(config: dict[str, Any], bias: Bias, name: str) -> None:
    causal, positions = HOPPER_MASKED[name]
    # Rows of elements in whole fours and in whole sixteens. The test of masks of keys has neither.
    shapes = ((140, 300, 2), (290, 208, 1))
    queries, keys, batch = shapes[[*HOPPER_MASKED].index(name) % 2]
    problem = a_small(causal, seqlen_q=queries, seqlen_kv=keys, batch=batch, bias=bias, **positions)
    assert are_right(kernel_of(problem, **config), problem, a_config(problem, **config))


@pytest.mark.sampled
@CONFIGS
@pytest.mark.parametrize(("queries", "keys"), [(420, 304), (20, 602)])
def test_masks_of_keys_have_one_list_for_all_tiles(config: dict[str, Any], queries: int, keys: int) -> None:
    problem = a_small(Causal.NONE, seqlen_q=queries, seqlen_kv=keys, batch=2, bias=Bias.BOOLEAN)
    lengths = torch.tensor([keys // 2, keys])
    mask = (torch.arange(keys) < lengths[:, None])[:, None, None].expand(-1, problem.heads, queries, -1)
    kernel, layout = kernel_of(problem, **config), a_config(problem, **config)
    assert are_right(kernel, problem, layout, mask)
    # The lists of one tile of queries.
    assert len(written(kernel, problem, mask)[-1]) == 2


def are_right(kernel: Kernel, problem: Problem, config: HopperConfig, bias: Tensor | None = None) -> bool:
    """Returns whether the lists and words of a mask or bias, by default a random one, are right."""
    bias = a_bias(problem) if bias is None else bias
    made = written(kernel, problem, bias)
    own = tuple(slice(0, 1 if bias.stride(axis) == 0 else None) for axis in (0, 1))
    rows = config.block_m if bias.stride(2) == 0 else problem.seqlen_q
    problem = msgspec.structs.replace(problem, seqlen_q=min(rows, problem.seqlen_q))
    right = True
    for tensor, meant in zip(made, block_lists(problem, config, bias[own][:, :, :rows]).written, strict=True):
        is_written = meant != -1
        right &= bool((tensor.numpy().reshape(-1) == meant)[is_written].all())
    return right


def written(kernel: Kernel, problem: Problem, bias: Tensor) -> list[Tensor]:
    """Returns the workspaces of the prologues."""
    module = load_module(kernel)
    queries, keys = problem.seqlen_q, problem.seqlen_kv
    lengths = ((problem.heads, queries), (problem.kv_heads, keys))
    q, k = (torch.empty(problem.batch, heads, length, 16) for heads, length in lengths)
    shapes = module.launch_plan(q, k, k, q, bias)[1]
    made = [torch.full(shape, -1, dtype=torch.int32) for shape in shapes]
    grid, integers = module.first_plan(q, k, k, q, bias)
    module.classify_blocks[grid](bias, *made[:-1], *integers)
    grid, integers = module.prologue_plan(q, k, k, q, bias)
    module.list_blocks[grid](made[0], made[-1], *integers)
    return made


@pytest.mark.slow
@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("layout", BLOCK_CONFIGS)
@pytest.mark.parametrize("name", HOPPER_BLOCKS)
def test_lists_of_block_masks(layout: str, name: str) -> None:
    queries, keys = ((200, 300), (420, 150), (20, 602))[[*HOPPER_BLOCKS].index(name) % 3]
    problem = a_block_mask(layout, name, queries, keys)
    config = a_config(problem, **BLOCK_CONFIGS[layout][1])
    assert lists_blocks(kernel_of(problem, **BLOCK_CONFIGS[layout][1]), problem, config)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("layout", ["one group", "one list", "one list, parts"])
@pytest.mark.parametrize(("queries", "keys"), [(200, 300), (420, 150), (20, 602)])
def test_lists_name_the_blocks_of_mask_functions(layout: str, queries: int, keys: int) -> None:
    functions = parse_functions("key.query.less_equal/0/1:-1:2:")
    problem = a_block_mask(layout, "alone", queries, keys)
    problem = msgspec.structs.replace(problem, functions=functions)
    config = a_config(problem, **BLOCK_CONFIGS[layout][1])
    assert lists_blocks(kernel_of(problem, **BLOCK_CONFIGS[layout][1]), problem, config)


def lists_blocks(kernel: Kernel, problem: Problem, config: HopperConfig) -> bool:
    """Returns whether the lists of random block masks are right."""
    side = score_inputs(problem, None)
    assert side.block_counts is not None
    if has_full_lists(problem):
        side = side._replace(full_counts=side.block_counts // 2)
    module = load_module(kernel)
    lengths = ((problem.heads, problem.seqlen_q), (problem.kv_heads, problem.seqlen_kv))
    q, k = (torch.empty(problem.batch, heads, length, 16) for heads, length in lengths)
    planned = q, k, k, q, *(getattr(side, name) for name in kernel.all_side if name not in NUMBERS)
    made = [torch.full(shape, -1, dtype=torch.int32) for shape in module.launch_plan(*planned)[1]]
    grid, integers = module.prologue_plan(*planned)
    lengths_too = () if side.seqlens_kv is None else (side.seqlens_kv,)
    listed = side.block_counts, side.block_indices, *(() if side.full_counts is None else (side.full_counts,))
    module.list_blocks[grid](*lengths_too, *listed, *made, *integers)
    right = True
    for workspace, meant in zip(made, lists_of_blocks(problem, config, side), strict=True):
        written = meant != -1
        right &= bool((workspace.numpy().reshape(-1) == meant)[written].all())
    return right


def problems_of(subject: Subject, batch: int, *shapes: tuple[int, int]) -> list[Problem]:
    small = {"heads": 2, "kv_heads": 1, "batch": batch}
    return [
        msgspec.structs.replace(subject.problem, **small, seqlen_q=queries, seqlen_kv=keys)
        for queries, keys in shapes
    ]


def all_lists_are_right(kernel: Kernel, subject: Subject) -> bool:
    """Returns whether the lists and words of a mask or bias are right at all shapes."""
    assert isinstance(subject.config, HopperConfig)
    problems = problems_of(subject, 1, (200, 330), (100, 700))
    return all(are_right(kernel, problem, subject.config) for problem in problems)


def all_blocks_are_right(kernel: Kernel, subject: Subject) -> bool:
    """Returns whether the lists of block masks are right at all shapes."""
    assert isinstance(subject.config, HopperConfig)
    problems = problems_of(subject, subject.problem.batch, (290, 331), (290, 700))
    return all(lists_blocks(kernel, problem, subject.config) for problem in problems)


CHECKS = {
    **{mutant.name: (mutant, all_lists_are_right) for mutant in listings()},
    **{mutant.name: (mutant, all_blocks_are_right) for mutant in block_listings()},
}
SUBJECTS = {mutant.subject: are_all_right for mutant, are_all_right in CHECKS.values()}


@pytest.mark.slow
@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(("subject", "are_all_right"), SUBJECTS.items())
def test_unmodified_kernels_write_the_lists(subject: Subject, are_all_right: Check) -> None:
    assert are_all_right(rendered(subject), subject)


@pytest.mark.slow
@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("name", CHECKS)
def test_mutants_write_other_lists(name: str) -> None:
    mutant, are_all_right = CHECKS[name]
    assert not are_all_right(broken(mutant), mutant.subject)
