"""What a backward launch of the Hopper family takes by its schedule."""

from __future__ import annotations

import math

from flashtune.problem import Problem
from flashtune.target import Target
from flashtune.templates.backward_hopper.space import GROUPS, ROWS, HopperBackwardConfig, width_of
from flashtune.templates.common.pace import BANDWIDTH_SHARE
from flashtune.templates.common.traffic import cycled_queries

# Before the first and after the last block, of three kernels one behind the other, in µs.
LAUNCH = 15.0
# Keys and values come in, their gradients go out: what a program takes beside its blocks, in µs.
PROGRAM = 3.0
# Share of the peak at which products of a block go on; shared memory is as busy as the matrix units.
PRODUCTS_SHARE = 0.62
# Each pair of query and key is in five products.
PRODUCTS = 5
FLOAT32 = 4


def hopper_backward_span(problem: Problem, config: HopperBackwardConfig, target: Target) -> float:
    """Time of the launches by their schedule, in ms."""
    keys = GROUPS * ROWS
    blocks = math.ceil(problem.seqlen_kv / keys)
    programs = problem.batch * problem.kv_heads * blocks
    if not programs or not problem.seqlen_q:
        return LAUNCH / 1e3
    width = width_of(problem)
    # As many microseconds as one multiprocessor takes for a block of queries.
    rate = PRODUCTS_SHARE * target.peak.half * 1e6 / target.sm_count
    step = PRODUCTS * 2 * config.block_m * keys * width / rate
    whole = math.ceil(problem.seqlen_q / config.block_m) * problem.group_size
    walked = cycled_queries(problem, config.block_m, keys) / config.block_m * problem.group_size
    total = problem.batch * problem.kv_heads * max(walked, 1.0) * step + programs * PROGRAM
    # One program has a multiprocessor to itself; the longest cannot be shared, nor can whole rounds of them.
    rounds = math.ceil(programs / target.sm_count) if walked >= blocks * whole else 1
    busy = max(rounds * (whole * step + PROGRAM), total / target.sm_count)
    return (LAUNCH + busy + _steps_us(problem, width, target)) / 1e3


def _steps_us(problem: Problem, width: int, target: Target) -> float:
    """What comes before and after: out and dout are read, sums cleared, read, and written as dq."""
    rows = problem.batch * problem.heads * problem.seqlen_q
    size = problem.dtype.itemsize
    bytes_of_row = (2 * problem.value_head_dim + problem.head_dim) * size + 2 * width * FLOAT32
    return rows * bytes_of_row / (target.hbm_bandwidth * 1e3 * BANDWIDTH_SHARE)
