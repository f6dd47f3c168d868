"""The search space of the fused backward family."""

import enum

from flashtune.core.config import Axis, BlockSize, Config, RegisterCap, Space
from flashtune.core.kernel import Alignment
from flashtune.core.problem import Bias, Problem
from flashtune.core.target import Target
from flashtune.templates.common.model.sram import backward_chunks, columns, may_split, widest_tile
from flashtune.templates.common.model.sram_backward import default_tiles_of_keys, fits_warps
from flashtune.templates.common.precision import (
    InputPrecision,
    float32_width,
    input_precisions,
    precision_axis,
)

# TMA addresses are multiples of this many float32 elements.
DESCRIBED_NUMBERS = 4


class Reduction(enum.StrEnum):
    """How a tile of dq is added to sums in memory: by atomics from registers, or by TMA."""

    ATOMICS = "atomics"
    COPY_ENGINE = "copy_engine"


class FusedConfig(Config, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One point of the space."""

    block_m: BlockSize  # Queries of a block in the loop.
    block_n: BlockSize  # Keys of a program's block.
    reduction: Reduction = Reduction.ATOMICS  # How the program's part of dq is added.
    split_masked_loop: bool = True  # A separate loop for blocks without a mask.
    # dq tiles are computed transposed, so that warps own columns instead of rows. No effect if tiles of
    # queries are not prefetched.
    transpose_dq: bool = False
    # A head dim that is not a power of two as several tiles instead of one padded tile.
    split_head_dim: bool = False
    # Neighbouring programs compute different heads, not different blocks of keys.
    heads_innermost: bool = False
    maxnreg: RegisterCap = 0  # Limit of registers per thread, 0 for none.
    # Precision of products of float32 tiles. No effect on 16-bit problems.
    input_precision: InputPrecision = InputPrecision.IEEE


# Below this many queries and keys, small tiles are in the space.
SHORT = 128
HOPPER = 90
# Queries, keys, warps and stages of float32 on Hopper, by the width of the head dim: the fastest that were
# measured on an H200, and smaller ones if scores are changed.
HOPPER_TILES = {64: (64, 64, 4, 1), 128: (32, 128, 8, 1), 256: (16, 32, 8, 1)}
SMALL_TILES = {64: (32, 64, 4, 2), 128: (32, 64, 4, 1), 256: (16, 32, 8, 1)}
# From this width on, tiles of 32 rows are in the space: larger ones may exceed SRAM.
WIDE_HEAD = 256


def fused_space(problem: Problem, target: Target) -> Space:
    """Returns the search space."""
    wide = problem.dtype.is_float32
    short = wide or max(problem.seqlen_q, problem.seqlen_kv) <= SHORT
    widest = widest_tile(problem)
    # Tiles that are not prefetched pass through registers, as do tiles with fewer rows than wgmma needs.
    # Kernels for Hopper then spill at least a hundred bytes.
    wgmma = target.capability == HOPPER and not wide
    narrow = widest >= WIDE_HEAD and not wgmma
    copies = target.has_descriptors and can_copy(problem)
    axes = (
        Axis("block_m", (16, 32, 64) if wide else (32, 64, 128)),
        Axis("block_n", (16, 32, 64, 128) if short else (32, 64, 128) if narrow else (64, 128)),
        Axis("num_warps", (4, 8)),
        Axis("num_stages", (2, 3) if wgmma else (1, 2, 3)),
        Axis("reduction", tuple(Reduction) if copies else (Reduction.ATOMICS,), False),
        Axis("split_masked_loop", (True, False), False),
        Axis("transpose_dq", (False, True) if has_whole_words(problem) else (False,)),
        Axis("split_head_dim", (False, True) if may_split(problem) else (False,)),
        Axis("heads_innermost", (False, True)),
        precision_axis(problem, target),
    )
    return Space(FusedConfig, axes, lambda config: fits_registers(problem, config, target))


def can_copy(problem: Problem) -> bool:
    """Returns whether TMA can address the rows of the sums."""
    return problem.head_dim % DESCRIBED_NUMBERS == 0


def can_turn(problem: Problem, alignment: Alignment) -> bool:
    """Returns whether dq tiles can be computed transposed: if tiles of queries are prefetched, by four bytes.

    Otherwise tiles pass through registers to one place in SRAM. With 32 queries, dS has rows of half the
    length and takes the place of dO. ptxas 12.8, which Triton 3.6 has for Hopper, makes both their
    descriptors from one number, in some kernels before that number is computed: dS is then read from a wrong
    address.
    """
    return alignment is not Alignment.ANY and has_whole_words(problem)


def has_whole_words(problem: Problem) -> bool:
    """Returns whether rows are aligned to four bytes, as prefetched tiles require."""
    return problem.head_dim % 2 == problem.value_head_dim % 2 == 0


def fits_registers(problem: Problem, config: Config, target: Target) -> bool:
    """Returns whether sums, and the live scores or tile of dq, fit the registers of their warps."""
    assert isinstance(config, FusedConfig)
    qk_chunks, v_chunks = backward_chunks(problem, config.split_head_dim)
    return fits_warps(
        problem,
        target,
        held=config.block_n,
        walked=config.block_m,
        summed=columns(qk_chunks) + columns(v_chunks),
        warps=config.num_warps,
        cap=config.maxnreg,
        shared=config.block_m * qk_chunks[0].width,
    )


def usual_config(problem: Problem, target: Target) -> FusedConfig:
    """Returns a config that fits the target, for untuned shapes."""
    width = widest_tile(problem) * problem.dtype.itemsize
    hopper = target.capability == HOPPER
    if hopper and not problem.dtype.is_float32:
        return _usual_of_hopper(problem, width)
    if hopper:
        tiles = SMALL_TILES if _changes_scores(problem) else HOPPER_TILES
        block_m, block_n, warps, stages = tiles[float32_width(problem)]
    else:
        block_m, block_n, warps, stages = default_tiles_of_keys(problem, width, target)
    return FusedConfig(
        block_m=block_m,
        block_n=block_n,
        num_warps=warps,
        num_stages=stages,
        split_masked_loop=not hopper,
        input_precision=input_precisions(problem, target)[-1],
    )


def _changes_scores(problem: Problem) -> bool:
    """Returns whether scores are changed, which needs more registers."""
    return bool(problem.bias is not Bias.NONE or problem.dropout or problem.alibi or problem.softcap)


def _usual_of_hopper(problem: Problem, width: int) -> FusedConfig:
    """Returns tiles that Triton 3.6 compiles without spills; features of scores need more registers."""
    wide = width > 256 or (width > 128 and problem.bias is not Bias.NONE)
    changes = _changes_scores(problem)
    return FusedConfig(
        block_m=32 if wide or changes else 64,
        block_n=64 if wide else 128,
        num_warps=8,
        num_stages=2,
        reduction=Reduction.COPY_ENGINE if can_copy(problem) else Reduction.ATOMICS,
        split_masked_loop=not (wide or changes),
        transpose_dq=wide and has_whole_words(problem),
    )
