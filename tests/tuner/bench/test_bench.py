"""Tests of `flashtune bench`: only correct results are timed."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import flashtune
from flashtune.core.errors import UsageError
from flashtune.core.problem import Bias, Causal, Dtype
from flashtune.runtime.unfused import unfused_attention
from flashtune.tuner.bench import bench
from flashtune.tuner.bench.admission import Admitted, admit
from flashtune.tuner.bench.bench import error_of, run_bench
from flashtune.tuner.bench.ceiling import clock_mhz, measure_ceiling
from flashtune.tuner.bench.peer_runs import CUDNN, FLASH_ATTN_4, FLEX, UNFUSED, Contestant, RefusalError
from flashtune.tuner.bench.results import OURS, LeftOut
from flashtune.tuner.execution.inputs import make_tensors
from flashtune.verification.reference.forward import Expected, Sample, expect, sample
from tests.tuner.bench.bench_problems import CPU, a_problem

Judged = tuple[Tensor, Sample, Expected]


@pytest.fixture(scope="module")
def judged() -> Judged:
    """A correct output and its reference."""
    torch.manual_seed(0)
    problem = a_problem()
    tensors = make_tensors(problem, CPU)
    chosen = sample(problem, torch.Generator().manual_seed(0))
    out, _ = unfused_attention(problem, tensors.q, tensors.k, tensors.v, scale=0.25)
    return out, chosen, expect(problem, tensors.q, tensors.k, tensors.v, 0.25, chosen)


def contestant(name: str, run: Callable[[], object]) -> Callable[[], Contestant]:
    return lambda: Contestant(name, "", run, run)


def test_correct_result_is_accepted(judged: Judged) -> None:
    out, chosen, expected = judged
    assert error_of(out, chosen, expected) <= 1
    assert error_of((out, None), chosen, expected) <= 1
    assert error_of(out.transpose(1, 2).contiguous().transpose(1, 2), chosen, expected) <= 1


@pytest.mark.parametrize("value", [math.nan, math.inf, 3.0])
def test_one_wrong_element_rejects_a_result(judged: Judged, value: float) -> None:
    out, chosen, expected = judged
    wrong = out.clone()
    wrong[1, 3, 69, 15] = value
    assert not error_of(wrong, chosen, expected) <= 1
    assert not math.isnan(error_of(wrong, chosen, expected))


def test_wrong_or_failing_implementations_are_left_out_with_a_reason(judged: Judged) -> None:
    out, chosen, expected = judged
    wrong, broken = out.clone(), out.clone()
    wrong[0, 0, 1] += 1
    broken[0, 0, 1] = math.nan

    def refuses() -> Contestant:
        raise RefusalError("it does not take this")

    def raises() -> object:
        raise AssertionError("head dim is too large\nand more")

    captured: list[object] = []
    entries = admit(
        {
            OURS: contestant(OURS, lambda: out),
            FLEX: contestant(FLEX, lambda: wrong),
            CUDNN: contestant(CUDNN, lambda: broken),
            FLASH_ATTN_4: contestant(FLASH_ATTN_4, raises),
            UNFUSED: refuses,
        },
        functools.partial(error_of, chosen=chosen, expected=expected),
        lambda run: captured.append(run) or (lambda: None),  # type: ignore[func-returns-value]
    )
    assert [type(entry) for entry in entries] == [Admitted, LeftOut, LeftOut, LeftOut, LeftOut]
    assert len(captured) == 1
    left = {entry.name: entry for entry in entries if isinstance(entry, LeftOut)}
    assert (left[FLEX].error or 0) > 1
    assert left[FLEX].message == ""
    assert left[CUDNN] == LeftOut(CUDNN, None)
    assert left[FLASH_ATTN_4].message == "AssertionError: head dim is too large"
    assert left[UNFUSED].message == "it does not take this"


def test_implementations_without_graph_capture_are_left_out(judged: Judged) -> None:
    out, chosen, expected = judged

    def refuse(run: object) -> Callable[[], object]:
        raise RuntimeError("operation not permitted when stream is capturing")

    judge = functools.partial(error_of, chosen=chosen, expected=expected)
    (entry,) = admit({FLEX: contestant(FLEX, lambda: out)}, judge, refuse)
    assert isinstance(entry, LeftOut)
    assert "capturing" in entry.message


@pytest.mark.parametrize(
    ("changes", "beside"),
    [
        ({}, set()),
        ({"dtype": Dtype.E4M3}, {"q_scale", "k_scale", "v_scale"}),
        ({"bias": Bias.ADDITIVE}, {"attn_bias"}),
        ({"bias": Bias.BOOLEAN}, {"attn_mask"}),
    ],
)
def test_flashtune_run_uses_a_generated_kernel_with_scales_and_masks(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], beside: set[str]
) -> None:
    calls: list[dict[str, object]] = []

    def record(*inputs: Tensor, **options: object) -> Callable[..., None]:
        calls.append(options)
        return lambda *again, **scales: calls.append(scales)

    monkeypatch.setattr(flashtune, "plan", record)
    monkeypatch.setattr(flashtune, "attention", record)
    problem = a_problem(**changes)
    bench.require_work(problem)
    bound = bench._ours(problem, make_tensors(problem, CPU), "")
    bound.run()
    bound.call()
    planned, replayed, called = calls
    assert planned == called
    assert planned["prefer"] == "generated"
    assert planned["causal"] == "bottom_right"
    assert planned.keys() - {"prefer", "causal"} == beside
    assert set(replayed) == beside


def test_bench_requires_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="no GPU is visible here"):
        run_bench(a_problem(), 0)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", list(Causal))
def test_implementations_are_timed_interleaved(causal: Causal) -> None:
    problem = a_problem(head_dim=64, value_head_dim=64, seqlen_q=512, seqlen_kv=512, causal=causal)
    found = run_bench(problem, 0)
    names = [row.name for row in found.rows]
    assert names[0] == OURS
    assert {"sdpa-flash", FLEX, UNFUSED} <= set(names), found.left_out
    assert found.clock_mhz > 100
    for row in found.rows:
        assert 0 < row.p20 <= row.ms <= row.p80
        assert row.error <= 1
        assert 0.5 < row.host_us < 5000
        assert row.tflops == pytest.approx(found.problem.nominal_flops() / row.ms / 1e9)


@pytest.mark.gpu
def test_flex_attention_is_compiled_beyond_torchs_recompile_limit() -> None:
    limit = torch._dynamo.config.recompile_limit
    for number in range(limit + 2):
        problem = a_problem(head_dim=64, value_head_dim=64, seqlen_q=128 + 64 * number, causal=Causal.NONE)
        found = run_bench(problem, 0, peers=(FLEX,), rounds=3)
        assert found.row(FLEX) is not None, found.left_out


@pytest.mark.gpu
def test_measured_peak_is_faster_than_any_attention() -> None:
    ceiling = measure_ceiling(Dtype.BF16, torch.device("cuda", 0), rounds=5)
    assert ceiling.tflops == pytest.approx(2 * ceiling.side**3 / ceiling.ms / 1e9)
    assert ceiling.tflops > 20
    assert 100 < ceiling.clock_mhz < 4000
    assert 100 < clock_mhz(torch.device("cuda", 0)) < 4000
