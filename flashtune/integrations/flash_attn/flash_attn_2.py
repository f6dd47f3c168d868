"""The public functions of flash_attn 2.8, with its signatures and semantics.

The log-sum-exp of rows without visible keys is infinity, as in flash_attn. It has no gradient there either.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashtune.core.errors import ProblemError
from flashtune.integrations.flash_attn import cache as caches
from flashtune.integrations.flash_attn.attend import without_gradient
from flashtune.integrations.flash_attn.dropout_pattern import dropout_pattern
from flashtune.integrations.flash_attn.features import Features, read_features, within
from flashtune.integrations.flash_attn.kv_cache import attend_and_append
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
    """Returns the attention of [batch, tokens, heads, head_dim].

    Args:
        q: Queries.
        k: Keys, with as many or fewer heads.
        v: Values.
        dropout_p: Fraction of weights to drop.
        softmax_scale: Factor of the scores; 1 / sqrt(head_dim) by default.
        causal: Whether keys after the query are hidden. The last query sees the last key.
        window_size: Numbers of visible keys before and after the query's own; -1 for all.
        softcap: Replaces scores s by softcap · tanh(s / softcap). 0 disables it.
        alibi_slopes: Float32 [heads] or [batch, heads].
        deterministic: Whether gradients must be bit-identical between runs.
        return_attn_probs: Whether to return the log-sum-exp [batch, heads, tokens] and the dropout pattern
            [batch, heads, queries, keys] too. The pattern is for tests. It is empty without dropout.
    """
    features = read_features(
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes=alibi_slopes,
        dropout=dropout_p,
        deterministic=deterministic,
    )
    features = within(features, k.shape[1])
    return _output(q, k, v, WHOLE, WHOLE, features, return_attn_probs)


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
    """Returns the attention of packed sequences [tokens, heads, head_dim].

    Args:
        q: Queries of all sequences.
        k: Keys of all sequences; pages [pages, page size, kv_heads, head_dim] with `block_table`.
        v: Values, likewise.
        cu_seqlens_q: Offsets of the sequences' queries and the end of the last one: int32 [batch + 1].
        cu_seqlens_k: Offsets of the sequences' keys, likewise. With pages, only the lengths count.
        max_seqlen_q: Number of queries of the longest sequence, or more.
        max_seqlen_k: Number of keys of the longest sequence, or more.
        dropout_p: As in `flash_attn_func`, as the next ones.
        softmax_scale: Factor of the scores.
        causal: Whether keys after the query are hidden.
        window_size: Numbers of visible keys before and after the query's own.
        softcap: Bound of the scores.
        alibi_slopes: Float32 [heads] or [batch, heads].
        deterministic: Whether gradients must be bit-identical between runs.
        return_attn_probs: Whether to return the log-sum-exp [heads, tokens] and the dropout pattern too.
        block_table: Pages of each sequence, int32 [batch, columns]. There is then no backward pass.
    """
    features = read_features(
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes=alibi_slopes,
        dropout=dropout_p,
        deterministic=deterministic,
    )
    features = within(features, int(max_seqlen_k))
    queries = Sequences(cu_seqlens_q, int(max_seqlen_q))
    if block_table is None:
        keys = Sequences(cu_seqlens_k, int(max_seqlen_k))
        return _output(q, k, v, queries, keys, features, return_attn_probs)
    cache = caches.cache_of(k, v, block_table, None, block_table.shape[0])
    lengths = as_lengths(cu_seqlens_k)
    out, lse = attend_cache(q, cache, lengths, queries, features, wants_lse=return_attn_probs)
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
    """Appends new tokens to a KV cache in place and returns the attention of queries to it.

    With a block table, the longest length is read on the host, as flash_attn does, unless a CUDA graph is
    being captured.

    Args:
        q: Queries, [batch, tokens, heads, head_dim].
        k_cache: Keys, [sequences, capacity, kv_heads, head_dim]; pages [pages, page size, kv_heads,
            head_dim] with `block_table`.
        v_cache: Values, likewise.
        k: New keys, [batch, tokens, kv_heads, head_dim].
        v: New values, likewise.
        rotary_cos: Cosines of the rotary embedding of q and k, [positions, rotated columns / 2].
        rotary_sin: Sines, likewise.
        cache_seqlens: Number of tokens in the cache, for all sequences or int32 [batch].
        cache_batch_idx: Row of the cache for each sequence, int32 [batch].
        cache_leftpad: Number of first tokens of the cache to ignore, int32 [batch].
        block_table: Pages of each sequence, int32 [batch, columns].
        softmax_scale: As in `flash_attn_func`, as the next ones.
        causal: Whether keys after the query are hidden.
        window_size: Numbers of visible keys before and after the query's own.
        softcap: Bound of the scores.
        rotary_interleaved: Whether neighbouring columns are rotated together. Otherwise those of both halves
            are.
        alibi_slopes: Float32 [heads] or [batch, heads].
        num_splits: Without effect.
        return_softmax_lse: Whether to return the log-sum-exp too.
    """
    del num_splits
    features = read_features(softmax_scale, causal, window_size, softcap, alibi_slopes=alibi_slopes)
    capacity = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    features = within(features, capacity)
    if block_table is not None and isinstance(cache_seqlens, Tensor):
        _check_capacity(cache_seqlens, capacity, 0 if k is None else k.shape[1])
    out, lse = attend_and_append(
        q,
        k_cache,
        v_cache,
        (k, v),
        cache_seqlens,
        WHOLE,
        features,
        rotary=(rotary_cos, rotary_sin, rotary_interleaved, None),
        batch_index=cache_batch_idx,
        skipped=cache_leftpad,
        table=block_table,
        wants_lse=return_softmax_lse,
    )
    out = without_gradient(NO_BACKWARD.format("a KV cache"), out, q)
    return out if lse is None else (out, with_infinity(lse))


def with_infinity(lse: Tensor) -> Tensor:
    """Returns a log-sum-exp without gradients, with flash_attn's value for rows without visible keys."""
    lse = lse.detach()
    return lse.masked_fill(lse == -torch.inf, torch.inf)


def _output(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: Sequences,
    keys: Sequences,
    features: Features,
    return_attn_probs: bool,
) -> Output:
    seed = draw_seed(q.device) if features.dropout and return_attn_probs else None
    out, lse = attend_sequences(q, k, v, queries, keys, features, seed=seed, wants_lse=return_attn_probs)
    if lse is None:
        return out
    pattern = q.new_empty(0) if seed is None else dropout_pattern(q, k, queries, keys, features, seed)
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
