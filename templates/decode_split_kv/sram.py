"""The minimum SRAM of a tile of rows and a stream of keys and values, item by item."""

from __future__ import annotations

import math

import msgspec

from flashtune.core.kernel import Specialization
from flashtune.core.problem import Problem
from flashtune.core.target import Target
from flashtune.templates.common.model.sram import Engine, Tiles, engine_of
from flashtune.templates.common.model.sram_stream import Stream
from flashtune.templates.decode_split_kv.space import DecodeConfig, query_chunks, value_chunks
from flashtune.templates.family import BytesItem


def decode_items(
    problem: Problem, config: DecodeConfig, target: Target, specialization: Specialization
) -> tuple[BytesItem, ...]:
    """Returns the items that are live at one point of the main loop."""
    tiles = _tiles(problem, config, target)
    # AMD's units reorder tiles in registers, other units read them from SRAM.
    if tiles is None or tiles.engine is Engine.MFMA:
        return ()
    stored = msgspec.structs.replace(tiles, itemsize=problem.kv_itemsize)
    # Columns beyond a head dim are masked in groups, whose size divides it.
    together = math.gcd(specialization.alignment, problem.head_dim, problem.value_head_dim)
    stream = Stream(
        tiles=stored,
        stages=config.num_stages,
        descriptors=False,
        ahead=False,
        aligned_bytes=together * problem.kv_itemsize,
        halves=False,
    )
    grouped = tiles.engine is Engine.WARPGROUP and problem.kv_dtype is None
    # Tensor Cores of warp groups read SRAM; others, and conversions, read registers.
    flight = config.num_stages if grouped else config.num_stages - 1
    items = [BytesItem(f"k, {flight} in flight", flight * stream.k)]
    if not problem.mla:
        items.append(BytesItem(f"v, {flight} in flight", flight * stream.v))
    if grouped:
        items.append(BytesItem("q", sum(tile for tile in tiles.q if tiles.worth_a_copy(tile))))
    return tuple(item for item in items if item.bytes)


def _tiles(problem: Problem, config: DecodeConfig, target: Target) -> Tiles | None:
    """Returns the tiles of a program, None for unknown architectures."""
    engine = engine_of(target, problem.dtype, config.block_m, config.num_warps, ieee=True)
    return engine and Tiles(
        block_m=config.block_m,
        block_n=config.block_n,
        qk_chunks=query_chunks(problem, config.split_head_dim),
        v_chunks=value_chunks(problem, config.split_head_dim),
        itemsize=problem.dtype.itemsize,
        warps=config.num_warps,
        warp_size=target.warp_size,
        engine=engine,
    )
