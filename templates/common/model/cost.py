"""Cost model of attention by the units of a GPU, in microseconds: for ratios, not for absolute times.

`Family.makespan_ms` uses it. Dispatch uses that to transfer measured times of configs from one shape to
another. The constants below were fitted to times of configs at random shapes on an H200, and tested at
others: docs/dispatch.md.
"""

import msgspec

from flashtune.core.problem import Dtype, Problem
from flashtune.core.target import Target
from flashtune.templates.common.model.traffic import keys_at_once

# Exponentials that one SM finishes per clock, with the arithmetic around them.
EXPONENTIALS_PER_CLOCK = 10.1
# Fraction of the last-level cache in which repeated reads of keys and values hit. A step: with the continuous
# fraction of `traffic.missed`, dispatch was no better at the shapes of benchmarks/dispatch_regret/regret.py.
CACHE_SHARE = 0.98
# Fraction of HBM's bandwidth that a launch reaches without other limits: that of a plain copy.
BANDWIDTH_SHARE = 0.9
# Time of a launch of a combine kernel, in µs.
COMBINE = 2.2
FLOAT32 = 4
# Work and transfers of similar duration overlap only in part: norm of this order of the two.
HIDING = 4


class CostParams(msgspec.Struct, frozen=True):
    """Cost parameters of a kind of kernel."""

    launch: float  # Time before the first and after the last tile, in µs.
    block: float  # Time of a block of keys without products and exponentials, in µs.
    tile: float  # Time of a tile without its blocks and its transfers, in µs.
    # Fraction of the shorter of products and exponentials that overlaps with the longer. Negative if even the
    # longer one is slowed.
    hidden: float
    exposed: float  # Fraction of a tile's transfers that overlaps with nothing.


def block_us(
    problem: Problem, pairs: int, pace: CostParams, target: Target, exponentials_of_pair: float = 1.0
) -> float:
    """Returns the time of a block with this many (query, key) pairs on an SM."""
    width = problem.head_dim + problem.value_head_dim
    products = 2 * pairs * width / (_rate(problem.dtype, target) * 1e6 / target.sm_count)
    exponentials = exponentials_of_pair * pairs / (EXPONENTIALS_PER_CLOCK * target.clock_mhz)
    longer, shorter = max(products, exponentials), min(products, exponentials)
    return pace.block + longer + (1 - pace.hidden) * shorter


def tile_us(problem: Problem, rows: int, pace: CostParams, target: Target) -> float:
    """Returns the time of a tile of rows without its blocks: loads of queries, stores of outputs."""
    size = rows * _row_bytes(problem)
    return pace.tile + pace.exposed * size / (target.hbm_bandwidth * 1e3 / target.sm_count)


def together_us(busy: float, moving: float) -> float:
    """Returns the time of overlapping work and transfers, more than the longer one if they are similar."""
    return float((busy**HIDING + moving**HIDING) ** (1 / HIDING))


def traffic_us(
    problem: Problem,
    streamed_keys: float,
    heads_at_once: float,
    programs: int,
    target: Target,
    *,
    neighbours: int = 1,
) -> float:
    """Returns the minimum time of HBM transfers.

    `streamed_keys` counts the keys that all tiles read. The concurrent programs of one KV head read its keys
    together. `neighbours` means that neighbouring programs are on heads of one KV head, at any tile.
    """
    both = (problem.head_dim + problem.value_head_dim) * problem.kv_itemsize
    once = problem.batch * problem.kv_heads * problem.seqlen_kv * both
    if heads_at_once * keys_at_once(problem, 1) * both > CACHE_SHARE * target.l2_bytes:
        together = max(1.0, programs / max(1.0, min(heads_at_once, programs / neighbours)))
        once = max(once, round(streamed_keys * both / together))
    rows = problem.batch * problem.heads * problem.seqlen_q * _row_bytes(problem)
    return (once + rows) / (target.hbm_bandwidth * 1e3 * BANDWIDTH_SHARE)


def combining_us(problem: Problem, num_splits: int, target: Target) -> float:
    """Returns the time to write, read and combine the partial results of split keys."""
    if num_splits == 1:
        return 0.0
    rows = (problem.packed or problem.batch * problem.seqlen_q) * problem.heads
    moved = 2 * num_splits * rows * problem.value_head_dim * FLOAT32
    return COMBINE + moved / (target.hbm_bandwidth * 1e3 * BANDWIDTH_SHARE)


def _row_bytes(problem: Problem) -> int:
    """Returns the bytes of a row of queries and of outputs."""
    return problem.head_dim * problem.dtype.itemsize + problem.value_head_dim * problem.out_dtype.itemsize


def _rate(dtype: Dtype, target: Target) -> float:
    """Returns peak TFLOP/s of the units that compute the products."""
    if dtype.is_quantized:
        return target.peak.fp8
    return target.peak.fp32 if dtype.is_float32 else target.peak.half
