"""Tests of the backends of vLLM and SGLang on a GPU against float64, also in graphs with other lengths."""

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpu.marks import SERVED
from tests.problems import sglang_objects, vllm_objects
from tests.problems.serving_batches import (
    CASES,
    E4M3,
    HEADS,
    KV_HEADS,
    PAGE,
    Batch,
    Case,
    expected,
    fill_earlier,
    make_batch,
)
from tests.support import host_stubs

pytestmark = SERVED

WIDTH, PAGES = 128, 96
BF16 = torch.bfloat16
# SGLang divides in bf16 before it rounds to fp8, which is exact for powers of two.
FP8 = Case(window=100, k_scale=2**-6, v_scale=0.5)
# Keys and new tokens of each sequence, in batches of as many sequences and tokens.
MIXED = [((300, 1), (245, 60), (90, 90), (1, 1)), ((64, 50), (77, 1), (160, 1), (100, 100))]
DECODING = [((300, 1), (245, 1), (17, 1), (1, 1)), ((2, 1), (77, 1), (160, 1), (301, 1))]
PROMPTS = [((300, 300), (45, 45), (1, 1))]
PAIRS = {"mixed": MIXED, "decoding": DECODING}


@pytest.fixture(name="backends")
def serving_backends(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    for library in ("vllm", "sglang"):
        modules = host_stubs.install(library, monkeypatch)
    pool = modules["sglang.srt.mem_cache.memory_pool"]
    pool.KVWriteLoc.for_layer = lambda batch, layer, swa_loc: (batch.out_cache_loc, swa_loc)
    names = ("vllm_backend", "sglang_backend")
    return SimpleNamespace(
        **{name: importlib.import_module(f"flashtune.integrations.{name}") for name in names}
    )


def inputs(batch: Batch) -> dict[str, Tensor]:
    """The tensors of a batch, with a block table of a fixed width."""
    table = torch.nn.functional.pad(batch.table, (0, 32 - batch.table.shape[1]))
    return {
        "q": batch.q,
        "k": batch.k,
        "v": batch.v,
        "slots": batch.slots,
        "table": table,
        "starts": batch.starts,
        "seqlens": batch.seqlens,
    }


def close(out: Tensor, batch: Batch, case: Case, dtype: torch.dtype) -> None:
    wanted = expected(batch, case, dtype)
    atol = 3e-2 if dtype is E4M3 else 1e-2
    torch.testing.assert_close(out[: len(wanted)].cpu().double(), wanted, atol=atol, rtol=1e-2)


class VllmStep:
    """A layer of vLLM with buffers for one batch after another."""

    def __init__(self, vllm: Any, batch: Batch, case: Case, dtype: torch.dtype) -> None:
        self.case, self.dtype = case, dtype
        self.static = {name: tensor.cuda() for name, tensor in inputs(batch).items()}
        stored = torch.uint8 if dtype is E4M3 else dtype
        self.cache = torch.zeros(PAGES, KV_HEADS, PAGE, 2 * WIDTH, dtype=stored, device="cuda")
        self.output = torch.zeros_like(self.static["q"])
        case = case._replace(sinks=None if case.sinks is None else case.sinks.cuda())
        kind = "fp8" if dtype is E4M3 else "auto"
        self.impl = vllm_objects.layer_of(vllm, batch, case, kv_cache_dtype=kind)
        self.layer = vllm_objects.scales_of(case, "cuda")

    def info(self, batch: Batch, **changes: Any) -> SimpleNamespace:
        static = self.static
        return vllm_objects.common(
            batch,
            query_start_loc=static["starts"],
            seq_lens=static["seqlens"],
            block_table_tensor=static["table"],
            slot_mapping=static["slots"],
            **changes,
        )

    def load(self, batch: Batch) -> None:
        """Puts a batch and its earlier keys into the buffers."""
        for name, tensor in inputs(batch).items():
            self.static[name].copy_(tensor)
        cache = torch.zeros_like(self.cache, device="cpu")
        fill_earlier(batch, *vllm_objects.split(cache), self.case.k_scale, self.case.v_scale)
        self.cache.copy_(cache)

    def run(self, metadata: Any) -> None:
        q, k, v, slots = (self.static[name] for name in ("q", "k", "v", "slots"))
        self.impl.do_kv_cache_update(self.layer, k, v, self.cache, slots)
        self.impl.forward(self.layer, q, k, v, self.cache, metadata, self.output)


@pytest.mark.parametrize(("case", "dtype"), [*((case, BF16) for case in CASES.values()), (FP8, E4M3)])
@pytest.mark.parametrize("lengths", [MIXED[0], DECODING[0], PROMPTS[0]], ids=["mixed", "decoding", "prompts"])
def test_vllm_matches_float64(backends: Any, case: Case, dtype: torch.dtype, lengths: Any) -> None:
    batch = make_batch(lengths, BF16, width=WIDTH)
    step = VllmStep(backends.vllm_backend, batch, case, dtype)
    step.load(batch)
    step.run(vllm_objects.builder(backends.vllm_backend).build(0, step.info(batch)))
    # Keys of prompts are not read from the cache.
    close(step.output, batch, case, BF16 if lengths is PROMPTS[0] else dtype)


@pytest.mark.parametrize(("case", "dtype"), [(CASES["all"], BF16), (FP8, E4M3)], ids=["bf16", "fp8"])
@pytest.mark.parametrize("lengths", PAIRS.values(), ids=PAIRS)
def test_graphs_of_vllm_replay_other_lengths(
    backends: Any, case: Case, dtype: torch.dtype, lengths: Any
) -> None:
    first, second = (make_batch(each, BF16, width=WIDTH, seed=seed) for seed, each in enumerate(lengths))
    step = VllmStep(backends.vllm_backend, first, case, dtype)
    # As vLLM captures: any sequence may have all tokens.
    longest = 1 if lengths is DECODING else len(first.q)
    info = step.info(first, max_query_len=longest, max_seq_len=32 * PAGE)
    metadata = vllm_objects.builder(backends.vllm_backend).build_for_cudagraph_capture(info)
    step.load(first)
    step.run(metadata)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.run(metadata)
    for batch in (second, first):
        step.load(batch)
        step.output.zero_()
        graph.replay()
        close(step.output, batch, case, dtype)


@pytest.mark.parametrize(("case", "dtype"), [(CASES["all"], BF16), (FP8, E4M3)], ids=["bf16", "fp8"])
def test_graphs_of_sglang_replay_other_lengths(backends: Any, case: Case, dtype: torch.dtype) -> None:
    first, second = (make_batch(each, BF16, width=WIDTH, seed=seed) for seed, each in enumerate(DECODING))
    # One pool and one table of requests for both batches.
    wide = max((first, second), key=lambda batch: int(batch.table.max()))
    pool = sglang_objects.KVPool(wide, dtype, device="cuda")
    runner = sglang_objects.runner_of(first, pool, context=32 * PAGE, dtype=BF16)
    rows = runner.req_to_token_pool.req_to_token
    backend = backends.sglang_backend.backend_class()(runner)
    scale = {"k_scale": torch.tensor(case.k_scale).cuda(), "v_scale": torch.tensor(case.v_scale).cuda()}
    layer = sglang_objects.layer_of(first, case, **(scale if dtype is E4M3 else dict.fromkeys(scale)))
    info = sglang_objects.forward_batch(first)
    moved = ("req_pool_indices", "seq_lens", "out_cache_loc")
    vars(info).update({name: getattr(info, name).cuda() for name in moved})
    q, k, v = (tensor.cuda() for tensor in (first.q, first.k, first.v))
    more = {} if case.sinks is None else {"sinks": case.sinks.cuda()}

    def load(batch: Batch) -> None:
        rows.copy_(sglang_objects.rows_of(batch, 32 * PAGE))
        earlier = sglang_objects.KVPool(wide, dtype)
        fill_earlier(batch, *earlier.pages(), case.k_scale, case.v_scale)
        for buffer, filled in zip(pool.buffers, earlier.buffers, strict=True):
            buffer.copy_(filled)
        for buffer, new in zip((q, k, v), (batch.q, batch.k, batch.v), strict=True):
            buffer.copy_(new)
        info.seq_lens.copy_(batch.seqlens)
        info.out_cache_loc.copy_(batch.slots)

    def run() -> Tensor:
        backend.init_forward_metadata_in_graph(info)
        out: Tensor = backend.forward_decode(q.flatten(1), k, v, layer, info, True, **more)
        return out

    load(first)
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for batch in (second, first):
        load(batch)
        graph.replay()
        close(out.view(-1, HEADS, WIDTH), batch, case, dtype)
