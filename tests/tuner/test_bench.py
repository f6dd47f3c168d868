"""`flashtune bench`: only right results are shown, and what is shown can be kept."""

from __future__ import annotations

import io
import math
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console

from flashtune.problem import Causal, Dtype, Problem
from flashtune.proof.reference import Expected, Sample, expect, sample
from flashtune.record import Versions
from flashtune.standard import standard_attention
from flashtune.tuner.bench import OURS, Bench, LeftOut, Row, error_of, run_bench
from flashtune.tuner.cli import main
from flashtune.tuner.cli.bench_report import bench_table, markdown, notes

SHAPE = "heads=4,kv_heads=2,seqlen=256,head_dim=64,dtype=bf16,causal,batch=2"
WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")


def a_problem(**changes: object) -> Problem:
    values: dict[str, object] = {
        "dtype": Dtype.BF16,
        "head_dim": 16,
        "value_head_dim": 16,
        "heads": 4,
        "kv_heads": 2,
        "batch": 2,
        "seqlen_q": 70,
        "seqlen_kv": 90,
        "causal": Causal.BOTTOM_RIGHT,
    }
    return Problem(**(values | changes))  # type: ignore[arg-type]


def a_bench(left_out: tuple[LeftOut, ...] = (), throttled: bool = False) -> Bench:
    rows = (
        Row(OURS, "forward_q_outer block_m=128 (database)", 0.5, 0.49, 0.52, 600.0, 12.5, 0.4),
        Row("sdpa-cudnn", "", 0.4, 0.39, 0.42, 750.0, 16.0, 0.5),
        Row("sdpa-flash", "", 1.0, 0.9, 1.1, 300.0, 17.0, 0.5),
    )
    versions = Versions("0.1.0", "0" * 32, "2.13.0", "3.7.1", "13.0", "580.1")
    return Bench(a_problem(), "nvidia-h200", rows, left_out, 21, throttled, versions)


@pytest.fixture(scope="module")
def judged() -> tuple[torch.Tensor, Sample, Expected]:
    """A right output, and what it is held against."""
    torch.manual_seed(0)
    problem = a_problem()
    q = torch.randn(2, 4, 70, 16, dtype=torch.bfloat16)
    k, v = (torch.randn(2, 2, 90, 16, dtype=torch.bfloat16) for _ in range(2))
    chosen = sample(problem, torch.Generator().manual_seed(0))
    out, _ = standard_attention(q, k, v, scale=0.25, causal=problem.causal)
    return out, chosen, expect(problem, q, k, v, 0.25, chosen)


def test_a_right_result_is_let_in(judged: tuple[torch.Tensor, Sample, Expected]) -> None:
    out, chosen, expected = judged
    assert error_of(out, chosen, expected) <= 1
    assert error_of((out, None), chosen, expected) <= 1
    assert error_of(out.transpose(1, 2).contiguous().transpose(1, 2), chosen, expected) <= 1


@pytest.mark.parametrize("value", [math.nan, math.inf, 3.0])
def test_one_wrong_element_keeps_a_result_out(
    judged: tuple[torch.Tensor, Sample, Expected], value: float
) -> None:
    out, chosen, expected = judged
    wrong = out.clone()
    wrong[1, 3, 69, 15] = value
    assert not error_of(wrong, chosen, expected) <= 1
    assert not math.isnan(error_of(wrong, chosen, expected))


def test_the_table_compares_with_the_best_sdpa() -> None:
    printed = io.StringIO()
    Console(width=120, file=printed).print(bench_table(a_bench()))
    lines = printed.getvalue().splitlines()
    ours = next(line for line in lines if OURS in line)
    assert "600.0" in ours
    assert "0.80" in ours
    assert "0.40" in next(line for line in lines if "sdpa-flash" in line)


def test_notes_name_the_kernel_and_who_was_left_out() -> None:
    said = notes(a_bench((LeftOut("sdpa-efficient", math.inf),), throttled=True))
    assert any("forward_q_outer block_m=128 (database)" in sentence for sentence in said)
    assert any(sentence.startswith("sdpa-efficient is left out") for sentence in said)
    assert any("clock" in sentence for sentence in said)
    assert len(notes(a_bench())) == 1


def test_markdown_holds_versions_command_and_rows() -> None:
    text = markdown([a_bench(), a_bench()], "flashtune bench --shape x")
    assert text.count("## forward_bf16") == 2
    for part in (
        "nvidia-h200",
        "torch 2.13.0",
        "triton 3.7.1",
        "driver 580.1",
        "`flashtune bench --shape x`",
    ):
        assert part in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len({row.count("|") for row in rows}) == 1
    assert max(map(len, text.splitlines())) <= 120


@WITHOUT_GPU
def test_without_a_gpu_it_says_so_in_one_sentence() -> None:
    result = CliRunner().invoke(main, ["bench", "--shape", SHAPE])
    assert result.exit_code == 2
    assert "no GPU is visible here" in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_it_wants_a_shape() -> None:
    assert CliRunner().invoke(main, ["bench"]).exit_code == 2


@pytest.mark.gpu
@pytest.mark.parametrize("causal", list(Causal))
def test_contestants_are_timed_side_by_side(causal: Causal) -> None:
    bench = run_bench(
        a_problem(head_dim=64, value_head_dim=64, seqlen_q=512, seqlen_kv=512, causal=causal), 0
    )
    names = [row.name for row in bench.rows]
    assert names[0] == OURS
    assert {"sdpa-flash", "standard"} <= set(names)
    assert not [left for left in bench.left_out if left.name == OURS]
    for row in bench.rows:
        assert 0 < row.p20 <= row.ms <= row.p80
        assert row.error <= 1
        assert 0.5 < row.host_us < 5000
        assert row.tflops == pytest.approx(bench.problem.nominal_flops() / row.ms / 1e9)


@pytest.mark.gpu
def test_the_command_prints_tables_json_and_markdown(tmp_path: Path) -> None:
    path = tmp_path / "bench.md"
    options = ["--rounds", "3", "--json", "--markdown", str(path)]
    result = CliRunner().invoke(main, ["bench", "--shape", SHAPE, *options])
    assert result.exit_code == 0, result.output
    assert '"tflops"' in result.output
    assert OURS in path.read_text(encoding="utf-8")


@pytest.mark.gpu
def test_nothing_to_compute_is_a_usage_error() -> None:
    shape = "heads=4,seqlen_q=0,seqlen_kv=64,head_dim=64"
    assert CliRunner().invoke(main, ["bench", "--shape", shape]).exit_code == 2
