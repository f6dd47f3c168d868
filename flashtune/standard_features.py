"""The standard computation of problems with features: right, differentiable where dense, and slow.

It serves where no kernel can, and where autograd must go back through a call. Sequences that are packed or in
pages are gathered one by one, for which the host asks the device for their lengths.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import torch
from torch import Tensor

from flashtune.dropout import kept_weights
from flashtune.features import Bias
from flashtune.problem import Causal
from flashtune.side import Side
from flashtune.standard import scaled_scores, score_dtype
from flashtune.value_checks import check_pages

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flashtune.problem import Problem


def standard_features(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, side: Side, *, scale: float, return_lse: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Attention with all features by two matrix products and a softmax in float32.

    Args:
        problem: What is computed; its numbers of tokens do not count, those of the tensors do.
        q: Queries as kernels see them, [batch, heads, seqlen_q, head_dim]; packed ones of one batch.
        k: Keys, [batch, kv_heads, seqlen_kv, head_dim], or pages of that form.
        v: Values.
        side: Side inputs as kernels see them.
        scale: Factor of the scores, not negative.
        return_lse: Whether to make the log-sum-exp.

    Returns:
        The output [batch, heads, seqlen_q, value_head_dim] in q's type, zeros in rows that see nothing, and
        the natural log-sum-exp [batch, heads, seqlen_q] in the scores' type, or None.
    """
    if not (problem.packed or problem.page_size):
        k, v = _numbers(k, side.k_scale, q.dtype), _numbers(v, side.v_scale, q.dtype)
        out, lse = _dense(problem, q, k, v, side, scale)
        return out, lse if return_lse else None
    out = q.new_zeros(*q.shape[:3], v.shape[3])
    lse = q.new_full(q.shape[:3], -torch.inf, dtype=score_dtype(q))
    dense = msgspec.structs.replace(problem, packed=0, page_size=0)
    for sequence in _sequences(problem, q, k, v, side):
        at = sequence.at
        out[at], lse[at] = _dense(
            dense, q[at], sequence.k, sequence.v, sequence.side, scale, at[2].start or 0
        )
    return out, lse if return_lse else None


class _Sequence(NamedTuple):
    """One sequence by itself: where its queries are, its keys and values, its side inputs."""

    at: tuple[slice, slice, slice]
    k: Tensor
    v: Tensor
    side: Side


def _sequences(problem: Problem, q: Tensor, k: Tensor, v: Tensor, side: Side) -> Iterator[_Sequence]:
    """One sequence after the other: copies of all at once would take the memory of a second cache."""
    if side.block_table is not None:
        assert side.seqlens_kv is not None
        # The host reads lengths below in any case. A page beyond the cache would break CUDA's context.
        check_pages(problem, side.block_table, side.seqlens_kv, k.shape[0])
    everything = slice(None)
    if side.cu_seqlens_q is None:
        places = [(slice(b, b + 1), everything, everything) for b in range(q.shape[0])]
    else:
        ends = side.cu_seqlens_q.tolist()
        places = [(everything, everything, slice(start, end)) for start, end in itertools.pairwise(ends)]
    for b, at in enumerate(places):
        if side.block_table is None:
            assert side.cu_seqlens_kv is not None
            start, end = side.cu_seqlens_kv[b : b + 2].tolist()
            keys = _numbers(k[:, :, start:end], side.k_scale, q.dtype)
            values = _numbers(v[:, :, start:end], side.v_scale, q.dtype)
        else:
            assert side.seqlens_kv is not None
            length = int(side.seqlens_kv[b])
            table = side.block_table[b, : -(-length // problem.page_size)].long()
            keys = _gathered(k, side.k_scale, table, length, q.dtype)
            values = _gathered(v, side.v_scale, table, length, q.dtype)
        alone = Side(
            slopes=None if side.slopes is None else side.slopes[b : b + 1],
            sinks=side.sinks,
            prefix=None if side.prefix is None else side.prefix[b : b + 1],
            seed=side.seed,
            softcap=side.softcap,
            dropout=side.dropout,
        )
        yield _Sequence(at, keys, values, alone)


def _numbers(stored: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """What stored elements stand for: [places, heads, tokens, width] times [places, heads]."""
    if scale is None:
        return stored
    return (stored.float() * scale[:, :, None, None]).to(dtype)


def _gathered(pages: Tensor, scale: Tensor | None, table: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """The tokens of one sequence, [1, heads, length, width]."""
    rows = _numbers(pages[table], None if scale is None else scale[table], dtype)
    return rows.transpose(0, 1).flatten(1, 2)[None, :, :length]


def _dense(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, side: Side, scale: float, first_row: int = 0
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of sequences in dense tensors; `first_row` is that of a packed one."""
    batch, heads, seqlen_q, _ = q.shape
    seqlen_kv = k.shape[2]
    places, seen = _visible(problem, q, k, side)
    if side.seqlens_kv is not None:
        # A cache holds whatever it held before; zero weights would not make numbers of that.
        beyond = torch.arange(seqlen_kv, device=q.device) >= side.seqlens_kv[:, None]
        k, v = (tensor.masked_fill(beyond[:, None, :, None], 0) for tensor in (k, v))
    scores = scaled_scores(q, k, scale).view(batch, heads, seqlen_q, seqlen_kv)
    if side.softcap is not None:
        scores = torch.tanh(scores / side.softcap) * side.softcap
    if side.slopes is not None:
        distances = (places[:, :, None] - torch.arange(seqlen_kv, device=q.device)).abs()
        scores = scores - side.slopes[:, :, None, None] * distances[:, None]
    if side.bias is not None:
        if problem.bias is Bias.BOOLEAN:
            seen = seen & side.bias
        else:
            scores = scores + side.bias
    factors = None
    if side.seed is not None and side.dropout is not None:
        number = torch.arange(batch * heads, device=q.device)
        rows = first_row + torch.arange(seqlen_q, device=q.device)
        factors = kept_weights(side.seed, number, rows, seqlen_kv, side.dropout) / (1.0 - side.dropout)
    return _averages(scores.masked_fill(~seen, -torch.inf), v, side.sinks, factors)


def _visible(problem: Problem, q: Tensor, k: Tensor, side: Side) -> tuple[Tensor, Tensor]:
    """Places of queries among the keys, [batch or 1, seqlen_q], and which keys each sees, of all heads."""
    lengths = side.seqlens_kv
    if lengths is None:
        lengths = torch.full((1,), k.shape[2], dtype=torch.int32, device=q.device)
    keys = torch.arange(k.shape[2], device=q.device)
    places = torch.arange(q.shape[2], device=q.device).expand(len(lengths), -1)
    if problem.causal is not Causal.TOP_LEFT:
        places = places + (lengths - q.shape[2])[:, None]
    p = places[:, :, None]
    near = torch.ones((), dtype=torch.bool, device=q.device)
    if problem.window_left is not None:
        near = near & (keys >= p - problem.window_left)
    if problem.chunk:
        own, chunk = keys // problem.chunk, p // problem.chunk
        near = near & (own == chunk if problem.causal is Causal.NONE else own >= chunk)
    seen = near | (keys < problem.first_tokens)
    if problem.causal is not Causal.NONE:
        seen = seen & (keys <= p)
    elif problem.window_right is not None:
        seen = seen & (keys <= p + problem.window_right)
    if side.prefix is not None:
        seen = seen | (keys < side.prefix[:, None, None])
    return places, (seen & (keys < lengths[:, None, None]))[:, None]


def _averages(
    scores: Tensor, v: Tensor, sinks: Tensor | None, factors: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Softmax-weighted values and the log-sum-exp; no NaN, in gradients neither, where all is hidden.

    `factors` of the weights are what dropout makes of them, [batch * heads, seqlen_q, seqlen_kv].
    """
    batch, heads, seqlen_q, seqlen_kv = scores.shape
    lowest = scores.new_full((batch, heads, seqlen_q, 1), -torch.inf)
    sink = lowest if sinks is None else sinks.view(1, heads, 1, 1).expand_as(lowest)
    largest = torch.maximum(lowest, scores.detach().amax(-1, keepdim=True)) if seqlen_kv else lowest
    largest = torch.maximum(largest, sink.detach())
    largest = largest.masked_fill(largest == -torch.inf, 0.0)
    weights = torch.exp(scores - largest)
    total = weights.sum(-1, keepdim=True) + torch.exp(sink - largest)
    empty = total == 0
    total = total.masked_fill(empty, 1.0)
    kv_heads, rows = v.shape[1], heads // v.shape[1] * seqlen_q
    shares = weights / total
    if factors is not None:
        shares = shares * factors.view_as(shares)
    shares = shares.to(v.dtype).reshape(batch * kv_heads, rows, seqlen_kv)
    out = torch.bmm(shares, v.flatten(0, 1)).view(batch, heads, seqlen_q, v.shape[3])
    lse = (largest + torch.log(total)).masked_fill(empty, -torch.inf)
    return out, lse.squeeze(-1)
