"""Tests of the Hopper family without a GPU: supported problems and kernel digests."""

import itertools

import msgspec
import pytest
import torch

from flashtune.core.errors import KernelError
from flashtune.core.kernel import Alignment, Specialization, specialization_of
from flashtune.core.problem import Bias, Causal, Dtype, KvDtype, KvScale, Problem
from flashtune.core.target import find_target
from flashtune.templates.family import unsupported_reason
from flashtune.templates.rendering import render
from tests.problems.hopper import FAMILY, H200, PLAIN, a_config, a_problem, sampled_configs


def test_only_hopper_is_supported() -> None:
    for name in ("h100", "h200"):
        assert FAMILY.supports(a_problem(), find_target(name)) is None
    for name in ("a100", "b200", "rtx-5090", "mi300x"):
        target = find_target(name)
        reason = FAMILY.supports(a_problem(), target)
        assert reason == f"forward_hopper runs on sm_90 alone, and {target.name} is {target.arch}"
    assert not FAMILY.interpreted


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (a_problem(64, dtype=Dtype.FP32), "takes bf16, fp16 and e4m3, not fp32"),
        (a_problem(264, 64), "takes head dims up to 256"),
        (a_problem(64, 264), "takes head dims up to 256"),
        (a_problem(8), "bf16 head dims from 16 on, in steps of 8"),
        (a_problem(64, 8), "bf16 head dims from 16 on, in steps of 8"),
        (a_problem(100, dtype=Dtype.FP16), "fp16 head dims from 16 on, in steps of 8"),
        (a_problem(16, dtype=Dtype.E4M3), "e4m3 head dims from 32 on, in steps of 16"),
        (a_problem(72, dtype=Dtype.E4M3), "e4m3 head dims from 32 on, in steps of 16"),
        (a_problem(dtype=Dtype.E4M3, dropout=True), "drops weights in bf16 and fp16"),
        (a_problem(packed=1, dropout=True), "of sequences that are not packed"),
        (a_problem(dtype=Dtype.E4M3, softcap=True), "takes e4m3 with windows alone"),
        (a_problem(page_size=16, dropout=True), "of sequences that are not packed or in pages"),
        (a_problem(page_size=16, dtype=Dtype.E4M3), "takes e4m3 with windows alone"),
        (a_problem(kv_dtype=KvDtype.E4M3), "takes 8-bit keys in pages"),
        (a_problem(kv_dtype=KvDtype.INT8), "takes 8-bit keys in pages"),
        (
            a_problem(page_size=4, kv_dtype=KvDtype.INT8, kv_scale=KvScale.PAGE),
            "takes scales of pages of 8 keys or more",
        ),
        (
            a_problem(page_size=16, dtype=Dtype.FP16, kv_dtype=KvDtype.INT8, kv_scale=KvScale.PAGE),
            "takes scales of pages in bf16",
        ),
        (a_problem(256, page_size=16, kv_dtype=KvDtype.E4M3), "8-bit keys of head dims 64 and 128"),
        (a_problem(128, 64, page_size=16, kv_dtype=KvDtype.E4M3), "as wide as their values"),
    ],
)
def test_unsupported_problems_have_reasons(problem: Problem, reason: str) -> None:
    assert reason in str(FAMILY.supports(problem, H200))


def test_varlen_requires_16_bits_and_no_packed_heads() -> None:
    reason = FAMILY.supports(a_problem(128, dtype=Dtype.E4M3, packed=1), H200)
    assert reason == "forward_hopper takes packed sequences in bf16 and fp16, not in e4m3"
    problem = a_problem(64, kv_heads=1, seqlen_q=16, packed=32)
    assert {config.pack_gqa for config in sampled_configs(problem, 60)} == {1}
    with pytest.raises(KernelError, match="set pack_gqa to 1"):
        render(FAMILY, problem, a_config(problem, pack_gqa=2), PLAIN)


def test_supported_features_are_those_of_masks_scores_and_pages() -> None:
    window = a_problem(causal=Causal.BOTTOM_RIGHT, window_left=100)
    scores = a_problem(softcap=True, alibi=True, sinks=True, chunk=64, sink_tokens=3)
    for problem in (window, a_problem(packed=1), a_problem(window_right=3, packed=1), scores):
        for changes in ({}, {"kv_lengths": True}, {"prefix": True}, {"page_size": 16}):
            supported = msgspec.structs.replace(problem, **changes)
            assert unsupported_reason(FAMILY, supported, H200, PLAIN) is None
    for bias in (Bias.ADDITIVE, Bias.BOOLEAN):
        supported = msgspec.structs.replace(window, bias=bias)
        assert unsupported_reason(FAMILY, supported, H200, PLAIN) is None
        for changes in ({"kv_lengths": True}, {"prefix": True}, {"packed": 1}):
            refused = msgspec.structs.replace(supported, **changes)
            assert "takes a bias or mask without" in str(unsupported_reason(FAMILY, refused, H200, PLAIN))


def test_biases_that_tma_cannot_copy_are_refused() -> None:
    q = torch.empty(2, 4, 32, 64, dtype=torch.bfloat16)
    rows = torch.empty(2, 4, 32, 48, dtype=torch.bfloat16)
    column = torch.empty(2, 1, 1, 40, dtype=torch.bfloat16).expand(2, 4, 32, 40)
    for bias, copied in (
        (rows, True),
        (rows[:1, :1].expand(2, 4, 32, 48), True),
        (rows[..., :43], True),
        (torch.empty(2, 4, 32, 43, dtype=torch.bfloat16), False),
        (rows[..., 1:], False),
        (column, False),
        (torch.empty(2, 4, 32, 43, dtype=torch.bool), True),
    ):
        specialization = specialization_of((q, q, q, q), lse=False, bias=bias)
        assert FAMILY.can_address(Dtype.BF16, specialization) is copied


def test_supported_tensors_can_be_addressed_by_tma() -> None:
    for dtype, least in ((Dtype.BF16, 8), (Dtype.FP16, 8), (Dtype.E4M3, 16)):
        for alignment in Alignment:
            for index_bits in (32, 64):
                specialization = Specialization(alignment, index_bits)
                assert FAMILY.can_address(dtype, specialization) is (alignment >= least)
    problem = a_problem()
    assert unsupported_reason(FAMILY, problem, H200, Specialization(Alignment.EIGHT, 64)) is None
    for kv_dtype, kv_scale in itertools.product(KvDtype, KvScale):
        stored = a_problem(page_size=16, kv_dtype=kv_dtype, kv_scale=kv_scale)
        assert unsupported_reason(FAMILY, stored, H200, PLAIN) is None
    assert "cannot address" in str(unsupported_reason(FAMILY, stored, H200, Specialization(Alignment.EIGHT)))
    assert "cannot address" in str(unsupported_reason(FAMILY, problem, H200, Specialization(Alignment.ANY)))


def test_source_does_not_depend_on_lengths_heads_and_batch() -> None:
    first, other = a_problem(), a_problem(heads=12, kv_heads=4, batch=7, seqlen_q=31, seqlen_kv=4096)
    for config in (a_config(first), a_config(first, pack_gqa=8, order="serpentine", head_swizzle=8)):
        assert render(FAMILY, first, config, PLAIN) == render(FAMILY, other, config, PLAIN)
