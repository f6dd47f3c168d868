"""The standard computation: unfused torch operators that materialise the scores.

It is the baseline of benchmarks and of traffic figures, and what dispatch may choose on short
sequences, where the scores are small.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from flashtune.costs import SCORE_BYTES
from flashtune.problem import Causal, Dtype, Problem
from flashtune.templates.family import TrafficItem


def standard_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: Causal = Causal.NONE, return_lse: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Attention by two matrix products of the inputs' dtype and a softmax in float32, or float64 as they.

    Rows with nothing to attend to give zeros, and -inf as log-sum-exp.

    Args:
        q: Queries [batch, heads, seqlen_q, head_dim], any strides.
        k: Keys [batch, kv_heads, seqlen_kv, head_dim]; `kv_heads` divides `heads`.
        v: Values [batch, kv_heads, seqlen_kv, value_head_dim].
        scale: Factor of the scores, of any sign.
        causal: The causal mask and its alignment.
        return_lse: Whether to make the log-sum-exp.

    Returns:
        The output [batch, heads, seqlen_q, value_head_dim] in the inputs' dtype, and the natural
        log-sum-exp [batch, heads, seqlen_q] in the scores' type, or None.
    """
    batch, heads, seqlen_q, _ = q.shape
    seqlen_kv, value_head_dim = v.shape[2:]
    if q.numel() == 0 or seqlen_kv == 0:
        lse = q.new_full((batch, heads, seqlen_q), -torch.inf, dtype=score_dtype(q)) if return_lse else None
        return q.new_zeros(batch, heads, seqlen_q, value_head_dim), lse
    if causal is Causal.BOTTOM_RIGHT and seqlen_q > seqlen_kv:
        # The first queries see no key; left out, they put no 0/0 into gradients either.
        blind = seqlen_q - seqlen_kv
        out, lse = standard_attention(
            q[:, :, blind:], k, v, scale=scale, causal=causal, return_lse=return_lse
        )
        return pad(out, (0, 0, blind, 0)), lse if lse is None else pad(lse, (blind, 0), value=-torch.inf)
    scores = scaled_scores(q, k, scale)
    if causal is not Causal.NONE:
        diagonal = seqlen_kv - seqlen_q if causal is Causal.BOTTOM_RIGHT else 0
        hidden = torch.ones(seqlen_q, seqlen_kv, dtype=torch.bool, device=q.device).triu_(diagonal + 1)
        scores.view(-1, seqlen_q, seqlen_kv).masked_fill_(hidden, -torch.inf)
    lse = None
    if return_lse:
        lse = torch.logsumexp(scores, -1).view(batch, heads, seqlen_q)
    weights = torch.softmax(scores, -1).to(v.dtype)
    # The heads of a group lie one after another, so folded rows unfold into heads.
    return torch.bmm(weights, v.flatten(0, 1)).view(batch, heads, seqlen_q, value_head_dim), lse


def scaled_scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Scaled scores [batch * kv_heads, group_size * seqlen_q, seqlen_kv].

    The query heads of one KV head become more rows of one product: keys and values are not repeated.
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
    """The type in which scores are kept: float32, or float64 of such queries."""
    return torch.float64 if q.dtype is torch.float64 else torch.float32


def _widens(q: Tensor, k: Tensor) -> bool:
    """Whether torch multiplies 16-bit matrices into float32: on CUDA, and outside of autograd."""
    needs_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad)
    return q.is_cuda and torch.version.hip is None and q.element_size() == 2 and not needs_grad


def standard_hbm_items(problem: Problem) -> tuple[TrafficItem, ...]:
    """HBM traffic of `standard_attention`, item by item, in bytes; of a backward problem autograd's.

    Each operator reads its whole input from HBM and writes its whole output there, scores in float32.
    """
    if problem.is_backward:
        return _gradient_hbm_items(problem)
    size = problem.dtype.itemsize
    queries = problem.batch * problem.heads * problem.seqlen_q * size
    keys = problem.batch * problem.kv_heads * problem.seqlen_kv * size
    pairs = problem.batch * problem.heads * problem.seqlen_q * problem.seqlen_kv
    mask = TrafficItem("scores read and written to mask them", pairs * 2 * SCORE_BYTES)
    rounding = TrafficItem("weights read and written to round them", pairs * (SCORE_BYTES + size))
    return (
        TrafficItem("q read once", queries * problem.head_dim),
        TrafficItem("k and v read once", keys * (problem.head_dim + problem.value_head_dim)),
        TrafficItem("scores written by the first product", pairs * SCORE_BYTES),
        TrafficItem("scores read and written to scale them", pairs * 2 * SCORE_BYTES),
        *(() if problem.causal is Causal.NONE else (mask,)),
        TrafficItem("scores read and weights written by the softmax", pairs * 2 * SCORE_BYTES),
        *(() if problem.dtype is Dtype.FP32 else (rounding,)),
        TrafficItem("weights read by the second product", pairs * size),
        TrafficItem("out written once", queries * problem.value_head_dim),
    )


def _gradient_hbm_items(problem: Problem) -> tuple[TrafficItem, ...]:
    """The weights are kept in both types, and gradients of weights and scores are made beside them."""
    size = problem.dtype.itemsize
    queries = problem.batch * problem.heads * problem.seqlen_q * size
    keys = problem.batch * problem.kv_heads * problem.seqlen_kv * size
    pairs = problem.batch * problem.heads * problem.seqlen_q * problem.seqlen_kv
    widening = TrafficItem(
        "the weights' gradients read and written to widen them", pairs * (SCORE_BYTES + size)
    )
    mask = TrafficItem("the scores' gradients read and written to mask them", pairs * 2 * SCORE_BYTES)
    return (
        TrafficItem("dout read for dv and for the weights' gradients", 2 * queries * problem.value_head_dim),
        TrafficItem("q, k and v read once", queries * problem.head_dim + keys * _both(problem)),
        TrafficItem("weights read for dv", pairs * size),
        TrafficItem("the weights' gradients written", pairs * size),
        *(() if problem.dtype is Dtype.FP32 else (widening,)),
        TrafficItem(
            "weights and their gradients read, the scores' gradients written", pairs * 3 * SCORE_BYTES
        ),
        *(() if problem.causal is Causal.NONE else (mask,)),
        TrafficItem("the scores' gradients read and written to scale them", pairs * 2 * SCORE_BYTES),
        TrafficItem("the scores' gradients read for dq and for dk", pairs * 2 * SCORE_BYTES),
        TrafficItem("dq, dk and dv written once", queries * problem.head_dim + keys * _both(problem)),
    )


def _both(problem: Problem) -> int:
    return problem.head_dim + problem.value_head_dim
