"""Tests of the append kernel, bitwise against torch."""

import mmap
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from flashtune import PagedKVCache
from flashtune.kv_cache import append
from flashtune.kv_cache.append import append_rows
from flashtune.kv_cache.layout import ENCODINGS, Pool

E4M3 = torch.float8_e4m3fn
PLAIN = [torch.float32, torch.bfloat16, torch.float16]
Pools = tuple[Pool, Pool]


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def by_torch(k: Tensor, v: Tensor, pools: Pools, slots: Tensor, patched: pytest.MonkeyPatch) -> None:
    with patched.context() as context:
        context.setattr(append, "interpreting", lambda: False)
        append_rows(k, v, *pools, slots)


def cache_pools(dtype: torch.dtype, growing: bool, layout: str, widths: tuple[int, int]) -> Pools:
    quantized = dtype in ENCODINGS
    cache = PagedKVCache(
        6,
        16,
        3,
        widths[0],
        value_head_dim=widths[1],
        layers=2,
        dtype=dtype,
        device="cpu",
        layout=layout,
        k_scale=torch.tensor([0.3, 1.0, 7.0]) if quantized and not growing else None,
        v_scale=0.7 if quantized and not growing and widths[1] else None,
        page_scales=growing,
    )
    return cache._keys.layer(1), cache._values.layer(1)


def appended_slots() -> Iterator[list[int]]:
    """Those of two sequences that grow side by side, as captured graphs see them: padded."""
    yield [*range(64, 70), -1, *range(14), -1]
    yield [*range(14, 37), 70, -1, -1]
    yield [37, 71]
    yield [38, 39, 40, *range(72, 82), -1]
    # Guessed tokens are written again; no query reads the rows behind them.
    yield [39, 40, *range(78, 82)]


@pytest.mark.sampled
@pytest.mark.parametrize(("layout", "widths"), [("nhd", (24, 16)), ("hnd", (64, 0))])
@pytest.mark.parametrize(
    ("dtype", "growing", "plain"),
    [
        *((dtype, False, dtype) for dtype in PLAIN),
        *((dtype, False, plain) for dtype in (E4M3, torch.int8) for plain in PLAIN),
        *((dtype, True, plain) for dtype in (E4M3, torch.int8) for plain in (torch.float32, torch.bfloat16)),
    ],
)
def test_kernel_matches_torch(
    dtype: torch.dtype,
    growing: bool,
    plain: torch.dtype,
    widths: tuple[int, int],
    layout: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernel, torch_too = (cache_pools(dtype, growing, layout, widths) for _ in range(2))
    generator = torch.Generator().manual_seed(widths[0])
    written: set[int] = set()
    for step, places in enumerate(appended_slots()):
        slots = torch.tensor(places)
        # Rows of a projection that gives queries, keys and values at once; they become larger.
        both = torch.randn(len(places), 3, sum(widths) + 8, generator=generator) * 4.0 ** (step - 2)
        k, v = both.to(plain)[..., 8:].split(widths, -1)
        append_rows(k, v, *kernel, slots)
        by_torch(k, v, torch_too, slots, monkeypatch)
        written.update(slot for slot in places if slot >= 0)
    rows = torch.tensor(sorted(written))
    for own, reference in zip(kernel, torch_too, strict=True):
        actual, right = (
            bits(pool.elements).view(*pool.elements.shape[:3], -1).transpose(1, 2).flatten(0, 1)
            for pool in (own, reference)
        )
        assert torch.equal(actual[rows], right[rows])
        untouched = torch.ones(len(actual), dtype=torch.bool).index_fill_(0, rows, False)
        assert not actual[untouched].any()
        if growing:
            assert own.scale is not None
            assert reference.scale is not None
            assert torch.equal(own.scale, reference.scale)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("dtype", [E4M3, torch.int8])
def test_every_16_bit_value_is_quantised_correctly(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    k = numbers.view(64, 1, 1024)
    actual, right = (torch.zeros(1, 1, 64, 1024, dtype=dtype) for _ in range(2))
    scale, slots = torch.ones(1, 1), torch.arange(64)
    append_rows(k, k[..., :0], Pool(actual, scale), Pool(actual[..., :0], scale), slots)
    by_torch(k, k[..., :0], (Pool(right, scale), Pool(right[..., :0], scale)), slots, monkeypatch)
    if dtype is torch.int8:
        assert torch.equal(actual, right)
        return
    nan = right.float().isnan()
    assert torch.equal(actual.float().isnan(), nan)
    assert torch.equal(bits(actual)[~nan], bits(right)[~nan])


@pytest.mark.parametrize("dtype", [E4M3, torch.int8])
def test_every_8_bit_code_is_requantised_correctly(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).float().view(1, 1, 256)
    if dtype is torch.int8:
        codes = codes.clamp(-127)
    pools = [Pool(torch.zeros(1, 1, 16, 256, dtype=dtype), torch.zeros(1, 1), True) for _ in range(2)]
    steps = ((codes, 0), (codes.abs().nan_to_num().clamp(max=448) * 3, 1))
    for rows, slot in steps:
        slots = torch.tensor([slot])
        empty = Pool(pools[0].elements[..., :0], pools[0].scale, True)
        append_rows(rows, rows[..., :0], pools[0], empty, slots)
        if slot == 0:
            first = pools[0].elements[0, 0, 0].float()
            torch.testing.assert_close(first, codes[0, 0], rtol=0, atol=0, equal_nan=True)
        empty = Pool(pools[1].elements[..., :0], pools[1].scale, True)
        by_torch(rows, rows[..., :0], (pools[1], empty), slots, monkeypatch)
    actual, right = (pool.elements[0, 0, :2].float() for pool in pools)
    assert pools[0].scale == pools[1].scale == 4
    torch.testing.assert_close(actual, right, rtol=0, atol=0, equal_nan=True)
    assert bool(actual[0].isnan().any()) is (dtype is E4M3), "what was no number stays none"


def test_offsets_of_more_than_31_bits() -> None:
    pages, width = 2**17, 1024
    # Memory that is there when it is written.
    room = torch.frombuffer(mmap.mmap(-1, pages * 16 * width), dtype=torch.int8)
    pool = Pool(room.view(pages, 1, 16, width), torch.ones(1, 1).expand(pages, 1))
    k = torch.arange(2.0).view(2, 1, 1).expand(2, 1, width) + 1
    slots = torch.tensor([pages * 16 - 1, 5])
    for growing in (False, True):
        scale = torch.ones(pages, 1) if growing else pool.scale
        keys = Pool(pool.elements, scale, growing)
        append_rows(k, k[..., :0], keys, Pool(pool.elements[..., :0], scale, growing), slots)
        # Scales of pages that are not begun are as they were.
        assert pool.elements[-1, 0, -1].unique().tolist() == [1]
        assert pool.elements[0, 0, 5].unique().tolist() == [2]
        room[-width:] = 0


def test_nothing_to_append() -> None:
    pool = Pool(torch.zeros(1, 1, 16, 8))
    k = torch.empty(0, 1, 8)
    append_rows(k, k, pool, pool, torch.empty(0, dtype=torch.int64))
    assert not pool.elements.any()


@pytest.mark.parametrize("growing", [False, True])
def test_slots_after_the_last_page_are_skipped(growing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    dtype = torch.int8 if growing else torch.float32
    memory = torch.full((3, 1, 16, 8), 7.0).to(dtype)
    scale = torch.ones(3, 1) if growing else None
    pools = Pool(memory[:2], scale, growing), Pool(memory[:2, ..., :0], scale, growing)
    rows, slots = torch.randn(3, 1, 8), torch.tensor([31, 32, 2**40])
    append_rows(rows, rows[..., :0], *pools, slots)
    by_torch(rows, rows[..., :0], pools, slots, monkeypatch)
    assert (memory[2] == 7).all()
    assert (memory[1, 0, 15] != 7).any()
