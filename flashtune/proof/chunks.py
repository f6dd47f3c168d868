"""How many heads of a reference are worked on at a time, so that memory stays bounded.

Each head has its scores, and a copy of its keys and values in float64. Where many query heads share a KV
head, as they do over latent keys, copies of these for each of them would be larger than anything else:
such heads are worked on with one copy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from flashtune.problem import Problem

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
