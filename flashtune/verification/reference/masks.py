"""Which keys the queries of a problem see, as booleans: every mask in the words of its definition."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from flashtune.core.problem import Bias, Causal, Problem
from flashtune.verification.inputs.placement import is_all
from flashtune.verification.lengths import Lengths

if TYPE_CHECKING:
    from torch import Tensor

    from flashtune.core.extra_inputs import Side

# Up to so many comparisons of rows with keys are done on the CPU, some milliseconds of them.
FEW_COMPARISONS = 2**22
# What a mask of features, or drawing a border of any mask, takes for each pair of a row and a key.
COMPARISONS_OF_A_MASK = 3


class Rows(NamedTuple):
    """Some rows of some heads.

    Attributes:
        batch: The sequence of each head, [heads] in int64, on the CPU.
        head: The head within its sequence, likewise.
        rows: Queries, [rows] likewise.
    """

    batch: Tensor
    head: Tensor
    rows: Tensor


def compared_on(comparisons: int, device: torch.device) -> torch.device:
    """Where so many comparisons of rows with keys are done: the CPU loads no kernels for it, and is slow."""
    return torch.device("cpu") if comparisons <= FEW_COMPARISONS else device


class Masks(NamedTuple):
    """Which of some heads have which mask: most share one with others.

    Attributes:
        rows: For each mask the sequence and the head that it is made of, [masks] each, and all rows.
        of_head: Which of them each head has, [heads] in int64, on the CPU.
    """

    rows: Rows
    of_head: Tensor

    @property
    def one_each(self) -> bool:
        """Whether every head has one of its own, in the heads' order."""
        return torch.equal(self.of_head, torch.arange(len(self.rows.batch)))


def distinct_masks(lengths: Lengths, side: Side, some: Rows) -> Masks:
    """The masks of some heads: one of all, of each sequence, or, with a bias, of each head."""
    if side.bias is not None:
        return Masks(some, torch.arange(len(some.batch)))
    if not _differ(lengths) and side.prefix is None:
        return Masks(Rows(some.batch[:1], some.head[:1], some.rows), torch.zeros_like(some.batch))
    batch, of_head = some.batch.unique(return_inverse=True)
    return Masks(Rows(batch, torch.zeros_like(batch), some.rows), of_head)


def places(problem: Problem, lengths: Lengths, batch: Tensor, rows: Tensor, device: torch.device) -> Tensor:
    """Where queries stand among the keys: [heads | 1, rows, 1].

    Args:
        problem: The mask's alignment.
        lengths: Of each sequence.
        batch: The sequence of each head, [heads]; one entry of the result where all are alike.
        rows: Queries, [rows].
        device: Where the result lies.
    """
    own = rows[None, :, None].to(device)
    if problem.causal is Causal.TOP_LEFT:
        return own
    queries, keys = _lengths(lengths, batch, device)
    return own + (keys - queries)


def visible_keys(
    problem: Problem, lengths: Lengths, batch: Tensor, rows: Tensor, side: Side, device: torch.device
) -> Tensor:
    """Which keys rows see, but for what a bias hides: [heads | 1, rows, keys].

    Rows beyond a sequence's last query see nothing.

    Args:
        problem: The masks.
        lengths: Of each sequence.
        batch: The sequence of each head, [heads].
        rows: Queries, [rows].
        side: Prefixes, where there are such, on any device.
        device: Where the result lies.
    """
    place = places(problem, lengths, batch, rows, device)
    queries, keys = _lengths(lengths, batch, device)
    key = torch.arange(problem.seqlen_kv, device=device)
    causal = problem.causal is not Causal.NONE
    near = torch.ones(1, 1, 1, dtype=torch.bool, device=device)
    if problem.window_left is not None:
        near = _both(near, key >= place - problem.window_left)
    if problem.chunk:
        chunk, own = key // problem.chunk, place // problem.chunk
        near = _both(near, chunk >= own if causal else chunk == own)
    seen = near | (key < problem.first_tokens)
    if causal:
        seen = _both(seen, key <= place)
    elif problem.window_right is not None:
        seen = _both(seen, key <= place + problem.window_right)
    if side.prefix is not None:
        prefix = side.prefix.cpu()[batch].to(device, torch.int64)
        seen = seen | (key < prefix[:, None, None])
    return _both(_both(seen, key < keys), rows[None, :, None].to(device) < queries)


def counted(seen: Tensor) -> Tensor:
    """How many keys each row sees, in float64: [heads, rows] of booleans [heads, rows, keys]."""
    # As bytes, of which the CPU adds up many at a time: booleans one by one take it twenty times as long.
    return seen.view(torch.uint8).sum(-1, dtype=torch.int32).double()


def unhidden_keys(problem: Problem, lengths: Lengths, side: Side, some: Rows, device: torch.device) -> Tensor:
    """As `visible_keys`, with what a bias hides: [heads | 1, rows, keys]."""
    seen = visible_keys(problem, lengths, some.batch, some.rows, side, device)
    if side.bias is None:
        return seen
    picked = bias_of(problem, side.bias, some).to(device)
    # Minus infinity times zero is NaN, which is not nothing: comparing would load kernels of its own.
    return seen & (picked if problem.bias is Bias.BOOLEAN else ~(picked * 0).bool())


def bias_of(problem: Problem, bias: Tensor, some: Rows) -> Tensor:
    """A bias at some rows of some heads, [heads, rows, keys]; nothing is looked up where all are wanted."""
    if is_all(problem, some.batch * problem.heads + some.head, some.rows):
        return bias.flatten(0, 1)
    return bias[some.batch, some.head][:, some.rows]


def _both(one: Tensor, other: Tensor) -> Tensor:
    """Where both hold, broadcast: as bytes, since the CPU takes thirty times as long for rows of booleans."""
    return (one.view(torch.uint8) & other.view(torch.uint8)).view(torch.bool)


def _lengths(
    lengths: Lengths, batch: Tensor, device: torch.device
) -> tuple[int, int] | tuple[Tensor, Tensor]:
    """Queries and keys of the sequence of each head, [heads, 1, 1], or of all."""
    if not _differ(lengths):
        return lengths.queries[0], lengths.keys[0]
    queries, keys = (torch.tensor(part)[batch][:, None, None].to(device) for part in lengths)
    return queries, keys


def _differ(lengths: Lengths) -> bool:
    """Whether there are sequences of different lengths."""
    return len(set(zip(*lengths, strict=True))) > 1
