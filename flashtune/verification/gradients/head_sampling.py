"""Choice of the KV heads whose gradients are compared, and their division into pieces.

The gradients of a KV head's keys and values need all query heads that share it, and all of their rows. So a
sample of a large problem consists of pairs of a sequence and a KV head, including the first and the last.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from flashtune.core.problem import Problem
from flashtune.verification.inputs.placement import are_all_rows
from flashtune.verification.reference.scores import CHUNK_SCORES

# Largest scores of one reference in elements, and largest exact gradients.
MAX_SCORES = {"cuda": 2**29, "cpu": 2**26}
MAX_GRADIENTS = 2**25
MIN_PAIRS = 2


class Pairs(NamedTuple):
    """Some KV heads of some sequences, with all query heads that share them; on the CPU."""

    batch: Tensor  # The sequence of each pair, [pairs] in int64.
    kv_head: Tensor  # Its KV head, [pairs] in int64.

    def heads(self, problem: Problem) -> Tensor:
        """Returns the query heads of each pair: [pairs, group]."""
        return self.kv_head[:, None] * problem.group_size + torch.arange(problem.group_size)

    def numbers(self, problem: Problem) -> Tensor:
        """Returns the query heads as `sequence · heads of a sequence + head`: [pairs, group]."""
        return self.batch[:, None] * problem.heads + self.heads(problem)

    def are_all(self, problem: Problem) -> bool:
        """Returns whether these are all pairs of a problem, in order."""
        return self._run(problem) == slice(0, problem.batch * problem.kv_heads)

    def _run(self, problem: Problem) -> slice | None:
        """Returns the range of these pairs among all pairs if it is contiguous, otherwise None."""
        numbers = self.batch * problem.kv_heads + self.kv_head
        first = int(numbers[0])
        run = slice(first, first + len(numbers))
        return run if torch.equal(numbers, torch.arange(run.start, run.stop)) else None

    def of_queries(self, problem: Problem, tensor: Tensor, rows: Tensor | None = None) -> Tensor:
        """Returns the query heads of each pair in a tensor, with the given rows or all.

        A contiguous range of pairs is not indexed, because this would load another CUDA kernel. The tensor is
        [batch, heads, ...], or [batch, heads, seqlen_q, ...] with `rows`, int64 on the CPU.

        Returns:
            [pairs, group, ...].
        """
        run = self._run(problem)
        if run is None:
            picked: Tensor = tensor[self.batch[:, None], self.heads(problem)]
        else:
            picked = tensor.unflatten(1, (problem.kv_heads, problem.group_size)).flatten(0, 1)[run]
        return picked if rows is None or are_all_rows(problem, rows) else picked[:, :, rows]

    def of_keys(self, problem: Problem, tensor: Tensor) -> Tensor:
        """Returns the KV head of each pair, [pairs, ...], in a tensor [batch, kv_heads, ...]."""
        run = self._run(problem)
        return tensor[self.batch, self.kv_head] if run is None else tensor.flatten(0, 1)[run]

    def part(self, start: int, count: int) -> Pairs:
        """Returns `count` pairs from `start` on."""
        return Pairs(self.batch[start : start + count], self.kv_head[start : start + count])


class Piece(NamedTuple):
    """Pairs that are processed together."""

    pairs: Pairs
    # Consecutive slices of all their query rows: [rows] each in int64, on the CPU.
    rows: tuple[Tensor, ...]


def sample_pairs(problem: Problem, generator: torch.Generator) -> Pairs:
    """Returns all pairs of a small problem, otherwise the first, the last and some random pairs."""
    total = problem.batch * problem.kv_heads
    rows = problem.group_size * problem.seqlen_q
    device = generator.device
    affordable = min(
        MAX_SCORES[device.type] // max(1, rows * problem.seqlen_kv),
        MAX_GRADIENTS // max(1, rows * problem.head_dim + problem.seqlen_kv * problem.head_dim),
    )
    wanted = max(MIN_PAIRS, affordable)
    if wanted >= total:
        chosen = torch.arange(total)
    else:
        inner = 1 + torch.randperm(total - 2, generator=generator, device=device).cpu()[: wanted - 2]
        chosen = torch.cat([torch.tensor([0, total - 1]), inner]).sort().values
    return Pairs(chosen // problem.kv_heads, chosen % problem.kv_heads)


def pieces(problem: Problem, pairs: Pairs, device: str) -> Iterator[Piece]:
    """Yields pieces of some pairs, with rows in several slices if one pair has too many scores."""
    limit = CHUNK_SCORES[device]
    scores = problem.group_size * problem.seqlen_q * problem.seqlen_kv
    at_once = max(1, limit // max(1, scores))
    slice_rows = max(1, limit // max(1, problem.group_size * problem.seqlen_kv))
    rows = torch.arange(problem.seqlen_q).split(slice_rows)
    for start in range(0, len(pairs.batch), at_once):
        yield Piece(pairs.part(start, at_once), rows)
