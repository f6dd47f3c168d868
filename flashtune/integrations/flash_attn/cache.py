"""KV caches of flash_attn: the new tokens that a call appends, and the pages that flashtune's kernels read.

Every cache is pages of tokens and a table of the pages of each sequence. A dense cache has one page for each
sequence. Kernels take pages of up to 256 tokens in powers of two. Other pages are views of several such
pages. They are gathered into a copy if their rows have no common stride, or if many queries read small
pages. All happens on the device.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from flashtune.integrations.flash_attn.attend import E4M3
from flashtune.integrations.flash_attn.token_rows import sequence_numbers, take

LARGEST_PAGE = 256
# Number of keys of which a gathered copy has a multiple.
GATHERED_PAGE = 64


class Cache(NamedTuple):
    """A cache."""

    k: Tensor  # Pages of keys, [pages, page size, kv_heads, width].
    v: Tensor  # Pages of values.
    table: Tensor  # The pages of each sequence in order, int32 [batch, columns].

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.k.shape[1]

    @property
    def capacity(self) -> int:
        """Tokens of the longest sequence that the table can hold."""
        return self.table.shape[1] * self.page_size


def cache_of(k: Tensor, v: Tensor, table: Tensor | None, batch_index: Tensor | None, batch: int) -> Cache:
    """Returns a cache.

    Args:
        k: Keys, [sequences, capacity, kv_heads, width], or pages with a table.
        v: Values, likewise.
        table: Pages of each sequence, int32 [batch, columns]; None for a dense cache.
        batch_index: For each sequence of the call its row in the dense cache or the table, int32 [batch].
        batch: Number of sequences of the call.
    """
    if table is not None:
        return Cache(k, v, table if batch_index is None else table[batch_index.long()])
    if batch_index is None:
        batch_index = torch.arange(batch, dtype=torch.int32, device=k.device)
    return Cache(k, v, batch_index[:, None])


def append(cache: Cache, k: Tensor, v: Tensor, lengths: Tensor, starts: Tensor | None) -> None:
    """Writes new tokens behind the present ones, in place. Tokens that do not fit are dropped.

    Args:
        cache: The cache.
        k: New keys, [batch, tokens, kv_heads, width]; packed [tokens, kv_heads, width] with `starts`.
        v: New values, likewise.
        lengths: Number of present tokens of each sequence, int32 [batch].
        starts: Offsets of the packed tokens, int32 [batch + 1].
    """
    if not k.shape[0] or not k.shape[-3] or not cache.capacity or not cache.k.shape[0]:
        return
    if starts is None:
        rows = torch.arange(k.shape[0] * k.shape[1], device=k.device)
        sequence = rows // k.shape[1]
        places = lengths.long()[sequence] + rows % k.shape[1]
        k, v = k.flatten(0, 1), v.flatten(0, 1)
        fits = places < cache.capacity
    else:
        rows = torch.arange(k.shape[0], device=k.device)
        sequence = sequence_numbers(starts, k.shape[0])
        places = (lengths - starts[:-1]).long()[sequence] + rows
        fits = (places < cache.capacity) & (rows < starts[-1])
    places = places.clamp(-1, cache.capacity - 1)
    page = cache.table[sequence, places.clamp(min=0) // cache.page_size].long()
    fits &= (places >= 0) & (page >= 0) & (page < cache.k.shape[0])
    # Other rows repeat the first token that fits, so that they write the same value again.
    rows = torch.where(fits, rows, fits.to(torch.uint8).argmax())
    any_fits = fits[rows[:1]]
    page, slot = torch.where(any_fits, page[rows], 0), (places % cache.page_size)[rows]
    for pages, tokens in ((cache.k, take(k, rows)), (cache.v, take(v, rows))):
        # torch cannot index 8-bit floats, so their bytes are written.
        kind = torch.uint8 if pages.dtype is E4M3 else pages.dtype
        stored, new = pages.view(kind), tokens.to(pages.dtype).view(kind)
        # If none fits, all rows write back a value that is there.
        stored[page, slot] = torch.where(any_fits[:, None, None], new, stored[page, slot])


def kernel_pages(cache: Cache) -> Cache | None:
    """Returns the cache with pages that kernels take, without a copy; None if a copy is needed."""
    size = cache.page_size
    part = min(size & -size, LARGEST_PAGE)
    if not part:
        return None
    if part == size:
        return cache
    parts = size // part
    views = [_divided(pages, parts, part) for pages in (cache.k, cache.v)]
    if views[0] is None or views[1] is None:
        return None
    offsets = torch.arange(parts, dtype=torch.int32, device=cache.table.device)
    return Cache(views[0], views[1], (cache.table[:, :, None] * parts + offsets).flatten(1))


def _divided(pages: Tensor, parts: int, size: int) -> Tensor | None:
    """Returns each page as several smaller ones; None if their addresses have no common stride."""
    count, tokens, heads, width = pages.shape
    page, token, head, column = pages.stride()
    if count > 1 and page != tokens * token:
        return None
    return pages.as_strided((count * parts, size, heads, width), (size * token, token, head, column))


def gathered(cache: Cache, skipped: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns copies of the keys and values of each sequence, [batch, tokens, kv_heads, width].

    `skipped` is the number of first tokens of each sequence to leave out, int32 [batch]. The number of tokens
    is the capacity, rounded up to a multiple of 64. Tokens after the last one are any finite or stored ones.
    """
    tokens = -(-cache.capacity // GATHERED_PAGE) * GATHERED_PAGE
    places = torch.arange(tokens, device=cache.k.device)[None]
    if skipped is not None:
        places = places + skipped.long()[:, None]
    places = places.expand(cache.table.shape[0], -1).clamp(0, max(cache.capacity - 1, 0))
    # Entries of a table after a sequence's last page may have any value.
    page = cache.table.long().gather(1, places // cache.page_size).clamp_(0, cache.k.shape[0] - 1)
    slot = places % cache.page_size
    k, v = (
        pages.view(torch.uint8)[page, slot].view(E4M3) if pages.dtype is E4M3 else pages[page, slot]
        for pages in (cache.k, cache.v)
    )
    return k, v


def as_cache(k: Tensor, v: Tensor) -> Cache:
    """Returns a dense cache whose sequences are those of the call."""
    return cache_of(k, v, None, None, k.shape[0])
