"""Tests of the prologue of `backward_hopper` that lists the steps of a block mask, in the interpreter."""

import math
from typing import Any

import msgspec
import pytest
import torch

from flashtune.core.expressions.text import parse_functions
from flashtune.core.features.records import NO_EXTRA_INPUTS, ExtraInputs
from flashtune.core.kernel import Kernel
from flashtune.core.problem import BlockLists, Causal, Problem
from flashtune.launch.compilation import load_module
from flashtune.templates.backward_hopper.space import HopperBackwardConfig
from tests.emulator.step_lists import steps_of_blocks
from tests.mutants.backward_hopper.backward_hopper_blocks import listings
from tests.mutants.core import Mutant, broken, rendered
from tests.problems.block_lists import with_lists
from tests.support.values import present
from tests.templates.backward.test_backward_hopper_emulated import a_problem, kernel_of, listed_blocks

SHAPES = ((300, 500), (450, 150))


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("causal", Causal)
@pytest.mark.parametrize("lists", BlockLists)
def test_steps_follow_the_lists(head_dim: int, size: int, causal: Causal, lists: BlockLists) -> None:
    queries, keys = SHAPES[lists is BlockLists.GROUP]
    problem = a_problem(
        head_dim, causal=causal, block_mask=size, block_lists=lists, seqlen_q=queries, seqlen_kv=keys,
        heads=4, kv_heads=2, batch=2,
    )  # fmt: skip
    assert lists_steps(*kernel_of(problem), problem)


@pytest.mark.parametrize("causal", Causal)
def test_steps_have_two_blocks_of_queries_of_the_mask(causal: Causal) -> None:
    problem = a_problem(64, block_mask=64, causal=causal, seqlen_q=300, seqlen_kv=500)
    assert lists_steps(*kernel_of(problem, block_m=128), problem)


def test_steps_are_listed_in_several_pieces() -> None:
    problem = a_problem(128, block_mask=64, seqlen_q=16000, seqlen_kv=200, heads=2, kv_heads=1)
    assert lists_steps(*kernel_of(problem), problem)


@pytest.mark.parametrize("axis", [0, 1])
def test_lists_may_be_shared(axis: int) -> None:
    problem = a_problem(128, block_mask=64, seqlen_q=300, seqlen_kv=500, heads=4, kv_heads=2, batch=2)
    visible = listed_blocks(problem).narrow(axis, 1, 1)
    side = with_lists(NO_EXTRA_INPUTS, visible)
    counts, indices = (present(tensor) for tensor in (side.block_counts, side.block_indices))
    shape = problem.batch, problem.heads
    shared = side._replace(
        block_counts=counts.expand(*shape, -1), block_indices=indices.expand(*shape, -1, -1)
    )
    assert lists_steps(*kernel_of(problem), problem, shared)


def test_blocks_without_effect_of_a_mask_function_are_marked() -> None:
    functions = parse_functions("key.query.less_equal/0/1:-1:2:")
    for head_dim in (64, 128):
        problem = a_problem(head_dim, block_mask=64, seqlen_q=300, seqlen_kv=500, functions=functions)
        side = with_lists(NO_EXTRA_INPUTS, listed_blocks(problem))
        side = side._replace(full_counts=present(side.block_counts) // 2)
        assert lists_steps(*kernel_of(problem), problem, side)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", listings(), ids=lambda mutant: mutant.name)
def test_mutants_list_other_steps(mutant: Mutant) -> None:
    subject = mutant.subject
    assert isinstance(subject.config, HopperBackwardConfig)
    problem = msgspec.structs.replace(subject.problem, batch=1, seqlen_q=350, seqlen_kv=410)
    assert lists_steps(rendered(subject), subject.config, problem)
    assert not lists_steps(broken(mutant), subject.config, problem)


def lists_steps(
    kernel: Kernel, config: HopperBackwardConfig, problem: Problem, side: ExtraInputs | None = None
) -> bool:
    """Whether the prologue writes the steps of random block masks, or of these lists."""
    side = with_lists(NO_EXTRA_INPUTS, listed_blocks(problem)) if side is None else side
    module = load_module(kernel)
    queries, keys = (problem.heads, problem.seqlen_q), (problem.kv_heads, problem.seqlen_kv)
    q, k = (torch.zeros(problem.batch, *size, problem.head_dim) for size in (queries, keys))
    lists = [
        tensor for tensor in (side.block_counts, side.block_indices, side.full_counts) if tensor is not None
    ]
    planned = q, k, k, q, q, q, k, k, *lists
    workspaces = [torch.full(shape, math.nan) for shape in module.launch_plan(*planned)[1]]
    steps = workspaces[2].view(torch.int32).fill_(-1)
    grid, integers = module.prologue_plan(*planned)
    rest: tuple[Any, ...] = (0.5,) if config.init_accumulators else ()
    arguments = q, q, torch.zeros(q.shape[:3]), *workspaces[:2], steps, *lists, *rest, *integers
    assert len(arguments) == len(present(kernel.prologue).arguments)
    module.prepare[grid](*arguments)
    meant = steps_of_blocks(problem, config, side)
    return bool((steps.numpy() == meant).all())
