"""The space of the fused backward family: what a config holds, and which values are worth trying."""

from __future__ import annotations

import enum

from flashtune.core.config import Axis, BlockSize, Config, RegisterCap, Space
from flashtune.core.kernel import Alignment
from flashtune.core.problem import Bias, Dtype, Problem
from flashtune.core.target import Target
from flashtune.templates.common.model.sram import Chunk, columns, is_exact, power_of_two
from flashtune.templates.common.model.sram_backward import (
    backward_chunks,
    fits_warps,
    may_split,
    usual_tiles_of_keys,
)

# What the copy engine addresses begins on a border of so many float32 numbers.
DESCRIBED_NUMBERS = 4


class Products(enum.StrEnum):
    """How float32 tiles are multiplied: in float32, or as three products of tf32 halves."""

    IEEE = "ieee"
    TF32X3 = "tf32x3"


class Reduction(enum.StrEnum):
    """How a tile of dq is added to sums in memory: by atomics from registers, or by the copy engine."""

    ATOMICS = "atomics"
    COPY_ENGINE = "copy_engine"


class FusedConfig(Config, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One point of the space.

    Attributes:
        block_m: Queries of a block that a program walks.
        block_n: Keys of the block that it holds.
        reduction: How its share of dq is added.
        two_phases: Blocks that no mask touches run in a loop of their own.
        turned: Tiles of dq are made transposed, so that warps have their columns and not their rows; of no
            effect where tiles of queries are not copied ahead.
        decomposed: A head dim that is no power of two as several tiles instead of one padded.
        heads_inner: Neighbouring programs work on different heads, not on different blocks of keys.
        max_registers: Register cap, 0 for none.
        products: How float32 tiles are multiplied; of no effect on 16-bit problems.
    """

    block_m: BlockSize
    block_n: BlockSize
    reduction: Reduction = Reduction.ATOMICS
    two_phases: bool = True
    turned: bool = False
    decomposed: bool = False
    heads_inner: bool = False
    max_registers: RegisterCap = 0
    products: Products = Products.IEEE


# Under this many queries and keys small tiles are worth trying.
SHORT = 128
HOPPER = 90
# From this width on, tiles of 32 rows are worth trying: others may be more than SRAM holds.
WIDE_HEAD = 256


def fused_space(problem: Problem, target: Target) -> Space:
    """All configs worth trying."""
    wide = problem.dtype is Dtype.FP32
    short = wide or max(problem.seqlen_q, problem.seqlen_kv) <= SHORT
    odd = not (is_exact(problem.head_dim) and is_exact(problem.value_head_dim))
    widest = power_of_two(max(problem.head_dim, problem.value_head_dim))
    # What is not copied ahead passes through registers, as do tiles of fewer rows than wgmma takes: kernels
    # for Hopper then spill a hundred bytes and more.
    wgmma = target.capability == HOPPER and not wide
    narrow = widest >= WIDE_HEAD and not wgmma
    copies = target.has_descriptors and can_copy(problem)
    axes = (
        Axis("block_m", (16, 32, 64) if wide else (32, 64, 128)),
        Axis("block_n", (16, 32, 64, 128) if short else (32, 64, 128) if narrow else (64, 128)),
        Axis("num_warps", (4, 8)),
        Axis("num_stages", (2, 3) if wgmma else (1, 2, 3)),
        Axis("reduction", tuple(Reduction) if copies else (Reduction.ATOMICS,), False),
        Axis("two_phases", (True, False), False),
        Axis("turned", (False, True) if has_whole_words(problem) else (False,)),
        Axis("decomposed", (False, True) if odd and may_split(problem) else (False,)),
        Axis("heads_inner", (False, True)),
        Axis("products", tuple(Products) if wide and target.is_nvidia else (Products.IEEE,), False),
    )
    return Space(FusedConfig, axes, lambda config: fits_registers(problem, config, target))


def can_copy(problem: Problem) -> bool:
    """Whether rows of the sums lie where the copy engine can address them."""
    return problem.head_dim % DESCRIBED_NUMBERS == 0


def can_turn(problem: Problem, alignment: Alignment) -> bool:
    """Whether tiles of dq can be made transposed: where tiles of queries are copied ahead, by four bytes.

    Else they pass through registers to one place in SRAM, and with 32 queries the tile of dS, whose rows are
    half as long, goes where that of dO was. ptxas 12.8, which Triton 3.6 has for Hopper, makes both their
    descriptors of one number there, and some before that number itself: dS is then read from anywhere.
    """
    return alignment is not Alignment.ANY and has_whole_words(problem)


def has_whole_words(problem: Problem) -> bool:
    """Whether rows begin at four bytes, by which tiles can be copied ahead."""
    return problem.head_dim % 2 == problem.value_head_dim % 2 == 0


def chunks_of(problem: Problem, config: FusedConfig) -> tuple[tuple[Chunk, ...], tuple[Chunk, ...]]:
    """The tiles of queries' and keys' columns, and those of values' columns."""
    widths = problem.head_dim, problem.value_head_dim
    qk, v = (backward_chunks(problem, width, config.decomposed) for width in widths)
    return qk, v


def fits_registers(problem: Problem, config: Config, target: Target) -> bool:
    """Whether sums, and the scores or the tile of dq at work, fit the registers of their warps."""
    assert isinstance(config, FusedConfig)
    qk_chunks, v_chunks = chunks_of(problem, config)
    return fits_warps(
        problem,
        target,
        held=config.block_n,
        walked=config.block_m,
        summed=columns(qk_chunks) + columns(v_chunks),
        warps=config.num_warps,
        cap=config.max_registers,
        shared=config.block_m * qk_chunks[0].width,
    )


def usual_config(problem: Problem, target: Target) -> FusedConfig:
    """A config that fits the target, for shapes that nobody tuned."""
    width = power_of_two(max(problem.head_dim, problem.value_head_dim)) * problem.dtype.itemsize
    if problem.dtype is not Dtype.FP32 and target.capability == HOPPER:
        return _usual_of_hopper(problem, width)
    block_m, block_n, warps, stages = usual_tiles_of_keys(problem, width, target)
    return FusedConfig(block_m=block_m, block_n=block_n, num_warps=warps, num_stages=stages)


def _usual_of_hopper(problem: Problem, width: int) -> FusedConfig:
    """What Triton 3.6 compiles without spills; what changes scores takes the registers of 32 queries."""
    wide = width > 256 or (width > 128 and problem.bias is not Bias.NONE)
    changes = problem.bias is not Bias.NONE or problem.dropout or problem.alibi or problem.softcap
    return FusedConfig(
        block_m=32 if wide or changes else 64,
        block_n=64 if wide else 128,
        num_warps=8,
        num_stages=2,
        reduction=Reduction.COPY_ENGINE if can_copy(problem) else Reduction.ATOMICS,
        two_phases=not (wide or changes),
        turned=wide and has_whole_words(problem),
    )
