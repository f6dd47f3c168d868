"""The search space of the masked family."""

from flashtune.core.config import Axis, BlockSize, Config, RegisterCap, Space
from flashtune.core.problem import Causal, Problem
from flashtune.core.target import Target
from flashtune.templates.common.model.splits import TILES_PER_SM, Splits, count_tiles, split_counts
from flashtune.templates.common.model.sram import Chunk, columns, masked_chunks, may_split
from flashtune.templates.common.pipeline import stage_axis
from flashtune.templates.common.precision import InputPrecision, precision_axis


class MaskedConfig(Config, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One point of the space."""

    block_m: BlockSize  # Queries of a tile.
    block_n: BlockSize  # Keys of a tile.
    split_masked_loop: bool = True  # A separate loop for blocks without a mask.
    # A head dim that is not a power of two as several tiles instead of one padded tile.
    split_head_dim: bool = False
    # Start with the last tiles of a sequence, which see the most keys (causal only).
    lpt: bool = False
    # Neighbouring programs compute different heads, not different tiles.
    heads_innermost: bool = False
    maxnreg: RegisterCap = 0  # Limit of registers per thread, 0 for none.
    # Precision of products of float32 tiles. No effect on 16-bit problems.
    input_precision: InputPrecision = InputPrecision.IEEE
    # Parts of the keys of each tile, one for each program. A second kernel combines them.
    num_splits: Splits = 1


# Below this many queries of a sequence, small tiles are in the space.
FEW_QUERIES = 128
HOPPER = 90
MAX_REGISTERS = 255
# Accumulator and scores of one thread leave this many registers for the rest, with bounds and biases.
SPARE_REGISTERS = 24


def masked_space(problem: Problem, target: Target) -> Space:
    """Returns the search space."""
    wide = problem.dtype.is_float32
    block_m = _tile_queries(problem)
    block_n = (16, 32, 64) if wide else (16, 32, 64, 128)
    # A tile lies within one block of a block mask.
    largest = problem.block_mask or max(block_m)
    axes = (
        Axis("block_m", tuple(rows for rows in block_m if rows <= largest)),
        Axis("block_n", tuple(keys for keys in block_n if keys <= largest)),
        Axis("num_warps", (4, 8)),
        stage_axis(problem, (1, 2, 3) if wide else (1, 2, 3, 4)),
        Axis("split_masked_loop", (True, False), False),
        Axis("split_head_dim", (False, True) if may_split(problem) else (False,)),
        Axis("lpt", (False, True) if _ends_differ(problem) else (False,)),
        Axis("heads_innermost", (False, True)),
        precision_axis(problem, target),
        Axis("num_splits", tile_splits(problem, target)),
    )
    return Space(MaskedConfig, axes, lambda config: _is_possible(problem, config, target))


def tile_splits(problem: Problem, target: Target) -> tuple[int, ...]:
    """Returns the numbers of parts into which the keys of a tile may be split."""
    return split_counts(problem, _tile_queries(problem), (1,), target)


def _tile_queries(problem: Problem) -> tuple[int, ...]:
    few = problem.seqlen_q < FEW_QUERIES or problem.dtype.is_float32
    return (16, 32, 64, 128) if few else (64, 128)


def value_chunks(problem: Problem, config: MaskedConfig) -> tuple[Chunk, ...]:
    """Returns the tiles of V's columns."""
    return masked_chunks(problem, problem.value_head_dim, config.split_head_dim)


def _ends_differ(problem: Problem) -> bool:
    """Returns whether later tiles have more blocks: no window or chunk limits them."""
    near = problem.window_left is not None or problem.chunk > 0
    return problem.causal is not Causal.NONE and not near


def _is_possible(problem: Problem, config: Config, target: Target) -> bool:
    """Returns whether tiles fit the registers of their warps, and there are not too many splits."""
    assert isinstance(config, MaskedConfig)
    programs = count_tiles(problem, config.block_m, 1) * config.num_splits
    return _fits_registers(problem, config, target) and (
        config.num_splits == 1 or programs <= TILES_PER_SM * target.sm_count
    )


def _fits_registers(problem: Problem, config: MaskedConfig, target: Target) -> bool:
    """Returns whether the tiles fit the registers of their warps, and every warp has its own rows."""
    if config.num_warps * 16 > max(config.block_m, 64):
        return False
    threads = config.num_warps * 32
    accumulator = config.block_m * columns(value_chunks(problem, config)) // threads
    scores = config.block_m * config.block_n // threads
    room = min(MAX_REGISTERS, target.registers_per_sm // threads)
    if target.capability == HOPPER and not problem.dtype.is_float32:
        # The probabilities are live in 16 bits too.
        scores += scores // 2
    return accumulator + scores + SPARE_REGISTERS <= room
