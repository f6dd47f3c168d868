"""The standard computation: unfused torch operators that materialise the scores.

It is the baseline of benchmarks and of traffic figures, and what dispatch may choose on short
sequences, where the scores are small.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashtune.problem import Causal, Problem
from flashtune.templates.family import TrafficItem


def standard_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: Causal = Causal.NONE, return_lse: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Attention by two matrix products and a softmax, in the inputs' dtype; torch sums in float32.

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
        log-sum-exp [batch, heads, seqlen_q] in float32, or None.
    """
    batch, heads, seqlen_q, _ = q.shape
    seqlen_kv, value_head_dim = v.shape[2:]
    if q.numel() == 0 or seqlen_kv == 0:
        lse = q.new_full((batch, heads, seqlen_q), -torch.inf, dtype=torch.float32) if return_lse else None
        return q.new_zeros(batch, heads, seqlen_q, value_head_dim), lse
    scores = _scores(q, k, scale)
    if causal is not Causal.NONE:
        diagonal = seqlen_kv - seqlen_q if causal is Causal.BOTTOM_RIGHT else 0
        hidden = torch.ones(seqlen_q, seqlen_kv, dtype=torch.bool, device=q.device).triu_(diagonal + 1)
        # [batch * kv_heads, group_size * seqlen_q, seqlen_kv], seen row group by row group.
        scores.view(-1, seqlen_q, seqlen_kv).masked_fill_(hidden, -torch.inf)
    lse = None
    if return_lse:
        lse = torch.logsumexp(scores.float(), -1).view(batch, heads, seqlen_q)
    # The heads of a group lie one after another, so folded rows unfold into heads.
    out = torch.bmm(torch.softmax(scores, -1), v.flatten(0, 1)).view(batch, heads, seqlen_q, value_head_dim)
    if causal is Causal.BOTTOM_RIGHT and seqlen_q > seqlen_kv:
        # The first queries see no key: their softmax is 0/0.
        out[:, :, : seqlen_q - seqlen_kv] = 0
    return out, lse


def _scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Scaled scores [batch * kv_heads, group_size * seqlen_q, seqlen_kv].

    The query heads of one KV head become more rows of one product: keys and values are not
    repeated. The scale is applied before rounding, so that float16 does not overflow early.
    """
    batch, heads, seqlen_q, head_dim = q.shape
    kv_heads = k.shape[1]
    rows = q.reshape(batch * kv_heads, heads // kv_heads * seqlen_q, head_dim)
    # With beta=0 the first operand gives nothing but its dtype.
    return torch.baddbmm(q.new_empty(1, 1, 1), rows, k.flatten(0, 1).mT, beta=0, alpha=scale)


def score_bytes(problem: Problem) -> int:
    """Bytes of all scores of a problem, the standard computation's extra memory (held twice)."""
    return problem.batch * problem.heads * problem.seqlen_q * problem.seqlen_kv * problem.dtype.itemsize


def standard_hbm_items(problem: Problem) -> tuple[TrafficItem, ...]:
    """HBM traffic of `standard_attention`, item by item, in bytes.

    Each operator reads its whole input from HBM and writes its whole output there: the scores go
    out of the first product, through the mask where there is one, through the softmax, into the
    second product.
    """
    size = problem.dtype.itemsize
    queries = problem.batch * problem.heads * problem.seqlen_q * size
    keys = problem.batch * problem.kv_heads * problem.seqlen_kv * size
    masked = problem.causal is not Causal.NONE
    return (
        TrafficItem("q read once", queries * problem.head_dim),
        TrafficItem("k and v read once", keys * (problem.head_dim + problem.value_head_dim)),
        TrafficItem("scores written by the first product", score_bytes(problem)),
        *((TrafficItem("scores read and written by the mask", 2 * score_bytes(problem)),) if masked else ()),
        TrafficItem("scores read by the softmax, weights written", 2 * score_bytes(problem)),
        TrafficItem("weights read by the second product", score_bytes(problem)),
        TrafficItem("out written once", queries * problem.value_head_dim),
    )
