"""Inputs that expose errors at mask boundaries, and inputs for keys whose first columns are the values."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from flashtune.core.features.records import ExtraInputs
from flashtune.core.problem import Problem
from flashtune.verification.inputs.placement import aside
from flashtune.verification.lengths import Lengths
from flashtune.verification.reference.masks import (
    COMPARISONS_OF_A_MASK,
    Rows,
    compared_on,
    distinct_masks,
    unhidden_keys,
)

# Pairs of queries and keys that are processed at a time. Each border takes a few dozen bytes.
CHUNK_PAIRS = 2**27
# Scores of the visible and of the hidden key at a border, relative to those of other keys.
LAST_VISIBLE = 6.0
FIRST_HIDDEN = 9.0


def at_edges(
    problem: Problem, scale: float, lengths: Lengths, side: ExtraInputs, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Returns queries and keys such that each query matches two neighbour keys, one visible and one hidden.

    The two keys are at a random border of the row's mask: the border of its window, chunk, first tokens,
    prefix, diagonal or bias, or the end of the sequence. Each key is a random vector of signs. In varlen
    batches, the key after the last one of a sequence is the first one of the next sequence.

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
    neighbours = _neighbours(problem, lengths, side, generator)
    batch = torch.arange(problem.batch)[:, None, None]
    head = (torch.arange(problem.heads) // problem.group_size)[None, :, None]
    # Indexing on the CPU loads no CUDA kernels. Signs are copied to the device as bytes.
    signs = words.to(torch.int8).cpu()
    last_visible, first_hidden = (signs[batch, head, key].to(device) for key in neighbours)
    words_of_keys = LAST_VISIBLE * last_visible + FIRST_HIDDEN * first_hidden
    return words_of_keys * (1 / (scale * width)), words[:, :, :keys].clone()


def _next(lengths: Lengths, sequence: int) -> int:
    """Returns the sequence whose first key follows the last key of `sequence`, or `sequence` if none does."""
    following = range(sequence + 1, len(lengths.keys))
    return next((other for other in following if lengths.keys[other]), sequence)


def _neighbours(
    problem: Problem, lengths: Lengths, side: ExtraInputs, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Returns a visible key of each row and a hidden neighbour: [batch, heads, seqlen_q] on the CPU."""
    number = torch.arange(problem.batch * problem.heads)
    all_rows = Rows(number // problem.heads, number % problem.heads, torch.arange(problem.seqlen_q))
    masks = distinct_masks(lengths, side, all_rows, problem.functions.mask >= 0)
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
    """Pairs of a visible and a hidden key that are neighbours in a row of a mask; on the CPU."""

    counts: Tensor  # Number of borders of each row, [rows].
    hidden: Tensor  # The hidden key at each border, row by row, [borders].
    visible: Tensor  # The visible key at each border, [borders].


def _borders(seen: Tensor) -> Iterator[Borders]:
    """Yields the borders of masks [masks, rows, keys]. Positions before and after all keys are hidden."""
    padded = torch.nn.functional.pad(seen, (1, 2))
    before, own, after = padded[..., :-2], padded[..., 1:-1], padded[..., 2:]
    border = ~own & (before | after)
    for at_border, left in zip(border, before, strict=True):
        row, hidden = at_border.nonzero(as_tuple=True)
        # If both neighbours are visible, the left one is used.
        visible = hidden + 1 - 2 * left[row, hidden].long()
        yield Borders(row.cpu().bincount(minlength=len(at_border)), hidden.cpu(), visible.cpu())


def _drawn(borders: Borders, drawn: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the visible and the hidden key at one border of each row. Rows without a border get any keys.

    `drawn` is the position of the border among those of its row, between 0 and 1, [heads, rows].
    """
    if not len(borders.hidden):
        return torch.zeros_like(drawn, dtype=torch.int64), torch.zeros_like(drawn, dtype=torch.int64)
    first = borders.counts.cumsum(0) - borders.counts
    number = (first + (drawn * borders.counts).long()).clamp_max(len(borders.hidden) - 1)
    return borders.visible[number], borders.hidden[number]


def with_latent(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Returns queries and keys with the values as first columns of the keys. Queries are zero there.

    `q` is the other columns of queries, [batch, heads, seqlen_q, other columns]. `k` is those of keys,
    [batch, kv_heads, seqlen_kv, other columns]. `v` is [batch, kv_heads, seqlen_kv, value_head_dim].
    """
    quiet = q.new_zeros(*q.shape[:3], v.shape[-1])
    return torch.cat([quiet, q], -1), torch.cat([v, k], -1)
