"""Which KV heads of which sequences have their gradients compared, and how they are worked on piece by piece.

The gradients of a KV head's keys and values need all query heads that share it, and all of their rows. So a
large problem is sampled by pairs of a sequence and a KV head, the first and the last always among them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch

from flashtune.verification.inputs.placement import are_all_rows
from flashtune.verification.reference.chunks import CHUNK_SCORES

if TYPE_CHECKING:
    from torch import Tensor

    from flashtune.core.problem import Problem

# Scores of one reference, in elements, and elements of its exact gradients of queries.
MAX_SCORES = {"cuda": 2**29, "cpu": 2**26}
MAX_GRADIENTS = 2**25
LEAST_PAIRS = 2


class Pairs(NamedTuple):
    """Some KV heads of some sequences, with all query heads that share them; on the CPU.

    Attributes:
        batch: The sequence of each, [pairs] in int64.
        kv_head: Its KV head, likewise.
    """

    batch: Tensor
    kv_head: Tensor

    def heads(self, problem: Problem) -> Tensor:
        """Query heads that share each pair's keys: [pairs, group]."""
        return self.kv_head[:, None] * problem.group_size + torch.arange(problem.group_size)

    def numbers(self, problem: Problem) -> Tensor:
        """The same, each as `sequence · heads of a sequence + head`: [pairs, group]."""
        return self.batch[:, None] * problem.heads + self.heads(problem)

    def are_all(self, problem: Problem) -> bool:
        """Whether these are all pairs of a problem, in their order."""
        return self._run(problem) == slice(0, problem.batch * problem.kv_heads)

    def _run(self, problem: Problem) -> slice | None:
        """Which of all pairs these are, where they follow one another."""
        numbers = self.batch * problem.kv_heads + self.kv_head
        first = int(numbers[0])
        run = slice(first, first + len(numbers))
        return run if torch.equal(numbers, torch.arange(run.start, run.stop)) else None

    def of_queries(self, problem: Problem, tensor: Tensor, rows: Tensor | None = None) -> Tensor:
        """A tensor's query heads that share each pair's keys, and of these all rows or some.

        Nothing is looked up where they follow one another, which would load kernels of its own.

        Args:
            problem: How many heads share keys.
            tensor: [batch, heads, ...], or [batch, heads, seqlen_q, ...] where rows are given.
            rows: In int64, on the CPU.

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
        """A tensor's KV heads, [pairs, ...] of [batch, kv_heads, ...], likewise."""
        run = self._run(problem)
        return tensor[self.batch, self.kv_head] if run is None else tensor.flatten(0, 1)[run]

    def part(self, start: int, count: int) -> Pairs:
        """Some of them."""
        return Pairs(self.batch[start : start + count], self.kv_head[start : start + count])


class Piece(NamedTuple):
    """What is worked on at a time.

    Attributes:
        pairs: Some pairs.
        rows: For these, all rows in slices one after the other: [rows] each in int64, on the CPU.
    """

    pairs: Pairs
    rows: tuple[Tensor, ...]


def sample_pairs(problem: Problem, generator: torch.Generator) -> Pairs:
    """All pairs of a small problem; of others the first, the last, and as many more as can be afforded."""
    total = problem.batch * problem.kv_heads
    rows = problem.group_size * problem.seqlen_q
    device = generator.device
    affordable = min(
        MAX_SCORES[device.type] // max(1, rows * problem.seqlen_kv),
        MAX_GRADIENTS // max(1, rows * problem.head_dim + problem.seqlen_kv * problem.head_dim),
    )
    wanted = max(LEAST_PAIRS, affordable)
    if wanted >= total:
        chosen = torch.arange(total)
    else:
        inner = 1 + torch.randperm(total - 2, generator=generator, device=device).cpu()[: wanted - 2]
        chosen = torch.cat([torch.tensor([0, total - 1]), inner]).sort().values
    return Pairs(chosen // problem.kv_heads, chosen % problem.kv_heads)


def pieces(problem: Problem, pairs: Pairs, device: str) -> Iterator[Piece]:
    """Pairs, some at a time, or their rows where the scores of one pair are too many.

    Args:
        problem: Lengths, and how many heads share a KV head.
        pairs: All that are compared.
        device: The kind of device that they are worked out on.
    """
    limit = CHUNK_SCORES[device]
    scores = problem.group_size * problem.seqlen_q * problem.seqlen_kv
    at_once = max(1, limit // max(1, scores))
    slice_rows = max(1, limit // max(1, problem.group_size * problem.seqlen_kv))
    rows = torch.arange(problem.seqlen_q).split(slice_rows)
    for start in range(0, len(pairs.batch), at_once):
        yield Piece(pairs.part(start, at_once), rows)
