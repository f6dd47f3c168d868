"""The search space of the split-KV family."""

import math
from typing import Annotated

import msgspec

from flashtune.core.config import Axis, BlockSize, Config, LaunchOptions, Space
from flashtune.core.features.mask_geometry import distinct_keys
from flashtune.core.kernel import Alignment, Specialization
from flashtune.core.problem import Problem
from flashtune.core.target import Target
from flashtune.templates.common.model.sram import Chunk, columns, head_chunks, is_exact, power_of_two
from flashtune.templates.common.pipeline import stage_axis

Splits = Annotated[int, msgspec.Meta(ge=1, le=256)]


class DecodeConfig(Config, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One point of the space."""

    block_m: BlockSize  # Rows of a tile: queries and the heads that share a KV head.
    block_n: BlockSize  # Keys of a block.
    num_splits: Splits = 1  # Parts of the keys of a sequence, one for each program.
    # A head dim that is not a power of two as several tiles instead of one padded tile.
    split_head_dim: bool = False
    # Launch the combine kernel before the last splits end (sm_90 and later).
    early_combine: bool = False
    # Launch the kernel before the preceding kernel of the stream ends (sm_90 and later). Needs
    # `early_combine` if there are several splits.
    early_start: bool = False


SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
ROWS = (16, 32, 64)
MIN_KEYS = 32
# Maximum number of programs per SM, in sequence.
PROGRAMS_PER_SM = 8
HOPPER = 90
MAX_REGISTERS = 255
SPARE_REGISTERS = 24
# Rows of a group of warps, and minimum columns of a warp's matrix product.
WARPGROUP_ROWS = 64
WARP_COLUMNS = 8
# Columns of the narrowest tile for loads in pairs.
MIN_PAIRED = 64
# Maximum elements of a row in a combine program, and its warps.
COMBINE_NUMBERS = 8192
COMBINE_WARPS = 4
MIN_COLUMNS = 32


def decode_space(problem: Problem, target: Target) -> Space:
    """Returns the search space."""
    odd_width = not problem.mla and not is_exact(problem)
    fewest = fewest_tiles(problem)
    most = min(
        max(1, math.ceil(distinct_keys(problem.sight) / MIN_KEYS)),
        max(1, PROGRAMS_PER_SM * target.sm_count // max(1, fewest)),
    )
    # Also the numbers that give every SM one, two or three programs.
    filling = (waves * target.sm_count // max(1, fewest) for waves in (1, 2, 3))
    splits = tuple(count for count in sorted({*SPLITS, *filling}) if 1 <= count <= min(most, SPLITS[-1]))
    early = len(splits) > 1 and target.capability >= HOPPER and not problem.dtype.is_float32
    axes = (
        Axis("block_m", tuple(rows for rows in ROWS if rows < 2 * group_rows(problem) or rows == ROWS[0])),
        Axis("block_n", (16, 32, 64) if problem.dtype.is_float32 else (32, 64, 128, 256)),
        Axis("num_warps", (2, 4, 8)),
        stage_axis(problem, (1, 2, 3) if problem.dtype.is_float32 else (2, 3, 4, 5)),
        Axis("num_splits", splits),
        Axis("split_head_dim", (False, True) if odd_width else (False,)),
        Axis(
            "early_combine",
            (False, True) if early else (False,),
            only_if=lambda chosen: chosen["num_splits"] != 1,
        ),
        Axis(
            "early_start",
            (False, True) if early else (False,),
            only_if=lambda chosen: chosen["num_splits"] == 1 or chosen["early_combine"] is True,
        ),
    )
    return Space(DecodeConfig, axes, lambda config: _is_possible(problem, config, target))


def group_rows(problem: Problem) -> int:
    """Returns the rows of one KV head of a sequence."""
    return max(1, problem.seqlen_q * problem.group_size)


def fewest_tiles(problem: Problem) -> int:
    """Returns the number of tiles with the most rows. Each packed sequence may end in a partial tile."""
    if problem.packed:
        tiles = problem.packed * problem.group_size // ROWS[-1] + problem.batch
    else:
        tiles = math.ceil(group_rows(problem) / ROWS[-1]) * problem.batch
    return tiles * problem.kv_heads


def query_chunks(problem: Problem, split_head_dim: bool) -> tuple[Chunk, ...]:
    """Returns the head dim as tiles. For latent keys, the values' columns are the first tile."""
    if not problem.mla:
        return head_chunks(problem.head_dim, split_head_dim)
    values = Chunk(0, 0, problem.value_head_dim, False)
    rest = head_chunks(problem.head_dim - problem.value_head_dim, True)
    return (
        values,
        *(Chunk(chunk.index + 1, chunk.start + values.width, chunk.width, chunk.padded) for chunk in rest),
    )


def value_chunks(problem: Problem, split_head_dim: bool) -> tuple[Chunk, ...]:
    """Returns the value head dim as tiles."""
    return head_chunks(problem.value_head_dim, split_head_dim and not problem.mla)


def loads_pairs(problem: Problem, config: DecodeConfig, specialization: Specialization) -> bool:
    """Returns whether stored bytes are loaded two columns at a time.

    Pairs must be complete and at even columns. Warps that divide the columns each need eight columns of such
    a half, and narrow tiles take more instructions than they save. If warps divide the rows, Tensor Cores
    read values from SRAM, and pairs gain nothing unless the values are keys as well.
    """
    if problem.kv_dtype is None or problem.dtype.is_float32 or specialization.alignment is Alignment.ANY:
        return False
    if problem.head_dim % 2 or problem.value_head_dim % 2:
        return False
    below = config.block_m >= WARPGROUP_ROWS and not problem.mla
    keys = min(chunk.width for chunk in query_chunks(problem, config.split_head_dim))
    values = min(chunk.width for chunk in value_chunks(problem, config.split_head_dim))
    return not below and min(keys, values) >= MIN_PAIRED and values >= 2 * WARP_COLUMNS * config.num_warps


def block_bytes(problem: Problem, config: DecodeConfig) -> int:
    """Returns the stored bytes of a block of keys and values, with padding."""
    width = columns(query_chunks(problem, config.split_head_dim))
    if not problem.mla:
        width += columns(value_chunks(problem, config.split_head_dim))
    return config.block_n * width * problem.kv_itemsize


def combined_columns(problem: Problem, config: DecodeConfig) -> int:
    """Returns the output columns of a combine program."""
    fit = max(MIN_COLUMNS, COMBINE_NUMBERS // split_tile(config))
    return min(power_of_two(problem.value_head_dim), fit)


def split_tile(config: DecodeConfig) -> int:
    """Returns the least power of two that holds all splits."""
    return 1 << (config.num_splits - 1).bit_length()


def combines_early(problem: Problem, config: DecodeConfig) -> bool:
    """Returns whether the combine kernel waits for the splits on the device.

    Triton's interpreter, used for float32 only, cannot do this.
    """
    return config.early_combine and not problem.dtype.is_float32


def combine_options(problem: Problem, config: DecodeConfig) -> LaunchOptions:
    """Returns the compiler options of the combine kernel."""
    early = combines_early(problem, config)
    return LaunchOptions(COMBINE_WARPS, 1, early=True if early else msgspec.UNSET)


def _is_possible(problem: Problem, config: Config, target: Target) -> bool:
    """Returns whether tiles fit the registers of their warps, and blocks in flight the SRAM."""
    assert isinstance(config, DecodeConfig)
    if config.num_splits > 1 and config.num_splits > math.ceil(distinct_keys(problem.sight) / config.block_n):
        return False
    programs = math.ceil(group_rows(problem) / config.block_m) * problem.batch * problem.kv_heads
    if config.num_splits > 1 and programs * config.num_splits > PROGRAMS_PER_SM * target.sm_count:
        return False
    if problem.block_mask and config.block_n > problem.block_mask:
        return False
    # A tile in use may be in registers.
    in_flight = (config.num_stages - 1) * block_bytes(problem, config)
    return fits_registers(problem, config, target) and in_flight <= target.sram_per_block


def fits_registers(problem: Problem, config: DecodeConfig, target: Target) -> bool:
    """Returns whether the tiles of outputs, scores and probabilities fit the registers of their warps."""
    threads = config.num_warps * target.warp_size
    output = config.block_m * columns(value_chunks(problem, config.split_head_dim)) // threads
    scores = config.block_m * config.block_n // threads
    return output + 2 * scores + SPARE_REGISTERS <= MAX_REGISTERS
