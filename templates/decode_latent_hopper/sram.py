"""SRAM of the latent Hopper family: the sum of its explicit allocations."""

from __future__ import annotations

from flashtune.core.problem import Problem
from flashtune.templates.decode_latent_hopper.space import BLOCK_N, ROWS, LatentConfig
from flashtune.templates.family import BytesItem

BARRIER_BYTES = 8
FLOAT32 = 4
# Blocks of probabilities in transit between the groups.
SLOTS = 2
# Barriers of halves, of the rest, of probabilities; of queries, and of the end.
BARRIERS_A_STAGE = 4
OTHER_BARRIERS = 2 + 2 * SLOTS + 2


def latent_items(problem: Problem, config: LatentConfig) -> tuple[BytesItem, ...]:
    """Returns all allocations of a program, in bytes."""
    size = problem.dtype.itemsize
    rest = problem.head_dim - problem.value_head_dim
    barriers = BARRIERS_A_STAGE * config.num_stages + OTHER_BARRIERS
    return (
        BytesItem("q", ROWS * problem.head_dim * size),
        BytesItem(
            f"k, {config.num_stages} in flight",
            BLOCK_N * (config.num_stages * problem.value_head_dim + rest) * size,
        ),
        BytesItem("weights", SLOTS * ROWS * BLOCK_N * size),
        BytesItem("factors of rows", (SLOTS + 1) * ROWS * FLOAT32),
        BytesItem("barriers", barriers * BARRIER_BYTES),
    )
