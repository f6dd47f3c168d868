"""What attention costs by the units of a GPU, in microseconds: a model for ratios, not for absolute times.

`Family.span` is built from it, and dispatch uses that for one thing: what a config that was measured at one
shape may take at another, in relation to other configs there. Shares below were fitted to the times of
configs at random shapes on an H200, and judged at others: docs/dispatch.md.
"""

from __future__ import annotations

import msgspec

from flashtune.core.problem import Dtype, Problem
from flashtune.core.target import Target
from flashtune.templates.common.model.traffic import keys_at_once

# Exponentials that one multiprocessor finishes per clock, with the arithmetic around them.
EXPONENTIALS_PER_CLOCK = 10.1
# Share of the last-level cache in which keys and values that are read again are still found. A step: with
# the continuous share of `traffic.missed` dispatch chose no better at the shapes of benchmarks/regret.py.
CACHE_SHARE = 0.98
# Share of the bandwidth of HBM that a launch reaches where nothing else holds it up: what a plain copy does.
BANDWIDTH_SHARE = 0.9
# Work and transfers that take about as long hide each other only in part: the power of their sum.
HIDING = 4


class Pace(msgspec.Struct, frozen=True):
    """How fast a kind of kernel gets on.

    Attributes:
        launch: Before the first and after the last tile, in µs.
        block: What a block of keys takes beside products and exponentials, in µs.
        tile: What a tile takes beside its blocks and its transfers, in µs.
        hidden: Share of the shorter of products and exponentials that runs beside the longer; under zero
            where even the longer one is held up.
        exposed: Time of a tile's transfers that nothing else runs beside, over that of the transfers alone.
    """

    launch: float
    block: float
    tile: float
    hidden: float
    exposed: float


def block_us(problem: Problem, pairs: int, pace: Pace, target: Target) -> float:
    """Time of a block of so many (query, key) pairs on a multiprocessor."""
    width = problem.head_dim + problem.value_head_dim
    products = 2 * pairs * width / (_rate(problem.dtype, target) * 1e6 / target.sm_count)
    exponentials = pairs / (EXPONENTIALS_PER_CLOCK * target.clock_mhz)
    longer, shorter = max(products, exponentials), min(products, exponentials)
    return pace.block + longer + (1 - pace.hidden) * shorter


def tile_us(problem: Problem, rows: int, pace: Pace, target: Target) -> float:
    """Time of a tile of so many rows beside its blocks: queries come in, outputs go out."""
    size = rows * _row_bytes(problem)
    return pace.tile + pace.exposed * size / (target.hbm_bandwidth * 1e3 / target.sm_count)


def together_us(busy: float, moving: float) -> float:
    """Time of work and of transfers beside it: the longer one's, and more where they take about as long."""
    return float((busy**HIDING + moving**HIDING) ** (1 / HIDING))


def traffic_us(
    problem: Problem,
    streamed_keys: float,
    heads_at_once: float,
    programs: int,
    target: Target,
    *,
    beside: int = 1,
) -> float:
    """Time that HBM takes at the least.

    Args:
        problem: What is computed.
        streamed_keys: Keys that all tiles read, taken together.
        heads_at_once: KV heads between two of whose tiles no other is begun.
        programs: Programs that run at once; those of one KV head read its keys together.
        target: The GPU.
        beside: Programs next to each other that work on heads of one KV head, whatever tile they are at.
    """
    both = (problem.head_dim + problem.value_head_dim) * problem.kv_itemsize
    once = problem.batch * problem.kv_heads * problem.seqlen_kv * both
    if heads_at_once * keys_at_once(problem, 1) * both > CACHE_SHARE * target.l2_bytes:
        together = max(1.0, programs / max(1.0, min(heads_at_once, programs / beside)))
        once = max(once, round(streamed_keys * both / together))
    rows = problem.batch * problem.heads * problem.seqlen_q * _row_bytes(problem)
    return (once + rows) / (target.hbm_bandwidth * 1e3 * BANDWIDTH_SHARE)


def _row_bytes(problem: Problem) -> int:
    """A row of queries and of outputs."""
    return problem.head_dim * problem.dtype.itemsize + problem.value_head_dim * problem.out_dtype.itemsize


def _rate(dtype: Dtype, target: Target) -> float:
    """Peak TFLOP/s of the units that make the products."""
    if dtype.is_quantized:
        return target.peak.fp8
    return target.peak.fp32 if dtype is Dtype.FP32 else target.peak.half
