"""The SRAM that the two passes need at the least: of the larger, what it holds and what streams by."""

from __future__ import annotations

from flashtune.kernel import Specialization
from flashtune.problem import Problem
from flashtune.target import Target
from flashtune.templates.backward_split.space import Products, SplitConfig, chunks_of
from flashtune.templates.common.sram import Engine, engine_of
from flashtune.templates.common.tiles import columns
from flashtune.templates.family import TrafficItem

# An asynchronous copy moves at least this much.
ASYNC_BYTES = 4


def split_items(
    problem: Problem, config: SplitConfig, target: Target, specialization: Specialization
) -> tuple[TrafficItem, ...]:
    """The items of the kernel or of its epilogue, whichever needs more."""
    keys = _items(problem, config, target, specialization, of_keys=True)
    queries = _items(problem, config, target, specialization, of_keys=False)
    return max(keys, queries, key=lambda items: sum(item.bytes for item in items))


def _items(
    problem: Problem, config: SplitConfig, target: Target, specialization: Specialization, *, of_keys: bool
) -> tuple[TrafficItem, ...]:
    held, walked = (config.block_n, config.block_m) if of_keys else (config.dq_block_m, config.dq_block_n)
    warps, stages = (config.num_warps, config.num_stages) if of_keys else (config.dq_warps, config.dq_stages)
    engine = engine_of(target, problem.dtype, held, warps, config.products is Products.IEEE)
    if engine is not Engine.WARPGROUP:
        return ()
    row = sum(map(columns, chunks_of(problem, config))) * problem.dtype.itemsize
    streamed = stages if specialization.alignment * problem.dtype.itemsize >= ASYNC_BYTES else 0
    return (
        TrafficItem("k and v" if of_keys else "q and dout", held * row),
        TrafficItem(
            f"{'q and dout' if of_keys else 'k and v'}, {streamed} in flight", streamed * walked * row
        ),
    )
