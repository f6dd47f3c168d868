"""Writes rows of keys and values into the pages of a cache.

A row is written to its slot, page · page_size + row. Slots after the last page are skipped. So are negative
ones: a captured CUDA graph may have more rows than tokens. Quantised caches hold x / scale, clamped and
rounded to nearest even: in e4m3, or in int8 from -127 to 127.

If each head has a scale per page, the page's first rows determine its first value. When a later row needs
a larger scale, the scale is doubled until the row fits, and the earlier rows are rewritten. In e4m3 this
loses precision only below its normal numbers. An int8 row that is rounded repeatedly is off by at most one
step of the final scale instead of half a step: each step is twice the previous one.

On a GPU and in Triton's interpreter a kernel does this. This module does it for tensors on the CPU.
"""

import torch
from torch import Tensor

from flashtune.core.errors import ProblemError
from flashtune.kv_cache.layout import MIN_SCALE, WIDE_DTYPES, Encoding, Pool
from flashtune.launch.compilation import interpreting
from flashtune.request.tensor_checks import require_dense


def append_rows(k: Tensor, v: Tensor, keys: Pool, values: Pool, slots: Tensor) -> None:
    """Writes rows into the pools.

    Args:
        k: [tokens, kv_heads, head_dim], the last dimension contiguous. It has the pool's type, or any
            floating type if the pool is quantised.
        v: [tokens, kv_heads, value_head_dim], likewise.
        keys: The pool of the keys.
        values: The pool of the values.
        slots: Int64 [tokens], without duplicates. With page scales, the rows of a page are consecutive, and a
            page starts at its first row unless its first rows are already written.
    """
    if k.is_meta:
        return
    k, v = k.resolve_neg(), v.resolve_neg()
    if k.is_cuda or interpreting():
        from flashtune.kv_cache.append_kernel import launch

        launch(k, v, keys, values, slots)
        return
    kept = (slots >= 0) & (slots < keys.elements.shape[0] * keys.elements.shape[2])
    for rows, pool in ((k, keys), (v, values)):
        if rows.shape[2]:
            _write(rows.detach()[kept], pool, slots[kept])


def check_slots(slots: Tensor, device: torch.device) -> None:
    """Checks the type, shape and device of slots. Their values are not checked."""
    require_dense("slots", slots)
    if slots.dtype is not torch.int64 or slots.dim() != 1 or not slots.is_contiguous():
        raise ProblemError(
            f"slots are {slots.dtype} of shape {list(slots.shape)}: pass contiguous int64 [tokens]"
        )
    if slots.device != device:
        raise ProblemError(f"slots are on {slots.device} and the cache on {device}: move them there")


def check_rows(name: str, rows: Tensor, pool: Pool, tokens: int) -> None:
    """Checks that rows of keys or values match their pool."""
    require_dense(name, rows)
    elements = pool.elements
    shape = (tokens, elements.shape[1], elements.shape[3])
    if rows.shape != shape:
        raise ProblemError(f"{name} has shape {list(rows.shape)}: pass {list(shape)}, a row for each slot")
    if pool.scale is None and rows.dtype is not elements.dtype:
        raise ProblemError(f"{name} is {rows.dtype} and the cache {elements.dtype}: pass that type")
    if pool.scale is not None and rows.dtype not in WIDE_DTYPES:
        raise ProblemError(f"{name} is {rows.dtype}: pass bfloat16, float16 or float32 to a quantised cache")
    if rows.device != elements.device:
        raise ProblemError(f"{name} is on {rows.device} and the cache on {elements.device}: move it there")
    if shape[2] and rows.stride(2) != 1:
        raise ProblemError(f"the elements of a row of {name} lie apart: pass {name}.contiguous()")


def quantized(numbers: Tensor, encoding: Encoding) -> Tensor:
    """Returns quotients in 8 bits, in any shape. int8 has no NaN, so NaN becomes zero."""
    clamped = numbers.clamp(-encoding.largest, encoding.largest)
    if encoding is Encoding.E4M3:
        return clamped.to(torch.float8_e4m3fn)
    return clamped.nan_to_num(nan=0.0).round().to(torch.int8)


def _write(rows: Tensor, pool: Pool, slots: Tensor) -> None:
    """Writes rows [tokens, kv_heads, head_dim] with torch. No slot is negative."""
    size = pool.elements.shape[2]
    page, row = slots // size, slots % size
    if pool.growing:
        _grow(rows, pool, slots)
    # Put rows before heads, because pages and rows are indexed together.
    elements = pool.elements.transpose(1, 2)
    if pool.scale is None:
        elements[page, row] = rows
        return
    codes = quantized(rows.float() / pool.scale[page][..., None], pool.encoding)
    # Some versions of torch cannot index 8-bit floats.
    elements.view(torch.uint8)[page, row] = codes.view(torch.uint8)


def _grow(rows: Tensor, pool: Pool, slots: Tensor) -> None:
    """Sets the scales of pages that start here, and raises those of others if a row needs it."""
    assert pool.scale is not None
    size, largest = pool.elements.shape[2], pool.encoding.largest
    pages, number = (slots // size).unique(return_inverse=True)
    numbers = rows.float().abs()
    # [tokens, kv_heads]. Non-finite elements do not affect the scale.
    magnitudes = numbers.where(numbers.isfinite(), 0.0).amax(-1)
    amax = magnitudes.new_zeros(len(pages), rows.shape[1])
    amax.scatter_reduce_(0, number[:, None].expand_as(magnitudes), magnitudes, "amax")
    begins = torch.isin(pages, slots[slots % size == 0] // size)[:, None]
    # Doubling cannot raise a scale of zero.
    before = torch.where(begins, amax / largest, pool.scale[pages]).clamp(min=MIN_SCALE)
    scale = before
    while bool((short := ~begins & (amax > scale * largest)).any()):
        scale = torch.where(short, scale * 2, scale)
    shrink = before / scale
    if bool((shrink < 1).any()):
        contents = pool.elements.view(torch.uint8)[pages].view(pool.elements.dtype).float()
        smaller = quantized(contents * shrink[..., None, None], pool.encoding)
        pool.elements.view(torch.uint8)[pages] = smaller.view(torch.uint8)
    pool.scale[pages] = scale
