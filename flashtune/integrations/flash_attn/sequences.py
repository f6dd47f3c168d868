"""Attention for any combination of dense, packed, partly used and cached sequences.

Queries are [batch, tokens, heads, width], or packed [tokens, heads, width]. Keys and values are likewise.
"""

import torch
from torch import Tensor

from flashtune.integrations.flash_attn import cache as caches
from flashtune.integrations.flash_attn.attend import E4M3, Attended, dense, packed, paged, without_gradient
from flashtune.integrations.flash_attn.cache import Cache
from flashtune.integrations.flash_attn.features import Features, UnsupportedError
from flashtune.integrations.flash_attn.token_rows import (
    Packed,
    Sequences,
    packed_rows,
    packing,
    padded,
    unpacked_rows,
    unpadded_rows,
)

NO_BACKWARD = "flash_attn has no backward pass for {}, and neither has this function: detach its inputs"


def attend_sequences(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: Sequences,
    keys: Sequences,
    features: Features,
    qv: Tensor | None = None,
) -> Attended:
    """Returns the attention of sequences whose keys are not in a cache.

    Products of `qv` with the values are added to the scores. Tokens that do not count get zeros, and a
    log-sum-exp of -inf.
    """
    if qv is not None:
        with torch.no_grad():
            wide_k, counts = padded(k, keys)
            cache = caches.as_cache(wide_k, padded(v, keys)[0])
            out, lse = attend_cache(q, cache, counts, queries, features, qv=qv)
        return without_gradient(NO_BACKWARD.format("qv"), out, q, k, v, qv), lse
    if q.dtype is E4M3 and torch.is_grad_enabled():
        with torch.no_grad():
            out, lse = attend_sequences(q, k, v, queries, keys, features)
        return without_gradient(NO_BACKWARD.format("8-bit queries"), out, q, k, v), lse
    if features.has_negative_bound:
        return _masked(q, k, v, queries, keys, features)
    if queries.starts is None and queries.is_whole and keys.starts is None and keys.skipped is None:
        lengths = None if keys.used is None else keys.used.to(torch.int32)
        return dense(q, k, v, features, lengths=lengths)
    how_q, how_k = packing(q, queries), packing(k, keys)
    out, lse = packed(
        packed_rows(q, queries, how_q),
        packed_rows(k, keys, how_k),
        packed_rows(v, keys, how_k),
        (how_q.starts, how_k.starts),
        (how_q.longest, how_k.longest),
        features,
    )
    return _in_place(out, lse, q, queries, how_q)


def attend_cache(
    q: Tensor,
    cache: Cache,
    lengths: Tensor,
    queries: Sequences,
    features: Features,
    *,
    skipped: Tensor | None = None,
    qv: Tensor | None = None,
) -> Attended:
    """Returns the attention of queries to keys in a cache, without gradients.

    `lengths` is the number of keys of each sequence, int32 [batch]. It includes the new tokens and `skipped`,
    the number of first keys that do not count. `qv` is as in `attend_sequences`.
    """
    with torch.no_grad():
        if not queries.is_whole:
            how = packing(q, queries)
            rows = packed_rows(q, queries, how)
            values = None if qv is None else packed_rows(qv, queries, how)
            whole = Sequences(how.starts, how.longest)
            out, lse = attend_cache(rows, cache, lengths, whole, features, skipped=skipped, qv=values)
            return _in_place(out, lse, q, queries, how)
        if qv is not None and q.dtype.itemsize == 1:
            raise UnsupportedError("qv is for queries of 16 bits, in flash_attn too: convert q, k, v and qv")
        pages = None if skipped is not None or qv is not None else caches.kernel_pages(cache)
        latent = 0
        if pages is None:
            k, v = caches.gathered(cache, skipped)
            if skipped is not None:
                lengths = (lengths - skipped).clamp(min=0)
            if qv is not None:
                k, latent = torch.cat([v, k], -1), v.shape[-1]
                q = torch.cat([qv, q], -1)
            elif queries.starts is None:
                return dense(q, k, v, features, lengths=lengths.to(torch.int32))
            pages = caches.kernel_pages(caches.as_cache(k, v))
            assert pages is not None
        return paged(
            q,
            pages.k,
            None if latent else pages.v,
            pages.table,
            lengths,
            features,
            starts=queries.starts,
            longest=queries.longest,
            latent=latent,
        )


def _in_place(out: Tensor, lse: Tensor | None, q: Tensor, queries: Sequences, how: Packed) -> Attended:
    """Returns results of packed queries in the shape of all queries."""
    out = unpacked_rows(out, how, 0.0)
    lse = None if lse is None else unpacked_rows(lse.mT, how, -torch.inf).mT
    if queries.starts is None:
        out = out.unflatten(0, q.shape[:2])
        lse = None if lse is None else lse.unflatten(1, q.shape[:2]).transpose(0, 1)
    return out, None if lse is None else lse.contiguous()


def _masked(
    q: Tensor, k: Tensor, v: Tensor, queries: Sequences, keys: Sequences, features: Features
) -> Attended:
    """Returns the attention with a negative bound of a window, by a mask of padded sequences."""
    if features.alibi_slopes is not None or features.chunk or features.dropout or q.dtype is E4M3:
        raise UnsupportedError(
            "a negative bound of a window does not go with ALiBi, chunks, dropout or 8-bit queries: "
            "leave it out"
        )
    wide_q, lengths_q = padded(q, queries)
    wide_k, lengths_k = padded(k, keys)
    wide_v, _ = padded(v, keys)
    row = torch.arange(wide_q.shape[1], device=q.device)[:, None]
    key = torch.arange(wide_k.shape[1], device=q.device)
    count_q, count_k = lengths_q[:, None, None], lengths_k[:, None, None]
    position = row + (count_k - count_q)
    seen = (row < count_q) & (key < count_k)
    if features.left is not None:
        seen = seen & (key >= position - features.left)
    right = 0 if features.causal else features.right
    if right is not None:
        seen = seen & (key <= position + right)
    free = features._replace(causal=False, left=None, right=None)
    out, lse = dense(wide_q, wide_k, wide_v, free, mask=seen[:, None])
    if queries.starts is None:
        return out, lse
    out = unpadded_rows(out, queries.starts, q.shape[0])
    if lse is not None:
        lse = unpadded_rows(lse.transpose(1, 2), queries.starts, q.shape[0]).mT.contiguous()
    return out, lse
