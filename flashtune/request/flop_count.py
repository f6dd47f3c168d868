"""Floating-point operations of calls, counted as `torch.utils.flop_counter` does for SDPA: without masks."""

from torch import Tensor

from flashtune.core.layouts import Layout
from flashtune.request.call import Call


def forward_flops(call: Call) -> int:
    """Returns the operations of the forward pass: two matrix products."""
    return 2 * _pairs(call) * sum(_widths(call))


def backward_flops(call: Call) -> int:
    """Returns the operations of the backward pass: five matrix products, one of them for the scores."""
    width, value_width = _widths(call)
    return 2 * _pairs(call) * (3 * width + 2 * value_width)


def _widths(call: Call) -> tuple[int, int]:
    return call.q.shape[-1], call.options.latent or call.v.shape[-1]


def _pairs(call: Call) -> int:
    """Returns the number of pairs of a query and a key, over all heads.

    Lengths of packed and paged sequences are read from the device. Those of a compiler are the largest ones.
    """
    options, side = call.options, call.side
    q, k = Layout(options.layout).heads_first(call.q), Layout(options.kv_layout).heads_first(call.k)
    batch, heads, queries, keys = *q.shape[:3], k.shape[2]
    if side.cu_seqlens_q is None and side.block_table is None:
        return batch * heads * queries * keys
    if side.block_table is not None:
        keys *= side.block_table.shape[1]
    if side.cu_seqlens_q is not None:
        batch, queries = side.cu_seqlens_q.numel() - 1, options.max_seqlen_q
        keys = options.max_seqlen_k if side.block_table is None else keys
    rows, columns = [queries] * batch, [keys] * batch
    if side.cu_seqlens_q is not None and _has_values(side.cu_seqlens_q):
        rows = side.cu_seqlens_q.diff().tolist()
    if side.cu_seqlens_kv is not None and _has_values(side.cu_seqlens_kv):
        columns = side.cu_seqlens_kv.diff().tolist()
    if side.block_table is not None and side.seqlens_kv is not None and _has_values(side.seqlens_kv):
        columns = side.seqlens_kv.tolist()
    return heads * sum(row * column for row, column in zip(rows, columns, strict=True))


def _has_values(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and not tensor.is_meta
