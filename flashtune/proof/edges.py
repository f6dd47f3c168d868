"""Probes of masks, and of keys whose first columns are the values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from flashtune.proof.visible import COMPARISONS_OF_A_MASK, Rows, compared_on, unhidden_keys

if TYPE_CHECKING:
    from torch import Tensor

    from flashtune.problem import Problem
    from flashtune.proof.lengths import Lengths
    from flashtune.side import Side

# Pairs of queries and keys worked on at a time, in elements: a dozen bytes each.
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
    heads = problem.batch * problem.heads
    where = compared_on(COMPARISONS_OF_A_MASK * heads * problem.seqlen_q * (keys + 1), device)
    words = torch.randint(2, shape, generator=generator, device=device) * 2.0 - 1.0
    if problem.packed and not problem.page_size:
        for sequence in range(problem.batch - 1):
            words[sequence, :, lengths.keys[sequence]] = words[_next(lengths, sequence), :, 0]
    step = max(1, CHUNK_PAIRS // max(1, problem.seqlen_q * (keys + 1)))
    parts = [
        _neighbours(_seen(problem, lengths, side, some, where), generator)
        for some in torch.arange(heads).split(step)
    ]
    visible, hidden = (
        torch.cat(part).unflatten(0, (problem.batch, problem.heads)) for part in zip(*parts, strict=True)
    )
    batch = torch.arange(problem.batch, device=where)[:, None, None]
    head = (torch.arange(problem.heads, device=where) // problem.group_size)[None, :, None]
    # Where queries are few keys are most of it, and signs travel as bytes.
    signs = words.to(torch.int8).to(where)
    asked = LAST_VISIBLE * signs[batch, head, visible] + FIRST_HIDDEN * signs[batch, head, hidden]
    return (asked * (1 / (scale * width))).to(device), words[:, :, :keys].clone()


def _next(lengths: Lengths, sequence: int) -> int:
    """The sequence whose first key follows another's last in memory; that one itself where none does."""
    following = range(sequence + 1, len(lengths.keys))
    return next((other for other in following if lengths.keys[other]), sequence)


def _neighbours(seen: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A key that each row sees and one beside it that the row does not see, [heads, seqlen_q] each."""
    # Keys beside one that is seen otherwise; beyond the last none is seen.
    before, after = seen.roll(1, -1), seen.roll(-1, -1)
    before[..., 0] = False
    border = ~seen & (before | after)
    drawn = torch.rand(border.shape, generator=generator, device=generator.device).to(seen.device)
    hidden = drawn.masked_fill_(~border, -1.0).argmax(-1)
    left = before.gather(-1, hidden[..., None])[..., 0]
    return torch.where(left, hidden - 1, (hidden + 1).clamp_max(seen.shape[-1] - 1)), hidden


def _seen(problem: Problem, lengths: Lengths, side: Side, heads: Tensor, device: torch.device) -> Tensor:
    """What each row of some heads sees, [heads, seqlen_q, seqlen_kv + 1]; nobody sees the last."""
    some = Rows(heads // problem.heads, heads % problem.heads, torch.arange(problem.seqlen_q))
    seen = unhidden_keys(problem, lengths, side, some, device)
    seen = seen.expand(len(heads), -1, -1)
    return torch.cat([seen, torch.zeros_like(seen[..., :1])], -1)


def with_latent(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys with values as the keys' first columns, which queries do not ask for.

    Args:
        q: What makes the scores, [batch, heads, seqlen_q, other columns].
        k: Likewise, [batch, kv_heads, seqlen_kv, other columns].
        v: [batch, kv_heads, seqlen_kv, value_head_dim].
    """
    quiet = q.new_zeros(*q.shape[:3], v.shape[-1])
    return torch.cat([quiet, q], -1), torch.cat([v, k], -1)
