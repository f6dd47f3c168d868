"""The minimum SRAM of the two backward kernels: resident and streamed tiles of the larger one."""

from __future__ import annotations

from flashtune.core.kernel import Specialization
from flashtune.core.problem import Problem
from flashtune.core.target import Target
from flashtune.templates.backward_split.space import InputPrecision, SplitConfig, chunks_of
from flashtune.templates.common.model.sram import columns
from flashtune.templates.common.model.sram_backward import Walk, walk_columns, walk_items
from flashtune.templates.family import BytesItem

KEYS, QUERIES = "k and v", "q and dout"


def split_items(
    problem: Problem, config: SplitConfig, target: Target, specialization: Specialization
) -> tuple[BytesItem, ...]:
    """Returns the items of the kernel or of its epilogue, whichever needs more."""
    queries = walk_items(_of_queries(problem, config), problem, target, specialization, (QUERIES, KEYS))
    keys = walk_items(_of_keys(problem, config), problem, target, specialization, (KEYS, QUERIES))
    return max(keys, queries, key=lambda items: sum(item.bytes for item in items))


def split_columns(problem: Problem, config: SplitConfig, target: Target) -> int:
    """Returns columns of tensor memory, of the kernel or of its epilogue, whichever needs more."""
    keys, queries = _of_keys(problem, config), _of_queries(problem, config)
    return max(
        walk_columns(keys, problem, target, keys.columns),
        walk_columns(queries, problem, target, columns(queries.qk_chunks)),
    )


def _of_keys(problem: Problem, config: SplitConfig) -> Walk:
    """Returns the tiles of the kernel that loops over queries."""
    qk_chunks, v_chunks = chunks_of(problem, config)
    return Walk(
        held=config.block_n,
        walked=config.block_m,
        qk_chunks=qk_chunks,
        v_chunks=v_chunks,
        warps=config.num_warps,
        stages=config.num_stages,
        ieee=config.input_precision is InputPrecision.IEEE,
    )


def _of_queries(problem: Problem, config: SplitConfig) -> Walk:
    """Returns the tiles of the kernel that loops over keys."""
    qk_chunks, v_chunks = chunks_of(problem, config)
    return Walk(
        held=config.dq_block_m,
        walked=config.dq_block_n,
        qk_chunks=qk_chunks,
        v_chunks=v_chunks,
        warps=config.dq_warps,
        stages=config.dq_stages,
        ieee=config.input_precision is InputPrecision.IEEE,
    )
