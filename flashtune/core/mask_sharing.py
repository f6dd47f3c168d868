"""The ways in which a mask is shared. A search times kernels and SDPA for each of them."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from flashtune.core.problem import Problem


class MaskSharing(enum.StrEnum):
    """The dimensions over which a mask of [batch, heads, seqlen_q, seqlen_kv] is shared."""

    HEADS = "heads"
    BATCH = "batch"
    HEADS_AND_ROWS = "heads and rows"
    BATCH_AND_HEADS = "batch and heads"

    @property
    def dimensions(self) -> tuple[int, ...]:
        """The indices of the dimensions."""
        return _DIMENSIONS[self]


_DIMENSIONS = {
    MaskSharing.HEADS: (1,),
    MaskSharing.BATCH: (0,),
    MaskSharing.HEADS_AND_ROWS: (1, 2),
    MaskSharing.BATCH_AND_HEADS: (0, 1),
}
_ROWS = 2


def distinct_ways(problem: Problem) -> Iterator[MaskSharing]:
    """Returns the ways that differ from one another and from no sharing, for a problem's extents."""
    extents = _extents(problem)
    return (way for way in MaskSharing if all(extents[dimension] > 1 for dimension in way.dimensions))


def nearest_way(problem: Problem, shared: Iterable[int]) -> MaskSharing | None:
    """Returns the way nearest to sharing a mask over some dimensions, or None if nothing is shared.

    `shared` are the indices of the dimensions. A dimension of extent 1 is not shared.
    """
    extents = _extents(problem)
    places = {dimension for dimension in shared if extents[dimension] > 1}
    if not places:
        return None
    if _ROWS in places:
        return MaskSharing.HEADS_AND_ROWS
    return next(way for way in MaskSharing if places == set(way.dimensions))


def narrowed(bias: Tensor, way: MaskSharing) -> Tensor:
    """Returns a bias of four dimensions as a contiguous tensor with extent 1 in the shared ones."""
    for dimension in way.dimensions:
        bias = bias.narrow(dimension, 0, 1)
    return bias.contiguous()


def _extents(problem: Problem) -> tuple[int, int, int]:
    return problem.batch, problem.heads, problem.seqlen_q
