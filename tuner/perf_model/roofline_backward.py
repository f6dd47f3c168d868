"""Predicted times of backward kernels, from the terms of the forward ones, without calibration.

A backward kernel loops over the visible queries of a block of keys and accumulates dk and dv. It computes dq
too, or a second kernel does. The second kernel loops over keys as a forward kernel does, and computes the
scores again.
"""

from __future__ import annotations

import math
from typing import Protocol, runtime_checkable

import msgspec

from flashtune.core.config import BlockSize, Config, LaunchOptions, Stages, Warps
from flashtune.core.kernel import Specialization
from flashtune.core.problem import Direction, Problem
from flashtune.core.record import Resources
from flashtune.core.target import Target
from flashtune.templates.common.model.makespan_backward import turned
from flashtune.templates.common.model.sram import columns, head_chunks
from flashtune.templates.family import Family
from flashtune.tuner.binary.resources import occupancy
from flashtune.tuner.perf_model import roofline


@runtime_checkable
class TwoPasses(roofline.Tiled, Protocol):
    """A config of two kernels, the second of which computes dq."""

    @property
    def dq_block_m(self) -> BlockSize:
        """Queries of a tile of the second kernel."""
        ...

    @property
    def dq_block_n(self) -> BlockSize:
        """Keys of a block in its loop."""
        ...

    @property
    def dq_warps(self) -> Warps:
        """Warps of the second kernel."""
        ...

    @property
    def dq_stages(self) -> Stages:
        """Stages of its software pipeline."""
        ...


class Tile(Config, frozen=True, kw_only=True):
    """The tile of one kernel as in forward configs: `block_m` fixed rows, blocks of `block_n` in the loop."""

    block_m: BlockSize
    block_n: BlockSize
    lpt: bool = False
    heads_innermost: bool = False
    split_head_dim: bool = False
    input_precision: str = ""


class Pass(msgspec.Struct, frozen=True):
    """One kernel's loop over all pairs.

    Attributes:
        problem: The fixed and the looped rows, in place of queries and keys of a forward problem.
        heads: Query heads for each head of that problem.
        columns: Padded columns of all products.
        summed: Accumulated columns of each fixed row.
    """

    problem: Problem
    tile: Tile
    heads: int
    columns: int
    summed: int


def predict_backward_ms(
    problem: Problem, family: Family, config: Config, resources: Resources, target: Target
) -> float:
    """Returns the predicted GPU time of all kernels of a backward launch, in ms.

    Infinite if one of them cannot run.

    Raises:
        UsageError: The family's configs have no tiles.
    """
    if not isinstance(config, roofline.Tiled):
        raise roofline.without_tiles(family)
    walks = passes(problem, config)
    spills = roofline.spill_factor(resources)
    compute = sum(_seconds(walk, family, config, resources, target) for walk in walks) * spills
    exposed = roofline.transfer_seconds(problem.minimal_bytes(), target)
    memory = roofline.memory_seconds(problem, family, config, target)
    steps = (step(problem, config, Specialization()) for step in (family.prologue, family.epilogue))
    launches = 1 + sum(step is not None for step in steps)
    return roofline.LAUNCH_MS * launches + 1e3 * max(compute + exposed, memory)


def passes(problem: Problem, config: Config) -> tuple[Pass, ...]:
    """Returns the kernels that loop over all pairs."""
    assert isinstance(config, roofline.Tiled)
    split_head_dim = bool(getattr(config, "split_head_dim", False))
    qk, v = (columns(head_chunks(dim, split_head_dim)) for dim in (problem.head_dim, problem.value_head_dim))
    # Scores, gradients of probabilities, dk and dv. The most queries see the first block of keys.
    keys = _tile(config, config.block_n, config.block_m, config.num_warps, config.num_stages, lpt=True)
    first = Pass(turned(problem), keys, problem.group_size, 2 * qk + 2 * v, qk + v)
    if not isinstance(config, TwoPasses):
        return (msgspec.structs.replace(first, columns=first.columns + qk),)
    lpt = bool(getattr(config, "lpt", False))
    queries = _tile(config, config.dq_block_m, config.dq_block_n, config.dq_warps, config.dq_stages, lpt=lpt)
    forward = msgspec.structs.replace(problem, direction=Direction.FORWARD)
    return first, Pass(forward, queries, 1, 2 * qk + v, qk)


def _tile(config: Config, kept: int, walked: int, warps: int, stages: int, *, lpt: bool) -> Tile:
    return Tile(
        block_m=kept,
        block_n=walked,
        num_warps=warps,
        num_stages=stages,
        lpt=lpt,
        heads_innermost=bool(getattr(config, "heads_innermost", False)),
        split_head_dim=bool(getattr(config, "split_head_dim", False)),
        input_precision=str(getattr(config, "input_precision", "")),
    )


def _seconds(walk: Pass, family: Family, config: Config, resources: Resources, target: Target) -> float:
    """Returns the time of one kernel's loops; infinite if not one block is resident."""
    tile = walk.tile
    resident = occupancy(resources, LaunchOptions(tile.num_warps, tile.num_stages), target)
    if resident.blocks == 0:
        return math.inf
    pairs = walk.heads * roofline.computed_pairs(walk.problem, tile)
    own = family.overlap(config)
    hidden = roofline.overlap(resident) if own is None else own
    rate = (
        roofline.matrix_rate(walk.problem, tile, target) * roofline.MATRIX_SHARE * roofline.tile_share(tile)
    )
    matrix, softmax = 2 * pairs * walk.columns / rate, roofline.softmax_seconds(pairs, target)
    loop = max(matrix, softmax) + (1 - hidden) * min(matrix, softmax)
    tiles = walk.problem.batch * walk.problem.heads * -(-walk.problem.seqlen_q // tile.block_m)
    return loop * roofline.imbalance(walk.problem, tile, tiles, target.sm_count * resident.blocks, target)
