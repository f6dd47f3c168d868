"""Tests of the SGLang backend in Triton's interpreter, against float64, over stubs of SGLang's classes."""

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.problems.serving_batches import (
    CASES,
    DECODING,
    E4M3,
    HEADS,
    MIXED,
    PAGE,
    PROMPTS,
    Batch,
    Case,
    expected,
    fill_earlier,
    make_batch,
)
from tests.problems.sglang_objects import CONTEXT, KVPool, forward_batch, layer_of, runner_of
from tests.support import host_stubs


@pytest.fixture(name="sglang")
def sglang_backend(monkeypatch: pytest.MonkeyPatch) -> Any:
    modules = host_stubs.install("sglang", monkeypatch)
    pool = modules["sglang.srt.mem_cache.memory_pool"]
    pool.KVWriteLoc.for_layer = lambda batch, layer, swa_loc: (batch.out_cache_loc, swa_loc)
    return importlib.import_module("flashtune.integrations.sglang_backend")


def attend(backend: Any, layer: Any, batch: Batch, case: Case, in_graph: bool = False) -> Tensor:
    info = forward_batch(batch)
    if in_graph:
        backend.init_forward_metadata_in_graph(info)
    else:
        backend.init_forward_metadata(info)
    k, v = batch.k.clone(), batch.v.clone()
    more = {} if case.sinks is None else {"sinks": case.sinks}
    forward = backend.forward_decode if info.forward_mode.is_decode() else backend.forward_extend
    out: Tensor = forward(batch.q.flatten(1), k, v, layer, info, True, **more)
    assert out.shape == (len(batch.q), HEADS * batch.width)
    return out.view(-1, HEADS, batch.width)


# SGLang pads a decoding batch with sequences of one key, not of none.
DECODED = (*DECODING[:-1], (1, 1))
BATCHES = {"mixed": MIXED[:-1], "decoding": DECODED, "prompts": PROMPTS}


@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES)
@pytest.mark.sampled
@pytest.mark.parametrize("name", [name for name in CASES if name != "alibi"])
def test_features_match_float64(sglang: Any, name: str, lengths: Any) -> None:
    case, batch = CASES[name], make_batch(lengths)
    pool = KVPool(batch, torch.float32, heads_first=name == "plain")
    fill_earlier(batch, *pool.pages())
    backend = sglang.backend_class()(runner_of(batch, pool))
    out = attend(backend, layer_of(batch, case), batch, case)
    torch.testing.assert_close(out.double(), expected(batch, case), atol=2e-6, rtol=2e-6)
    assert backend.forward_metadata.batch.is_fresh == (lengths is PROMPTS)


@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES)
def test_pages_may_have_one_token(sglang: Any, lengths: Any) -> None:
    case, batch = Case(), make_batch(lengths)
    pool = KVPool(batch, torch.float32)
    fill_earlier(batch, *pool.pages())
    backend = sglang.backend_class()(runner_of(batch, pool, page_size=1))
    out = attend(backend, layer_of(batch, case), batch, case)
    torch.testing.assert_close(out.double(), expected(batch, case), atol=2e-6, rtol=2e-6)


def test_layers_of_llama_4_have_chunks(sglang: Any) -> None:
    case, batch = Case(chunk=24), make_batch(MIXED[:-1])
    pool = KVPool(batch, torch.float32)
    fill_earlier(batch, *pool.pages())
    backend = sglang.backend_class()(runner_of(batch, pool, attention_chunk_size=24))
    for use_irope in (True, False):
        out = attend(backend, layer_of(batch, case, use_irope=use_irope), batch, case)
        wanted = expected(batch, case if use_irope else Case())
        torch.testing.assert_close(out.double(), wanted, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("window", [None, 8])
def test_graphs_have_tables_of_the_longest_context(sglang: Any, window: int | None) -> None:
    case, batch = Case(window=window), make_batch(DECODED)
    pool = KVPool(batch, torch.float32)
    fill_earlier(batch, *pool.pages())
    backend = sglang.backend_class()(runner_of(batch, pool))
    out = attend(backend, layer_of(batch, case), batch, case, in_graph=True)
    torch.testing.assert_close(out.double(), expected(batch, case), atol=2e-6, rtol=2e-6)
    assert backend.forward_metadata.batch.block_table.shape == (len(DECODED), CONTEXT // PAGE)
    with pytest.raises(NotImplementedError, match="decoding alone"):
        backend.init_forward_metadata_in_graph(forward_batch(make_batch(PROMPTS)))


@pytest.mark.parametrize("lengths", [MIXED[:-1], DECODED], ids=["mixed", "decoding"])
def test_windows_may_have_a_pool_of_their_own(
    sglang: Any, lengths: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools = importlib.import_module("sglang.srt.mem_cache.base_swa_memory_pool")
    monkeypatch.setattr(pools, "BaseSWAKVPool", KVPool)
    case, batch = Case(window=8), make_batch(lengths)
    pool = KVPool(batch, torch.float32, offset=2 * PAGE)
    fill_earlier(batch._replace(table=batch.table + 2), *pool.pages())
    backend = sglang.backend_class()(runner_of(batch, pool))
    out = attend(backend, layer_of(batch, case), batch, case)
    torch.testing.assert_close(out.double(), expected(batch, case), atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES)
def test_fp8_pools_are_read_with_their_scales(sglang: Any, lengths: Any) -> None:
    case, batch = Case(k_scale=0.02, v_scale=0.5), make_batch(lengths)
    pool = KVPool(batch, E4M3)
    fill_earlier(batch, *pool.pages(), case.k_scale, case.v_scale)
    scales = {"k_scale": torch.tensor([case.k_scale]), "v_scale": torch.tensor([case.v_scale])}
    backend = sglang.backend_class()(runner_of(batch, pool))
    out = attend(backend, layer_of(batch, case, **scales), batch, case)
    torch.testing.assert_close(out.double(), expected(batch, case, E4M3), atol=2e-3, rtol=2e-3)


def test_encoders_see_later_keys(sglang: Any) -> None:
    case, batch = Case(window=6, causal=False), make_batch(PROMPTS)
    pool = KVPool(batch, torch.float32)
    out = attend(sglang.backend_class()(runner_of(batch, pool)), layer_of(batch, case), batch, case)
    torch.testing.assert_close(out.double(), expected(batch, case), atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"page_size": 48}, "pass --page-size 64"),
        ({"use_mla_backend": True}, "latent keys"),
        ({"spec_algorithm": SimpleNamespace(is_speculative=lambda: True)}, "speculative decoding"),
        ({"kv_cache_dtype": torch.float8_e5m2}, "fp8_e4m3"),
        ({"model_config": SimpleNamespace(context_len=8, is_encoder_decoder=True)}, "cross-attention"),
    ],
)
def test_unsupported_servers_are_named(sglang: Any, changes: dict[str, Any], says: str) -> None:
    batch = make_batch(PROMPTS)
    with pytest.raises(ValueError, match=says):
        sglang.backend_class()(runner_of(batch, KVPool(batch, torch.float32), **changes))


def test_servers_without_deterministic_kernels_are_named(
    sglang: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, wanted = make_batch(PROMPTS), SimpleNamespace(enable_deterministic_inference=True)
    runner = runner_of(batch, KVPool(batch, torch.float32), server_args=wanted)
    for capability, says in {(9, 0): "not fp32", (8, 0): "sm_90"}.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda found=capability: found)
        with pytest.raises(ValueError, match=f"deterministically: .*{says}"):
            sglang.backend_class()(runner)


def test_unsupported_layers_and_arguments_are_named(sglang: Any) -> None:
    batch = make_batch(PROMPTS)
    backend = sglang.backend_class()(runner_of(batch, KVPool(batch, torch.float32)))
    info = forward_batch(batch)
    backend.init_forward_metadata(info)
    call = batch.q, batch.k, batch.v
    with pytest.raises(NotImplementedError, match="q_rope, rel_bias"):
        backend.forward_extend(*call, layer_of(batch, Case()), info, rel_bias=1, q_rope=1, k_rope=None)
    with pytest.raises(NotImplementedError, match="temperatures"):
        backend.forward_extend(*call, layer_of(batch, Case(), xai_temperature_len=8), info)
