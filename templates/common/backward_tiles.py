"""Tiles of the columns of a head, as kernels of the backward pass take them."""

from __future__ import annotations

from flashtune.problem import Dtype, Problem
from flashtune.templates.common.tiles import Chunk, head_chunks

# With 16-bit tiles that are 32 columns wide, Triton 3.6's ptxas was seen to put scalars of the loop into
# registers where wgmma looks for the tile's address.
LEAST_WIDTH = 64


def backward_chunks(problem: Problem, width: int, decomposed: bool) -> tuple[Chunk, ...]:
    """The tiles of a head dim's columns."""
    chunks = head_chunks(width, decomposed)
    if problem.dtype is Dtype.FP32 or chunks[0].width >= LEAST_WIDTH:
        return chunks
    return (Chunk(0, 0, LEAST_WIDTH, padded=True),)


def may_split(problem: Problem) -> bool:
    """Whether no tile of a head dim that is cut would be too narrow."""
    if problem.dtype is Dtype.FP32:
        return True
    widths = problem.head_dim, problem.value_head_dim
    return all(chunk.width >= LEAST_WIDTH for width in widths for chunk in head_chunks(width, True))
