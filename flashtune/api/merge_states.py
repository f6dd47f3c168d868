"""Combination of attention over two sets of keys by their log-sum-exps."""

from __future__ import annotations

import torch
from torch import Tensor

from flashtune.core.errors import ProblemError
from flashtune.core.layouts import WIDE_FLOATS, Layout
from flashtune.request.request import read_option
from flashtune.request.tensor_checks import require_dense


def merge_attention(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, *, layout: str = "bhsd"
) -> tuple[Tensor, Tensor]:
    """Returns the attention over the keys of both parts.

    Args:
        out_a: Output over the first keys, [batch, heads, seqlen_q, head_dim] ("bshd": [batch, seqlen_q,
            heads, head_dim]; "thd", varlen: [tokens, heads, head_dim]; "bhd", one token per sequence: [batch,
            heads, head_dim]).
        lse_a: Natural log-sum-exp of out_a in float32, [batch, heads, seqlen_q], [heads, tokens] or [batch,
            heads]. -inf for rows without visible keys.
        out_b: Output over the other keys.
        lse_b: Natural log-sum-exp of out_b.
        layout: Order of the dimensions of the outputs.

    Returns:
        The output and log-sum-exp over all keys, in the shapes of `out_a` and `lse_a`.

    Raises:
        ProblemError: The parts do not match one another, or the layout is unknown.
    """
    for name, part in (("out_a", out_a), ("lse_a", lse_a), ("out_b", out_b), ("lse_b", lse_b)):
        require_dense(name, part)
        if part.dtype not in WIDE_FLOATS or part.device != out_a.device:
            raise ProblemError(
                f"{name} is {part.dtype} on {part.device} and out_a on {out_a.device}: pass 16, 32 "
                "or 64 bit floats on one device"
            )
    order = read_option("layout", layout, tuple(Layout))
    rows = tuple(out_a.shape[:-1])
    if order in (Layout.BSHD, Layout.THD):
        rows = (*rows[:-2], rows[-1], rows[-2])
    if out_a.shape != out_b.shape or not lse_a.shape == lse_b.shape == rows:
        raise ProblemError(
            f"outputs are {list(out_a.shape)} and {list(out_b.shape)}, log-sum-exps {list(lse_a.shape)} and "
            f"{list(lse_b.shape)}: pass two parts of one call in layout {order.value!r}"
        )
    # A row without visible keys in both parts gets shares of 0. Its output and gradients stay zeros.
    hidden = (lse_a == -torch.inf) & (lse_b == -torch.inf)
    base = torch.logaddexp(lse_a.masked_fill(hidden, 0.0), lse_b.masked_fill(hidden, 0.0))
    shares = [torch.exp(part - base) for part in (lse_a, lse_b)]
    lse = base.masked_fill(hidden, -torch.inf)
    if order in (Layout.BSHD, Layout.THD):
        shares = [share.transpose(-1, -2) for share in shares]
    out = out_a.float() * shares[0].unsqueeze(-1) + out_b.float() * shares[1].unsqueeze(-1)
    return out.to(out_a.dtype), lse
