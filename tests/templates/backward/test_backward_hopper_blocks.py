"""Tests of emulated Hopper backward kernels with block masks."""

from typing import Any

import pytest

from flashtune.core.problem import BlockLists, Causal
from tests.templates.backward.test_backward_hopper_emulated import a_problem, emulated

LENGTHS = ((300, 500), (450, 150), (100, 390))


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("causal", Causal)
@pytest.mark.parametrize("lists", BlockLists)
def test_block_masks(head_dim: int, size: int, causal: Causal, lists: BlockLists) -> None:
    for queries, keys in LENGTHS:
        problem = a_problem(
            head_dim, causal=causal, block_mask=size, block_lists=lists, seqlen_q=queries, seqlen_kv=keys,
            heads=4, kv_heads=2,
        )  # fmt: skip
        emulated(problem, 2)


ORDERS: tuple[dict[str, Any], ...] = (
    {"alternate_dq": False, "defer_dq": False, "early_dk": False, "init_accumulators": False},
    {"alternate_dq": False, "defer_dq": True},
)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("changes", ORDERS, ids=str)
def test_block_masks_in_other_orders(head_dim: int, size: int, changes: dict[str, Any]) -> None:
    emulated(a_problem(head_dim, block_mask=size, seqlen_q=300, seqlen_kv=500, batch=2), 2, **changes)


@pytest.mark.slow
@pytest.mark.parametrize("feature", [{}, {"causal": Causal.BOTTOM_RIGHT}, {"softcap": True}], ids=str)
def test_blocks_of_queries_with_two_blocks_of_the_mask(feature: dict[str, Any]) -> None:
    emulated(a_problem(64, block_mask=64, seqlen_q=300, seqlen_kv=500, **feature), 2, block_m=128)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("feature", ["softcap", "sinks", "dropout"])
def test_block_masks_with_other_features(head_dim: int, feature: str) -> None:
    if feature == "dropout" and head_dim > 128:
        pytest.skip("no dropout of such heads")
    problem = a_problem(head_dim, block_mask=64, seqlen_q=300, seqlen_kv=500, **{feature: True})
    emulated(problem, 2)
