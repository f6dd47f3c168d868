"""How many heads of a reference are worked on at a time, so that memory stays bounded.

Each head has its scores, and a copy of its keys and values in float64. Where many query heads share a KV
head, as they do over latent keys, copies of these for each of them would be larger than anything else:
such heads are worked on with one copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from flashtune.verification.inputs.placement import is_all

if TYPE_CHECKING:
    from torch import Tensor

    from flashtune.core.extra_inputs import Side
    from flashtune.core.problem import Problem

# Scores held at a time, in elements; a handful of float64 copies of them exist at once.
CHUNK_SCORES = {"cuda": 2**24, "cpu": 2**21}
# Keys and values held at a time, in elements: in float64, and squared once more.
CHUNK_KEYS = {"cuda": 2**28, "cpu": 2**25}


class Chunk(NamedTuple):
    """Some heads of a reference.

    Attributes:
        heads: [heads], each `batch index · heads of a sequence + head`; int64.
        copies: Copies of a KV head that are held: one for each head, or one for all, which then share it.
    """

    heads: Tensor
    copies: int


def chunked(problem: Problem, heads: Tensor, rows: int, device: str) -> list[Chunk]:
    """Heads, ascending, in chunks whose scores, keys and values fit what may be held at a time.

    Args:
        problem: Lengths, widths, and how many heads share a KV head.
        heads: As in `Chunk`.
        rows: Rows of each head.
        device: The kind of device that they are worked out on.
    """
    by_scores = max(1, CHUNK_SCORES[device] // max(1, rows * problem.seqlen_kv))
    elements = problem.seqlen_kv * (problem.head_dim + problem.value_head_dim)
    by_keys = max(1, CHUNK_KEYS[device] // max(1, elements))
    step = min(by_scores, by_keys)
    if by_keys >= by_scores or by_keys >= min(problem.group_size, len(heads)):
        return [Chunk(some, len(some)) for some in heads.split(step)]
    _, counts = torch.unique_consecutive(heads // problem.group_size, return_counts=True)
    sharing = heads.split(counts.tolist())
    return [Chunk(some, 1) for group in sharing for some in group.split(by_scores)]


def together(parts: Sequence[Tensor], axis: int = 0) -> Tensor:
    """Tensors one behind the other; one alone is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts), axis)


def widened(
    problem: Problem, chunk: Chunk, rows: Tensor, tensors: tuple[Tensor, Tensor, Tensor], side: Side
) -> list[Tensor]:
    """Queries, keys and values of a chunk in float64 and times their scales: [heads or copies, ..., width].

    Args:
        problem: How many heads there are.
        chunk: Heads.
        rows: Queries, as in `Sample`.
        tensors: q, k and v, as `expect` takes them.
        side: The scales.
    """
    heads, copies = chunk
    group = problem.group_size
    factors = side.scales
    if copies == len(heads) and is_all(problem, heads, rows):
        return [
            _all_widened(tensor, factor, times)
            for tensor, factor, times in zip(tensors, factors, (1, group, group), strict=True)
        ]
    q, k, v = tensors
    batch, head = heads // problem.heads, heads % problem.heads
    of_keys = batch[:copies], head[:copies] // group
    return [
        _widened(q, factors[0], batch, head, rows),
        _widened(k, factors[1], *of_keys),
        _widened(v, factors[2], *of_keys),
    ]


def _all_widened(tensor: Tensor, factor: Tensor | None, times: int) -> Tensor:
    """All heads, each so many times, by kernels that copy alone: nothing is looked up."""

    def widened(one: Tensor) -> Tensor:
        repeated = one[:, :, None].expand(-1, -1, times, *one.shape[2:])
        return repeated.to(torch.float64, memory_format=torch.contiguous_format).flatten(0, 2)

    wide = widened(tensor)
    return wide if factor is None else wide.mul_(widened(factor).reshape(len(wide), -1, 1))


def _widened(
    tensor: Tensor, factor: Tensor | None, batch: Tensor, head: Tensor, rows: Tensor | None = None
) -> Tensor:
    """Some heads, all their rows or some."""
    picked = tensor[batch, head]
    wide = (picked if rows is None else picked[:, rows]).double()
    return wide if factor is None else wide * factor[batch, head].double().reshape(len(batch), -1, 1)
