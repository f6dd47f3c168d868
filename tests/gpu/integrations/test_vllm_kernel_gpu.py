"""Tests of the vLLM backend against vLLM's own Triton kernel. The tester provides its files."""

import importlib
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from triton.testing import do_bench_cudagraph

from tests.gpu.integrations import vllm_kernel
from tests.gpu.integrations.vllm_kernel import VllmKernel
from tests.gpu.marks import SERVED
from tests.problems import vllm_objects
from tests.problems.serving_batches import CASES, HEADS, KV_HEADS, PAGE, expected, fill_earlier, make_batch
from tests.support import host_stubs

pytestmark = SERVED
WIDTH, PAGES, BF16 = 128, 96, torch.bfloat16
MIXED = ((300, 1), (245, 60), (90, 90), (1, 1))


@pytest.fixture(name="function")
def kernel_of_vllm(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    return vllm_kernel.load(monkeypatch)


@pytest.fixture(name="vllm")
def backend(function: object, monkeypatch: pytest.MonkeyPatch) -> Any:
    host_stubs.install("vllm", monkeypatch)
    return importlib.import_module("flashtune.integrations.vllm_backend")


@pytest.mark.parametrize("name", CASES)
def test_errors_are_not_larger(function: Any, vllm: Any, name: str) -> None:
    """Both kernels' outputs are compared with float64."""
    ours, theirs = errors(function, vllm, name, "cuda")
    assert ours <= 2 * theirs + 1e-4


def errors(function: Any, vllm: Any, name: str, device: str) -> list[float]:
    """The largest errors of flashtune and of vLLM's kernel."""
    batch, case = make_batch(MIXED, BF16, width=WIDTH), CASES[name]
    stored = torch.zeros(PAGES, KV_HEADS, PAGE, 2 * WIDTH, dtype=BF16)
    fill_earlier(batch, *vllm_objects.split(stored), case.k_scale, case.v_scale)
    cache = stored.to(device)
    q, k, v = (tensor.to(device) for tensor in (batch.q, batch.k, batch.v))
    names = {"query_start_loc": batch.starts, "seq_lens": batch.seqlens, "slot_mapping": batch.slots}
    changes: Any = {key: tensor.to(device) for key, tensor in names.items()}
    common = vllm_objects.common(batch, block_table_tensor=batch.table.to(device), **changes)
    sinks = None if case.sinks is None else case.sinks.to(device)
    case = case._replace(sinks=sinks)
    impl, layer = vllm_objects.layer_of(vllm, batch, case), vllm_objects.scales_of(case, device)
    impl.do_kv_cache_update(layer, k, v, cache, common.slot_mapping)
    out = torch.empty_like(q)
    impl.forward(layer, q, k, v, cache, vllm_objects.builder(vllm).build(0, common), out)
    kernel = VllmKernel(function, HEADS, KV_HEADS, WIDTH, device)
    theirs = kernel(
        q,
        cache,
        common,
        scale=batch.scale,
        window=case.window,
        softcap=case.softcap,
        slopes=case.slopes,
        sinks=sinks,
    )
    want = expected(batch, CASES[name])
    return [float((result.cpu().double() - want).abs().max()) for result in (out, theirs)]


class Load(NamedTuple):
    """Sequences with as many keys and new tokens each, of a model with 32 heads and 8 KV heads."""

    batch: int
    keys: int
    new: int


LOADS = {
    "decode 64 x 4096": Load(64, 4096, 1),
    "decode 4 x 16384": Load(4, 16384, 1),
    "chunks 4 x 512 of 4096": Load(4, 4096, 512),
}


@pytest.mark.parametrize("name", LOADS)
def test_times_next_to_vllms_kernel(function: Any, vllm: Any, name: str) -> None:
    """Prints both times, in CUDA graphs, without the writing of new keys."""
    load, heads, kv_heads = LOADS[name], 32, 8
    pages, tokens = load.keys // PAGE, load.batch * load.new
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda", dtype=BF16)

    cache = normal(load.batch * pages, kv_heads, PAGE, 2 * WIDTH)
    q, k = normal(tokens, heads, WIDTH), normal(tokens, kv_heads, WIDTH)
    starts = torch.arange(0, tokens + 1, load.new, dtype=torch.int32)
    common = SimpleNamespace(
        query_start_loc=starts.cuda(),
        query_start_loc_cpu=starts,
        seq_lens=torch.full((load.batch,), load.keys, dtype=torch.int32, device="cuda"),
        seq_lens_cpu_upper_bound=torch.full((load.batch,), load.keys, dtype=torch.int32),
        num_reqs=load.batch,
        num_actual_tokens=tokens,
        max_query_len=load.new,
        max_seq_len=load.keys,
        block_table_tensor=torch.randperm(load.batch * pages, generator=generator, device="cuda")
        .int()
        .view(load.batch, pages),
        slot_mapping=None,
        causal=True,
        is_prefilling=torch.full((load.batch,), load.new > 1),
    )
    impl = vllm.Impl(heads, WIDTH, WIDTH**-0.5, kv_heads)
    metadata = vllm_objects.builder(vllm).build(0, common)
    out, layer = torch.empty_like(q), SimpleNamespace()
    kernel = VllmKernel(function, heads, kv_heads, WIDTH, "cuda")

    def ours() -> Tensor:
        result: Tensor = impl.forward(layer, q, k, k, cache, metadata, out)
        return result

    def theirs() -> Tensor:
        return kernel(q, cache, common, scale=WIDTH**-0.5)

    torch.testing.assert_close(ours(), theirs(), atol=2e-2, rtol=2e-2)
    own_time, vllm_time = (do_bench_cudagraph(call, rep=50) for call in (ours, theirs))
    words = f"flashtune {1e3 * own_time:.1f} us, vLLM {1e3 * vllm_time:.1f} us, {vllm_time / own_time:.2f}"
    sys.stdout.write(f"\n{name}: {words}\n")
