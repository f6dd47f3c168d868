"""Unfused attention of dense tensors without features."""

from torch import Tensor

from flashtune.core.problem import Causal, Problem
from flashtune.request.tensor_checks import dtype_of
from flashtune.runtime.unfused import unfused_attention


def problem_of(q: Tensor, k: Tensor, v: Tensor, causal: Causal = Causal.NONE) -> Problem:
    return Problem(
        dtype=dtype_of(q),
        head_dim=q.shape[3],
        value_head_dim=v.shape[3],
        heads=q.shape[1],
        kv_heads=k.shape[1],
        batch=q.shape[0],
        seqlen_q=q.shape[2],
        seqlen_kv=k.shape[2],
        causal=causal,
    )


def unfused(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: Causal = Causal.NONE, return_lse: bool = False
) -> tuple[Tensor, Tensor | None]:
    problem = problem_of(q, k, v, causal)
    return unfused_attention(problem, q, k, v, scale=scale, return_lse=return_lse)
