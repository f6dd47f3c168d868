"""Which keys the queries of a problem see, as booleans: every mask in the words of its definition."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from flashtune.features import Bias
from flashtune.problem import Causal, Problem
from flashtune.proof.lengths import Lengths

if TYPE_CHECKING:
    from torch import Tensor

    from flashtune.side import Side


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
        side: Prefixes, where there are such.
        device: Where the result lies.
    """
    place = places(problem, lengths, batch, rows, device)
    queries, keys = _lengths(lengths, batch, device)
    key = torch.arange(problem.seqlen_kv, device=device)
    causal = problem.causal is not Causal.NONE
    near = torch.ones(1, 1, 1, dtype=torch.bool, device=device)
    if problem.window_left is not None:
        near = near & (key >= place - problem.window_left)
    if problem.chunk:
        chunk, own = key // problem.chunk, place // problem.chunk
        near = near & (chunk >= own if causal else chunk == own)
    seen = near | (key < problem.first_tokens)
    if causal:
        seen = seen & (key <= place)
    elif problem.window_right is not None:
        seen = seen & (key <= place + problem.window_right)
    if side.prefix is not None:
        prefix = side.prefix[batch.to(device)].to(torch.int64)
        seen = seen | (key < prefix[:, None, None])
    return seen & (key < keys) & (rows[None, :, None].to(device) < queries)


def hidden_by_bias(problem: Problem, side: Side, batch: Tensor, head: Tensor, rows: Tensor) -> Tensor | None:
    """Which keys a bias takes from rows: [heads, rows, keys]; None where there is no bias."""
    if side.bias is None:
        return None
    picked = side.bias[batch, head][:, rows]
    return ~picked if problem.bias is Bias.BOOLEAN else picked == float("-inf")


def _lengths(lengths: Lengths, batch: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Queries and keys of the sequence of each head, [heads | 1, 1, 1]."""
    some = batch if len(set(zip(*lengths, strict=True))) > 1 else batch[:1]
    queries, keys = (torch.tensor(part)[some][:, None, None].to(device) for part in lengths)
    return queries, keys
