"""The space of Hopper's own backward pass: what a config holds, and which values are worth trying."""

from __future__ import annotations

from typing import Annotated

import msgspec

from flashtune.core.config import Axis, AxisValue, BlockSize, Config, Space, Stages
from flashtune.core.problem import Causal, Problem

GROUP_WARPS = 4
# Keys whose gradients a group keeps, the rows of one matrix instruction; there are two groups.
ROWS = 64
GROUPS = 2
# Registers of a thread: what the multiprocessor has, shared among the groups and the producer's four warps.
CONSUMER_REGISTERS = 240
PRODUCER_REGISTERS = 24
# Widths of a tile; in the widest, registers hold dk or dv of a block of keys, and not both.
NARROW, WIDE, WIDEST = 64, 128, 256
# Queries of a block by width: half of its dq, at most 64 registers a thread, is made by each group.
BLOCK_QUERIES = {NARROW: 128, WIDE: 64, WIDEST: 64}
# Of an H100 or H200: where sums are ordered, as many programs begin at once.
MULTIPROCESSORS = 132
# Bytes of the copy engine's widest row that keeps banks of shared memory apart.
SWIZZLE = 128


class HopperBackwardConfig(Config, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One point of the space. `num_stages` tiles of queries are in flight.

    Attributes:
        block_m: Queries of a block.
        block_n: Keys of a program. Groups divide them or, in tiles of 256 columns, the products.
        do_stages: Tiles of the output's gradient in flight.
        ds_stages: Tiles of gradients of scores of each group that may wait for their products; where
            groups divide the products, of weights as well.
        eager: The product of weights for dv is issued before the weights' gradients are waited for.
        late_wait: The wait for the weights' gradients stands behind the exponentials, not before.
        product_first: The product for dk is issued before the gradients of scores are stored.
        init: Products begin at minus the log-sum-exp and at minus delta, and not at zero.
        delay: A block of dq is made one step late, so that groups need not keep step.
        turns: Groups take turns at dq: each makes all of every second block's, and not half of each.
            It is late by a step, and never in tiles of 256 columns.
        rotate: Programs begin at different blocks of queries, so that they do not add to one at once.
        beside: Heads whose programs take turns, over those that fill the GPU: a head's programs, which
            add in their order, start the further apart. Of no effect where sums have no order.
    """

    block_m: BlockSize
    block_n: BlockSize = GROUPS * ROWS
    do_stages: Stages = 2
    ds_stages: Stages = 2
    eager: bool = False
    late_wait: bool = False
    product_first: bool = True
    init: bool = True
    delay: bool = False
    turns: bool = False
    rotate: bool = False
    beside: Annotated[int, msgspec.Meta(ge=1, le=8)] = 1


def width_of(problem: Problem) -> int:
    """Columns of a tile: what lies beyond a head dim is read as zeros and not written."""
    widest = max(problem.head_dim, problem.value_head_dim)
    return next(width for width in BLOCK_QUERIES if widest <= width)


def may_rotate(problem: Problem) -> bool:
    """Whether programs may begin at different blocks of queries.

    Under a causal mask they do as it is, and ordered sums want all to begin at one.
    """
    return problem.causal is Causal.NONE and not problem.deterministic


def hopper_backward_space(problem: Problem) -> Space:
    """All configs worth trying."""
    begins = (
        Axis("rotate", (False, True) if may_rotate(problem) else (False,), False),
        Axis("beside", (1, 2, 4) if problem.deterministic else (1,)),
    )
    width = width_of(problem)
    if width == WIDEST:
        return Space(HopperBackwardConfig, (*_widest_axes(), *begins))
    axes = (
        Axis("num_warps", (GROUP_WARPS,)),
        Axis("block_m", (BLOCK_QUERIES[width],)),
        Axis("num_stages", (2, 3, 4)),
        Axis("do_stages", (2, 3, 4)),
        Axis("delay", (False, True), False),
        Axis("turns", (False, True), False, _is_late),
        Axis("ds_stages", (1, 2, 3)),
        Axis("eager", (False, True), False, _has_halves if problem.dropout else None),
        Axis("late_wait", (False, True), False),
        Axis("product_first", (True, False), False),
        Axis("init", (True, False), False),
        *begins,
    )
    return Space(HopperBackwardConfig, axes, _is_possible)


def _widest_axes() -> tuple[Axis, ...]:
    """What there is to choose where groups divide the products: these have one order, and dq is late.

    Rings have two slots each and share a counter: with one more, Triton 3.6 spills 128 bytes a thread.
    """
    return (
        Axis("num_warps", (GROUP_WARPS,)),
        Axis("block_m", (BLOCK_QUERIES[WIDEST],)),
        Axis("block_n", (ROWS,)),
        Axis("num_stages", (2,)),
        Axis("delay", (True,), False),
        Axis("init", (True, False), False),
    )


def _is_late(chosen: dict[str, AxisValue]) -> bool:
    """Whether dq is made a step late, as it is where groups take turns."""
    return bool(chosen["delay"])


def _has_halves(chosen: dict[str, AxisValue]) -> bool:
    """Words of random state and all of a block of dq leave no registers for weights in flight."""
    return not chosen["turns"]


def _is_possible(config: Config) -> bool:
    """Whether what is late by a step has room beside what is new."""
    assert isinstance(config, HopperBackwardConfig)
    return config.ds_stages > config.delay


def _usual_beside(problem: Problem) -> int:
    """Under a causal mask a head's programs are shorter, so that more must start between them."""
    if not problem.deterministic:
        return 1
    return 2 if problem.causal is Causal.NONE else 4


def usual_config(problem: Problem) -> HopperBackwardConfig:
    """Where a search begins, by head dims."""
    width = width_of(problem)
    narrow = width == NARROW
    # At a width of 64 the words of random state take the registers that turns need.
    turns = width == WIDE or (narrow and not problem.dropout)
    return HopperBackwardConfig(
        num_warps=GROUP_WARPS,
        num_stages=2,
        block_m=BLOCK_QUERIES[width],
        block_n=ROWS if width == WIDEST else GROUPS * ROWS,
        eager=width == WIDE and not problem.dropout,
        late_wait=narrow or turns,
        # Where sums are ordered, a turn then has another step to come.
        delay=narrow or turns or width == WIDEST or problem.deterministic,
        turns=turns,
        rotate=may_rotate(problem),
        beside=_usual_beside(problem),
    )
