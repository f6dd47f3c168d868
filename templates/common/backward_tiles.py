"""Tiles of portable kernels of the backward pass: of a head's columns, of rows, and which registers hold."""

from __future__ import annotations

from flashtune.features import Bias
from flashtune.problem import Dtype, Problem
from flashtune.target import Target
from flashtune.templates.common.tiles import Chunk, head_chunks

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
