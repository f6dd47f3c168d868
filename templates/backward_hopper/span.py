"""What a backward launch of the Hopper family takes by its schedule."""

from __future__ import annotations

import math

from flashtune.core.problem import Causal, Problem
from flashtune.core.target import Target
from flashtune.templates.backward_hopper.space import HopperBackwardConfig, width_of
from flashtune.templates.common.model.cost import BANDWIDTH_SHARE
from flashtune.templates.common.model.traffic import cycled_queries

# None of these was fitted.
# Before the first and after the last block, of three kernels one behind the other, in µs.
LAUNCH = 15.0
# Keys and values come in, their gradients go out: what a program takes beside its blocks, in µs.
PROGRAM = 3.0
# From a block of keys' addition to a block of dq until the next one's, where they are ordered, in µs.
TURN = 1.5
# Share of the peak at which products of a block go on: shared memory is as busy as the matrix units.
PRODUCTS_SHARE = 0.62
# The same where groups take turns at dq, for which less is read.
TURNS_SHARE = 0.68
# Each pair of a query and a key is in five products.
PRODUCTS = 5
# Bytes that the last-level cache adds up, over what HBM moves in the same time.
ADDITION_RATE = 0.7
FLOAT32 = 4


def hopper_backward_span(problem: Problem, config: HopperBackwardConfig, target: Target) -> float:
    """Time of the launches by their schedule, in ms."""
    heads = problem.batch * problem.kv_heads
    blocks = math.ceil(problem.seqlen_kv / config.block_n)
    programs = heads * blocks
    if not programs or not problem.seqlen_q:
        return LAUNCH / 1e3
    width = width_of(problem)
    rate = (TURNS_SHARE if config.turns else PRODUCTS_SHARE) * target.peak.half * 1e6 / target.sm_count
    step = PRODUCTS * 2 * config.block_m * config.block_n * width / rate
    # The program that walks the most blocks of queries, and all together.
    most = PROGRAM + math.ceil(problem.seqlen_q / config.block_m) * problem.group_size * step
    rows = cycled_queries(problem, config.block_m, config.block_n) * problem.group_size
    if problem.causal is Causal.NONE:
        busy = math.ceil(programs / target.sm_count) * most
    else:
        busy = max(most, (programs * PROGRAM + heads * rows / config.block_m * step) / target.sm_count)
    added = heads * rows * width * FLOAT32 / (target.hbm_bandwidth * 1e3 * ADDITION_RATE)
    if problem.deterministic:
        # Programs of a head that begin at once fall in behind one another.
        busy += TURN * min(blocks, target.sm_count) / config.beside
    return (LAUNCH + max(busy, added) + _steps_us(problem, width, target)) / 1e3


def _steps_us(problem: Problem, width: int, target: Target) -> float:
    """What comes before and after: out and dout are read, sums cleared, read, and written as dq."""
    rows = problem.batch * problem.heads * problem.seqlen_q
    bytes_of_row = (2 * problem.value_head_dim + problem.head_dim) * problem.dtype.itemsize
    return rows * (bytes_of_row + 2 * width * FLOAT32) / (target.hbm_bandwidth * 1e3 * BANDWIDTH_SHARE)
