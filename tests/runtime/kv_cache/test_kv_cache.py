"""Tests of `PagedKVCache` on the CPU: positions of rows, tables, slots, scales of 8 bits and refusals."""

from typing import Any

import pytest
import torch
from torch import Tensor

from flashtune import PagedKVCache
from flashtune.core.errors import CacheFullError, ProblemError, UsageError
from flashtune.core.problem import KvScale
from flashtune.kv_cache.append import quantized
from flashtune.kv_cache.layout import Encoding
from flashtune.request.side_inputs import scale_kind
from tests.runtime.kv_cache.kv_caches import E4M3, HEADS, LAYERS, VALUE_WIDTH, WIDTH, make, read, rows


@pytest.mark.parametrize("layout", ["nhd", "hnd"])
@pytest.mark.parametrize("page_size", [4, 8, 16, 32, 64, 128, 256])
def test_rows_are_stored_at_page_and_offset(layout: str, page_size: int) -> None:
    cache = make(4, page_size, dtype=torch.float32, layout=layout)
    page = (page_size, HEADS) if layout == "nhd" else (HEADS, page_size)
    assert cache.keys.shape == (LAYERS, 4, *page, WIDTH)
    assert cache.values.shape == (LAYERS, 4, *page, VALUE_WIDTH)
    first, second = cache.add(), cache.add()
    cache.extend(first, 1)
    slots = cache.extend([second, first], [page_size + 1, 2])
    assert slots.dtype is torch.int64
    assert slots.tolist() == [*range(page_size, 2 * page_size), 2 * page_size, 1, 2]
    k, v = rows(page_size + 3, WIDTH, torch.float32), rows(page_size + 3, VALUE_WIDTH, torch.float32)
    cache.append(k, v, slots, layer=1)
    keys, values = cache.layer(1)
    assert keys.shape == (4, HEADS, page_size, WIDTH)
    assert values.shape == (4, HEADS, page_size, VALUE_WIDTH)
    assert keys.data_ptr() == cache.keys[1].data_ptr()
    assert torch.equal(keys[1].transpose(0, 1), k[:page_size])
    assert torch.equal(values[2, :, 0], v[page_size])
    assert torch.equal(keys[0, :, 1:3].transpose(0, 1), k[page_size + 1 :])
    assert not cache.keys[0].any()


def test_tables_lengths_and_slots_are_written_to_given_buffers() -> None:
    cache = make(dtype=torch.float32)
    first, second, empty = cache.add(), cache.add(), cache.add()
    cache.extend([first, second], [33, 5])
    assert cache.block_table([second, first, empty]).tolist() == [[3, 0, 0], [0, 1, 2], [0, 0, 0]]
    assert cache.block_table([empty]).shape == (1, 1)
    table = torch.full((4, 5), 9, dtype=torch.int32)
    lengths, slots = torch.full((4,), 9, dtype=torch.int32), torch.full((4,), 9)
    assert cache.block_table([first, second], out=table) is table
    assert table.tolist() == [[0, 1, 2, 0, 0], [3, 0, 0, 0, 0], [0] * 5, [0] * 5]
    assert cache.lengths([first, second], out=lengths).tolist() == [33, 5, 0, 0]
    assert cache.extend([second, first], 1, out=slots) is slots
    assert slots.tolist() == [3 * 16 + 5, 2 * 16 + 1, -1, -1]
    k, v = rows(4, WIDTH, torch.float32), rows(4, VALUE_WIDTH, torch.float32)
    cache.append(k, v, slots)
    assert torch.equal(read(cache, second, 0)[0][5], k[0])
    assert torch.equal(read(cache, first, 0)[1][33], v[1])
    assert int(cache.keys.count_nonzero()) == 2 * HEADS * WIDTH, "rows of negative slots go nowhere"
    assert cache.slots(first, 2).tolist() == [32, 33]


def test_mismatched_buffers_are_refused_without_side_effects() -> None:
    cache = make(dtype=torch.float32)
    sequence = cache.add()
    for out in (torch.zeros(2), torch.zeros(1, 3, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)):
        with pytest.raises(UsageError, match=r"out (is|of shape)"):
            cache.extend(sequence, 3, out=out)
    assert (cache.length(sequence), cache.pages_used) == (0, 0)
    cache.extend(sequence, 17)
    with pytest.raises(UsageError, match=r"out of shape \[1, 1\] is too small: \[1, 2\] are needed"):
        cache.block_table([sequence], out=torch.zeros(1, 1, dtype=torch.int32))
    with pytest.raises(UsageError, match=r"pass torch.int32 of 1 on cpu"):
        cache.lengths([sequence], out=torch.zeros(1, dtype=torch.int64))


def test_usage_statistics() -> None:
    cache = make(dtype=torch.float32)
    token = LAYERS * HEADS * (WIDTH + VALUE_WIDTH) * 4
    assert (cache.token_bytes, cache.utilisation, cache.bytes_used) == (token, 1.0, 0)
    parent = cache.add()
    cache.extend(parent, 24)
    fork = cache.fork(parent)
    assert (cache.pages_used, cache.pages_free) == (2, 10)
    assert cache.utilisation == 24 / 32
    cache.extend(fork, 4)
    assert cache.pages_used == 3
    assert cache.utilisation == (16 + 8 + 12) / 48
    assert cache.bytes_used == 48 * token
    assert cache.contiguous_bytes(100) == 200 * token
    assert PagedKVCache(1, 16, 1, 8, dtype=torch.int8, device="cpu").token_bytes == 16


def test_a_full_cache_is_refused_without_side_effects() -> None:
    cache = make(3)
    first, second = cache.add(), cache.add()
    cache.extend(first, 20)
    with pytest.raises(
        CacheFullError, match=r"^2 pages of 16 tokens are needed and 1 of 3 are free: free or "
    ):
        cache.extend([first, second], [13, 1])
    fork = cache.fork(first)
    with pytest.raises(CacheFullError, match=r"^3 pages"):
        # The copy of the shared page counts, and the last to grow needs none.
        cache.extend([first, fork, second], [1, 13, 1])
    assert (cache.pages_free, cache.length(first), cache.length(second)) == (1, 20, 0)
    cache.extend([first, fork], [1, 1])
    assert cache.pages_free == 0
    cache.free(fork)
    assert cache.add() == 3, "numbers are never given twice"


def test_values_that_are_columns_of_keys() -> None:
    cache = make(dtype=torch.float32, value_head_dim=0)
    sequence = cache.add()
    k = rows(20, WIDTH, torch.float32)
    cache.append(k, None, cache.extend(sequence, 20))
    assert torch.equal(read(cache, sequence, 0)[0], k)
    assert cache.values.numel() == 0


def test_cache_has_no_gradients() -> None:
    cache = make(dtype=torch.float32)
    k = rows(1, WIDTH, torch.float32).requires_grad_()
    cache.append(k, rows(1, VALUE_WIDTH, torch.float32), cache.extend(cache.add(), 1))
    assert not cache.keys.requires_grad


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"page_size": 48}, "pages of 48 tokens are not supported: make them one of 1, 2, 4, 8, 16, 32"),
        ({"pages": 0}, "pages cannot be 0: pass a number of pages from 1 to"),
        ({"layers": 0}, "layers cannot be 0"),
        ({"value_head_dim": 2000}, "value_head_dim cannot be 2000: pass from 1 to 1024, or 0"),
        ({"dtype": torch.float64}, "a cache of torch.float64 is not supported: make it one of bfloat16"),
        ({"layout": "hdn"}, "layout cannot be 'hdn'"),
        ({"k_scale": 1.0}, "scales belong to caches of float8_e4m3fn or int8, not torch.bfloat16"),
        ({"page_scales": True}, "scales belong to caches of"),
        ({"dtype": E4M3, "page_scales": True, "v_scale": 1.0}, "leave k_scale and v_scale out"),
        ({"dtype": E4M3, "k_scale": torch.ones(3)}, r"a scale of shape \[3\] .*: pass one of \[1\], \[2\]"),
        ({"dtype": E4M3, "value_head_dim": 0, "v_scale": 2.0}, "k_scale is theirs too"),
        ({"dtype": E4M3, "k_scale": 0.0}, "not a positive number"),
        ({"dtype": E4M3, "k_scale": torch.tensor([1.0, torch.nan])}, "not a positive number"),
    ],
)
def test_invalid_cache_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make(**options)


def test_mismatched_rows_are_refused() -> None:
    cache = make(dtype=torch.float16)
    k, v = rows(3, WIDTH, torch.float16), rows(3, VALUE_WIDTH, torch.float16)
    slots = cache.extend(cache.add(), 3)
    refused: list[tuple[Tensor, Tensor | None, Tensor, str]] = [
        (k[:2], v, slots, r"k has shape \[2, 2, 8\]: pass \[3, 2, 8\]"),
        (k, None, slots, r"v has shape \[3, 2, 0\]: pass \[3, 2, 4\]"),
        (k, v.float(), slots, "v is torch.float32 and the cache torch.float16"),
        (k.mT.contiguous().mT, v, slots, "the elements of a row of k lie apart"),
        (k, v, slots.int(), "slots are torch.int32"),
        (k, v.to("meta"), slots, "v is on meta and the cache on cpu"),
        (k, v, slots.to("meta"), "slots are on meta"),
    ]
    for keys, values, places, message in refused:
        with pytest.raises(ProblemError, match=message):
            cache.append(keys, values, places)
    with pytest.raises(ProblemError, match="there is no layer 2: the cache has 2"):
        cache.append(k, v, slots, layer=2)
    with pytest.raises(ProblemError, match="there is no layer -1"):
        cache.append(k, v, slots, layer=-1)
    eight = make(dtype=torch.int8)
    with pytest.raises(ProblemError, match=r"k is torch.int8: pass bfloat16, float16 or float32"):
        eight.append(k.to(torch.int8), v, eight.extend(eight.add(), 3))


@pytest.mark.parametrize(
    ("scale", "kind", "shape"),
    [
        (None, KvScale.TENSOR, (1, 1)),
        (0.5, KvScale.TENSOR, (1, 1)),
        (torch.tensor([0.5]), KvScale.TENSOR, (1, 1)),
        (torch.tensor([0.5, 2.0]), KvScale.HEAD, (1, HEADS)),
        (torch.tensor([[0.5], [1.0]]), KvScale.TENSOR, (LAYERS, 1)),
        (torch.tensor([[0.5, 1.0], [2.0, 3.0]]), KvScale.HEAD, (LAYERS, HEADS)),
    ],
)
def test_given_scales(scale: Tensor | float | None, kind: KvScale, shape: tuple[int, int]) -> None:
    cache = make(dtype=E4M3, k_scale=scale)
    right = torch.as_tensor(1.0 if scale is None else scale).reshape(shape)[:, None].expand(LAYERS, 12, HEADS)
    assert cache.kv_scale is kind
    assert cache.k_scales is not None
    assert torch.equal(cache.k_scales, right)
    assert cache.k_scales.stride(1) == 0, "pages share them"
    sequence = cache.add()
    k = rows(3, WIDTH, torch.bfloat16) * 1000
    cache.append(k, rows(3, VALUE_WIDTH, torch.float16), cache.extend(sequence, 3), layer=1)
    stored = cache.layer(1)[0][0, :, :3].transpose(0, 1)
    numbers = (k.float() / right[1, 0][:, None]).clamp(-448, 448)
    assert torch.equal(stored.float(), numbers.to(E4M3).float())
    assert float(stored.float().abs().max()) == 448


@pytest.mark.parametrize("dtype", [E4M3, torch.int8])
def test_page_scales_follow_their_rows(dtype: torch.dtype) -> None:
    largest = 448 if dtype is E4M3 else 127
    cache = PagedKVCache(4, 16, 1, 2, dtype=dtype, device="cpu", page_scales=True)
    assert cache.kv_scale is KvScale.PAGE
    assert cache.k_scales is not None
    sequence = cache.add()

    def append(*values: float) -> None:
        k = torch.tensor(values).reshape(-1, 1, 1).expand(-1, -1, 2).contiguous()
        cache.append(k, k, cache.extend(sequence, len(values)))

    scale = torch.tensor(1.0) / largest
    append(1.0, -0.5)
    assert torch.equal(cache.k_scales[0, 0, 0], scale)
    append(0.1)
    assert torch.equal(cache.k_scales[0, 0, 0], scale), "smaller rows change nothing"
    append(5.0)
    assert torch.equal(cache.k_scales[0, 0, 0], 8 * scale), "the least power of two that fits"
    stored = read(cache, sequence, 0)[0][:, 0, 0]
    torch.testing.assert_close(stored, torch.tensor([1.0, -0.5, 0.1, 5.0]), rtol=2**-4, atol=8 / largest)
    fork = cache.fork(sequence)
    append(100.0)
    torch.testing.assert_close(read(cache, sequence, 0)[0][:4, 0, 0], stored, rtol=2**-4, atol=128 / largest)
    assert torch.equal(read(cache, fork, 0)[0][:, 0, 0], stored), "a copy has a scale of its own"
    cache.truncate(sequence, 0)
    append(0.25)
    assert torch.equal(cache.k_scales[0, int(cache.block_table([sequence])), 0], scale / 4), (
        "a page begins anew"
    )
    append(torch.inf)
    assert read(cache, sequence, 0)[0][1, 0, 0] == torch.tensor(largest) * (scale / 4), (
        "clamped, and asks for nothing"
    )


@pytest.mark.parametrize("scales", [{"k_scale": torch.tensor([0.5, 2.0])}, {"page_scales": True}])
def test_values_that_are_columns_of_keys_share_scales(scales: dict[str, Any]) -> None:
    cache = make(dtype=E4M3, value_head_dim=0, **scales)
    kind = KvScale.PAGE if "page_scales" in scales else KvScale.HEAD
    sequence = cache.add()
    for layer, slots in enumerate([cache.extend(sequence, 3)] * LAYERS):
        cache.append(rows(3, WIDTH, torch.float32) * (layer + 1), None, slots, layer=layer)
    assert cache.kv_scale is kind
    assert cache.k_scales is not None
    assert cache.v_scales is cache.k_scales
    assert cache.k_scales.dtype is torch.float32
    assert scale_kind(cache.k_scales[1], cache.v_scales[1], True, 12, HEADS) is kind


def test_scales_are_float32_under_any_default_dtype() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        cache = make(dtype=torch.int8, page_scales=True)
    finally:
        torch.set_default_dtype(torch.float32)
    assert cache.k_scales is not None
    assert cache.k_scales.dtype is torch.float32


def test_page_of_zeros_gets_its_scale_from_later_rows() -> None:
    cache = PagedKVCache(2, 16, 1, 2, dtype=torch.int8, device="cpu", page_scales=True)
    sequence = cache.add()
    for numbers in (torch.zeros(2, 1, 2), torch.full((1, 1, 2), 3e-4)):
        cache.append(numbers, numbers, cache.extend(sequence, len(numbers)))
    torch.testing.assert_close(
        read(cache, sequence, 0)[0][:, 0, 0], torch.tensor([0, 0, 3e-4]), rtol=0.02, atol=0
    )


def test_nan_is_preserved_by_types_that_have_it() -> None:
    assert quantized(torch.tensor([torch.nan]), Encoding.E4M3).float().isnan().all()
    assert quantized(torch.tensor([torch.nan, 0.5, 1.5, -200.0]), Encoding.INT8).tolist() == [0, 0, 2, -127]
