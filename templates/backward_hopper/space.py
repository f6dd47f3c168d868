"""The search space of Hopper's backward pass."""

from typing import Annotated

import msgspec

from flashtune.core.config import Axis, BlockSize, Config, Space, Stages
from flashtune.core.expressions.derivative import derivatives
from flashtune.core.problem import Causal, Problem
from flashtune.templates.common.args.gluon_table_gradients import adds_tiles

GROUP_WARPS = 4
# Keys of a group's gradients, the rows of one matrix instruction. There are two groups.
ROWS = 64
GROUPS = 2
# Registers of a thread: those of the SM, shared by the groups and the producer's four warps.
CONSUMER_REGISTERS = 240
PRODUCER_REGISTERS = 24
# Widths of a tile. At the widest, a group holds dk or dv of a block of keys, not both.
NARROW, WIDE, WIDEST = 64, 128, 256
# Queries of a block by width: each group computes half of its dq, at most 64 registers a thread.
BLOCK_QUERIES = {NARROW: 128, WIDE: 64, WIDEST: 64}
# Of an H100 or H200: in deterministic kernels, this many programs start at once.
MULTIPROCESSORS = 132
# Heads of which the longest programs start first.
MAX_INTERLEAVED_HEADS = 8
# With more keys, interleaved heads were 5% slower on an H200.
MAX_INTERLEAVED_KEYS = 8192


class HopperBackwardConfig(Config, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One point of the space. `num_stages` tiles of queries are in flight."""

    block_m: BlockSize  # Queries of a block.
    # Keys of a program. Groups divide the keys or, in tiles of 256 columns, the products.
    block_n: BlockSize = GROUPS * ROWS
    do_stages: Stages = 2  # Tiles of the output's gradient in flight.
    # Tiles of gradients of scores of each group that may wait for their products. If groups divide the
    # products, also tiles of probabilities.
    ds_stages: Stages = 2
    # The dv product is issued before the wait for the gradients of probabilities.
    early_dv: bool = False
    # The wait for the gradients of probabilities is after the exponentials, not before.
    defer_dp_wait: bool = False
    early_dk: bool = True  # The dk product is issued before the gradients of scores are stored.
    # Accumulators start at minus the log-sum-exp and at minus delta, not at zero.
    init_accumulators: bool = True
    # dq of a block is computed one step later, so that groups need not run in step.
    defer_dq: bool = False
    # Each group computes all of dq of every second block, not half of each. It is late by a step, and never
    # in tiles of 256 columns.
    alternate_dq: bool = False
    # Programs start at different blocks of queries, so that they do not add to the same one at once.
    stagger_start: bool = False
    # Number of interleaved heads. If deterministic, in multiples of those that fill the GPU: the programs of
    # a head, which add in order, then start further apart. Else the longest programs of so many heads start
    # first.
    interleaved_heads: Annotated[int, msgspec.Meta(ge=1, le=8)] = 1


def width_of(problem: Problem) -> int:
    """Returns the columns of a tile. Columns beyond a head dim are read as zeros and not written."""
    widest = max(problem.head_dim, problem.value_head_dim)
    return next(width for width in BLOCK_QUERIES if widest <= width)


def may_rotate(problem: Problem) -> bool:
    """Returns whether programs may start at different blocks of queries.

    Under a causal mask or a window they do anyway, and deterministic sums need a common start.
    """
    bounded = problem.sight.left is not None or problem.sight.right is not None
    return not bounded and not problem.deterministic


def has_own_steps(problem: Problem) -> bool:
    """Returns whether groups process their keys independently: blocks of the mask have no more keys."""
    return problem.block_mask == ROWS and width_of(problem) != WIDEST


def has_small_blocks(problem: Problem) -> bool:
    """Returns whether the default block has 64 queries although the tile is narrow.

    Terms of gradients of captured tensors in blocks of 128 spilled 100 to 1100 bytes a thread.
    """
    return width_of(problem) == NARROW and adds_tiles(derivatives(problem.functions))


def query_parts(problem: Problem, config: HopperBackwardConfig) -> int:
    """Returns the blocks of a block mask in a block of queries: 1 where a block of the mask is larger."""
    return max(1, config.block_m // problem.block_mask) if problem.block_mask else 1


def hopper_backward_space(problem: Problem) -> Space:
    """Returns the search space."""
    begins = (
        Axis("stagger_start", (False, True) if may_rotate(problem) else (False,), False),
        Axis("interleaved_heads", _interleaved_heads(problem)),
    )
    width = width_of(problem)
    if width == WIDEST:
        return Space(HopperBackwardConfig, (*_widest_axes(problem), *begins))
    own = has_own_steps(problem)
    small = has_small_blocks(problem) and not own
    axes = (
        Axis("num_warps", (GROUP_WARPS,)),
        Axis(
            "block_m",
            (ROWS, BLOCK_QUERIES[width]) if width == NARROW and (own or small) else (BLOCK_QUERIES[width],),
        ),
        Axis("num_stages", (2, 3, 4)),
        Axis("do_stages", (2, 3, 4)),
        # Halves of dq need 128 queries.
        Axis("defer_dq", (False,) if own else (True,) if small else (False, True), False),
        Axis(
            "alternate_dq",
            (True,) if small else (False, True),
            False,
            lambda chosen: chosen["defer_dq"] is True,
        ),
        Axis("ds_stages", (1, 2, 3)),
        # Random words and all of dq of a block leave no registers for prefetched probabilities.
        Axis(
            "early_dv",
            (False, True),
            False,
            (lambda chosen: not chosen["alternate_dq"]) if problem.dropout else None,
        ),
        Axis("defer_dp_wait", (False, True), False),
        Axis("early_dk", (True, False), False),
        Axis("init_accumulators", (True, False), False),
        *begins,
    )
    return Space(HopperBackwardConfig, axes, _is_possible)


def _interleaved_heads(problem: Problem) -> tuple[int, ...]:
    """Returns the numbers of interleaved heads to try: one where all programs of a head are equally long."""
    if problem.deterministic:
        return 1, 2, 4
    return (1, MAX_INTERLEAVED_HEADS) if problem.causal is not Causal.NONE or problem.packed else (1,)


def interleaves(problem: Problem, config: HopperBackwardConfig) -> bool:
    """Returns whether programs are numbered by blocks of keys first, over some heads."""
    return problem.deterministic or config.interleaved_heads > 1


def _widest_axes(problem: Problem) -> tuple[Axis, ...]:
    """Returns the axes if groups divide the products: these have one order, and dq is late.

    Both products start at rows, or neither does. Scores with a softcap start at zero.
    Rings have two slots each and share a counter: with one more, Triton 3.6 spills 128 bytes a thread.
    """
    return (
        Axis("num_warps", (GROUP_WARPS,)),
        Axis("block_m", (BLOCK_QUERIES[WIDEST],)),
        Axis("block_n", (ROWS,)),
        Axis("num_stages", (2,)),
        Axis("defer_dq", (True,), False),
        Axis("init_accumulators", (False,) if problem.softcap else (True, False), False),
    )


def _is_possible(config: Config) -> bool:
    """Returns whether delayed tiles have space in addition to new ones."""
    assert isinstance(config, HopperBackwardConfig)
    return config.ds_stages > config.defer_dq


def _usual_interleaved_heads(problem: Problem) -> int:
    """Returns the default number of interleaved heads.

    Under a causal mask a head's programs are shorter, so more others must start between them. The lengths of
    packed sequences differ. Programs of grouped queries are long and few, except within windows.
    """
    if not problem.deterministic:
        is_long = problem.group_size > 1 and problem.sight.left is None and width_of(problem) != WIDEST
        has_few_keys = problem.causal is not Causal.NONE and problem.seqlen_kv <= MAX_INTERLEAVED_KEYS
        return MAX_INTERLEAVED_HEADS if problem.packed or (is_long and has_few_keys) else 1
    return 2 if problem.causal is Causal.NONE else 4


def usual_config(problem: Problem) -> HopperBackwardConfig:
    """Returns the first config of a search, by head dims."""
    width = width_of(problem)
    narrow = width == NARROW
    # At a width of 64, random words take the registers that alternating groups need.
    own = has_own_steps(problem)
    turns = (width == WIDE or (narrow and not problem.dropout)) and not own
    small = own or has_small_blocks(problem)
    return HopperBackwardConfig(
        num_warps=GROUP_WARPS,
        num_stages=3 if small and narrow else 2,
        do_stages=3 if small and narrow else 2,
        # As many queries as a block of the mask, so that no hidden ones are computed.
        block_m=ROWS if small else BLOCK_QUERIES[width],
        block_n=ROWS if width == WIDEST else GROUPS * ROWS,
        # Groups with steps of their own have tiles of their own.
        ds_stages=1 if own else 2,
        early_dv=width == WIDE and not problem.dropout,
        defer_dp_wait=narrow or width == WIDE,
        # In deterministic kernels, a program that waits for its turn then has another step to compute.
        defer_dq=(narrow or turns or width == WIDEST or problem.deterministic) and not own,
        alternate_dq=turns,
        init_accumulators=not (problem.softcap and width == WIDEST),
        stagger_start=may_rotate(problem),
        interleaved_heads=_usual_interleaved_heads(problem),
    )
