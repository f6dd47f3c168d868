"""The search space of the family with an outer loop over keys."""

from flashtune.core.config import Axis, BlockSize, Config, RegisterCap, Space
from flashtune.core.problem import Problem
from flashtune.templates.common.model.sram import is_exact


class KVOuterConfig(Config, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One point of the space."""

    block_m: BlockSize  # Queries of a tile.
    block_n: BlockSize  # Keys of a tile.
    # A head dim that is not a power of two as several tiles instead of one padded tile.
    split_head_dim: bool = False
    maxnreg: RegisterCap = 0  # Limit of registers per thread, 0 for none.


def kv_outer_space(problem: Problem) -> Space:
    """Returns the search space."""
    axes = (
        Axis("block_m", (16, 32, 64, 128)),
        Axis("block_n", (16, 32, 64, 128, 256)),
        Axis("num_warps", (2, 4, 8, 16)),
        # Triton does not pipeline loops that contain a barrier: more stages change nothing.
        Axis("num_stages", (1,)),
        Axis("split_head_dim", (False,) if is_exact(problem) else (False, True)),
        Axis("maxnreg", (0,)),
    )
    return Space(KVOuterConfig, axes)
