"""The numbers of splits of the keys of tiles with many queries, and the kernel that combines them."""

import math
from typing import Annotated

import msgspec

from flashtune.core.errors import KernelError
from flashtune.core.features.mask_geometry import distinct_keys
from flashtune.core.problem import Feature, Problem
from flashtune.core.target import Target
from flashtune.templates.common.model.sram import power_of_two
from flashtune.templates.common.model.traffic import unpacked

# Features with which keys are not split.
UNSPLIT = {Feature.DROPOUT, Feature.BIAS, Feature.BLOCK_MASK}
# Numbers of splits, in addition to those that give every SM one or two tiles, and the most of them.
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
MAX_SPLITS = 256
# Up to this many queries, another family splits keys.
MAX_DECODED = 16
# With fewer keys launches dominate. The fewest keys of a split, and the most tiles of an SM with splits.
LONG_KEYS = 1024
MIN_SPLIT_KEYS = 256
TILES_PER_SM = 4
# Maximum elements of a row in a program that combines splits, its minimum columns, and its warps.
COMBINE_NUMBERS = 8192
MIN_COLUMNS = 32
COMBINE_WARPS = 4

Splits = Annotated[int, msgspec.Meta(ge=1, le=MAX_SPLITS)]


def can_split(problem: Problem) -> bool:
    """Returns whether kernels split the keys of tiles for such features and types."""
    return not problem.dtype.is_quantized and problem.features.isdisjoint(UNSPLIT)


def split_counts(
    problem: Problem, rows: tuple[int, ...], packs: tuple[int, ...], target: Target
) -> tuple[int, ...]:
    """Returns the numbers of splits: only 1 if tiles occupy all SMs, or with few queries or keys.

    `rows` are the rows that a tile may have, and `packs` the numbers of heads that may share it.
    """
    tiles = [count_tiles(problem, count, pack) for count in rows for pack in packs]
    fewest, keys = max(1, min(tiles)), distinct_keys(problem.sight)
    is_short = problem.seqlen_q <= MAX_DECODED or keys < LONG_KEYS
    if is_short or not can_split(problem) or fewest >= target.sm_count:
        return (1,)
    most = min(keys // MIN_SPLIT_KEYS, TILES_PER_SM * target.sm_count // fewest, MAX_SPLITS)
    filling = (waves * target.sm_count // max(1, count) for count in tiles for waves in (1, 2))
    return tuple(count for count in sorted({*SPLITS, *filling}) if 1 <= count <= most)


def count_tiles(problem: Problem, rows: int, pack: int) -> int:
    """Returns the tiles of so many rows, of `pack` heads each. Packed sequences count as equal ones."""
    problem = unpacked(problem)
    packs = problem.batch * problem.kv_heads * math.ceil(problem.group_size / pack)
    return packs * math.ceil(problem.seqlen_q / (rows // pack))


def split_tile(num_splits: int) -> int:
    """Returns the least power of two that holds all splits."""
    return 1 << (num_splits - 1).bit_length()


def combined_columns(problem: Problem, num_splits: int) -> int:
    """Returns the output columns of a program that combines splits."""
    return min(
        power_of_two(problem.value_head_dim), max(MIN_COLUMNS, COMBINE_NUMBERS // split_tile(num_splits))
    )


def split_values(problem: Problem, num_splits: int) -> dict[str, object]:
    """Returns the template values of splits of the keys, and of the kernel that combines them.

    Raises:
        KernelError: Keys are not split for such a problem.
    """
    if num_splits > 1 and not can_split(problem):
        raise KernelError(
            "keys are not split with dropout, a bias, masks or 8-bit queries: set num_splits to 1"
        )
    combined = combined_columns(problem, num_splits)
    return {
        # A tile has one part of the keys, of which a second kernel combines all.
        "is_split": num_splits > 1,
        "split_tile": split_tile(num_splits),
        "combined": combined,
        "column_blocks": math.ceil(problem.value_head_dim / combined),
        "masked_columns": problem.value_head_dim % combined > 0,
        "combine_warps": COMBINE_WARPS,
    }
