"""The numbers of splits of keys of Hopper's tiles."""

from flashtune.core.problem import Problem
from flashtune.core.target import Target
from flashtune.templates.common.model import splits
from flashtune.templates.common.model.splits import (
    COMBINE_WARPS,
    MAX_DECODED,
    MAX_SPLITS,
    TILES_PER_SM,
    UNSPLIT,
    can_split,
    combined_columns,
    count_tiles,
    split_tile,
)

__all__ = [
    "COMBINE_WARPS", "MAX_DECODED", "MAX_SPLITS", "TILES_PER_SM", "UNSPLIT", "can_split", "combined_columns",
    "count_tiles", "split_counts", "split_tile",
]  # fmt: skip

# Rows of tiles of one group or more.
TILE_ROWS = (64, 128, 192, 256)


def split_counts(problem: Problem, packs: tuple[int, ...], target: Target) -> tuple[int, ...]:
    """Returns the numbers of splits: only 1 if tiles occupy all SMs, or with few queries or keys.

    `packs` are the numbers of heads that may share a tile.
    """
    return splits.split_counts(problem, TILE_ROWS, packs, target)
