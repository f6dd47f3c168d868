"""The SRAM of a kernel that holds rows of one side and walks those of the other: facts of backward families.

Like those of `sram.py`, a lower bound: what compilers of some version share or keep in registers is left out.
"""

from __future__ import annotations

import math

import msgspec

from flashtune.kernel import Specialization
from flashtune.problem import Problem
from flashtune.target import Target
from flashtune.templates.common.sram import ASYNC_BYTES, TENSOR_MEMORY_ROWS, Engine, engine_of
from flashtune.templates.common.tiles import Chunk, columns
from flashtune.templates.family import TrafficItem


class Walk(msgspec.Struct, frozen=True, kw_only=True):
    """A program's tiles: of keys and values, and of queries and gradients of outputs; one side stays.

    Attributes:
        held: Rows of the side that stays.
        walked: Rows of a block of the other.
        qk_chunks: The head dim as tiles.
        v_chunks: The value head dim as tiles.
        warps: Warps of the block.
        stages: Depth of the software pipeline.
        ieee: Whether float32 products are made as such.
    """

    held: int
    walked: int
    qk_chunks: tuple[Chunk, ...]
    v_chunks: tuple[Chunk, ...]
    warps: int
    stages: int
    ieee: bool

    @property
    def columns(self) -> int:
        """Columns of a row of either side."""
        return columns(self.qk_chunks) + columns(self.v_chunks)

    @property
    def whole(self) -> bool:
        """Whether neither head dim is cut into chunks."""
        return len(self.qk_chunks) == len(self.v_chunks) == 1


def walk_items(
    walk: Walk, problem: Problem, target: Target, specialization: Specialization, names: tuple[str, str]
) -> tuple[TrafficItem, ...]:
    """What is live at one point of the main loop; nothing where nothing is known of the architecture.

    Args:
        walk: The tiles.
        problem: Its type and its head dims.
        target: The GPU.
        specialization: What is assumed of the tensors.
        names: Of what is held and of what is walked.
    """
    engine = engine_of(target, problem.dtype, walk.held, walk.warps, walk.ieee)
    # AMD's units read registers, and SRAM holds what they are loaded with in passing.
    if engine is None or engine is Engine.MFMA:
        return ()
    size = problem.dtype.itemsize
    # Columns beyond a head dim are masked, by as many at once as divide it.
    together = math.gcd(specialization.alignment, problem.head_dim, problem.value_head_dim)
    pipelined = walk.stages > 1 and together * size >= ASYNC_BYTES
    if engine is Engine.WARPGROUP or (engine is Engine.TENSOR_MEMORY and walk.whole):
        # Operands are read from SRAM while the instruction runs.
        flight = walk.stages if pipelined else 1
    else:
        # A block in use is in registers.
        flight = walk.stages - 1 if pipelined else 0
    row = walk.columns * size
    items = (
        TrafficItem(names[0], walk.held * row),
        TrafficItem(f"{names[1]}, {flight} in flight", flight * walk.walked * row),
    )
    return tuple(item for item in items if item.bytes)


def walk_columns(walk: Walk, problem: Problem, target: Target, summed: int) -> int:
    """Columns of tensor memory at the least: of sums of so many columns, and of one tile of scores."""
    engine = engine_of(target, problem.dtype, walk.held, walk.warps, walk.ieee)
    if engine is not Engine.TENSOR_MEMORY:
        return 0
    return (summed + walk.walked) * walk.held // TENSOR_MEMORY_ROWS
