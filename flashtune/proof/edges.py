"""Probes of masks, and of keys whose first columns are the values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from flashtune.proof.chance import aside
from flashtune.proof.visible import (
    COMPARISONS_OF_A_MASK,
    Rows,
    compared_on,
    distinct_masks,
    unhidden_keys,
)

if TYPE_CHECKING:
    from torch import Tensor

    from flashtune.problem import Problem
    from flashtune.proof.lengths import Lengths
    from flashtune.side import Side

# Pairs of queries and keys worked on at a time, in elements: a few dozen bytes for each border.
CHUNK_PAIRS = 2**27
# Scores of a visible key beside a border and of the hidden one across it, over the others'.
LAST_VISIBLE = 6.0
FIRST_HIDDEN = 9.0


def at_edges(
    problem: Problem, scale: float, lengths: Lengths, side: Side, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Queries and keys such that each query asks for two neighbours, one visible and one not.

    Which border a row asks at is drawn: of its window, its chunk, the first tokens, the prefix, the diagonal,
    a bias, or the sequence's end. Each key has a random word of signs. What lies behind a packed sequence's
    last key is the next one's first.

    Returns:
        q [batch, heads, seqlen_q, head_dim] and k [batch, kv_heads, seqlen_kv, head_dim] in float32.
    """
    device, width = generator.device, problem.head_dim
    keys = problem.seqlen_kv
    shape = (problem.batch, problem.kv_heads, keys + 1, width)
    words = torch.randint(2, shape, generator=generator, device=device) * 2.0 - 1.0
    if problem.packed and not problem.page_size:
        for sequence in range(problem.batch - 1):
            words[sequence, :, lengths.keys[sequence]] = words[_next(lengths, sequence), :, 0]
    asked_for = _neighbours(problem, lengths, side, generator)
    batch = torch.arange(problem.batch)[:, None, None]
    head = (torch.arange(problem.heads) // problem.group_size)[None, :, None]
    # Words are looked up on the CPU, which loads no kernels for it; signs travel as bytes.
    signs = words.to(torch.int8).cpu()
    last_visible, first_hidden = (signs[batch, head, key].to(device) for key in asked_for)
    asked = LAST_VISIBLE * last_visible + FIRST_HIDDEN * first_hidden
    return asked * (1 / (scale * width)), words[:, :, :keys].clone()


def _next(lengths: Lengths, sequence: int) -> int:
    """The sequence whose first key follows another's last in memory; that one itself where none does."""
    following = range(sequence + 1, len(lengths.keys))
    return next((other for other in following if lengths.keys[other]), sequence)


def _neighbours(
    problem: Problem, lengths: Lengths, side: Side, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """A key that each row sees and one beside it that it does not: [batch, heads, seqlen_q], on the CPU."""
    number = torch.arange(problem.batch * problem.heads)
    all_rows = Rows(number // problem.heads, number % problem.heads, torch.arange(problem.seqlen_q))
    masks = distinct_masks(lengths, side, all_rows)
    pairs = problem.seqlen_q * (problem.seqlen_kv + 1)
    where = compared_on(COMPARISONS_OF_A_MASK * masks * pairs, generator.device)
    # Heads that see alike share one mask.
    step = max(1, CHUNK_PAIRS // max(1, pairs)) if masks > 1 else len(number)
    chance = aside(generator, 3)
    parts = []
    for some in number.split(step):
        rows = Rows(all_rows.batch[some], all_rows.head[some], all_rows.rows)
        seen = unhidden_keys(problem, lengths, side, rows, where)
        drawn = torch.rand(len(some), problem.seqlen_q, generator=chance, dtype=torch.float64)
        parts.append(_drawn_borders(seen, drawn))
    visible, hidden = (
        torch.cat(part).unflatten(0, (problem.batch, problem.heads)) for part in zip(*parts, strict=True)
    )
    return visible, hidden


def _drawn_borders(seen: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor]:
    """One border of each row: the key on this side, and the one beyond. Any two where there is none.

    Args:
        seen: Boolean [heads | 1, seqlen_q, seqlen_kv].
        drawn: Which of its borders each row gets, between 0 and 1: [heads, seqlen_q], on the CPU.
    """
    # Nobody sees what is before the first key or behind the last; the latter may be asked for.
    padded = torch.nn.functional.pad(seen, (1, 2))
    before, own, after = padded[..., :-2], padded[..., 1:-1], padded[..., 2:]
    border = ~own & (before | after)
    counts = border.sum(-1).cpu()
    borders = border.nonzero()[:, -1].cpu()
    if not len(borders):
        return torch.zeros_like(drawn, dtype=torch.int64), torch.zeros_like(drawn, dtype=torch.int64)
    from_left = before[border].cpu()
    first = (counts.flatten().cumsum(0) - counts.flatten()).view_as(counts)
    place = (first + (drawn * counts).long()).clamp_max(len(borders) - 1)
    hidden = borders[place]
    return torch.where(from_left[place], hidden - 1, hidden + 1), hidden


def with_latent(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys with values as the keys' first columns, which queries do not ask for.

    Args:
        q: What makes the scores, [batch, heads, seqlen_q, other columns].
        k: Likewise, [batch, kv_heads, seqlen_kv, other columns].
        v: [batch, kv_heads, seqlen_kv, value_head_dim].
    """
    quiet = q.new_zeros(*q.shape[:3], v.shape[-1])
    return torch.cat([quiet, q], -1), torch.cat([v, k], -1)
