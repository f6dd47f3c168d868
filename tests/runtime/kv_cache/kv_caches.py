"""Caches of keys and values on the CPU, rows for them, and what attention would read of them."""

from typing import Any

import torch
from torch import Tensor

from flashtune import PagedKVCache

E4M3 = torch.float8_e4m3fn
HEADS, WIDTH, VALUE_WIDTH, LAYERS = 2, 8, 4, 2


def make(pages: int = 12, page_size: int = 16, **options: Any) -> PagedKVCache:
    options = {"value_head_dim": VALUE_WIDTH, "layers": LAYERS, "device": "cpu", **options}
    return PagedKVCache(pages, page_size, HEADS, WIDTH, **options)


def rows(tokens: int, width: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(tokens, HEADS, width, generator=generator)
    # Some rows are far larger than others.
    return (numbers * 10.0 ** torch.randint(-2, 3, (tokens, 1, 1), generator=generator)).to(dtype)


def read(cache: PagedKVCache, sequence: int, layer: int) -> tuple[Tensor, Tensor]:
    """Keys and values of a sequence as attention finds them: [length, kv_heads, width] in float32."""
    table, length = cache.block_table([sequence]), int(cache.lengths([sequence]))
    pages = table[0].long()
    stored = []
    for pool, scales in zip(cache.layer(layer), (cache.k_scales, cache.v_scales), strict=True):
        # Not every version of torch indexes 8-bit floats.
        numbers = pool.float()[pages]
        if scales is not None:
            numbers = numbers * scales[layer][pages][..., None, None]
        stored.append(numbers.transpose(1, 2).flatten(0, 1)[:length])
    return stored[0], stored[1]
