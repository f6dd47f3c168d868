"""Probes of masks, and of keys whose first columns are the values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch

from flashtune.verification.inputs.cpu_generator import aside
from flashtune.verification.reference.masks import (
    COMPARISONS_OF_A_MASK,
    Rows,
    compared_on,
    distinct_masks,
    unhidden_keys,
)

if TYPE_CHECKING:
    from torch import Tensor

    from flashtune.core.extra_inputs import Side
    from flashtune.core.problem import Problem
    from flashtune.verification.lengths import Lengths

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
    where = compared_on(COMPARISONS_OF_A_MASK * len(masks.rows.batch) * pairs, generator.device)
    drawn = torch.rand(len(number), problem.seqlen_q, generator=aside(generator, 3), dtype=torch.float64)
    visible, hidden = torch.zeros(2, *drawn.shape, dtype=torch.int64)
    for some in torch.arange(len(masks.rows.batch)).split(max(1, CHUNK_PAIRS // max(1, pairs))):
        own = Rows(masks.rows.batch[some], masks.rows.head[some], all_rows.rows)
        seen = unhidden_keys(problem, lengths, side, own, where)
        for mask, borders in zip(some.tolist(), _borders(seen), strict=True):
            heads = masks.of_head == mask
            visible[heads], hidden[heads] = _drawn(borders, drawn[heads])
    return visible.view(problem.batch, problem.heads, -1), hidden.view(problem.batch, problem.heads, -1)


class Borders(NamedTuple):
    """Where each row of a mask stops seeing, or begins to; on the CPU.

    Attributes:
        counts: How many borders each row has, [rows].
        hidden: The key beyond each border, those of one row after the other: [borders].
        visible: The key on this side, likewise.
    """

    counts: Tensor
    hidden: Tensor
    visible: Tensor


def _borders(seen: Tensor) -> Iterator[Borders]:
    """The borders of some masks, [masks, rows, keys]. Nobody sees what is before or behind all keys."""
    padded = torch.nn.functional.pad(seen, (1, 2))
    before, own, after = padded[..., :-2], padded[..., 1:-1], padded[..., 2:]
    border = ~own & (before | after)
    for one, left in zip(border, before, strict=True):
        row, hidden = one.nonzero(as_tuple=True)
        # A border whose left side is seen is asked for there.
        visible = hidden + 1 - 2 * left[row, hidden].long()
        yield Borders(row.cpu().bincount(minlength=len(one)), hidden.cpu(), visible.cpu())


def _drawn(borders: Borders, drawn: Tensor) -> tuple[Tensor, Tensor]:
    """The key on this side of one border of each row, and the one beyond; any where a row has none.

    Args:
        borders: Of the heads' mask.
        drawn: Which of its borders each row gets, between 0 and 1: [heads, rows].
    """
    if not len(borders.hidden):
        return torch.zeros_like(drawn, dtype=torch.int64), torch.zeros_like(drawn, dtype=torch.int64)
    first = borders.counts.cumsum(0) - borders.counts
    place = (first + (drawn * borders.counts).long()).clamp_max(len(borders.hidden) - 1)
    return borders.visible[place], borders.hidden[place]


def with_latent(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys with values as the keys' first columns, which queries do not ask for.

    Args:
        q: What makes the scores, [batch, heads, seqlen_q, other columns].
        k: Likewise, [batch, kv_heads, seqlen_kv, other columns].
        v: [batch, kv_heads, seqlen_kv, value_head_dim].
    """
    quiet = q.new_zeros(*q.shape[:3], v.shape[-1])
    return torch.cat([quiet, q], -1), torch.cat([v, k], -1)
