"""Tests of block masks in the masked and the split backward family in the interpreter, against float64."""

import functools
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from flashtune.core.block_mask import BlockMask
from flashtune.core.config import Config
from flashtune.core.problem import BlockLists, Causal, Direction, Problem
from flashtune.templates.registry import find_family
from tests.interpreter.families import kernel_calls
from tests.interpreter.families.kernel_calls import Call, make_call, small_config
from tests.problems import backward_calls
from tests.problems.block_lists import visible_blocks, with_lists
from tests.problems.kernel_cases import WITH_BLOCK_MASK

MASKED, GRADIENTS = (find_family(name) for name in ("forward_masked", "backward_split"))
CAUSAL = pytest.mark.parametrize("causal", list(Causal))
# Lists of more heads are tested without other features.
FEW_HEADS = {"heads": 2, "kv_heads": 1}
check = functools.partial(kernel_calls.check, MASKED)


def a_problem(**changes: Any) -> Problem:
    shape = {"head_dim": 16, "heads": 4, "kv_heads": 2, "seqlen_q": 150, "seqlen_kv": 330, "block_mask": 64}
    return kernel_calls.a_problem(**{**shape, **changes})


def a_config(seed: str, **changes: Any) -> Config:
    return small_config(MASKED, seed, (32, 64), num_splits=1, **changes)


def a_call(problem: Problem, visible: Tensor) -> Call:
    """A call with these blocks."""
    call = make_call(msgspec.structs.replace(problem, block_mask=0))
    return call._replace(side=with_lists(call.side, visible))


@pytest.mark.sampled
@pytest.mark.parametrize("lists", list(BlockLists))
@pytest.mark.parametrize("size", [64, 128])
@CAUSAL
def test_random_blocks(causal: Causal, size: int, lists: BlockLists) -> None:
    torch.manual_seed(0)
    problem = a_problem(causal=causal, block_mask=size, block_lists=lists)
    config = a_config(f"{causal} {size} {lists}", split_masked_loop=causal is not Causal.TOP_LEFT)
    check(problem, a_call(problem, visible_blocks(problem)), config)


@pytest.mark.sampled
@pytest.mark.parametrize("name", WITH_BLOCK_MASK)
@CAUSAL
def test_with_another_feature(name: str, causal: Causal) -> None:
    torch.manual_seed(0)
    problem = a_problem(causal=causal, **FEW_HEADS, **WITH_BLOCK_MASK[name])
    config = a_config(f"{name} {causal}", split_masked_loop=causal is not Causal.TOP_LEFT)
    check(problem, a_call(problem, visible_blocks(problem)), config, index_bits=64)


@pytest.mark.parametrize("causal", [Causal.NONE, Causal.BOTTOM_RIGHT])
def test_more_queries_than_keys(causal: Causal) -> None:
    torch.manual_seed(0)
    problem = a_problem(causal=causal, seqlen_q=290, seqlen_kv=140)
    check(problem, a_call(problem, visible_blocks(problem)), a_config("queries", split_masked_loop=True))


def test_lists_longer_than_one_search_step() -> None:
    """The list has more blocks than one step of the search in it."""
    torch.manual_seed(0)
    problem = a_problem(
        batch=1, heads=1, kv_heads=1, seqlen_q=64, seqlen_kv=300 * 64 + 5, causal=Causal.BOTTOM_RIGHT
    )
    visible = torch.rand(1, 1, 1, 301) < 0.7
    config = a_config("long", block_m=64, block_n=64, split_masked_loop=True)
    assert visible.sum() > 128
    check(problem, a_call(problem, visible), config)


def test_no_visible_block_at_all() -> None:
    problem = a_problem()
    visible = torch.zeros_like(visible_blocks(problem))
    check(problem, a_call(problem, visible), a_config("nothing", split_masked_loop=True))


def test_narrow_lists_shared_by_sequences_and_heads() -> None:
    """Lists with room for two blocks only, with strides of zero."""
    torch.manual_seed(0)
    problem = a_problem(block_lists=BlockLists.GROUP)
    mask = BlockMask.from_scores(torch.randn(3, 6), 2, 64)
    assert mask.indices.shape == (1, 1, 3, 2)
    call = make_call(msgspec.structs.replace(problem, block_mask=0))
    side = call.side._replace(
        block_counts=mask.counts.expand(2, 2, -1), block_indices=mask.indices.expand(2, 2, -1, -1)
    )
    check(problem, call._replace(side=side), a_config("narrow", split_masked_loop=True))


def check_gradients(problem: Problem, seed: str, *, with_dlse: bool = False) -> None:
    problem = msgspec.structs.replace(problem, direction=Direction.BACKWARD, seqlen_q=100, seqlen_kv=200)
    split = problem.causal is not Causal.TOP_LEFT
    config = small_config(GRADIENTS, seed, (32, 64), split_masked_loop=split)
    call = backward_calls.make_call(problem, with_dlse=with_dlse)
    backward_calls.check_gradients(GRADIENTS, problem, config, call)


@pytest.mark.sampled
@pytest.mark.parametrize("lists", list(BlockLists))
@pytest.mark.parametrize("size", [64, 128])
@CAUSAL
def test_gradients(causal: Causal, size: int, lists: BlockLists) -> None:
    problem = a_problem(causal=causal, block_mask=size, block_lists=lists)
    check_gradients(problem, f"{causal} {size} {lists}", with_dlse=size == 128)


@pytest.mark.sampled
@pytest.mark.parametrize("name", [name for name in WITH_BLOCK_MASK if name not in ("alibi", "additive")])
@CAUSAL
def test_gradients_with_another_feature(name: str, causal: Causal) -> None:
    check_gradients(a_problem(causal=causal, **FEW_HEADS, **WITH_BLOCK_MASK[name]), f"{name} {causal}")


def test_gradients_of_biases_are_refused() -> None:
    for name in ("alibi", "additive"):
        problem = a_problem(direction=Direction.BACKWARD, **WITH_BLOCK_MASK[name])
        reason = GRADIENTS.supports(problem, backward_calls.TARGET)
        assert reason == "backward_split takes no ALiBi and no additive bias with a block mask"
