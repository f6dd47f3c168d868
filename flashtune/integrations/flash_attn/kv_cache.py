"""`flash_attn_with_kvcache` of all versions: new tokens are rotated, appended and attended to."""

from typing import NamedTuple

import torch
from torch import Tensor

from flashtune.core.errors import ProblemError
from flashtune.integrations.flash_attn import cache as caches
from flashtune.integrations.flash_attn.attend import Attended, dense
from flashtune.integrations.flash_attn.cache import Cache
from flashtune.integrations.flash_attn.features import Features
from flashtune.integrations.flash_attn.rotary import rotated, token_positions
from flashtune.integrations.flash_attn.sequences import attend_cache
from flashtune.integrations.flash_attn.token_rows import Sequences, as_lengths, sequence_numbers
from flashtune.runtime.value_checks import is_capturing, values_are_checked


class NewTokens(NamedTuple):
    """Tokens that a call appends to a cache, and the rotary embedding of them and the queries."""

    k: Tensor | None  # Their keys, [batch, tokens, heads, width], or packed [tokens, heads, width].
    v: Tensor | None  # Their values, likewise.
    starts: Tensor | None  # Offsets of packed tokens, int32 [batch + 1].
    cos: Tensor | None  # Cosines of the rotary embedding.
    sin: Tensor | None  # Sines, likewise.
    interleaved: bool  # Whether neighbouring columns are rotated together.
    # Positions of the first new tokens; by default, those behind the tokens in the cache.
    offsets: Tensor | None


def attend_and_append(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    new: NewTokens,
    lengths: int | Tensor | None,
    queries: Sequences,
    features: Features,
    *,
    batch_index: Tensor | None = None,
    skipped: Tensor | None = None,
    table: Tensor | None = None,
    qv: Tensor | None = None,
) -> Attended:
    """Returns the attention to a cache after new tokens were appended to it, without gradients.

    `lengths` is the number of tokens in the cache, None if it is full. `skipped` is the number of first
    tokens of the cache that do not count. The other arguments are those of `cache_of` and `attend_sequences`.
    """
    batch = q.shape[0] if queries.starts is None else queries.starts.numel() - 1
    cache = caches.cache_of(k_cache, v_cache, table, batch_index, batch)
    is_cached = table is not None or batch_index is not None or skipped is not None or qv is not None
    is_dense = not is_cached and queries.starts is None and queries.is_whole
    with torch.no_grad():
        if lengths is None and new.k is None and is_dense:
            return _dense(q, cache, None, features)
        if new.k is not None:
            if lengths is None:
                raise ProblemError(
                    "new keys are given without cache_seqlens: pass how many tokens the cache has"
                )
            check_room(lengths, new.k, new.starts, cache.capacity)
        present = cache.capacity if lengths is None else lengths
        if not isinstance(present, Tensor):
            present = torch.full((batch,), present, dtype=torch.int32, device=q.device)
        q, present = _appended(q, cache, new, present, queries, features)
        if is_dense:
            return _dense(q, cache, present, features)
        return attend_cache(q, cache, present, queries, features, skipped=skipped, qv=qv)


def check_room(lengths: int | Tensor, k: Tensor, starts: Tensor | None, capacity: int) -> None:
    """Checks that new tokens fit a cache, by numbers of the host, and by values that are checked."""
    if starts is None and k.shape[1] > capacity:
        raise ProblemError(f"k has {k.shape[1]} new tokens and the cache has room for {capacity}: pass fewer")
    values = next((tensor for tensor in (lengths, starts) if isinstance(tensor, Tensor)), torch.empty(0))
    if torch.compiler.is_compiling() or not values_are_checked(values.device) or is_capturing(values):
        return
    if not isinstance(lengths, Tensor):
        lengths = torch.tensor([lengths], device=values.device)
    ends = lengths + (k.shape[1] if starts is None else as_lengths(starts))
    wrong = ((lengths < 0) | (ends > capacity)).nonzero()
    if len(wrong):
        sequence = int(wrong[0])
        length = int(lengths.expand_as(ends)[sequence])
        raise ProblemError(
            f"cache_seqlens[{sequence}] is {length}, with {int(ends[sequence]) - length} new tokens, and the "
            f"cache has room for {capacity}: pass lengths from 0 that leave room for the new tokens"
        )


def _dense(q: Tensor, cache: Cache, lengths: Tensor | None, features: Features) -> Attended:
    """Returns the attention to a dense cache whose first sequences are those of the call."""
    k, v = cache.k[: q.shape[0]], cache.v[: q.shape[0]]
    if lengths is not None:
        lengths = lengths.to(torch.int32).contiguous()
    return dense(q, k, v, features, lengths=lengths)


def _appended(
    q: Tensor, cache: Cache, new: NewTokens, lengths: Tensor, queries: Sequences, features: Features
) -> tuple[Tensor, Tensor]:
    """Returns the rotated queries and the lengths with new tokens, which are in the cache then."""
    k, v, starts, cos, sin, interleaved, offsets = new
    if (k is None) != (v is None):
        raise ProblemError("only one of new keys and new values is given: pass both, or none")
    if (cos is None) != (sin is None):
        raise ProblemError("only one of rotary_cos and rotary_sin is given: pass both, or none")
    if k is None or v is None:
        if cos is not None:
            raise ProblemError("rotary_cos is given without new keys: pass k and v, or leave it out")
        return q, lengths
    tokens = k.shape[1] if starts is None else k.shape[0]
    if cos is not None and sin is not None:
        first = lengths if offsets is None else offsets
        k = rotated(k, cos, sin, token_positions(first, tokens, starts), interleaved)
        q = rotated(q, cos, sin, _query_positions(q, first, queries, features), interleaved)
    caches.append(cache, k, v, lengths, starts)
    added = tokens if starts is None else as_lengths(starts)
    return q, (lengths + added).clamp_(0, cache.capacity)


def _query_positions(q: Tensor, first: Tensor, queries: Sequences, features: Features) -> Tensor:
    """Returns the positions of queries. Without causal mask and window, all have that of the first one."""
    tokens = q.shape[-3]
    if features.is_positional:
        return token_positions(first, tokens, queries.starts)
    if queries.starts is None:
        return first[:, None]
    return first[sequence_numbers(queries.starts, tokens)]
