"""The numbers of splits of keys of Hopper's tiles."""

import math

from flashtune.core.problem import Feature, Problem
from flashtune.core.target import Target
from flashtune.templates.common.model import splits
from flashtune.templates.common.model.splits import TILES_PER_SM
from flashtune.templates.family import ORDERED_KEYS

# Masks with which one program walks all splits of a batch-invariant tile.
UNSPLIT_IN_ORDER = {Feature.WINDOW, Feature.CHUNK}
# The most tiles of splits of a fixed length for each SM. Programs skip those beyond the last key.
ORDERED_TILES_PER_SM = 32
# Splits that a program of batch-invariant kernels loads at a time.
COMBINED_AT_ONCE = 8
# Rows of tiles of one group or more.
TILE_ROWS = (64, 128, 192, 256)


def split_counts(problem: Problem, packs: tuple[int, ...], target: Target) -> tuple[int, ...]:
    """Returns the numbers of splits: only 1 if tiles occupy all SMs, or with few queries or keys.

    `packs` are the numbers of heads that may share a tile.
    """
    if problem.batch_invariant:
        return ordered_counts(problem)
    return splits.split_counts(problem, TILE_ROWS, packs, target)


def max_split_tiles(problem: Problem, target: Target) -> int:
    """Returns the most tiles of splits."""
    return (ORDERED_TILES_PER_SM if problem.batch_invariant else TILES_PER_SM) * target.sm_count


def ordered_counts(problem: Problem) -> tuple[int, ...]:
    """Returns 1, and 2 if a program may compute one split of a fixed length: `split_parts` counts these.

    Masks on the left hide most of such splits. Launch plans of packed keys do not know the longest sequence.
    """
    is_known = not problem.packed or problem.page_size > 0
    is_hidden = not problem.features.isdisjoint(UNSPLIT_IN_ORDER)
    return (1, 2) if problem.seqlen_kv > ORDERED_KEYS and is_known and not is_hidden else (1,)


def split_parts(problem: Problem, num_splits: int) -> int:
    """Returns the parts of a tile's keys. Splits of batch-invariant kernels have a fixed length."""
    is_fixed = problem.batch_invariant and num_splits > 1
    return max(1, math.ceil(problem.seqlen_kv / ORDERED_KEYS)) if is_fixed else num_splits
