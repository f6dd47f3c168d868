"""The public functions of flash_attn 2.8, with its signatures and semantics.

`num_splits` has no effect. `window_size` has the numbers of visible keys before and after the query's own.
The log-sum-exp of rows without visible keys is infinity, as in flash_attn. It has no gradient there either.
"""

from typing import Any

import torch
from torch import Tensor

from flashtune.core.errors import ProblemError
from flashtune.integrations.flash_attn import cache as caches
from flashtune.integrations.flash_attn.attend import without_gradient
from flashtune.integrations.flash_attn.dropout_pattern import dropout_pattern
from flashtune.integrations.flash_attn.features import Features, read_features
from flashtune.integrations.flash_attn.kv_cache import NewTokens, attend_and_append
from flashtune.integrations.flash_attn.sequences import NO_BACKWARD, attend_cache, attend_sequences
from flashtune.integrations.flash_attn.token_rows import WHOLE, Sequences, as_lengths
from flashtune.request.dropout import draw_seed

Window = Any
# The output, or the output, the log-sum-exp and the dropout pattern. Callers of flash_attn know which.
Output = Any


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Output:
    """Returns the attention of [batch, tokens, heads, head_dim], as flash_attn 2.8's.

    With `return_attn_probs`, the log-sum-exp and the dropout pattern are returned too. The pattern is for
    tests. It is empty without dropout.
    """
    features = read_features(
        softmax_scale,
        causal,
        window_size,
        softcap,
        keys=k.shape[1],
        alibi_slopes=alibi_slopes,
        dropout=dropout_p,
        deterministic=deterministic,
        wants_lse=return_attn_probs,
    )
    return _output(q, k, v, WHOLE, WHOLE, features)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Output:
    """Returns `flash_attn_func` of keys and values in one tensor, [batch, tokens, 2, kv_heads, head_dim]."""
    k, v = kv.unbind(-3)
    options = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
    return flash_attn_func(q, k, v, *options, return_attn_probs)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Output:
    """Returns `flash_attn_func` of all inputs in one tensor, [batch, tokens, 3, heads, head_dim]."""
    q, k, v = qkv.unbind(-3)
    options = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
    return flash_attn_func(q, k, v, *options, return_attn_probs)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Output:
    """Returns the attention of packed sequences [tokens, heads, head_dim], as flash_attn 2.8's.

    `max_seqlen_q` and `max_seqlen_k` may be any upper bounds. With `block_table`, only the lengths of
    `cu_seqlens_k` count, and there is no backward pass.
    """
    features = read_features(
        softmax_scale,
        causal,
        window_size,
        softcap,
        keys=int(max_seqlen_k),
        alibi_slopes=alibi_slopes,
        dropout=dropout_p,
        deterministic=deterministic,
        wants_lse=return_attn_probs,
    )
    queries = Sequences(cu_seqlens_q, int(max_seqlen_q))
    if block_table is None:
        keys = Sequences(cu_seqlens_k, int(max_seqlen_k))
        return _output(q, k, v, queries, keys, features)
    cache = caches.cache_of(k, v, block_table, None, block_table.shape[0])
    out, lse = attend_cache(q, cache, as_lengths(cu_seqlens_k), queries, features)
    out = without_gradient(NO_BACKWARD.format("block_table"), out, q, k, v)
    return out if lse is None else (out, with_infinity(lse), q.new_empty(0))


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Output:
    """Returns `flash_attn_varlen_func` of keys and values in one tensor, [tokens, 2, kv_heads, head_dim]."""
    k, v = kv.unbind(-3)
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    options = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
    return flash_attn_varlen_func(q, k, v, *(*lengths, *options, return_attn_probs))


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Output:
    """Returns `flash_attn_varlen_func` of all inputs in one tensor, [tokens, 3, heads, head_dim]."""
    q, k, v = qkv.unbind(-3)
    lengths = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
    options = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
    return flash_attn_varlen_func(q, k, v, *(*lengths, *options, return_attn_probs))


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Appends new tokens to a KV cache, as flash_attn 2.8's, and returns the attention of queries to it.

    With a block table, the longest length is read on the host, as flash_attn does, unless a CUDA graph is
    being captured.
    """
    del num_splits
    capacity = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    others = {"alibi_slopes": alibi_slopes, "wants_lse": return_softmax_lse}
    features = read_features(softmax_scale, causal, window_size, softcap, keys=capacity, **others)
    if block_table is not None and isinstance(cache_seqlens, Tensor):
        _check_capacity(cache_seqlens, capacity, 0 if k is None else k.shape[1])
    out, lse = attend_and_append(
        q,
        k_cache,
        v_cache,
        NewTokens(k, v, None, rotary_cos, rotary_sin, rotary_interleaved, None),
        cache_seqlens,
        WHOLE,
        features,
        batch_index=cache_batch_idx,
        skipped=cache_leftpad,
        table=block_table,
    )
    out = without_gradient(NO_BACKWARD.format("a KV cache"), out, q)
    return out if lse is None else (out, with_infinity(lse))


def with_infinity(lse: Tensor) -> Tensor:
    """Returns a log-sum-exp without gradients, with flash_attn's value for rows without visible keys."""
    lse = lse.detach()
    return lse.masked_fill(lse == -torch.inf, torch.inf)


def _output(
    q: Tensor, k: Tensor, v: Tensor, queries: Sequences, keys: Sequences, features: Features
) -> Output:
    if features.dropout and features.wants_lse:
        features = features._replace(seed=draw_seed(q.device))
    out, lse = attend_sequences(q, k, v, queries, keys, features)
    if lse is None:
        return out
    pattern = q.new_empty(0) if features.seed is None else dropout_pattern(q, k, queries, keys, features)
    return out, with_infinity(lse), pattern


def _check_capacity(lengths: Tensor, capacity: int, new: int) -> None:
    if lengths.is_meta or (lengths.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    longest = int(lengths.max()) + new if lengths.numel() else 0
    if longest > capacity:
        raise CapacityError(
            f"a sequence has {longest} keys and its row of block_table holds {capacity}: pass a block_table "
            "with more columns"
        )


class CapacityError(ProblemError, RuntimeError):
    """A sequence has more keys than the pages of its row of the block table hold."""
