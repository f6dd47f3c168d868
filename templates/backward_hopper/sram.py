"""The SRAM of Hopper's own backward pass: it allocates its tiles itself, so the model is a sum."""

from __future__ import annotations

from flashtune.problem import Problem
from flashtune.templates.backward_hopper.space import GROUPS, ROWS, HopperBackwardConfig, width_of
from flashtune.templates.family import TrafficItem

BARRIER_BYTES = 8
FLOAT32 = 4
# Rings have barriers for tiles that are full and for tiles that are empty; keys and values only the former.
SIDES = 2
KEY_BARRIERS = 2 * GROUPS


def hopper_backward_items(problem: Problem, config: HopperBackwardConfig) -> tuple[TrafficItem, ...]:
    """All allocations of a program, in bytes."""
    size, width = problem.dtype.itemsize, width_of(problem)
    tile = config.block_m * width * size
    scores = GROUPS * ROWS * config.block_m * size
    streamed = config.num_stages + config.do_stages
    # Empty slots of gradients of scores are empty for both groups.
    waits = SIDES * streamed + (GROUPS + 1) * config.ds_stages + KEY_BARRIERS
    return (
        TrafficItem(f"q, {config.num_stages} in flight", config.num_stages * tile),
        TrafficItem(f"dout, {config.do_stages} in flight", config.do_stages * tile),
        TrafficItem("k and v", 2 * GROUPS * ROWS * width * size),
        TrafficItem(f"gradients of scores, {config.ds_stages} of each group", config.ds_stages * scores),
        TrafficItem("log-sum-exps and deltas", streamed * config.block_m * FLOAT32),
        TrafficItem("barriers", waits * BARRIER_BYTES),
    )
