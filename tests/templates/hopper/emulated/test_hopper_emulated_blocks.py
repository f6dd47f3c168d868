"""Tests of emulated Hopper kernels with masks, biases and block masks against a reference."""

from typing import Any

import pytest

from flashtune.core.problem import Bias, BlockLists, Problem
from tests.problems.hopper import a_config
from tests.problems.kernel_cases import HOPPER_BLOCKS, HOPPER_MASKED
from tests.templates.hopper.emulated.test_hopper_emulated import (
    ALONE,
    CONFIGS,
    SMALL,
    THREE,
    a_small,
    kernel_of,
    worst_error,
)

TALL = {**SMALL, "block_n": 128, "num_stages": 3, "q_stages": 2}
PACKED = {**SMALL, "pack_gqa": 2, "q_stages": 2, "dynamic_schedule": False}
BLOCK_CONFIGS: dict[str, tuple[int, dict[str, Any]]] = {
    "a list of each group": (64, {**SMALL, "dynamic_schedule": False}),
    "three groups": (128, {**THREE, "dynamic_schedule": False}),
    "one group": (128, ALONE),
    "one list": (128, TALL),
    "one list, parts": (128, {**SMALL, "dynamic_schedule": False}),
    "heads of a tile": (64, PACKED),
}
LENGTHS = [(200, 300), (150, 420), (420, 150), (20, 700), (300, 602)]


@pytest.mark.slow
@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("layout", BLOCK_CONFIGS)
@pytest.mark.parametrize("name", HOPPER_BLOCKS)
def test_block_masks(layout: str, name: str) -> None:
    config = BLOCK_CONFIGS[layout][1]
    for queries, keys in LENGTHS:
        problem = a_block_mask(layout, name, queries, keys)
        chosen = a_config(problem, **config)
        worst = worst_error(kernel_of(problem, **config), problem, 2, config=chosen)
        assert worst < 1e-12, (queries, keys)


def a_block_mask(layout: str, name: str, queries: int, keys: int) -> Problem:
    size, config = BLOCK_CONFIGS[layout]
    causal, features = HOPPER_BLOCKS[name]
    lists = BlockLists.GROUP if config["pack_gqa"] > 1 else BlockLists.HEAD
    return a_small(
        causal, seqlen_q=queries, seqlen_kv=keys, batch=2, block_mask=size, block_lists=lists, **features
    )


@pytest.mark.slow
@pytest.mark.sampled(every=5)
@CONFIGS
@pytest.mark.parametrize("bias", [Bias.ADDITIVE, Bias.BOOLEAN])
@pytest.mark.parametrize("name", HOPPER_MASKED)
def test_masks_and_biases(config: dict[str, Any], bias: Bias, name: str) -> None:
    causal, features = HOPPER_MASKED[name]
    for queries, keys in LENGTHS:
        problem = a_small(causal, seqlen_q=queries, seqlen_kv=keys, batch=2, bias=bias, **features)
        chosen = a_config(problem, **config)
        worst = worst_error(kernel_of(problem, **config), problem, 3, config=chosen)
        assert worst < 1e-12, (queries, keys)
