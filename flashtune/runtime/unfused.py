"""The unfused computation: torch operators that store all scores in memory.

It is a baseline of benchmarks, and dispatch may select it for short sequences, whose scores are small. It is
the fallback if no kernel supports a call. It is differentiable. Packed or paged sequences are gathered one by
one, for which the host reads their lengths from the device.
"""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from flashtune.core.features.description import ScoreRows
from flashtune.core.features.functions import has_positions, visible_by_function
from flashtune.core.features.masks import seen_keys, seen_newest, seen_pairs
from flashtune.core.features.records import NO_EXTRA_INPUTS, ExtraInputs, FeatureFields
from flashtune.core.features.table import TENSOR_INPUTS, changed_scores
from flashtune.core.problem import SCORE_BYTES, Bias, Causal, Problem
from flashtune.request.dropout import kept_weights
from flashtune.runtime.value_checks import check_pages
from flashtune.templates.family import BytesItem

# Inputs with an entry for each sequence, and inputs that a gathered sequence does not have.
OF_SEQUENCES = (
    "slopes",
    *(entry.name for entry in TENSOR_INPUTS.values() if entry.shape and entry.shape[0] == "batch"),
)
ABSENT: dict[str, Any] = dict.fromkeys(
    ("k_scale", "v_scale", "cu_seqlens_q", "cu_seqlens_kv", "seqlens_kv", "block_table")
)


def unfused_attention(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    side: ExtraInputs = NO_EXTRA_INPUTS,
    *,
    scale: float,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Returns attention by two matrix products in the inputs' dtype and a softmax in float32 or float64.

    The softmax is in float64 if the inputs are.

    Args:
        problem: The problem. Its numbers of tokens, sequences and heads are those of the tensors.
        q: Queries [batch, heads, seqlen_q, head_dim], any strides. Packed ones have batch 1.
        k: Keys [batch, kv_heads, seqlen_kv, head_dim], or pages of that shape; `kv_heads` divides `heads`.
        v: Values [batch, kv_heads, seqlen_kv, value_head_dim], likewise.
        side: Extra inputs in the kernels' layout.
        scale: Factor of the scores, of any sign.
        return_lse: Whether to compute the log-sum-exp.

    Returns:
        The output [batch, heads, seqlen_q, value_head_dim] in q's type, with zeros in rows without visible
        keys, and the natural log-sum-exp [batch, heads, seqlen_q] in the scores' type, or None.
    """
    if not (problem.packed or problem.page_size):
        k, v = _numbers(k, side.k_scale, q.dtype), _numbers(v, side.v_scale, q.dtype)
        return _dense(problem, q, k, v, side, scale, return_lse)
    out = q.new_zeros(*q.shape[:3], v.shape[3])
    lse = q.new_full(q.shape[:3], -torch.inf, dtype=score_dtype(q))
    # The queries of functions of paged sequences are positions.
    page_size = problem.page_size if problem.functions else 0
    dense = msgspec.structs.replace(problem, packed=0, batch=1, page_size=page_size)
    for number, sequence in enumerate(_sequences(problem, q, k, v, side)):
        at = sequence.at
        operands = q[at], sequence.k, sequence.v, sequence.side
        out[at], part = _dense(dense, *operands, scale, True, at[2].start or 0, number)
        assert part is not None
        lse[at] = part
    return out, lse if return_lse else None


def scaled_scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Returns scaled scores [batch * kv_heads, group_size * seqlen_q, seqlen_kv].

    The query heads of one KV head become rows of one matrix product, so that keys and values are not
    repeated.
    """
    batch, heads, seqlen_q, head_dim = q.shape
    kv_heads = k.shape[1]
    rows = q.reshape(batch * kv_heads, heads // kv_heads * seqlen_q, head_dim)
    columns = k.flatten(0, 1).mT
    if _widens(q, k):
        return torch.bmm(rows, columns, out_dtype=torch.float32).mul_(scale)
    wide = score_dtype(q)
    return torch.bmm(rows.to(wide), columns.to(wide)).mul_(scale)


def score_dtype(q: Tensor) -> torch.dtype:
    """Returns the type of scores: float64 for float64 queries, else float32."""
    return torch.float64 if q.dtype is torch.float64 else torch.float32


def _widens(q: Tensor, k: Tensor) -> bool:
    """Whether torch can multiply 16-bit matrices into float32: on CUDA and without gradients."""
    needs_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad)
    return q.is_cuda and torch.version.hip is None and q.element_size() == 2 and not needs_grad


def standard_hbm_items(problem: Problem) -> tuple[BytesItem, ...]:
    """Returns the HBM traffic of `unfused_attention`, or of its backward pass, by item in bytes.

    Each operator reads its inputs from HBM and writes its output there. Scores are in float32.
    """
    if problem.is_backward:
        return _gradient_hbm_items(problem)
    size = problem.dtype.itemsize
    queries = problem.batch * problem.heads * problem.seqlen_q * size
    keys = problem.batch * problem.kv_heads * problem.seqlen_kv * size
    pairs = problem.batch * problem.heads * problem.seqlen_q * problem.seqlen_kv
    mask = BytesItem("scores read and written to mask them", pairs * 2 * SCORE_BYTES)
    rounding = BytesItem("weights read and written to round them", pairs * (SCORE_BYTES + size))
    return (
        BytesItem("q read once", queries * problem.head_dim),
        BytesItem("k and v read once", keys * (problem.head_dim + problem.value_head_dim)),
        BytesItem("scores written by the first product", pairs * SCORE_BYTES),
        BytesItem("scores read and written to scale them", pairs * 2 * SCORE_BYTES),
        *(() if problem.causal is Causal.NONE else (mask,)),
        BytesItem("scores read and weights written by the softmax", pairs * 2 * SCORE_BYTES),
        *(() if problem.dtype.is_float32 else (rounding,)),
        BytesItem("weights read by the second product", pairs * size),
        BytesItem("out written once", queries * problem.value_head_dim),
    )


def _gradient_hbm_items(problem: Problem) -> tuple[BytesItem, ...]:
    """Returns the traffic of the backward pass, with weights and their gradients in both types."""
    size = problem.dtype.itemsize
    queries = problem.batch * problem.heads * problem.seqlen_q * size
    keys = problem.batch * problem.kv_heads * problem.seqlen_kv * size
    pairs = problem.batch * problem.heads * problem.seqlen_q * problem.seqlen_kv
    widening = BytesItem(
        "the weights' gradients read and written to widen them", pairs * (SCORE_BYTES + size)
    )
    mask = BytesItem("the scores' gradients read and written to mask them", pairs * 2 * SCORE_BYTES)
    return (
        BytesItem("dout read for dv and for the weights' gradients", 2 * queries * problem.value_head_dim),
        BytesItem("q, k and v read once", queries * problem.head_dim + keys * _both(problem)),
        BytesItem("weights read for dv", pairs * size),
        BytesItem("the weights' gradients written", pairs * size),
        *(() if problem.dtype.is_float32 else (widening,)),
        BytesItem("weights and their gradients read, the scores' gradients written", pairs * 3 * SCORE_BYTES),
        *(() if problem.causal is Causal.NONE else (mask,)),
        BytesItem("the scores' gradients read and written to scale them", pairs * 2 * SCORE_BYTES),
        BytesItem("the scores' gradients read for dq and for dk", pairs * 2 * SCORE_BYTES),
        BytesItem("dq, dk and dv written once", queries * problem.head_dim + keys * _both(problem)),
    )


def _both(problem: Problem) -> int:
    return problem.head_dim + problem.value_head_dim


class _Sequence(NamedTuple):
    """One sequence: the indices of its queries, its keys and values, and its side inputs."""

    at: tuple[slice, slice, slice]
    k: Tensor
    v: Tensor
    side: ExtraInputs


def _sequences(problem: Problem, q: Tensor, k: Tensor, v: Tensor, side: ExtraInputs) -> Iterator[_Sequence]:
    """Yields one sequence at a time. Copies of all of them would need as much memory as the cache."""
    if side.block_table is not None:
        assert side.seqlens_kv is not None
        # The host reads lengths below anyway. A page index out of range would corrupt the CUDA context.
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
        own = {
            name: tensor[b : b + 1] for name in OF_SEQUENCES if (tensor := getattr(side, name)) is not None
        }
        if side.bias is not None:
            own["bias"] = side.bias[b : b + 1, :, : q[at].shape[2], : keys.shape[2]]
        alone = side._replace(**{**own, **ABSENT})
        yield _Sequence(at, keys, values, alone)


def _numbers(stored: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Returns dequantized values: [places, heads, tokens, width] times [places, heads]."""
    if scale is None:
        return stored
    return (stored.float() * scale[:, :, None, None]).to(dtype)


def _gathered(pages: Tensor, scale: Tensor | None, table: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """Returns the tokens of one sequence, [1, heads, length, width]."""
    rows = _numbers(pages[table], None if scale is None else scale[table], dtype)
    return rows.transpose(0, 1).flatten(1, 2)[None, :, :length]


def _dense(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    side: ExtraInputs,
    scale: float,
    return_lse: bool,
    first_row: int = 0,
    sequence: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """Returns output and log-sum-exp of dense sequences.

    `first_row` is that of a packed sequence, and `sequence` is the number of the first sequence.
    """
    batch, heads, seqlen_q, _ = q.shape
    kv_heads, seqlen_kv = k.shape[1:3]
    if side.seqlens_kv is not None:
        # A cache may hold NaN or infinity after the last key, and 0 times these is NaN.
        beyond = torch.arange(seqlen_kv, device=q.device) >= side.seqlens_kv[:, None]
        k, v = (tensor.masked_fill(beyond[:, None, :, None], 0) for tensor in (k, v))
    scores = scaled_scores(q, k, scale).view(batch, heads, seqlen_q, seqlen_kv)
    scores = changed_scores(scores, _score_rows(problem, q, k, side, scores.dtype, sequence)).scores
    hidden = _hidden(problem, q, k, side, sequence)
    if hidden is not None:
        scores.masked_fill_(hidden, -torch.inf)
    lse = None
    has_blind_rows = problem.causal is Causal.BOTTOM_RIGHT and seqlen_q > seqlen_kv
    if problem.features or has_blind_rows or not seqlen_kv:
        weights, lse = _weights(scores, side.sinks)
    else:
        weights = torch.softmax(scores, -1)
        if return_lse:
            lse = torch.logsumexp(scores, -1)
    if side.seed is not None and side.dropout is not None:
        number = torch.arange(batch * heads, device=q.device)
        rows = first_row + torch.arange(seqlen_q, device=q.device)
        kept = kept_weights(side.seed, number, rows, seqlen_kv, side.dropout)
        weights = weights * (kept / (1.0 - side.dropout)).view_as(weights)
    # The heads of a group are adjacent, so folded rows unfold into heads.
    folded = weights.to(v.dtype).reshape(batch * kv_heads, heads // kv_heads * seqlen_q, seqlen_kv)
    out = torch.bmm(folded, v.flatten(0, 1)).view(batch, heads, seqlen_q, v.shape[3])
    return out, lse if return_lse else None


def _score_rows(
    problem: Problem, q: Tensor, k: Tensor, side: ExtraInputs, dtype: torch.dtype, sequence: int
) -> ScoreRows[FeatureFields, ExtraInputs]:
    """Returns all rows for the arithmetic of features, in the type of the scores."""

    def positions() -> Tensor:
        return _positions(problem, q, k, side)[:, None, :, None].to(dtype)

    def distances() -> Tensor:
        return (positions() - torch.arange(k.shape[2], dtype=dtype, device=q.device)).abs_()

    def of_heads(tensor: Tensor) -> Tensor:
        return tensor[:, :, None, None]

    return ScoreRows(problem, side, of_heads, lambda bias: bias, positions, distances, sequence)


def _positions(problem: Problem, q: Tensor, k: Tensor, side: ExtraInputs) -> Tensor:
    """Returns positions of queries among the keys, [batch or 1, seqlen_q]."""
    places = torch.arange(q.shape[2], device=q.device)[None]
    if problem.causal is Causal.TOP_LEFT:
        return places
    if side.seqlens_kv is None:
        return places + (k.shape[2] - q.shape[2])
    return places + (side.seqlens_kv - q.shape[2])[:, None]


def _hidden(problem: Problem, q: Tensor, k: Tensor, side: ExtraInputs, sequence: int) -> Tensor | None:
    """Returns the pairs that no head may use, for [batch, heads, seqlen_q, seqlen_kv]; None without any."""
    if not problem.features:
        if problem.causal is Causal.NONE:
            return None
        diagonal = k.shape[2] - q.shape[2] if problem.causal is Causal.BOTTOM_RIGHT else 0
        return torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu_(diagonal + 1)
    keys = torch.arange(k.shape[2], device=q.device)
    prefix = None if side.prefix is None else side.prefix[:, None, None]
    seen = seen_keys(problem, _positions(problem, q, k, side)[:, :, None], keys, prefix)
    if side.seqlens_kv is not None:
        seen = seen & (keys < side.seqlens_kv[:, None, None])
    if side.tree is not None:
        ends = k.shape[2] if side.seqlens_kv is None else side.seqlens_kv.long()[:, None, None]
        places = (keys - (ends - q.shape[2])).view(-1, 1, len(keys))
        seen = seen & seen_newest(side.tree[:, : q.shape[2]], places)
    seen = seen.unsqueeze(1)
    if side.bias is not None and problem.bias is Bias.BOOLEAN:
        seen = seen & side.bias
    if problem.block_mask:
        seen = seen & seen_pairs(problem, side, torch.arange(q.shape[2], device=q.device), k.shape[2])
    if problem.functions.mask >= 0:
        batch, head, query = (
            torch.arange(extent, device=q.device).view(shape)
            for extent, shape in zip(q.shape[:3], ((-1, 1, 1, 1), (1, -1, 1, 1), (1, 1, -1, 1)), strict=True)
        )
        if has_positions(problem):
            query = _positions(problem, q, k, side)[:, None, :, None]
        shown = visible_by_function(problem, side, batch + sequence, head, query, k.shape[2])
        assert shown is not None
        seen = seen & shown
    return ~seen


def _weights(scores: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns the softmax and the log-sum-exp. Fully hidden rows give no NaN, also in gradients."""
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
    lse = (largest + torch.log(total)).masked_fill(empty, -torch.inf)
    return weights / total, lse.squeeze(-1)
