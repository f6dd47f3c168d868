"""`PagedKVCache` on the CPU: what attention would read of it, against plain lists of rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor

import flashtune
from flashtune import PagedKVCache
from flashtune.append import Encoding, quantized
from flashtune.errors import CacheFullError, FlashtuneError, ProblemError, UsageError
from flashtune.features import KvScale
from flashtune.side_inputs import scale_kind

E4M3 = torch.float8_e4m3fn
HEADS, WIDTH, VALUE_WIDTH, LAYERS = 2, 8, 4, 2
CASES: list[dict[str, Any]] = [
    {"dtype": torch.float32, "layout": "hnd"},
    {"dtype": torch.bfloat16},
    {"dtype": E4M3, "k_scale": 0.5, "v_scale": torch.tensor([0.25, 2.0])},
    {"dtype": torch.int8, "page_scales": True, "layout": "hnd"},
    {"dtype": E4M3, "page_scales": True},
]


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
    found = []
    for pool, scales in zip(cache.layer(layer), (cache.k_scales, cache.v_scales), strict=True):
        # Not every version of torch indexes 8-bit floats.
        numbers = pool.float()[pages]
        if scales is not None:
            numbers = numbers * scales[layer][pages][..., None, None]
        found.append(numbers.transpose(1, 2).flatten(0, 1)[:length])
    return found[0], found[1]


class AgainstRows(RuleBasedStateMachine):
    """Every sequence must read its own rows back from every layer, whatever others do."""

    case: dict[str, Any]

    @initialize()
    def begin(self) -> None:
        case = self.case
        self.cache = make(**case)
        self.given = torch.float32 if self.cache.kv_scale else case["dtype"]
        self.expected: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self.seed = 0

    def some(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.expected)))

    @rule()
    def add(self) -> None:
        sequence = self.cache.add()
        self.expected[sequence] = [
            (torch.empty(0, HEADS, WIDTH), torch.empty(0, HEADS, VALUE_WIDTH)) for _ in range(LAYERS)
        ]

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = self.some(data)
        self.expected[self.cache.fork(parent)] = list(self.expected[parent])

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        sequence = self.some(data)
        self.cache.free(sequence)
        del self.expected[sequence]

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        sequence = self.some(data)
        length = data.draw(st.integers(0, self.cache.length(sequence)))
        self.cache.truncate(sequence, length)
        self.expected[sequence] = [(k[:length], v[:length]) for k, v in self.expected[sequence]]

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def append(self, data: st.DataObject) -> None:
        sequences = data.draw(st.lists(st.sampled_from(sorted(self.expected)), unique=True, min_size=1))
        counts = [data.draw(st.integers(0, 20)) for _ in sequences]
        before = self.state()
        try:
            slots = self.cache.extend(sequences, counts)
        except CacheFullError:
            assert self.state() == before
            return
        for layer in range(LAYERS):
            self.seed += 2
            k, v = (rows(sum(counts), width, self.given, self.seed + width) for width in (WIDTH, VALUE_WIDTH))
            self.cache.append(k, v, slots, layer=layer)
            parts = zip(sequences, k.float().split(counts), v.float().split(counts), strict=True)
            for sequence, *more in parts:
                old = self.expected[sequence][layer]
                self.expected[sequence] = list(self.expected[sequence])
                self.expected[sequence][layer] = (torch.cat((old[0], more[0])), torch.cat((old[1], more[1])))

    def state(self) -> object:
        return [
            self.cache.pages_free,
            self.cache.sequences,
            self.cache.block_table(self.cache.sequences).tolist(),
            self.cache.lengths(self.cache.sequences).tolist(),
        ]

    @precondition(lambda self: hasattr(self, "cache"))
    @invariant()
    def sequences_read_their_own_rows(self) -> None:
        for sequence, layers in self.expected.items():
            for layer, expected in enumerate(layers):
                for name, found, right in zip("kv", read(self.cache, sequence, layer), expected, strict=True):
                    assert found.shape == right.shape
                    assert bool(((found - right).abs() <= self.allowed(name, sequence, layer, right)).all())

    def allowed(self, name: str, sequence: int, layer: int, right: Tensor) -> Tensor:
        """How far a stored row may be off: [length, kv_heads, width]."""
        scales = self.cache.k_scales if name == "k" else self.cache.v_scales
        if scales is None:
            return torch.zeros_like(right)
        length = right.shape[0]
        pages = self.cache.block_table([sequence])[0].long()
        scale = scales[layer][pages].repeat_interleave(16, 0)[:length, :, None]
        if self.case["dtype"] is torch.int8:
            return 1.001 * scale
        clamped = (right.abs() - 448 * scale).clamp(min=0)
        # Half a unit in the last place, or two roundings below the normal numbers.
        return clamped + 1.001 * torch.maximum(right.abs() * 2**-4, scale * 2**-9)


@pytest.mark.parametrize("case", CASES)
def test_against_rows(case: dict[str, Any]) -> None:
    machine = type("AgainstRowsOfOneCase", (AgainstRows,), {"case": case})
    run_state_machine_as_test(machine, settings=settings(max_examples=25, stateful_step_count=25))


def test_the_name_is_exported() -> None:
    assert flashtune.PagedKVCache is PagedKVCache
    assert issubclass(CacheFullError, FlashtuneError)


@pytest.mark.parametrize("layout", ["nhd", "hnd"])
@pytest.mark.parametrize("page_size", [16, 32, 64, 128, 256])
def test_where_rows_lie(layout: str, page_size: int) -> None:
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


def test_tables_lengths_and_slots_fill_buffers_that_a_graph_reads() -> None:
    cache = make(dtype=torch.float32)
    one, two, empty = cache.add(), cache.add(), cache.add()
    cache.extend([one, two], [33, 5])
    assert cache.block_table([two, one, empty]).tolist() == [[3, 0, 0], [0, 1, 2], [0, 0, 0]]
    assert cache.block_table([empty]).shape == (1, 1)
    table = torch.full((4, 5), 9, dtype=torch.int32)
    lengths, slots = torch.full((4,), 9, dtype=torch.int32), torch.full((4,), 9)
    assert cache.block_table([one, two], out=table) is table
    assert table.tolist() == [[0, 1, 2, 0, 0], [3, 0, 0, 0, 0], [0] * 5, [0] * 5]
    assert cache.lengths([one, two], out=lengths).tolist() == [33, 5, 0, 0]
    assert cache.extend([two, one], 1, out=slots) is slots
    assert slots.tolist() == [3 * 16 + 5, 2 * 16 + 1, -1, -1]
    k, v = rows(4, WIDTH, torch.float32), rows(4, VALUE_WIDTH, torch.float32)
    cache.append(k, v, slots)
    assert torch.equal(read(cache, two, 0)[0][5], k[0])
    assert torch.equal(read(cache, one, 0)[1][33], v[1])
    assert int(cache.keys.count_nonzero()) == 2 * HEADS * WIDTH, "rows of negative slots go nowhere"
    assert cache.slots(one, 2).tolist() == [32, 33]


def test_buffers_that_do_not_fit_are_refused_before_anything_changes() -> None:
    cache = make(dtype=torch.float32)
    one = cache.add()
    for out in (torch.zeros(2), torch.zeros(1, 3, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)):
        with pytest.raises(UsageError, match=r"out (is|of shape)"):
            cache.extend(one, 3, out=out)
    assert (cache.length(one), cache.pages_used) == (0, 0)
    cache.extend(one, 17)
    with pytest.raises(UsageError, match=r"out of shape \[1, 1\] is too small: \[1, 2\] are needed"):
        cache.block_table([one], out=torch.zeros(1, 1, dtype=torch.int32))
    with pytest.raises(UsageError, match=r"pass torch.int32 of 1 on cpu"):
        cache.lengths([one], out=torch.zeros(1, dtype=torch.int64))


def test_how_full_it_is() -> None:
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


def test_values_that_are_columns_of_the_keys() -> None:
    cache = make(dtype=torch.float32, value_head_dim=0)
    one = cache.add()
    k = rows(20, WIDTH, torch.float32)
    cache.append(k, None, cache.extend(one, 20))
    assert torch.equal(read(cache, one, 0)[0], k)
    assert cache.values.numel() == 0


def test_gradients_do_not_reach_the_cache() -> None:
    cache = make(dtype=torch.float32)
    k = rows(1, WIDTH, torch.float32).requires_grad_()
    cache.append(k, rows(1, VALUE_WIDTH, torch.float32), cache.extend(cache.add(), 1))
    assert not cache.keys.requires_grad


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
    one = cache.add()
    k = rows(3, WIDTH, torch.bfloat16) * 1000
    cache.append(k, rows(3, VALUE_WIDTH, torch.float16), cache.extend(one, 3), layer=1)
    stored = cache.layer(1)[0][0, :, :3].transpose(0, 1)
    numbers = (k.float() / right[1, 0][:, None]).clamp(-448, 448)
    assert torch.equal(stored.float(), numbers.to(E4M3).float())
    assert float(stored.float().abs().max()) == 448


@pytest.mark.parametrize("dtype", [E4M3, torch.int8])
def test_scales_of_pages_follow_their_rows(dtype: torch.dtype) -> None:
    largest = 448 if dtype is E4M3 else 127
    cache = PagedKVCache(4, 16, 1, 2, dtype=dtype, device="cpu", page_scales=True)
    assert cache.kv_scale is KvScale.PAGE
    assert cache.k_scales is not None
    one = cache.add()

    def append(*values: float) -> None:
        k = torch.tensor(values).reshape(-1, 1, 1).expand(-1, -1, 2).contiguous()
        cache.append(k, k, cache.extend(one, len(values)))

    scale = torch.tensor(1.0) / largest
    append(1.0, -0.5)
    assert torch.equal(cache.k_scales[0, 0, 0], scale)
    append(0.1)
    assert torch.equal(cache.k_scales[0, 0, 0], scale), "smaller rows change nothing"
    append(5.0)
    assert torch.equal(cache.k_scales[0, 0, 0], 8 * scale), "the least power of two that fits"
    found = read(cache, one, 0)[0][:, 0, 0]
    torch.testing.assert_close(found, torch.tensor([1.0, -0.5, 0.1, 5.0]), rtol=2**-4, atol=8 / largest)
    fork = cache.fork(one)
    append(100.0)
    torch.testing.assert_close(read(cache, one, 0)[0][:4, 0, 0], found, rtol=2**-4, atol=128 / largest)
    assert torch.equal(read(cache, fork, 0)[0][:, 0, 0], found), "a copy has a scale of its own"
    cache.truncate(one, 0)
    append(0.25)
    assert torch.equal(cache.k_scales[0, int(cache.block_table([one])), 0], scale / 4), "a page begins anew"
    append(torch.inf)
    assert read(cache, one, 0)[0][1, 0, 0] == torch.tensor(largest) * (scale / 4), (
        "clamped, and asks for nothing"
    )


@pytest.mark.parametrize("scales", [{"k_scale": torch.tensor([0.5, 2.0])}, {"page_scales": True}])
def test_values_that_are_columns_of_the_keys_have_their_scales(scales: dict[str, Any]) -> None:
    cache = make(dtype=E4M3, value_head_dim=0, **scales)
    kind = KvScale.PAGE if "page_scales" in scales else KvScale.HEAD
    one = cache.add()
    for layer, slots in enumerate([cache.extend(one, 3)] * LAYERS):
        cache.append(rows(3, WIDTH, torch.float32) * (layer + 1), None, slots, layer=layer)
    assert cache.kv_scale is kind
    assert cache.k_scales is not None
    assert cache.v_scales is cache.k_scales
    assert cache.k_scales.dtype is torch.float32
    assert scale_kind(cache.k_scales[1], cache.v_scales[1], True, 12, HEADS) is kind


def test_scales_are_of_32_bits_whatever_torch_makes_by_default() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        cache = make(dtype=torch.int8, page_scales=True)
    finally:
        torch.set_default_dtype(torch.float32)
    assert cache.k_scales is not None
    assert cache.k_scales.dtype is torch.float32


def test_a_page_of_zeros_waits_for_numbers() -> None:
    cache = PagedKVCache(2, 16, 1, 2, dtype=torch.int8, device="cpu", page_scales=True)
    one = cache.add()
    for numbers in (torch.zeros(2, 1, 2), torch.full((1, 1, 2), 3e-4)):
        cache.append(numbers, numbers, cache.extend(one, len(numbers)))
    torch.testing.assert_close(read(cache, one, 0)[0][:, 0, 0], torch.tensor([0, 0, 3e-4]), rtol=0.02, atol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"page_size": 48}, "pages of 48 tokens are not supported: make them one of 16, 32"),
        ({"pages": 0}, "a cache cannot have 0 pages"),
        ({"layers": 0}, "layers cannot be 0"),
        ({"value_head_dim": 2000}, "head dims of 8 and 2000"),
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
def test_caches_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make(**options)


def test_rows_that_do_not_fit() -> None:
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


def test_nan_stays_one_where_it_can() -> None:
    assert quantized(torch.tensor([torch.nan]), Encoding.E4M3).float().isnan().all()
    assert quantized(torch.tensor([torch.nan, 0.5, 1.5, -200.0]), Encoding.INT8).tolist() == [0, 0, 2, -127]
