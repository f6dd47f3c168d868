"""The search space of the split backward family."""

import functools

from flashtune.core.config import Axis, BlockSize, Config, RegisterCap, Space, Stages, Warps
from flashtune.core.problem import Causal, Problem
from flashtune.core.target import Target
from flashtune.templates.common.model.sram import backward_chunks, columns, may_split, widest_tile
from flashtune.templates.common.model.sram_backward import (
    SMALL_SRAM,
    default_tiles_of_keys,
    fits_warps,
    is_narrow,
)
from flashtune.templates.common.pipeline import stage_axis
from flashtune.templates.common.precision import InputPrecision, float32_width, precision_axis


class SplitConfig(Config, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One point of the space. Fields with the prefix `dq` are those of the dq kernel."""

    block_m: BlockSize  # Queries of a block in the loop.
    block_n: BlockSize  # Keys of a program's block.
    dq_block_m: BlockSize  # Queries of a dq program's tile.
    dq_block_n: BlockSize  # Keys of a block in its loop.
    dq_warps: Warps  # Its warps.
    dq_stages: Stages  # Stages of its software pipeline.
    split_masked_loop: bool = True  # A separate loop for blocks without a mask.
    # A head dim that is not a power of two as several tiles instead of one padded tile.
    split_head_dim: bool = False
    # Start with the last tiles of queries, which see the most keys (causal only).
    lpt: bool = False
    # Neighbouring programs compute different heads, not different tiles.
    heads_innermost: bool = False
    maxnreg: RegisterCap = 0  # Limit of registers per thread, 0 for none.
    # Precision of products of float32 tiles. No effect on 16-bit problems.
    input_precision: InputPrecision = InputPrecision.IEEE


HOPPER = 90
# Sides, warps and stages of both kernels in float32 on Hopper, by the width of the head dim.
HOPPER_TILES = {
    64: (32, 128, 8, 1, 128, 64, 8, 1),
    128: (32, 64, 4, 1, 64, 32, 4, 1),
    256: (16, 32, 4, 1, 64, 16, 4, 1),
}
# Below this many queries and keys, small tiles are in the space.
SHORT = 128
# From this width on, tiles of 32 rows are in the space: larger ones may exceed SRAM.
WIDE_HEAD = 256


def split_space(problem: Problem, target: Target) -> Space:
    """Returns the search space."""
    wide = problem.dtype.is_float32
    short = wide or max(problem.seqlen_q, problem.seqlen_kv) <= SHORT
    widest = widest_tile(problem)
    held = (16, 32, 64, 128) if short else (32, 64, 128) if widest >= WIDE_HEAD else (64, 128)
    walked = (16, 32, 64) if wide else (32, 64, 128)
    # A tile lies within one block of a block mask.
    largest = problem.block_mask or max(held + walked)
    axes = (
        Axis("block_m", _up_to(largest, walked)),
        Axis("block_n", _up_to(largest, held)),
        Axis("num_warps", (4, 8)),
        stage_axis(problem, (1, 2, 3)),
        Axis("dq_block_m", _up_to(largest, held)),
        Axis("dq_block_n", _up_to(largest, walked)),
        Axis("dq_warps", (4, 8)),
        stage_axis(problem, (1, 2, 3) if wide or target.sram_per_block < SMALL_SRAM else (2, 3), "dq_stages"),
        Axis("split_masked_loop", (True, False), False),
        Axis("split_head_dim", (False, True) if may_split(problem) else (False,)),
        Axis("lpt", (False, True) if problem.causal is not Causal.NONE else (False,)),
        Axis("heads_innermost", (False, True)),
        precision_axis(problem, target),
    )
    return Space(SplitConfig, axes, lambda config: fits_registers(problem, config, target))


def _up_to(largest: int, sides: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(side for side in sides if side <= largest)


def fits_registers(problem: Problem, config: Config, target: Target) -> bool:
    """Returns whether accumulators and live scores fit the registers of their warps, in both kernels."""
    assert isinstance(config, SplitConfig)
    qk, v = map(columns, backward_chunks(problem, config.split_head_dim))
    fits = functools.partial(fits_warps, problem, target, cap=config.maxnreg)
    keys = fits(held=config.block_n, walked=config.block_m, summed=qk + v, warps=config.num_warps)
    return keys and fits(held=config.dq_block_m, walked=config.dq_block_n, summed=qk, warps=config.dq_warps)


def default_tiles(width: int, problem: Problem, target: Target) -> tuple[int, ...]:
    """Returns sides, warps and stages of both kernels' default config, for heads of this many bytes."""
    walked = 32 if is_narrow(problem, width) else 64
    if not problem.dtype.is_float32 and target.capability == HOPPER:
        return walked, 128 if width <= 256 else 64, 8, 2, 128, walked, 8, 2
    if target.capability == HOPPER:
        return HOPPER_TILES[float32_width(problem)]
    keys = default_tiles_of_keys(problem, width, target)
    block_m, block_n, warps, stages = keys
    if problem.dtype.is_float32:
        return *keys, block_n, block_m, warps, stages
    if target.sram_per_block < SMALL_SRAM:
        return *keys, block_n, block_m, 4, 1
    return *keys, 64, walked, 4, 2
