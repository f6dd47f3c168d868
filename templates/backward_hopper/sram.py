"""SRAM of Hopper's backward pass: the sum of its explicit allocations."""

from __future__ import annotations

from flashtune.core.problem import Problem
from flashtune.templates.backward_hopper.space import ROWS, WIDEST, HopperBackwardConfig, width_of
from flashtune.templates.family import BytesItem

BARRIER_BYTES = 8
FLOAT32 = 4
RANDOM_WORDS = 2
# Rings have barriers for full and for empty tiles.
SIDES = 2
# Barriers of each slot of the rings between groups, and others. If groups divide keys, gradients of scores
# have a full barrier for each group and an empty one for both; others are those of k and v, of each group. If
# they divide products, probabilities and gradients of scores have full and empty ones; others are those of k,
# of v, and of the end.
DIVIDED_KEYS = 3, 4
DIVIDED_PRODUCTS = 4, 3
# In deterministic kernels: a group may add, and it has added.
TURNS = 4


def hopper_backward_items(problem: Problem, config: HopperBackwardConfig) -> tuple[BytesItem, ...]:
    """Returns all allocations of a program, in bytes."""
    size, width = problem.dtype.itemsize, width_of(problem)
    tile = config.block_m * width * size
    widest = width == WIDEST
    of_slot, others = DIVIDED_PRODUCTS if widest else DIVIDED_KEYS
    passed = "weights and gradients of scores" if widest else "gradients of scores of each group"
    # Two tiles of 64 keys in either case.
    scores = 2 * ROWS * config.block_m * size
    streamed = config.num_stages + config.do_stages
    # Random words are loaded with dout.
    rows = streamed + (RANDOM_WORDS * config.do_stages if problem.dropout else 0)
    waits = SIDES * streamed + of_slot * config.ds_stages + others + (TURNS if problem.deterministic else 0)
    return (
        BytesItem(f"q, {config.num_stages} in flight", config.num_stages * tile),
        BytesItem(f"dout, {config.do_stages} in flight", config.do_stages * tile),
        BytesItem("k and v", 2 * config.block_n * width * size),
        BytesItem(f"{passed}, {config.ds_stages} in flight", config.ds_stages * scores),
        BytesItem("what rows are weighed with", rows * config.block_m * FLOAT32),
        BytesItem("barriers", waits * BARRIER_BYTES),
    )
