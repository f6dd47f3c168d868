"""Tests of `PagedKVCache` on a GPU: equal to the CPU, in graphs, and beyond 2^31 elements."""

from typing import Any

import pytest
import torch
from torch import Tensor

from flashtune import PagedKVCache
from tests.gpu.calls import free_memory

pytestmark = pytest.mark.gpu

E4M3 = torch.float8_e4m3fn
HEADS, WIDTH, VALUE_WIDTH, LAYERS = 4, 128, 96, 2
CASES: list[dict[str, Any]] = [
    {"dtype": torch.float32, "layout": "hnd"},
    {"dtype": torch.bfloat16},
    {"dtype": torch.float16, "value_head_dim": 0},
    *(
        {"dtype": dtype, "layout": layout, **scales}
        for dtype, layout in ((E4M3, "nhd"), (torch.int8, "hnd"))
        for scales in (
            {"k_scale": 0.02, "v_scale": torch.tensor([0.01, 0.1, 1.0, 0.3])},
            {"page_scales": True},
        )
    ),
]


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8).cpu()


def make(device: str, pages: int = 64, **options: Any) -> PagedKVCache:
    options = {"value_head_dim": VALUE_WIDTH, "layers": LAYERS, "device": device, **options}
    return PagedKVCache(pages, 16, HEADS, WIDTH, **options)


def projected(cache: PagedKVCache, tokens: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Keys and values as columns of one projection, on the CPU."""
    widths = [WIDTH, cache.values.shape[-1]]
    sizes = 10.0 ** torch.randint(-2, 3, (tokens, HEADS, 1), generator=generator)
    both = torch.randn(tokens, HEADS, sum(widths), generator=generator) * sizes
    k, v = both.to(torch.bfloat16 if cache.kv_scale else cache.dtype).split(widths, -1)
    return k, v


@pytest.mark.parametrize("case", CASES)
def test_cache_matches_the_cpu_bitwise(case: dict[str, Any]) -> None:
    caches = make("cpu", **case), make("cuda", **case)
    generator = torch.Generator().manual_seed(1)

    def extend(sequences: list[int], tokens: list[int]) -> None:
        slots = [cache.extend(sequences, tokens) for cache in caches]
        assert torch.equal(slots[0], slots[1].cpu())
        for layer in range(LAYERS):
            k, v = projected(caches[0], sum(tokens), generator)
            for cache, its_slots in zip(caches, slots, strict=True):
                cache.append(k.to(cache.device), v.to(cache.device), its_slots, layer=layer)

    first, second = ({cache.add() for cache in caches}.pop() for _ in range(2))
    extend([first, second], [200, 33])
    for _ in range(20):
        extend([second, first], [1, 1])
    fork = {cache.fork(first) for cache in caches}.pop()
    extend([first, fork, second], [3, 5, 1])
    for cache in caches:
        cache.truncate(fork, 221)
    extend([fork], [20])
    sequences = [first, second, fork]
    assert torch.equal(caches[0].block_table(sequences), caches[1].block_table(sequences).cpu())
    assert torch.equal(caches[0].lengths(sequences), caches[1].lengths(sequences).cpu())
    for sequence in sequences:
        slots = caches[0].slots(sequence, caches[0].length(sequence))
        page, row = slots // 16, slots % 16
        for layer in range(LAYERS):
            for host_pool, gpu_pool in zip(caches[0].layer(layer), caches[1].layer(layer), strict=True):
                if host_pool.shape[-1]:
                    elements = [
                        bits(pool).view(*pool.shape[:3], -1).transpose(1, 2) for pool in (host_pool, gpu_pool)
                    ]
                    assert torch.equal(*(pool[page, row] for pool in elements))
    if case.get("page_scales"):
        used = caches[0].block_table(sequences).unique().long()
        for host_scales, gpu_scales in zip(
            (caches[0].k_scales, caches[0].v_scales), (caches[1].k_scales, caches[1].v_scales), strict=True
        ):
            assert host_scales is not None
            assert gpu_scales is not None
            assert torch.equal(host_scales[:, used], gpu_scales.cpu()[:, used])


@pytest.mark.parametrize("case", CASES)
def test_graph_appends_at_the_given_slots(case: dict[str, Any]) -> None:
    cache, plain = make("cuda", **case), make("cuda", **case)
    generator = torch.Generator().manual_seed(2)
    batch = 4
    k, v = (tensor.cuda() for tensor in projected(cache, batch, generator))
    slots = torch.full((batch,), -1, dtype=torch.int64, device="cuda")
    cache.append(k, v, slots)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cache.append(k, v, slots)
    assert not cache.keys.view(torch.uint8).any(), "negative slots go nowhere"
    live = [{each.add() for each in (cache, plain)}.pop() for _ in range(batch)]
    for step in range(40):
        if step == 25:
            for each in (cache, plain):
                each.free(live[1])
            del live[1]
        for buffer, new in zip((k, v), projected(cache, batch, generator), strict=True):
            buffer.copy_(new)
        cache.extend(live, 1, out=slots)
        graph.replay()
        plain.append(k[: len(live)], v[: len(live)], plain.extend(live, 1))
    assert torch.equal(bits(cache.keys), bits(plain.keys))
    assert torch.equal(bits(cache.values), bits(plain.values))
    if cache.k_scales is not None and plain.k_scales is not None:
        assert torch.equal(cache.k_scales, plain.k_scales)


@pytest.mark.alone
def test_pools_of_more_than_two_to_the_31_elements() -> None:
    pages, heads, width = 2**17 + 8, 8, 256  # more than 2^32 elements of keys
    if free_memory() < 24 * 2**30:
        pytest.skip("needs 24 GiB of free memory")
    cache = PagedKVCache(pages, 16, heads, width, device="cuda", layout="hnd")
    first, last = cache.add(), cache.add()
    cache.extend(first, (pages - 2) * 16)
    slots = cache.extend(last, 17)
    k, v = (torch.randn(17, heads, width, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    cache.append(k, v, slots)
    cache.truncate(first, 16)
    # The copy of a shared page lies and is read beyond 2^31 elements too.
    fork = cache.fork(last)
    copied = cache.extend(fork, 1)
    cache.append(k[:1], v[:1], copied)
    for pool, rows in zip(cache.layer(0), (k, v), strict=True):
        assert torch.equal(pool[pages - 2].transpose(0, 1), rows[:16])
        assert torch.equal(pool[pages - 1, :, 0], rows[16])
        page = int(copied[0]) // 16
        assert torch.equal(pool[page, :, :2].transpose(0, 1), torch.stack((rows[16], rows[0])))
        assert not pool[0].any()
