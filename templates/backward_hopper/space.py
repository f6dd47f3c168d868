"""The space of Hopper's own backward pass: what a config holds, and which values are worth trying."""

from __future__ import annotations

from flashtune.config import Axis, BlockSize, Config, Space, Stages
from flashtune.problem import Causal, Problem

GROUP_WARPS = 4
# Keys of a group, the rows of one matrix instruction; there are two groups.
ROWS = 64
GROUPS = 2
# Registers of a thread: what the multiprocessor has, shared among the groups and the producer's four warps.
CONSUMER_REGISTERS = 240
PRODUCER_REGISTERS = 24
# Each group makes half a block of dq of 64 by 64 numbers: queries by width of a tile.
BLOCK_NUMBERS = 8192
NARROW, WIDE = 64, 128
# Bytes of the copy engine's widest row that keeps banks of shared memory apart.
SWIZZLE = 128


class HopperBackwardConfig(Config, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One point of the space. `num_stages` tiles of queries are in flight.

    Attributes:
        block_m: Queries of a block.
        do_stages: Tiles of the output's gradient in flight.
        ds_stages: Tiles of gradients of scores of each group that may wait for their products.
        eager: The product of weights for dv is issued before the weights' gradients are waited for.
        late_wait: The wait for the weights' gradients stands behind the exponentials, not before.
        product_first: The product for dk is issued before the gradients of scores are stored.
        init: Products begin at minus the log-sum-exp and at minus delta, and not at zero.
        delay: A block of dq is made one step late, so that groups need not keep step.
        rotate: Programs begin at different blocks of queries, so that they do not add to one at once.
    """

    block_m: BlockSize
    do_stages: Stages = 2
    ds_stages: Stages = 2
    eager: bool = False
    late_wait: bool = False
    product_first: bool = True
    init: bool = True
    delay: bool = False
    rotate: bool = False

    @property
    def block_n(self) -> int:
        """Keys of a program, of both groups together."""
        return GROUPS * ROWS


def width_of(problem: Problem) -> int:
    """Columns of a tile: what lies beyond a head dim is read as zeros and not written."""
    return NARROW if max(problem.head_dim, problem.value_head_dim) <= NARROW else WIDE


def hopper_backward_space(problem: Problem) -> Space:
    """All configs worth trying."""
    # Under a causal mask programs begin at different blocks as it is.
    rotations = (False, True) if problem.causal is Causal.NONE else (False,)
    axes = (
        Axis("num_warps", (GROUP_WARPS,)),
        Axis("block_m", (BLOCK_NUMBERS // width_of(problem),)),
        Axis("num_stages", (2, 3, 4)),
        Axis("do_stages", (2, 3, 4)),
        Axis("delay", (False, True), False),
        Axis("ds_stages", (1, 2, 3)),
        Axis("eager", (False, True), False),
        Axis("late_wait", (False, True), False),
        Axis("product_first", (True, False), False),
        Axis("init", (True, False), False),
        Axis("rotate", rotations, False),
    )
    return Space(HopperBackwardConfig, axes, _is_possible)


def _is_possible(config: Config) -> bool:
    """Whether what is late by a step has room beside what is new."""
    assert isinstance(config, HopperBackwardConfig)
    return config.ds_stages > config.delay


def usual_config(problem: Problem) -> HopperBackwardConfig:
    """Where a search begins, by head dims."""
    width = width_of(problem)
    narrow = width == NARROW
    return HopperBackwardConfig(
        num_warps=GROUP_WARPS,
        num_stages=2,
        block_m=BLOCK_NUMBERS // width,
        late_wait=narrow,
        delay=narrow,
        rotate=problem.causal is Causal.NONE,
    )
