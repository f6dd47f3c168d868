"""The search space of the q-outer family."""

import enum

from flashtune.core.config import Axis, AxisValue, BlockSize, Config, RegisterCap, Space
from flashtune.core.problem import Causal, Problem
from flashtune.core.target import Target
from flashtune.templates.common.model.sram import columns, head_chunks, is_exact, widest_tile
from flashtune.templates.common.precision import InputPrecision, precision_axis


class Loads(enum.StrEnum):
    """Loads of tiles into shared memory."""

    POINTER = "pointer"
    DESCRIPTOR = "descriptor"


class QOuterConfig(Config, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One point of the space."""

    block_m: BlockSize  # Queries of a tile.
    block_n: BlockSize  # Keys of a tile.
    loads: Loads = Loads.POINTER  # Pointer loads, or TMA descriptors made on the device.
    overlap_qk: bool = False  # Issue the next block's scores before this block's softmax.
    split_masked_loop: bool = True  # A separate loop for blocks without a mask.
    # A head dim that is not a power of two as several tiles instead of one padded tile.
    split_head_dim: bool = False
    lpt: bool = False  # Start with the tiles with the most keys (causal only).
    # Neighbouring programs compute different heads, not different tiles.
    heads_innermost: bool = False
    maxnreg: RegisterCap = 0  # Limit of registers per thread, 0 for none.
    # Precision of products of float32 tiles. No effect on 16-bit problems.
    input_precision: InputPrecision = InputPrecision.IEEE


# Rows of a multiple of these bytes may be copied at once.
ROW_BYTES = 16
# Below this many queries, small tiles are in the space; up to this many keys, masking of every block.
FEW_QUERIES = 128
FEW_KEYS = 512
# From this width on, issuing QK early can help; up to this one, a limit of registers can.
WIDE_HEAD = 256
NARROW_HEAD = 64
HOPPER = 90
MAX_REGISTERS = 255
# Accumulator and scores of one thread leave this many registers for the rest.
SPARE_REGISTERS = 15
# On Hopper the scores are live in 16 bits too. With fewer registers than these left, ptxas serialises the
# matrix instructions: it did for each of 691 such kernels, and for none of 3,467 others.
SPARE_FOR_WGMMA = 24


def q_outer_space(problem: Problem, target: Target) -> Space:
    """Returns the search space without values that no measurement selected: benchmarks/results/axes.md."""
    causal = problem.causal is not Causal.NONE
    widest = widest_tile(problem)
    wide = problem.dtype.is_float32
    few_queries = problem.seqlen_q < FEW_QUERIES
    few_keys = problem.seqlen_kv <= FEW_KEYS
    axes = (
        Axis("block_m", (16, 32, 64, 128) if wide or few_queries else (64, 128, 256)),
        Axis("block_n", (16, 32, 64) if wide else (32, 64, 128)),
        Axis("num_warps", (2, 4, 8) if wide or few_queries else (4, 8, 16)),
        Axis("num_stages", (1, 2, 3) if wide else (2, 3, 4)),
        Axis(
            "loads",
            (Loads.POINTER, Loads.DESCRIPTOR) if target.has_descriptors else (Loads.POINTER,),
            False,
        ),
        Axis("split_head_dim", (False, True) if _may_split(problem) else (False,)),
        Axis("overlap_qk", (False, True) if widest >= WIDE_HEAD else (False,), only_if=_can_run_ahead),
        Axis("split_masked_loop", (True, False) if causal or few_keys else (True,), False),
        Axis("lpt", (False, True) if causal else (False,)),
        Axis("heads_innermost", (False, True)),
        precision_axis(problem, target),
        Axis("maxnreg", (0, 128, 232) if widest <= NARROW_HEAD and target.is_nvidia else (0,)),
    )
    return Space(QOuterConfig, axes, lambda config: _is_possible(problem, config, target))


def _may_split(problem: Problem) -> bool:
    """Returns whether a head dim may be several tiles: rows are multiples of 16 bytes (`can_load`)."""
    dims = problem.head_dim, problem.value_head_dim
    return not is_exact(problem) and not any(dim * problem.dtype.itemsize % ROW_BYTES for dim in dims)


def _can_run_ahead(chosen: dict[str, AxisValue]) -> bool:
    # Triton 3.6 miscompiles a score tile that is summed over chunks and carried by the loop: wrong results
    # and illegal accesses on an H200. Tests of verification force this combination.
    return chosen["loads"] is Loads.DESCRIPTOR and not chosen["split_head_dim"]


def _is_possible(problem: Problem, config: Config, target: Target) -> bool:
    """Returns whether a config can run: it fits, and Triton compiles it correctly."""
    assert isinstance(config, QOuterConfig)
    # With sixteen warps and several tiles for a head dim, Triton 3.6 reads shared memory that it did not
    # allocate: found by compute-sanitizer's memcheck on an H200.
    beyond = config.split_head_dim and config.num_warps == 16
    return not beyond and _fits_registers(problem, config, target)


def _fits_registers(problem: Problem, config: QOuterConfig, target: Target) -> bool:
    """Returns whether the tiles fit the registers of their warps, and every warp has its own rows."""
    if config.num_warps * 16 > max(config.block_m, 64):
        return False
    threads = config.num_warps * 32
    accumulator = (
        config.block_m * columns(head_chunks(problem.value_head_dim, config.split_head_dim)) // threads
    )
    scores = config.block_m * config.block_n // threads
    next_scores = scores if config.overlap_qk else 0
    room = min(MAX_REGISTERS, target.registers_per_sm // threads)
    if config.maxnreg:
        if config.maxnreg > room:
            return False
        room = config.maxnreg
    if target.capability == HOPPER and not problem.dtype.is_float32:
        return accumulator + scores + scores // 2 + next_scores + SPARE_FOR_WGMMA <= room
    return accumulator + scores + next_scores + SPARE_REGISTERS <= room
