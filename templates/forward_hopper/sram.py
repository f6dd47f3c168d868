"""SRAM of the Hopper family: the sum of its explicit allocations."""

from __future__ import annotations

from flashtune.core.problem import Problem
from flashtune.templates.common.model.sram import columns, head_chunks
from flashtune.templates.family import BytesItem
from flashtune.templates.forward_hopper.space import HopperConfig

BARRIER_BYTES = 8
# Each ring has barriers for full and for empty tiles.
SIDES = 2


def hopper_items(problem: Problem, config: HopperConfig) -> tuple[BytesItem, ...]:
    """Returns all allocations of a program, in bytes."""
    size = problem.dtype.itemsize
    queries = columns(head_chunks(problem.head_dim, config.split_head_dim)) * size
    values = columns(head_chunks(problem.value_head_dim, config.split_head_dim))
    q_slots = config.q_stages * config.num_consumer_groups
    staged = values // 2 if config.split_epilogue else values
    block = config.num_stages * config.block_n
    barriers = SIDES * (q_slots + 2 * config.num_stages) * BARRIER_BYTES
    items = (
        BytesItem(f"q, {config.q_stages} in flight", q_slots * config.rows_per_group * queries),
        BytesItem(f"k, {config.num_stages} in flight", block * queries),
        BytesItem(f"v, {config.num_stages} in flight", block * values * size),
        BytesItem(
            f"weights, {config.p_stages} in flight", config.p_stages * config.block_m * config.block_n * size
        ),
        BytesItem("out on its way", config.block_m * staged * problem.dtype.out.itemsize),
        BytesItem("barriers", barriers),
    )
    return tuple(item for item in items if item.bytes)
