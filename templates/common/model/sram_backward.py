"""SRAM of backward kernels that keep rows of one operand and iterate over the other.

Each value is a lower bound, as in `sram.py`.
"""

import math

from flashtune.core.kernel import Specialization
from flashtune.core.problem import Bias, Problem
from flashtune.core.target import Target
from flashtune.templates.common.model.sram import (
    ASYNC_BYTES,
    Engine,
    Tiles,
    columns,
)
from flashtune.templates.family import BytesItem, BytesItems


def walk_items(
    tiles: Tiles | None, stages: int, problem: Problem, specialization: Specialization, names: tuple[str, str]
) -> BytesItems:
    """Returns the items that are live at one point of the main loop; none for unknown architectures.

    `block_m` are the rows of the fixed side, and `block_n` those of a block of the other side.
    """
    # AMD's units read registers, and SRAM is only used during loads.
    if tiles is None or tiles.engine is Engine.MFMA:
        return ()
    # Columns beyond a head dim are masked in groups, whose size divides it.
    together = math.gcd(specialization.alignment, problem.head_dim, problem.value_head_dim)
    pipelined = stages > 1 and together * tiles.itemsize >= ASYNC_BYTES
    if tiles.engine is Engine.WARPGROUP or (tiles.engine is Engine.TENSOR_MEMORY and tiles.whole):
        # Operands are read from SRAM during the instruction.
        flight = stages if pipelined else 1
    else:
        # A block in use is in registers.
        flight = stages - 1 if pipelined else 0
    row = (columns(tiles.qk_chunks) + columns(tiles.v_chunks)) * tiles.itemsize
    items = (
        BytesItem(names[0], tiles.block_m * row),
        BytesItem(f"{names[1]}, {flight} in flight", flight * tiles.block_n * row),
    )
    return tuple(item for item in items if item.bytes)


SMALL_SRAM = 128 * 1024
WARP_ROWS = 16
WARPGROUP_ROWS = 64
# Fewer columns than these are not shared by two groups of warps. With 16 columns, a forward kernel of float32
# that Triton 3.6 compiled read illegal addresses on an H200.
MIN_SHARED = 32
MAX_REGISTERS = 255
# Accumulators and scores of one thread leave this many registers for the rest.
SPARE_REGISTERS = 24


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
    """Returns whether accumulators and live tiles fit the registers of their warps.

    Args:
        problem: Supplies the type.
        target: The GPU.
        held: Rows of the fixed side.
        walked: Rows of a block of the other side.
        summed: Accumulated columns for each fixed row.
        warps: Warps of a block.
        cap: Limit of registers per thread, 0 for the target's own.
        shared: Elements of a tile that is computed after the scores and added to memory.
    """
    wide = problem.dtype.is_float32
    # Two groups of warps may share 64 rows: each then has half of the columns.
    if not wide and warps * WARP_ROWS > 2 * max(held, WARPGROUP_ROWS // 2):
        return False
    if wide and warps * WARP_ROWS > held >= WARPGROUP_ROWS and walked < MIN_SHARED:
        return False
    threads = warps * target.warp_size
    sums = held * summed // threads
    # Probabilities and their gradients are live at once, and one of them in the type of the next product.
    scores = 2 * held * walked // threads
    if not wide:
        scores += held * walked // threads // 2
    room = min(MAX_REGISTERS, target.registers_per_sm // threads)
    if cap > room:
        return False
    return sums + max(scores, shared // threads) + SPARE_REGISTERS <= (cap or room)


def default_tiles_of_keys(problem: Problem, width: int, target: Target) -> tuple[int, int, int, int]:
    """Returns queries, keys, warps and stages of a kernel over keys, for heads of this many bytes.

    Not on Hopper, where families have their own tiles.
    """
    if problem.dtype.is_float32:
        # Parts of operands are in registers, several times.
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
    """Returns whether blocks have few rows: a bias is a tile of its own, in addition to the scores."""
    return width > 256 or problem.bias is not Bias.NONE
