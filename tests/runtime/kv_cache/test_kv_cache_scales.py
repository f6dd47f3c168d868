"""Tests of 8-bit `PagedKVCache`: given scales and scales per page."""

from typing import Any

import pytest
import torch
from torch import Tensor

from flashtune import PagedKVCache
from flashtune.core.problem import KvScale
from flashtune.kv_cache.append import quantized
from flashtune.kv_cache.layout import Encoding
from flashtune.request.side_inputs import scale_kind
from tests.runtime.kv_cache.kv_caches import E4M3, HEADS, LAYERS, VALUE_WIDTH, WIDTH, make, read, rows


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
