"""The search space of the latent Hopper family."""

import math
from typing import Annotated

import msgspec

from flashtune.core.config import Axis, Config, Space
from flashtune.core.features.mask_geometry import distinct_keys
from flashtune.core.problem import Problem
from flashtune.core.target import Target

Splits = Annotated[int, msgspec.Meta(ge=1, le=256)]
Queries = Annotated[int, msgspec.Meta(ge=1, le=64)]

GROUP_WARPS = 4
# Rows of one matrix instruction of a group, and keys of a block.
ROWS = 64
BLOCK_N = 64
# Registers of a thread of the second group and of the producer's four warps. The rest of the SM's registers
# leaves the first group 240. A producer of small pages needs registers for several page numbers; the second
# group can do with fewer.
REGISTERS = (240, 24)
REGISTERS_OF_SMALL_PAGES = (216, 48)
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
QUERIES = (1, 2, 4, 8, 16)
# Maximum number of programs per SM, in sequence, if keys are split.
PROGRAMS_PER_SM = 8
# Halves of values this wide leave space for two blocks of keys; narrower ones for more.
WIDEST_HALF = 256
# Maximum elements of a row in a combine program, and its warps: more do not fit registers.
COMBINE_NUMBERS = 8192
COMBINE_WARPS = 4


class LatentConfig(Config, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One point of the space. `num_stages` blocks of keys are in flight."""

    queries: Queries = 1  # Queries of a tile of 64 rows. The other rows are heads.
    num_splits: Splits = 1  # Parts of the keys of a sequence, one for each program.
    # The second group multiplies a block during the first one's softmax of the next, not before.
    overlap_pv: bool = False

    @property
    def block_m(self) -> int:
        """Rows of a tile."""
        return ROWS

    @property
    def block_n(self) -> int:
        """Keys of a block."""
        return BLOCK_N


def latent_space(problem: Problem, target: Target) -> Space:
    """Returns the search space."""
    fewest = math.ceil(problem.seqlen_q * problem.heads / ROWS) * problem.batch
    most = min(
        max(1, math.ceil(distinct_keys(problem.sight) / BLOCK_N)),
        max(1, PROGRAMS_PER_SM * target.sm_count // max(1, fewest)),
    )
    # Also the numbers that give every SM one, two or three programs.
    filling = (waves * target.sm_count // max(1, fewest) for waves in (1, 2, 3))
    splits = tuple(count for count in sorted({*SPLITS, *filling}) if 1 <= count <= min(most, SPLITS[-1]))
    narrow = problem.value_head_dim < 2 * WIDEST_HALF
    axes = (
        Axis("num_warps", (GROUP_WARPS,)),
        Axis("num_stages", (2, 3, 4) if narrow else (2,)),
        Axis("queries", tuple(count for count in QUERIES if count < 2 * problem.seqlen_q) or (1,)),
        Axis("num_splits", splits),
        Axis("overlap_pv", (False, True)),
    )
    return Space(LatentConfig, axes, lambda config: _is_possible(problem, config, target))


def row_tiles(problem: Problem, config: LatentConfig) -> int:
    """Returns the tiles of rows of one sequence."""
    return math.ceil(problem.heads * config.queries / ROWS) * math.ceil(problem.seqlen_q / config.queries)


def copied_keys(problem: Problem) -> int:
    """Returns the keys of one copy: a block, or a page if that is smaller."""
    return min(problem.page_size or BLOCK_N, BLOCK_N)


def worker_registers(problem: Problem) -> tuple[int, int]:
    """Returns registers of a thread of the second group, and of the producer."""
    return REGISTERS if copied_keys(problem) == BLOCK_N else REGISTERS_OF_SMALL_PAGES


def split_tile(config: LatentConfig) -> int:
    """Returns the least power of two that holds all splits."""
    return 1 << (config.num_splits - 1).bit_length()


def combined_columns(problem: Problem, config: LatentConfig) -> int:
    """Returns the output columns of a combine program."""
    return min(problem.value_head_dim, COMBINE_NUMBERS // split_tile(config))


def _is_possible(problem: Problem, config: Config, target: Target) -> bool:
    """Returns whether there are not too many splits."""
    assert isinstance(config, LatentConfig)
    programs = row_tiles(problem, config) * problem.batch * config.num_splits
    return config.num_splits == 1 or programs <= PROGRAMS_PER_SM * target.sm_count
