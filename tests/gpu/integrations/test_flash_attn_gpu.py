"""Tests of flash_attn on a GPU: 8-bit inputs, CUDA graphs, and no synchronization with the host."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from flashtune.integrations.flash_attn import flash_attn_3, flash_attn_4, flash_attn_func
from flashtune.integrations.flash_attn.rotary import apply_rotary_emb
from tests.support.flash_attn_reference import Rule, one_sequence

pytestmark = pytest.mark.gpu
version_3: Any = flash_attn_3
version_4: Any = flash_attn_4
E4M3 = torch.float8_e4m3fn
LENGTHS, WIDTH = [37, 90], 64


@pytest.fixture
def without_sync() -> Iterator[Callable[[Callable[[], Any]], Any]]:
    """Runs a call twice. The second time, a synchronization with the host raises an error."""

    def run(call: Callable[[], Any]) -> Any:
        call()
        torch.cuda.set_sync_debug_mode("error")
        try:
            return call()
        finally:
            torch.cuda.set_sync_debug_mode("default")

    yield run
    torch.cuda.set_sync_debug_mode("default")


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(sum(shape))
    return torch.randn(*shape, device="cuda", generator=generator).to(dtype)


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def largest_error(out: Tensor, expected: Tensor) -> float:
    return float((out.cpu().double() - expected).abs().max())


@pytest.mark.parametrize("page", [None, 1, 32, 512])
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("skipped", [None, [5, 0]])
def test_caches_without_synchronization(
    page: int | None,
    is_packed: bool,
    skipped: list[int] | None,
    without_sync: Callable[[Callable[[], Any]], Any],
) -> None:
    size = 128 if page is None else page
    columns = 1 if page is None else -(-128 // page)
    k_cache, v_cache = normal(2 * columns, size, 2, WIDTH), normal(2 * columns, size, 2, WIDTH)
    table = torch.randperm(2 * columns, generator=torch.Generator().manual_seed(0)).view(2, columns)
    rows = table if page else torch.arange(2)[:, None]
    q, k = normal(2, 3, 4, WIDTH), normal(2, 2, 2, WIDTH)
    angle = normal(256, 16, dtype=torch.float32)
    inputs: dict[str, Any] = {
        "cache_seqlens": int32(LENGTHS),
        "page_table": table.int().cuda() if page else None,
        "cache_leftpad": None if skipped is None else int32(skipped),
        "cu_seqlens_q": int32([0, 3, 6]) if is_packed else None,
        "max_seqlen_q": 3 if is_packed else None,
        "rotary_cos": angle.cos().bfloat16(),
        "rotary_sin": angle.sin().bfloat16(),
    }
    queries = q.flatten(0, 1) if is_packed else q
    out = without_sync(
        lambda: version_3.flash_attn_with_kvcache(queries, k_cache, v_cache, k, k, causal=True, **inputs)
    )
    turned = apply_rotary_emb(
        q,
        inputs["rotary_cos"],
        inputs["rotary_sin"],
        interleaved=True,
        seqlen_offsets=inputs["cache_seqlens"],
    )
    for b, length in enumerate(LENGTHS):
        first = 0 if skipped is None else skipped[b]
        keys, values = (
            cache[rows[b].cuda()].flatten(0, 1)[first : length + 2].cpu() for cache in (k_cache, v_cache)
        )
        expected, _ = one_sequence(turned[b].cpu(), keys, values, Rule(causal=True))
        assert torch.equal(values[length - first :], k[b].cpu())
        assert largest_error(out.view_as(q)[b], expected) < 2e-2


def test_partly_used_sequences_without_synchronization(
    without_sync: Callable[[Callable[[], Any]], Any],
) -> None:
    q, k = normal(2, 40, 4, WIDTH), normal(2, 70, 2, WIDTH)
    used_q, used_k = [40, 11], [70, 33]
    counts = {"seqused_q": int32(used_q), "seqused_k": int32(used_k)}
    out, _ = without_sync(lambda: version_4.flash_attn_varlen_func(q, k, k, **counts, causal=True))
    for b in range(2):
        own = k[b, : used_k[b]].cpu()
        expected, _ = one_sequence(q[b, : used_q[b]].cpu(), own, own, Rule(causal=True))
        assert largest_error(out[b, : used_q[b]], expected) < 2e-2
        assert not out[b, used_q[b] :].any()


@pytest.mark.parametrize("options", [{}, {"window_size": (9, 0)}, {"attention_chunk": 16, "causal": True}])
@pytest.mark.parametrize("is_packed", [False, True])
def test_queries_in_8_bits_with_factors(options: dict[str, Any], is_packed: bool) -> None:
    q, k, v = (normal(2, 48, heads, WIDTH, dtype=torch.float32).to(E4M3) for heads in (4, 2, 2))
    factors = {
        name: normal(2, 2, dtype=torch.float32).abs() + 0.5
        for name in ("q_descale", "k_descale", "v_descale")
    }
    if is_packed:
        starts = int32([0, 48, 96])
        rows = [tensor.flatten(0, 1) for tensor in (q, k, v)]
        out = version_3.flash_attn_varlen_func(*rows, starts, starts, 48, 48, **factors, **options).view_as(q)
    else:
        out = version_3.flash_attn_func(q, k, v, **factors, **options)
    assert out.dtype is torch.bfloat16
    left, right = options.get("window_size", (None, None))
    rule = Rule(options.get("causal", False), left, right, chunk=options.get("attention_chunk", 0))
    for b in range(2):
        scales = [factors[name][b].cpu() for name in ("q_descale", "k_descale", "v_descale")]
        own_q = q[b].cpu().double() * scales[0].repeat_interleave(2)[:, None]
        own_k, own_v = (
            tensor[b].cpu().double() * scale[:, None] for tensor, scale in ((k, scales[1]), (v, scales[2]))
        )
        expected, _ = one_sequence(own_q, own_k, own_v, rule)
        # Kernels for 8-bit queries round the softmax to 8 bits.
        assert largest_error(out[b], expected) < 0.2


def test_8_bit_caches_in_pages_with_new_tokens() -> None:
    k_cache, v_cache = (normal(4, 64, 2, WIDTH, dtype=torch.float32).to(E4M3) for _ in range(2))
    table = torch.tensor([[3, 0], [1, 2]])
    q, k = (normal(2, 1, heads, WIDTH, dtype=torch.float32).to(E4M3) for heads in (4, 2))
    out = version_3.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, k, cache_seqlens=int32(LENGTHS), page_table=table.int().cuda(), causal=True
    )
    for b, length in enumerate(LENGTHS):
        keys, values = (
            cache.cpu().float()[table[b]].flatten(0, 1)[: length + 1] for cache in (k_cache, v_cache)
        )
        assert torch.equal(keys[-1], k[b, 0].cpu().float())
        expected, _ = one_sequence(q[b].cpu().float(), keys, values, Rule(causal=True))
        assert largest_error(out[b], expected) < 3e-2


def test_a_cuda_graph_follows_lengths_and_the_cache() -> None:
    cache = normal(2, 256, 2, WIDTH)
    stored = cache.clone(), cache.clone()
    q, k, lengths = normal(2, 1, 4, WIDTH), normal(2, 1, 2, WIDTH), int32([3, 9])

    def step() -> Any:
        return version_3.flash_attn_with_kvcache(q, *stored, k, k, cache_seqlens=lengths, causal=True)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    lengths.copy_(int32([100, 200]))
    for pool in stored:
        pool.copy_(cache)
    graph.replay()
    again = cache.clone(), cache.clone()
    expected = version_3.flash_attn_with_kvcache(q, *again, k, k, cache_seqlens=lengths, causal=True)
    assert torch.equal(out, expected)
    assert torch.equal(stored[0], again[0])


def test_gradients_of_a_plain_call_are_near_the_reference() -> None:
    own: Any = [normal(1, 20, 2, WIDTH).requires_grad_() for _ in range(3)]
    out: Any = flash_attn_func(own[0], own[1], own[2], causal=True)
    dout = normal(1, 20, 2, WIDTH)
    gradients = torch.autograd.grad(out, own, dout)
    theirs = [tensor.detach().cpu().double().requires_grad_() for tensor in own]
    expected, _ = one_sequence(theirs[0][0], theirs[1][0], theirs[2][0], Rule(causal=True))
    wanted = torch.autograd.grad(expected, theirs, dout[0].cpu().double())
    assert largest_error(out[0], expected) < 2e-2
    assert all(
        largest_error(gradient, exact) < 5e-2 for gradient, exact in zip(gradients, wanted, strict=True)
    )
