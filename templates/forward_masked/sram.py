"""The SRAM that a tile of queries and a stream of K and V need at the least, however these are stored."""

from __future__ import annotations

from flashtune.kernel import Specialization
from flashtune.problem import Dtype, Problem
from flashtune.templates.common.sram import Tiles
from flashtune.templates.common.stream import Stream, stream_items
from flashtune.templates.family import TrafficItem
from flashtune.templates.forward_masked.space import MaskedConfig, Products


def masked_items(
    problem: Problem, config: MaskedConfig, tiles: Tiles, specialization: Specialization
) -> tuple[TrafficItem, ...]:
    """The items, which are all live at one point of the main loop."""
    stream = Stream(
        tiles=tiles,
        stages=config.num_stages,
        descriptors=False,
        ahead=False,
        aligned_bytes=specialization.alignment * problem.dtype.itemsize,
        halves=problem.dtype is Dtype.FP32 and config.products is Products.TF32X3,
    )
    return stream_items(stream)
