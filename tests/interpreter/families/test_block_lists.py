"""Tests of the prologue of `forward_hopper` that lists blocks by a mask or bias, in the interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from flashtune.core.problem import Bias, Causal
from flashtune.launch.compilation import load_module
from tests.emulator.block_lists import block_lists
from tests.problems.hopper import a_config
from tests.templates.hopper.test_hopper_emulated import CONFIGS, a_bias, a_small, kernel_of

POSITIONS: dict[str, tuple[Causal, dict[str, int]]] = {
    "all": (Causal.NONE, {}),
    "causal": (Causal.BOTTOM_RIGHT, {}),
    "top left, window": (Causal.TOP_LEFT, {"window_left": 100}),
    "window": (Causal.NONE, {"window_left": 90, "window_right": 40}),
    "chunks, first tokens": (Causal.BOTTOM_RIGHT, {"attention_chunk": 100, "sink_tokens": 5}),
}


@pytest.mark.slow
@pytest.mark.sampled(every=3)
@CONFIGS
@pytest.mark.parametrize("bias", [Bias.ADDITIVE, Bias.BOOLEAN])
@pytest.mark.parametrize("name", POSITIONS)
def test_lists_and_words(config: dict[str, Any], bias: Bias, name: str) -> None:
    causal, positions = POSITIONS[name]
    for queries, keys in ((200, 300), (420, 150), (20, 602)):
        problem = a_small(causal, seqlen_q=queries, seqlen_kv=keys, batch=2, bias=bias, **positions)
        given = a_bias(problem)
        module = load_module(kernel_of(problem, **config))
        q, k = (torch.empty(2, heads, length, 16) for heads, length in ((2, queries), (1, keys)))
        shapes = module.launch_plan(q, k, k, q, given)[1]
        made = [torch.full(shape, -1, dtype=torch.int32) for shape in shapes]
        grid, integers = module.prologue_plan(q, k, k, q, given)
        module.list_blocks[grid](given, *made, *integers)
        own = tuple(slice(0, 1 if given.stride(axis) == 0 else None) for axis in (0, 1))
        meant = block_lists(problem, a_config(problem, **config), given[own])
        for found, right in zip(made, (one for one in meant if one.size), strict=True):
            written = right.reshape(-1) != -1
            got = found.numpy().reshape(-1)
            assert (got == right.reshape(-1))[written].all(), (queries, keys)
            assert np.count_nonzero(written)
