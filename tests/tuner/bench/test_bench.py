"""Tests of `flashtune bench`: only correct results are timed."""

import math
from collections.abc import Callable

import msgspec
import pytest
import torch
from torch import Tensor

from flashtune.core.errors import UsageError
from flashtune.core.kernel import Specialization
from flashtune.core.problem import Causal, Dtype
from flashtune.core.record import Outcome
from flashtune.core.target import find_target
from flashtune.dispatch.lookup import select
from flashtune.dispatch.tables import tuned_records
from flashtune.launch.kernel_cache import kernel_of
from flashtune.runtime.unfused import unfused_attention
from flashtune.tuner.bench.admission import Admitted, Judge, admit
from flashtune.tuner.bench.bench import run_bench
from flashtune.tuner.bench.ceiling import measure_ceiling
from flashtune.tuner.bench.driver import compile_ahead
from flashtune.tuner.bench.flash_attn_4 import FLASH_ATTN_4
from flashtune.tuner.bench.grids import grid_problems
from flashtune.tuner.bench.judging import output_judge
from flashtune.tuner.bench.peer_runs import CUDNN, FLEX, UNFUSED, Contestant, RefusalError
from flashtune.tuner.bench.results import OURS, LeftOut
from flashtune.tuner.execution.inputs import make_tensors
from flashtune.tuner.execution.timing import clock_mhz
from tests.tuner.bench.bench_problems import CPU, a_problem

Judged = tuple[Tensor, Judge]


@pytest.fixture(scope="module")
def judged() -> Judged:
    """A correct output, and the comparison with its reference."""
    torch.manual_seed(0)
    problem = a_problem()
    tensors = make_tensors(problem, CPU)
    out, _ = unfused_attention(problem, tensors.q, tensors.k, tensors.v, scale=0.25)
    return out, output_judge(problem, tensors)


def contestant(name: str, run: Callable[[], object]) -> Callable[[], Contestant]:
    return lambda: Contestant(name, "", run, run)


def test_correct_result_is_accepted(judged: Judged) -> None:
    out, judge = judged
    assert judge(out) <= 1
    assert judge((out, None)) <= 1
    assert judge(out.transpose(1, 2).contiguous().transpose(1, 2)) <= 1


@pytest.mark.parametrize("value", [math.nan, math.inf, 3.0])
def test_one_wrong_element_rejects_a_result(judged: Judged, value: float) -> None:
    out, judge = judged
    wrong = out.clone()
    wrong[1, 3, 69, 15] = value
    assert not judge(wrong) <= 1
    assert not math.isnan(judge(wrong))


def test_wrong_or_failing_implementations_are_left_out_with_a_reason(judged: Judged) -> None:
    out, judge = judged
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
        judge,
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
    out, judge = judged

    def refuse(run: object) -> Callable[[], object]:
        raise RuntimeError("operation not permitted when stream is capturing")

    (entry,) = admit({FLEX: contestant(FLEX, lambda: out)}, judge, refuse)
    assert isinstance(entry, LeftOut)
    assert "capturing" in entry.message


def test_bench_requires_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="no GPU is visible here"):
        run_bench(a_problem(), 0)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", list(Causal))
def test_implementations_are_timed_interleaved(causal: Causal) -> None:
    problem = a_problem(head_dim=64, value_head_dim=64, seqlen_q=512, seqlen_kv=512, causal=causal)
    bench = run_bench(problem, 0)
    names = [row.name for row in bench.rows]
    assert names[0] == OURS
    assert {"sdpa-flash", FLEX, UNFUSED} <= set(names), bench.left_out
    assert bench.clock_mhz > 100
    for row in bench.rows:
        assert 0 < row.p20 <= row.ms <= row.p80
        assert row.error <= 1
        assert 0.5 < row.host_us < 5000
        assert row.tflops == pytest.approx(bench.problem.nominal_flops() / row.ms / 1e9)


@pytest.mark.gpu
def test_flex_attention_is_compiled_beyond_torchs_recompile_limit() -> None:
    limit = torch._dynamo.config.recompile_limit
    for number in range(limit + 2):
        problem = a_problem(head_dim=64, value_head_dim=64, seqlen_q=128 + 64 * number, causal=Causal.NONE)
        bench = run_bench(problem, 0, peers=(FLEX,), rounds=3)
        assert bench.row(FLEX) is not None, bench.left_out


@pytest.mark.gpu
def test_measured_peak_is_faster_than_any_attention() -> None:
    ceiling = measure_ceiling(Dtype.BF16, torch.device("cuda", 0), rounds=5)
    assert ceiling.tflops == pytest.approx(2 * ceiling.side**3 / ceiling.ms / 1e9)
    assert ceiling.tflops > 20
    assert 100 < ceiling.clock_mhz < 4000
    assert 100 < clock_mhz(torch.device("cuda", 0)) < 4000


H200 = find_target("h200")
# A kernel that takes no more than a moment to compile.
SMALL = msgspec.structs.replace(grid_problems("paper")[0], dtype=Dtype.FP16)


@pytest.mark.xdist_group("processes")
def test_each_selected_kernel_is_compiled_once() -> None:
    more = msgspec.structs.replace(SMALL, batch=SMALL.batch + 1)
    tables = tuned_records(H200.name)
    expected = {
        kernel_of(select(problem, H200, tables, Specialization(), generated=True).record, Specialization())
        for problem in (SMALL, more)
    }
    compiled = compile_ahead((SMALL, more, SMALL), H200)
    assert {compilation.kernel for compilation in compiled} == {kernel.digest for kernel in expected}
    assert len(compiled) == len(expected)
    assert all(compilation.outcome is Outcome.OK for compilation in compiled)


def test_unsupported_problems_are_skipped() -> None:
    wide = msgspec.structs.replace(SMALL, head_dim=512, value_head_dim=512)
    assert compile_ahead((wide,), H200) == ()
