"""SRAM of backward kernels that keep rows of one operand and iterate over the other.

Each value is a lower bound, as in `sram.py`.
"""

from __future__ import annotations

import math

import msgspec

from flashtune.core.kernel import Specialization
from flashtune.core.problem import Bias, Dtype, Problem
from flashtune.core.target import Target
from flashtune.templates.common.model.sram import (
    ASYNC_BYTES,
    TENSOR_MEMORY_ROWS,
    Chunk,
    Engine,
    columns,
    engine_of,
    head_chunks,
)
from flashtune.templates.family import TrafficItem


class Walk(msgspec.Struct, frozen=True, kw_only=True):
    """A program's tiles: of keys and values, and of queries and gradients of outputs; one side stays.

    Attributes:
        held: Rows of the side that stays.
        walked: Rows of a block of the other.
        qk_chunks: The head dim as tiles.
        v_chunks: The value head dim as tiles.
        warps: Warps of the block.
        stages: Depth of the software pipeline.
        ieee: Whether float32 products are made as such.
    """

    held: int
    walked: int
    qk_chunks: tuple[Chunk, ...]
    v_chunks: tuple[Chunk, ...]
    warps: int
    stages: int
    ieee: bool

    @property
    def columns(self) -> int:
        """Columns of a row of either side."""
        return columns(self.qk_chunks) + columns(self.v_chunks)

    @property
    def whole(self) -> bool:
        """Whether neither head dim is cut into chunks."""
        return len(self.qk_chunks) == len(self.v_chunks) == 1


def walk_items(
    walk: Walk, problem: Problem, target: Target, specialization: Specialization, names: tuple[str, str]
) -> tuple[TrafficItem, ...]:
    """What is live at one point of the main loop; nothing where nothing is known of the architecture.

    Args:
        walk: The tiles.
        problem: Its type and its head dims.
        target: The GPU.
        specialization: What is assumed of the tensors.
        names: Of what is held and of what is walked.
    """
    engine = engine_of(target, problem.dtype, walk.held, walk.warps, walk.ieee)
    # AMD's units read registers, and SRAM holds what they are loaded with in passing.
    if engine is None or engine is Engine.MFMA:
        return ()
    size = problem.dtype.itemsize
    # Columns beyond a head dim are masked, by as many at once as divide it.
    together = math.gcd(specialization.alignment, problem.head_dim, problem.value_head_dim)
    pipelined = walk.stages > 1 and together * size >= ASYNC_BYTES
    if engine is Engine.WARPGROUP or (engine is Engine.TENSOR_MEMORY and walk.whole):
        # Operands are read from SRAM while the instruction runs.
        flight = walk.stages if pipelined else 1
    else:
        # A block in use is in registers.
        flight = walk.stages - 1 if pipelined else 0
    row = walk.columns * size
    items = (
        TrafficItem(names[0], walk.held * row),
        TrafficItem(f"{names[1]}, {flight} in flight", flight * walk.walked * row),
    )
    return tuple(item for item in items if item.bytes)


def walk_columns(walk: Walk, problem: Problem, target: Target, summed: int) -> int:
    """Columns of tensor memory at the least: of sums of so many columns, and of one tile of scores."""
    engine = engine_of(target, problem.dtype, walk.held, walk.warps, walk.ieee)
    if engine is not Engine.TENSOR_MEMORY:
        return 0
    return (summed + walk.walked) * walk.held // TENSOR_MEMORY_ROWS


# With 16-bit tiles that are 32 columns wide, Triton 3.6's ptxas was seen to put scalars of the loop into
# registers where wgmma looks for the tile's address.
LEAST_WIDTH = 64
SMALL_SRAM = 128 * 1024
WARP_ROWS = 16
WARPGROUP_ROWS = 64
MOST_REGISTERS = 255
# Sums and scores of one thread leave this many registers for the rest.
SPARE_REGISTERS = 24


def backward_chunks(problem: Problem, width: int, decomposed: bool) -> tuple[Chunk, ...]:
    """The tiles of a head dim's columns."""
    chunks = head_chunks(width, decomposed)
    if problem.dtype is Dtype.FP32 or chunks[0].width >= LEAST_WIDTH:
        return chunks
    return (Chunk(0, 0, LEAST_WIDTH, padded=True),)


def may_split(problem: Problem) -> bool:
    """Whether no tile of a head dim that is cut would be too narrow."""
    if problem.dtype is Dtype.FP32:
        return True
    widths = problem.head_dim, problem.value_head_dim
    return all(chunk.width >= LEAST_WIDTH for width in widths for chunk in head_chunks(width, True))


def fits_warps(
    problem: Problem,
    target: Target,
    *,
    held: int,
    walked: int,
    summed: int,
    warps: int,
    cap: int,
    shared: int = 0,
) -> bool:
    """Whether what a kernel adds up, and what is at work beside it, fit the registers of its warps.

    Args:
        problem: Its type decides.
        target: The GPU.
        held: Rows of the side that stays.
        walked: Rows of a block of the other.
        summed: Columns that are added up for each row that stays.
        warps: Warps of a block.
        cap: Registers of a thread at the most, 0 for the target's own bound.
        shared: Numbers of a tile that comes after the scores and is added to memory.
    """
    wide = problem.dtype is Dtype.FP32
    # Two groups of warps may share 64 rows: each then has half of the columns.
    if not wide and warps * WARP_ROWS > 2 * max(held, WARPGROUP_ROWS // 2):
        return False
    threads = warps * target.warp_size
    sums = held * summed // threads
    # Weights and their gradients are live at once, and one of them in the type of the next product.
    scores = 2 * held * walked // threads
    if not wide:
        scores += held * walked // threads // 2
    room = min(MOST_REGISTERS, target.registers_per_sm // threads)
    if cap > room:
        return False
    return sums + max(scores, shared // threads) + SPARE_REGISTERS <= (cap or room)


def usual_tiles_of_keys(problem: Problem, width: int, target: Target) -> tuple[int, int, int, int]:
    """Of a kernel that holds keys, for heads of so many bytes: queries, keys, warps and stages.

    Of Hopper for float32 alone: for narrower types families have tiles of their own there.
    """
    if problem.dtype is Dtype.FP32:
        # Operands of ordinary arithmetic are in registers, several times over.
        if width > 512:
            return 16, 16, 8, 1
        return (16, 32, 4, 1) if width <= 256 else (16, 32, 8, 1)
    narrow = is_narrow(problem, width)
    if target.sram_per_block < SMALL_SRAM:
        if width > 256:
            return 32, 32, 4, 1
        return 32, 64, 8 if narrow else 4, 1 if width > 128 else 2
    return 32 if narrow else 64, 64, 8 if narrow else 4, 2


def is_narrow(problem: Problem, width: int) -> bool:
    """Whether few rows are walked at a time: a bias is a tile of its own, held beside the scores."""
    return width > 256 or problem.bias is not Bias.NONE
