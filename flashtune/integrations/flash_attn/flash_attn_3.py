# ruff: noqa: ARG001 - The signatures are those of flash_attn.
"""The functions of flash_attn 3's module `flash_attn_interface`, with its signatures and semantics.

The log-sum-exp of rows without visible keys is -inf. Numbers of splits, packing of query heads, the margin of
multiprocessors and scheduler metadata have no effect. Backward passes of `qv`, 8-bit queries and caches raise
`UnsupportedError`.
"""

from typing import Any

import torch
from torch import Tensor

from flashtune.integrations.flash_attn.attend import Attended, flash_attn_combine, without_gradient
from flashtune.integrations.flash_attn.features import Descales, read_features
from flashtune.integrations.flash_attn.gradients import gradients, row_sums
from flashtune.integrations.flash_attn.kv_cache import NewTokens, attend_and_append
from flashtune.integrations.flash_attn.sequences import NO_BACKWARD, attend_sequences
from flashtune.integrations.flash_attn.token_rows import WHOLE, Sequences

__all__ = [
    "_flash_attn_backward",
    "_flash_attn_forward",
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]

Window = Any
# The output, or the output and the log-sum-exp. Callers of flash_attn know which.
Output = Any


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Output:
    """Returns the attention of [batch, tokens, heads, width], as flash_attn 3's.

    With `return_attn_probs`, the log-sum-exp is returned too.
    """
    features = read_features(
        softmax_scale,
        causal,
        window_size,
        softcap,
        chunk=attention_chunk,
        deterministic=deterministic,
        descales=Descales(q_descale, k_descale, v_descale),
        wants_lse=return_attn_probs,
    )
    return _output(attend_sequences(q, k, v, WHOLE, WHOLE, features, qv=qv))


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Output:
    """Returns `flash_attn_func` of all inputs in one tensor.

    `qkv` is [batch, tokens, 3, heads, width]; with `num_heads_q` [batch, tokens, all heads, width].
    """
    if qkv.dim() == 5:
        q, k, v = qkv.unbind(2)
    else:
        heads = qkv.shape[2] // 3 if num_heads_q is None else num_heads_q
        rest = (qkv.shape[2] - heads) // 2
        q, k, v = qkv.split([heads, rest, rest], 2)
    return flash_attn_func(
        q,
        k,
        v,
        softmax_scale,
        causal,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        window_size=window_size,
        attention_chunk=attention_chunk,
        softcap=softcap,
        deterministic=deterministic,
        sm_margin=sm_margin,
        return_attn_probs=return_attn_probs,
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Output:
    """Returns the attention of packed sequences [tokens, heads, width], as flash_attn 3's.

    Without `cu_seqlens_q`, `q` is [batch, tokens, heads, width]. Keys are likewise. Queries that do not
    count, by `seqused_q`, get zeros. With `return_attn_probs`, the log-sum-exp is returned too.
    """
    features = read_features(
        softmax_scale,
        causal,
        window_size,
        softcap,
        chunk=attention_chunk,
        deterministic=deterministic,
        descales=Descales(q_descale, k_descale, v_descale),
        wants_lse=return_attn_probs,
    )
    queries = sequences_of(q, cu_seqlens_q, max_seqlen_q, seqused_q)
    keys = sequences_of(k, cu_seqlens_k, max_seqlen_k, seqused_k)
    return _output(attend_sequences(q, k, v, queries, keys, features, qv=qv))


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Output:
    """Appends new tokens to a KV cache, as flash_attn 3's, and returns the attention of queries to it."""
    features = read_features(
        softmax_scale,
        causal,
        window_size,
        softcap,
        chunk=attention_chunk,
        descales=Descales(q_descale, k_descale, v_descale),
        wants_lse=return_softmax_lse,
    )
    out, lse = attend_and_append(
        q,
        k_cache,
        v_cache,
        NewTokens(k, v, cu_seqlens_k_new, rotary_cos, rotary_sin, rotary_interleaved, rotary_seqlens),
        cache_seqlens,
        sequences_of(q, cu_seqlens_q, max_seqlen_q, None),
        features,
        batch_index=cache_batch_idx,
        skipped=cache_leftpad,
        table=page_table,
        qv=qv,
    )
    return _output((without_gradient(NO_BACKWARD.format("a KV cache"), out, q), lse))


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Tensor:
    """Returns an empty tensor, because flashtune's kernels take no scheduler metadata."""
    return torch.empty(0, dtype=torch.int32, device=cache_seqlens.device)


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_new: Tensor | None = None,
    v_new: Tensor | None = None,
    qv: Tensor | None = None,
    out_: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    page_table: Tensor | None = None,
    kv_batch_idx: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    seqlens_rotary: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns output, log-sum-exp and two empty tensors. It takes no part in autograd."""
    features = read_features(
        softmax_scale,
        causal,
        (window_size_left, window_size_right),
        softcap,
        chunk=attention_chunk,
        descales=Descales(q_descale, k_descale, v_descale),
        wants_lse=True,
    )
    queries = sequences_of(q, cu_seqlens_q, max_seqlen_q, seqused_q)
    is_cached = page_table is not None or seqused_k is not None or k_new is not None
    with torch.no_grad():
        if cu_seqlens_k is None and k.dim() == 4 and is_cached:
            out, lse = attend_and_append(
                q,
                k,
                v,
                NewTokens(
                    k_new, v_new, cu_seqlens_k_new, rotary_cos, rotary_sin, rotary_interleaved, seqlens_rotary
                ),
                seqused_k,
                queries,
                features,
                batch_index=kv_batch_idx,
                skipped=leftpad_k,
                table=page_table,
                qv=qv,
            )
        else:
            keys = sequences_of(k, cu_seqlens_k, max_seqlen_k, seqused_k)._replace(skipped=leftpad_k)
            out, lse = attend_sequences(q, k, v, queries, keys, features, qv=qv)
        assert lse is not None
        empty = lse.new_empty(0)
        return (out if out_ is None else out_.copy_(out)), lse, empty, empty


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    sequed_q: Tensor | None = None,
    sequed_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dq: Tensor | None = None,
    dk: Tensor | None = None,
    dv: Tensor | None = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
) -> Tensor:
    """Writes the gradients to dq, dk and dv, and returns the sums of dout · out of all rows."""
    window = window_size_left, window_size_right
    features = read_features(softmax_scale, is_causal, window, softcap, deterministic=deterministic)
    queries = sequences_of(q, cu_seqlens_q, max_seqlen_q, sequed_q)
    keys = sequences_of(k, cu_seqlens_k, max_seqlen_k, sequed_k)
    gradients(dout, q, k, v, out, softmax_lse, queries, keys, features, (dq, dk, dv))
    return row_sums(dout, out)


def sequences_of(
    tensor: Tensor, starts: Tensor | None, longest: int | None, used: Tensor | None
) -> Sequences:
    """Returns where the sequences of a tensor are. Without `longest`, the bound is the number of tokens."""
    if starts is None:
        return Sequences(used=used)
    return Sequences(starts, tensor.shape[0] if longest is None else int(longest), used)


def _output(result: Attended) -> Output:
    out, lse = result
    return out if lse is None else (out, lse.detach())
