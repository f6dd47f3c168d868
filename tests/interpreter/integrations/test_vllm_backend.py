"""Tests of the vLLM backend in Triton's interpreter, against float64, over stubs of vLLM's classes."""

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from flashtune.request.call import Call
from tests.problems.serving_batches import (
    CASES,
    DECODING,
    E4M3,
    MIXED,
    PAGE,
    PROMPTS,
    Batch,
    Case,
    expected,
    fill_earlier,
    make_batch,
)
from tests.problems.vllm_objects import builder, common, layer_of, packed_cache, scales_of, split
from tests.support import host_stubs


@pytest.fixture(name="vllm")
def vllm_backend(monkeypatch: pytest.MonkeyPatch) -> Any:
    host_stubs.install("vllm", monkeypatch)
    return importlib.import_module("flashtune.integrations.vllm_backend")


def attention_types() -> Any:
    return importlib.import_module("vllm.v1.attention.backend").AttentionType


def serve(impl: Any, batch: Batch, case: Case, cache: Tensor, metadata: Any) -> Tensor:
    """Writes the new keys to the cache and returns the attention, as vLLM does."""
    fill_earlier(batch, *split(cache), case.k_scale, case.v_scale)
    layer, untouched = scales_of(case), cache[0].clone()
    impl.do_kv_cache_update(layer, batch.k, batch.v, cache, batch.slots)
    assert torch.equal(cache[0], untouched)
    output = torch.full_like(batch.q, 7.0)
    assert impl.forward(layer, batch.q, batch.k, batch.v, cache, metadata, output) is output
    out: Tensor = output[: batch.starts[-1]]
    return out


# The numbers of sequences of each part.
PARTS = {MIXED: [1, 4], DECODING: [4], PROMPTS: [3]}


@pytest.mark.parametrize("lengths", [MIXED, DECODING, PROMPTS], ids=["mixed", "decoding", "prompts"])
@pytest.mark.sampled
@pytest.mark.parametrize("name", CASES)
def test_features_match_float64(vllm: Any, name: str, lengths: Any) -> None:
    case, batch = CASES[name], make_batch(lengths)
    cache = packed_cache(batch, torch.float32, tokens_first=name == "plain")
    metadata = builder(vllm).build(0, common(batch))
    out = serve(layer_of(vllm, batch, case), batch, case, cache, metadata)
    torch.testing.assert_close(out.double(), expected(batch, case), atol=2e-6, rtol=2e-6)
    # The last sequences of MIXED are one that decodes and padding, which come after prompts here.
    assert [len(part.batch.seqlens_k) for part in metadata.parts] == PARTS[lengths]
    # Keys of prompts are read from the projection, and all others from the cache.
    assert [part.batch.is_fresh for part in metadata.parts] == [lengths is PROMPTS] * len(metadata.parts)


def test_prompts_next_to_decoding_sequences_are_not_read_from_the_cache(vllm: Any) -> None:
    case, batch = CASES["window"], make_batch(((37, 1), (50, 1), (20, 20), (7, 7)))
    metadata = builder(vllm).build(0, common(batch))
    cache = packed_cache(batch, torch.float32)
    out = serve(layer_of(vllm, batch, case), batch, case, cache, metadata)
    torch.testing.assert_close(out.double(), expected(batch, case), atol=2e-6, rtol=2e-6)
    assert [part.batch.is_fresh for part in metadata.parts] == [False, True]
    assert [part.batch.cu_seqlens_q is None for part in metadata.parts] == [True, False]


def test_a_layer_that_shares_a_cache_reads_it(vllm: Any) -> None:
    case, batch = CASES["plain"], make_batch(PROMPTS)
    impl = layer_of(vllm, batch, case)
    impl.kv_sharing_target_layer_name = "layers.0"
    metadata = builder(vllm).build(0, common(batch))
    assert metadata.parts[-1].batch.is_fresh
    cache = packed_cache(batch, torch.float32)
    fill_earlier(batch, *split(cache), case.k_scale, case.v_scale)
    impl.do_kv_cache_update(scales_of(case), batch.k, batch.v, cache, batch.slots)
    other, output = torch.full_like(batch.k, 3.0), torch.empty_like(batch.q)
    impl.forward(scales_of(case), batch.q, other, other, cache, metadata, output)
    out = output[: batch.starts[-1]].double()
    torch.testing.assert_close(out, expected(batch, case), atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("lengths", [MIXED, DECODING], ids=["mixed", "decoding"])
def test_fp8_caches_are_read_with_their_scales(vllm: Any, lengths: Any) -> None:
    case = Case(k_scale=0.02, v_scale=0.5)
    batch = make_batch(lengths)
    cache = packed_cache(batch, torch.uint8)
    impl = layer_of(vllm, batch, case, kv_cache_dtype="fp8")
    out = serve(impl, batch, case, cache, builder(vllm).build(0, common(batch)))
    torch.testing.assert_close(out.double(), expected(batch, case, E4M3), atol=2e-3, rtol=2e-3)


def test_a_captured_batch_takes_any_lengths(vllm: Any) -> None:
    """A captured batch is one part, and its keys are read from the cache."""
    batch = make_batch(PROMPTS)
    metadata = builder(vllm).build_for_cudagraph_capture(common(batch))
    # Draft models are captured with metadata of other batches, which have no prompts.
    draft = builder(vllm).build(0, common(batch, is_prefilling=torch.zeros(3, dtype=torch.bool)))
    for captured in (metadata, draft):
        assert [part.batch.is_fresh for part in captured.parts] == [False]
    case = CASES["plain"]
    cache = packed_cache(batch, torch.float32)
    out = serve(layer_of(vllm, batch, case), batch, case, cache, metadata)
    torch.testing.assert_close(out.double(), expected(batch, case), atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("kind", ["auto", "fp8"])
def test_the_first_capture_prepares_the_kernels_of_prompts(
    vllm: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, case = make_batch(MIXED), CASES["window"]
    impl = layer_of(vllm, batch, case, kv_cache_dtype=kind)
    cache = packed_cache(batch, torch.uint8 if kind == "fp8" else torch.float32)
    layer = SimpleNamespace(impl=impl, kv_cache=cache, dtype=torch.float32, **vars(scales_of(case)))
    encoder = SimpleNamespace(impl=layer_of(vllm, batch, case, attn_type=attention_types().ENCODER_ONLY))
    prepared, calls = vllm.prepare, []

    def watched(call: Call) -> None:
        prepared(call)
        calls.append((call.side.block_table is not None, call.q.shape[0]))

    monkeypatch.setattr(vllm, "prepare", watched)
    made = builder(vllm, layer=layer, encoder=encoder)
    for _ in range(2):
        made.build_for_cudagraph_capture(common(batch))
    tokens = [16, 32, 64, 128]
    assert sorted(calls) == sorted(2 * [(paged, count) for paged in (False, True) for count in tokens])


def test_padding_tokens_are_neither_stored_nor_needed(vllm: Any) -> None:
    case, batch = CASES["window"], make_batch(MIXED, padding=5)
    metadata = builder(vllm).build(0, common(batch, padding=3))
    out = serve(layer_of(vllm, batch, case), batch, case, packed_cache(batch, torch.float32), metadata)
    torch.testing.assert_close(out.double(), expected(batch, case), atol=2e-6, rtol=2e-6)


def test_encoders_see_later_keys_and_use_no_cache(vllm: Any) -> None:
    case, batch = Case(window=6, causal=False), make_batch(PROMPTS)
    impl = layer_of(vllm, batch, case, attn_type=attention_types().ENCODER_ONLY)
    metadata = builder(vllm).build(0, common(batch, causal=False))
    cache = torch.zeros(0)
    impl.do_kv_cache_update(None, batch.k, batch.v, cache, batch.slots)
    out = impl.forward(None, batch.q, batch.k, batch.v, cache, metadata, torch.empty_like(batch.q))
    torch.testing.assert_close(out.double(), expected(batch, case), atol=2e-6, rtol=2e-6)


def test_cross_attention_sees_all_keys_of_the_cache(vllm: Any) -> None:
    batch = make_batch(((20, 4), (33, 1)))
    cache = packed_cache(batch, torch.float32)
    fill_earlier(batch._replace(lengths=((20, 0), (33, 0))), *split(cache))
    impl = layer_of(vllm, batch, Case(), attn_type=attention_types().ENCODER_DECODER)
    metadata = builder(vllm).build(0, common(batch, causal=False))
    out = impl.forward(None, batch.q, None, None, cache, metadata, torch.empty_like(batch.q))
    torch.testing.assert_close(out.double(), expected(batch, Case(causal=False)), atol=2e-6, rtol=2e-6)


def test_a_cache_of_one_head_may_have_any_unused_stride(vllm: Any) -> None:
    cache = torch.zeros(3, PAGE, 64).as_strided((3, 1, PAGE, 64), (PAGE * 64, 1, 64, 1))
    keys, values = layer_of(vllm, make_batch(MIXED), CASES["plain"])._pages(cache)
    assert all(stride % 16 == 0 for stride in (*keys.stride()[:3], *values.stride()[:3]))
    assert values.data_ptr() - keys.data_ptr() == 4 * 32


def test_a_profiling_run_and_unsupported_calls(vllm: Any) -> None:
    impl, q = layer_of(vllm, make_batch(MIXED), CASES["plain"]), torch.ones(3, 4, 32)
    assert not impl.forward(None, q, q, q, torch.zeros(0), None, torch.ones_like(q)).any()
    with pytest.raises(NotImplementedError, match="quantized output"):
        impl.forward(None, q, q, q, torch.zeros(0), None, q, output_scale=q)
    with pytest.raises(ValueError, match="own causal flag"):
        builder(vllm).build(0, common(make_batch(MIXED), causal=torch.ones(5)))


def test_another_group_of_layers_gets_its_own_pages(vllm: Any) -> None:
    batch = make_batch(MIXED)
    metadata = builder(vllm).build(0, common(batch))
    table, slots = torch.zeros(5, 40, dtype=torch.int32), batch.slots + 1
    other = builder(vllm).update_block_table(metadata, table, slots)
    shapes = [[part.batch.block_table.shape[0] for part in built.parts] for built in (metadata, other)]
    assert shapes == [[1, 4], [1, 4]]
    assert all(part.batch.block_table.shape[1] == 40 for part in other.parts)
    assert other.slot_mapping is slots
    assert metadata.slot_mapping is not slots


def test_configurations_without_batch_invariant_kernels_are_named(
    vllm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    for head_dim, dtype, cache, capability, words in (
        (128, torch.bfloat16, "auto", (9, 0), None),
        (128, torch.bfloat16, "fp8", (9, 0), None),
        (96, torch.bfloat16, "fp8", (9, 0), "head dims 64 and 128"),
        (84, torch.bfloat16, "auto", (9, 0), "in steps of 8"),
        (128, torch.float32, "auto", (9, 0), "not fp32"),
        (128, torch.bfloat16, "auto", (8, 0), "sm_90"),
    ):
        reason = vllm.Backend.supports_combination(
            head_dim, dtype, cache, 16, False, False, False, False, capability
        )
        assert reason is None if words is None else words in reason


def test_unsupported_configurations_are_named(vllm: Any) -> None:
    def reason(kv_cache_dtype: str, dtype: torch.dtype, capability: tuple[int, int]) -> str | None:
        text: str | None = vllm.Backend.supports_combination(
            64, dtype, kv_cache_dtype, 16, False, False, False, False, capability
        )
        return text

    assert reason("auto", torch.bfloat16, (8, 0)) is None
    assert reason("fp8", torch.bfloat16, (9, 0)) is None
    assert "sm_89" in str(reason("fp8_e4m3", torch.bfloat16, (8, 6)))
    assert "of this type" in str(reason("float16", torch.bfloat16, (9, 0)))
    assert vllm.Backend.supports_head_size(256)
    assert not vllm.Backend.supports_head_size(257)
    assert vllm.Backend.supports_batch_invariance()
    assert vllm.Backend.get_impl_cls() is vllm.Impl
    assert vllm.Backend.get_builder_cls() is vllm.Builder
