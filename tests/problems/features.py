"""Calls of attention with features: their tensors, and float64 references."""

from typing import NamedTuple

import torch
from torch import Tensor

from flashtune import testing
from flashtune.request.call import Call
from flashtune.testing.inputs import inputs_of

# Lengths of sequences that are packed or in pages: empty ones, one key, on borders of pages and between.
QUERIES = (5, 0, 1, 16, 3)
KEYS = (40, 12, 0, 32, 17)


class Paged(NamedTuple):
    """A cache in pages and the sequences that lie in it; page 0 belongs to no sequence."""

    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    seqlens_k: Tensor


def starts(lengths: tuple[int, ...]) -> Tensor:
    """The offsets of contiguous sequences, and the end of the last one."""
    return torch.tensor((0, *lengths)).cumsum(0).to(torch.int32)


def paged(
    keys: tuple[int, ...] = KEYS,
    *,
    page_size: int = 16,
    kv_heads: int = 2,
    widths: tuple[int, int] = (32, 32),
    layout: str = "nhd",
) -> Paged:
    """Pages in a random order; what no sequence has is NaN, and what is behind its pages out of reach."""
    generator = torch.Generator().manual_seed(sum(keys))
    counts = [-(-length // page_size) for length in keys]
    order = torch.randperm(sum(counts), generator=generator) + 1
    table = torch.full((len(keys), max(counts)), -1_000_000, dtype=torch.int32)
    caches = [torch.full((sum(counts) + 1, page_size, kv_heads, width), torch.nan) for width in widths]
    for sequence, (count, pages) in enumerate(zip(counts, order.split(counts), strict=True)):
        table[sequence, :count] = pages
        for cache in caches:
            for number, page in enumerate(pages):
                rows = min(page_size, keys[sequence] - number * page_size)
                cache[page, :rows] = torch.randn(rows, kv_heads, cache.shape[3], generator=generator)
    if layout == "hnd":
        caches = [cache.transpose(1, 2).contiguous() for cache in caches]
    return Paged(caches[0], caches[1], table, torch.tensor(keys, dtype=torch.int32))


def expected(call: Call) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of a call in float64, in the call's own forms."""
    reference = testing.reference(inputs_of(call))
    return reference.out.exact, reference.lse.exact


def agrees(call: Call, result: Tensor | tuple[Tensor, Tensor], tolerance: float = 2e-5) -> None:
    """Checks an output, with a tolerance, and its log-sum-exp, which is float32, against float64."""
    out, lse = result
    right, right_lse = expected(call)
    torch.testing.assert_close(out.double(), right, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.double(), right_lse, atol=2e-5, rtol=2e-5)
