"""The backward pass as a function of the output and the log-sum-exp, which may be those of more keys.

Ring attention calls it for each block of keys, with the output and the log-sum-exp over all keys.
"""

import torch
from torch import Tensor

from flashtune.integrations.flash_attn.features import Features, UnsupportedError
from flashtune.integrations.flash_attn.token_rows import (
    Packed,
    Sequences,
    packed_rows,
    packing,
    unpacked_rows,
)
from flashtune.request.call import Call, dense_call, varlen_call
from flashtune.runtime.op_library import operands

Gradients = tuple[Tensor, Tensor, Tensor]


@torch.no_grad()
def gradients(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    queries: Sequences,
    keys: Sequences,
    features: Features,
    results: tuple[Tensor | None, Tensor | None, Tensor | None],
) -> Gradients:
    """Returns the gradients of q, k and v, written to the tensors of `results` where there are some.

    `lse` is the natural log-sum-exp, float32 [batch, heads, tokens] or packed [heads, tokens]. Infinity of
    any sign marks rows without visible keys.
    """
    if features.has_negative_bound:
        raise UnsupportedError("the backward function takes no negative bound of a window: use autograd")
    options = features.options()
    lse = lse.masked_fill(lse == torch.inf, -torch.inf).contiguous()
    if queries.starts is None and queries.is_whole and keys.starts is None and keys.skipped is None:
        lengths = None if keys.used is None else keys.used.to(torch.int32)
        call = dense_call(q, k, v, layout="bshd", kv_lengths=lengths, **options)
        dq, dk, dv = _backward(call, dout, out, lse, features.seed)
    else:
        how_q, how_k = packing(q, queries), packing(k, keys)
        if queries.starts is None:
            lse = lse.transpose(0, 1).flatten(1)
        if how_q.source is not None:
            lse = lse.index_select(1, how_q.source)
        q_rows, dout_rows, out_rows = (packed_rows(tensor, queries, how_q) for tensor in (q, dout, out))
        k_rows, v_rows = packed_rows(k, keys, how_k), packed_rows(v, keys, how_k)
        longest_q = min(how_q.longest, q_rows.shape[0])
        lengths_of = how_q.starts.to(torch.int32), how_k.starts.to(torch.int32), longest_q, how_k.longest
        call = varlen_call(q_rows, k_rows, v_rows, *lengths_of, **options)
        dq, dk, dv = _backward(call, dout_rows, out_rows, lse.contiguous(), features.seed)
        dq, dk, dv = (
            _in_place(dq, q, queries, how_q),
            _in_place(dk, k, keys, how_k),
            _in_place(dv, v, keys, how_k),
        )
    pairs = zip((dq, dk, dv), results, strict=True)
    dq, dk, dv = (gradient if result is None else result.copy_(gradient) for gradient, result in pairs)
    return dq, dk, dv


def _backward(call: Call, dout: Tensor, out: Tensor, lse: Tensor, seed: Tensor | None) -> Gradients:
    call = call._replace(side=call.side._replace(seed=seed))
    results = torch.ops.flashtune.attention_backward(dout, None, out, lse, *operands(call))
    return results[0], results[1], results[2]


def _in_place(rows: Tensor, like: Tensor, sequences: Sequences, how: Packed) -> Tensor:
    """Returns gradients of packed tokens in the shape of the tensor."""
    rows = unpacked_rows(rows, how, 0.0)
    return rows.unflatten(0, like.shape[:2]) if sequences.starts is None else rows


@torch.no_grad()
def row_sums(dout: Tensor, out: Tensor) -> Tensor:
    """Returns the sum of dout · out of each row, float32 [..., heads, tokens]."""
    return (dout.float() * out.float()).sum(-1).transpose(-1, -2).contiguous()
