"""Merging attention over two sets of keys into attention over both, by their log-sum-exps."""

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
    """What attention to the keys of both parts would have given.

    Args:
        out_a: The output over some keys, [batch, heads, seqlen_q, head_dim] ("bshd": [batch, seqlen_q, heads,
            head_dim]; "thd", packed: [tokens, heads, head_dim]; "bhd", one token of each sequence: [batch,
            heads, head_dim]).
        lse_a: Its natural log-sum-exp in float32, [batch, heads, seqlen_q], [heads, tokens] or [batch,
            heads]; -inf where a row saw none of them.
        out_b: The output over the other keys.
        lse_b: Its log-sum-exp.
        layout: The order of the outputs' dimensions.

    Returns:
        Output and log-sum-exp over all keys, in the forms of `out_a` and `lse_a`.

    Raises:
        ProblemError: The parts do not fit one another, or the layout is unknown.
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
    # A row that sees nothing in either part has no shares: its zeros stay zeros, and so do its gradients.
    hidden = (lse_a == -torch.inf) & (lse_b == -torch.inf)
    base = torch.logaddexp(lse_a.masked_fill(hidden, 0.0), lse_b.masked_fill(hidden, 0.0))
    shares = [torch.exp(part - base) for part in (lse_a, lse_b)]
    lse = base.masked_fill(hidden, -torch.inf)
    if order in (Layout.BSHD, Layout.THD):
        shares = [share.transpose(-1, -2) for share in shares]
    out = out_a.float() * shares[0].unsqueeze(-1) + out_b.float() * shares[1].unsqueeze(-1)
    return out.to(out_a.dtype), lse
