"""The kernel that writes rows into pages, on a GPU or in Triton's interpreter; see `append`.

It computes the bits of e4m3 itself, because not every GPU can convert to and from it.

Notation
  stride_kt, stride_kh                  elements between tokens and heads of k; likewise for v
  stride_keys_p, _h, _s                 between pages, heads and rows of its pool; likewise for values
  stride_k_scale_p, stride_k_scale_h    between pages and heads of its scales
"""

# Triton passes untyped arguments: addresses, numbers and constants.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# Triton compiles code after an `if` that returns, so `else` is necessary. Only NaN differs from itself.
# ruff: noqa: ANN001, ANN201, PLR0124, RET505

import contextlib
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashtune.kv_cache.layout import MIN_SCALE, Encoding, Pool
from flashtune.launch.compilation import FP_FUSION, interpreting, launching

PLAIN, E4M3 = tl.constexpr(Encoding.PLAIN.value), tl.constexpr(Encoding.E4M3.value)
LARGEST_E4M3, LARGEST_INT8 = tl.constexpr(Encoding.E4M3.largest), tl.constexpr(Encoding.INT8.largest)
LEAST = tl.constexpr(MIN_SCALE)
# Adding and subtracting 1.5 · 2^23 rounds to the nearest even integer.
WHOLE = tl.constexpr(12582912.0)
# The last bit of 2^14 is 2^-9, the smallest step of e4m3. A sum has a number below 2^-6 in its low bits.
STEP_BASE = tl.constexpr(16384.0)
STEP_BASE_BITS = tl.constexpr(0x46800000)
# Elements of a tile.
TILE = 2048


@triton.jit
def encode(numbers, encoding: tl.constexpr):
    """Returns float32 quotients as elements of a pool."""
    if encoding == E4M3:
        bits = numbers.to(tl.int32, bitcast=True)
        magnitude = tl.minimum(tl.abs(numbers), LARGEST_E4M3)
        magnitude_bits = magnitude.to(tl.int32, bitcast=True)
        # Add half a unit of three mantissa bits, less one if even; 960 makes the exponent bias 7.
        normal = ((magnitude_bits + 0x7FFFF + ((magnitude_bits >> 20) & 1)) >> 20) - 960
        small = (magnitude + STEP_BASE).to(tl.int32, bitcast=True) - STEP_BASE_BITS
        code = tl.where(magnitude < 0.015625, small, normal)
        code = tl.where(numbers == numbers, code, 0x7F)
        return (code | ((bits >> 24) & 0x80)).to(tl.uint8)
    else:
        known = tl.where(numbers == numbers, numbers, 0.0)
        clamped = tl.minimum(tl.maximum(known, -LARGEST_INT8), LARGEST_INT8)
        return ((clamped + WHOLE) - WHOLE).to(tl.int8)


@triton.jit
def decode(elements, encoding: tl.constexpr):
    """Returns elements of a pool as float32 quotients."""
    if encoding == E4M3:
        code = elements.to(tl.int32)
        exponent, mantissa = (code >> 3) & 15, code & 7
        normal = (((exponent + 120) << 23) | (mantissa << 20)).to(tl.float32, bitcast=True)
        magnitude = tl.where(exponent == 0, mantissa.to(tl.float32) * 0.001953125, normal)
        magnitude = tl.where((code & 0x7F) == 0x7F, float("nan"), magnitude)
        signed = magnitude.to(tl.int32, bitcast=True) | ((code & 0x80) << 24)
        return signed.to(tl.float32, bitcast=True)
    else:
        return elements.to(tl.float32)


@triton.jit
def load_rows(rows, tokens, mask, stride_t, head_dim: tl.constexpr, block_dim: tl.constexpr):
    """Returns the rows of some tokens, [tokens, block_dim]."""
    columns = tl.arange(0, block_dim)
    return tl.load(
        rows + tokens[:, None] * stride_t + columns[None, :],
        mask=mask[:, None] & (columns < head_dim)[None, :],
        other=0.0,
    )


@triton.jit
def store_rows(numbers, scale, places, mask, encoding: tl.constexpr, head_dim: tl.constexpr):
    """Writes rows [tokens, block_dim] to the addresses of their first elements, [tokens, 1]."""
    columns = tl.arange(0, numbers.shape[1])
    if encoding != PLAIN:
        numbers = encode(tl.div_rn(numbers.to(tl.float32), scale), encoding)
    tl.store(places + columns[None, :], numbers, mask=mask[:, None] & (columns < head_dim)[None, :])


@triton.jit
def append_tile(
    rows, pool, scales, tokens, slots, head,
    stride_t, stride_h, stride_p, stride_ph, stride_ps, stride_scale_p, stride_scale_h,
    page_size: tl.constexpr, encoding: tl.constexpr, head_dim: tl.constexpr, block_dim: tl.constexpr,
):  # fmt: skip
    """Writes one head's rows of some tokens to any pages, with existing scales."""
    mask = slots >= 0
    page, row = slots // page_size, slots % page_size
    numbers = load_rows(rows + head * stride_h, tokens, mask, stride_t, head_dim, block_dim)
    scale = 1.0
    if encoding != PLAIN:
        scale = tl.load(scales + page * stride_scale_p + head * stride_scale_h, mask=mask, other=1.0)[:, None]
    places = pool + head * stride_ph + (page * stride_p + row * stride_ps)[:, None]
    store_rows(numbers, scale, places, mask, encoding, head_dim)


@triton.jit
def append_run(
    rows, pool, scales, token, count, slot, head,
    stride_t, stride_h, stride_p, stride_ph, stride_ps, stride_scale_p, stride_scale_h,
    page_size: tl.constexpr, encoding: tl.constexpr, head_dim: tl.constexpr, block_dim: tl.constexpr,
    tile_rows: tl.constexpr,
):  # fmt: skip
    """Writes one head's rows of `count` tokens to consecutive rows of one page, and sets the page's scale."""
    largest: tl.constexpr = LARGEST_E4M3 if encoding == E4M3 else LARGEST_INT8
    page, row = slot // page_size, slot % page_size
    rows += head * stride_h + token * stride_t
    pool += page * stride_p + head * stride_ph
    scales += page * stride_scale_p + head * stride_scale_h
    tile, columns = tl.arange(0, tile_rows), tl.arange(0, block_dim)
    amax = tl.full((), 0.0, tl.float32)
    for start in range(0, count, tile_rows):
        numbers = load_rows(rows, start + tile, start + tile < count, stride_t, head_dim, block_dim)
        magnitudes = tl.abs(numbers.to(tl.float32))
        # Non-finite elements do not affect the scale.
        finite = tl.where(magnitudes < float("inf"), magnitudes, 0.0)
        amax = tl.maximum(amax, tl.max(tl.max(finite, 1), 0))
    scale = tl.maximum(tl.div_rn(amax, largest), LEAST)
    if row > 0:
        # Doubling cannot raise a scale of zero.
        before = tl.maximum(tl.load(scales), LEAST)
        # All threads must read the scale before one writes it.
        tl.debug_barrier()
        scale = before
        while amax > scale * largest:
            scale *= 2.0
        if scale > before:
            for old in range(0, row, tile_rows):
                old_places = pool + (old + tile)[:, None] * stride_ps + columns[None, :]
                old_mask = (old + tile < row)[:, None] & (columns < head_dim)[None, :]
                quotients = decode(tl.load(old_places, mask=old_mask, other=0), encoding)
                smaller = encode(quotients * tl.div_rn(before, scale), encoding)
                tl.store(old_places, smaller, mask=old_mask)
    tl.store(scales, scale)
    for start in range(0, count, tile_rows):
        mask = start + tile < count
        numbers = load_rows(rows, start + tile, mask, stride_t, head_dim, block_dim)
        places = pool + (row + start + tile)[:, None] * stride_ps
        store_rows(numbers, scale, places, mask, encoding, head_dim)


@triton.jit(do_not_specialize=["tokens", "room_of_pool"])
def append(
    k, v, keys, values, k_scale, v_scale, slots, tokens, room_of_pool,
    stride_kt, stride_kh, stride_keys_p, stride_keys_h, stride_keys_s, stride_k_scale_p, stride_k_scale_h,
    stride_vt, stride_vh, stride_values_p, stride_values_h, stride_values_s,
    stride_v_scale_p, stride_v_scale_h,
    page_size: tl.constexpr, encoding: tl.constexpr, growing: tl.constexpr, tile_rows: tl.constexpr,
    head_dim: tl.constexpr, block_dim: tl.constexpr, value_dim: tl.constexpr, block_value_dim: tl.constexpr,
):  # fmt: skip
    """Has a program for each head and `tile_rows` tokens, or for the first token of each run in a page.

    Slots that are negative or not less than `room_of_pool`, the rows of the pool, are skipped.
    """
    head = tl.program_id(1).to(tl.int64)
    if growing:
        token = tl.program_id(0).to(tl.int64)
        slot = tl.load(slots + token)
        slot = tl.where(slot < room_of_pool, slot, -1)
        previous = tl.load(slots + token - 1, mask=token > 0, other=-2)
        if (slot >= 0) & ((slot % page_size == 0) | (previous != slot - 1)):
            # The rows up to the end of the page that have consecutive slots.
            steps = tl.arange(0, page_size)
            room = (steps < page_size - slot % page_size) & (token + steps < tokens)
            follows = tl.load(slots + token + steps, mask=room, other=-1) == slot + steps
            count = tl.min(tl.where(follows, page_size, steps), 0)
            append_run(
                k, keys, k_scale, token, count, slot, head,
                stride_kt, stride_kh, stride_keys_p, stride_keys_h, stride_keys_s,
                stride_k_scale_p, stride_k_scale_h,
                page_size, encoding, head_dim, block_dim, tile_rows,
            )  # fmt: skip
            if value_dim > 0:
                append_run(
                    v, values, v_scale, token, count, slot, head,
                    stride_vt, stride_vh, stride_values_p, stride_values_h, stride_values_s,
                    stride_v_scale_p, stride_v_scale_h,
                    page_size, encoding, value_dim, block_value_dim, tile_rows,
                )  # fmt: skip
    else:
        some = tl.program_id(0).to(tl.int64) * tile_rows + tl.arange(0, tile_rows)
        places = tl.load(slots + some, mask=some < tokens, other=-1)
        places = tl.where(places < room_of_pool, places, -1)
        append_tile(
            k, keys, k_scale, some, places, head,
            stride_kt, stride_kh, stride_keys_p, stride_keys_h, stride_keys_s,
            stride_k_scale_p, stride_k_scale_h,
            page_size, encoding, head_dim, block_dim,
        )  # fmt: skip
        if value_dim > 0:
            append_tile(
                v, values, v_scale, some, places, head,
                stride_vt, stride_vh, stride_values_p, stride_values_h, stride_values_s,
                stride_v_scale_p, stride_v_scale_h,
                page_size, encoding, value_dim, block_value_dim,
            )  # fmt: skip


def launch(k: Tensor, v: Tensor, keys: Pool, values: Pool, slots: Tensor) -> None:
    """Launches the kernel on the current stream of the tensors' device; see `append.append_rows`."""
    tokens, heads, head_dim = k.shape
    if not tokens:
        return
    value_dim = v.shape[2]
    blocks = triton.next_power_of_2(head_dim), triton.next_power_of_2(max(1, value_dim))
    tile_rows = max(1, TILE // max(blocks))
    grid = (tokens if keys.growing else triton.cdiv(tokens, tile_rows), heads)
    scales = [k if pool.scale is None else pool.scale for pool in (keys, values)]
    with torch.cuda.device_of(k), launching() if interpreting() else contextlib.nullcontext():
        queue: Any = append[grid]
        queue(
            k, v, _elements(keys), _elements(values), *scales, slots, tokens,
            keys.elements.shape[0] * keys.elements.shape[2],
            *_strides(k, keys), *_strides(v, values),
            page_size=keys.elements.shape[2], encoding=keys.encoding.value, growing=keys.growing,
            tile_rows=tile_rows, head_dim=head_dim, block_dim=blocks[0],
            value_dim=value_dim, block_value_dim=blocks[1], enable_fp_fusion=FP_FUSION,
        )  # fmt: skip


def _elements(pool: Pool) -> Tensor:
    return pool.elements.view(torch.uint8) if pool.encoding is Encoding.E4M3 else pool.elements


def _strides(rows: Tensor, pool: Pool) -> tuple[int, ...]:
    scale = (0, 0) if pool.scale is None else pool.scale.stride()
    return *rows.stride()[:2], *pool.elements.stride()[:3], *scale
