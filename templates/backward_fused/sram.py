"""The SRAM that the one pass needs at the least: what it holds, what streams by, and gradients of scores."""

from __future__ import annotations

from flashtune.kernel import Specialization
from flashtune.problem import Problem
from flashtune.target import Target
from flashtune.templates.backward_fused.space import FusedConfig, Products, chunks_of
from flashtune.templates.common.sram import ASYNC_BYTES, Engine, engine_of
from flashtune.templates.common.tiles import columns
from flashtune.templates.family import TrafficItem


def fused_items(
    problem: Problem, config: FusedConfig, target: Target, specialization: Specialization
) -> tuple[TrafficItem, ...]:
    """The items, which are all live at one point of the main loop; nothing where nothing is known."""
    ieee = config.products is Products.IEEE
    engine = engine_of(target, problem.dtype, config.block_n, config.num_warps, ieee)
    if engine is not Engine.WARPGROUP:
        return ()
    size = problem.dtype.itemsize
    row = sum(map(columns, chunks_of(problem, config))) * size
    streamed = config.num_stages if specialization.alignment * size >= ASYNC_BYTES else 0
    return (
        TrafficItem("k and v", config.block_n * row),
        TrafficItem(f"q and dout, {streamed} in flight", streamed * config.block_m * row),
        TrafficItem("gradients of scores", config.block_m * config.block_n * size),
    )
