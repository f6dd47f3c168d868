"""Tests of grids, published figures, and summaries of benches."""

import json
import math
from pathlib import Path

import msgspec
import pytest

from flashtune.core.errors import UsageError
from flashtune.core.problem import Causal, Dtype, Problem
from flashtune.tuner.bench.driver import read_report, report_of
from flashtune.tuner.bench.grids import GRIDS, PeerFile, case_of, grid_problems, read_figures
from flashtune.tuner.bench.results import OURS, LeftOut
from flashtune.tuner.bench.summary import ANY_PEER, against, of_copy, ratios
from tests.tuner.bench.bench_fakes import SPEEDS, a_bench, a_reading_bench, a_run

PEERS = Path(__file__).parents[3] / "benchmarks" / "peers"
PAPER, DECODE = grid_problems("paper"), grid_problems("decode")


def test_paper_grid_matches_the_papers() -> None:
    assert len(set(PAPER)) == 36
    for problem in PAPER:
        assert problem.heads * problem.head_dim == 2048
        assert problem.batch * problem.seqlen_q == 16_384
        assert problem.seqlen_q == problem.seqlen_kv
        assert problem.kv_heads == problem.heads
        assert problem.dtype is Dtype.BF16
    assert {problem.head_dim for problem in PAPER} == {64, 128, 256}
    assert {problem.seqlen_q for problem in PAPER} == {512, 1024, 2048, 4096, 8192, 16_384}


def test_grids_have_their_shapes() -> None:
    assert {(problem.heads, problem.kv_heads) for problem in grid_problems("gqa")} == {(64, 8)}
    assert {problem.seqlen_q for problem in grid_problems("backward")} == {2048, 8192}


def test_case_names_are_unique_in_every_grid() -> None:
    for name in GRIDS:
        cases = [case_of(problem) for problem in grid_problems(name)]
        assert len(set(cases)) == len(cases) > 0


def test_case_names_contain_the_distinguishing_fields() -> None:
    assert case_of(PAPER[0]) == "fwd d64 full s512"
    changed = msgspec.structs.replace(PAPER[0], kv_heads=8, causal=Causal.TOP_LEFT)
    assert case_of(changed) == "fwd bf16 d64 h32x8 causal s512"
    ragged = msgspec.structs.replace(changed, value_head_dim=32, seqlen_kv=600)
    assert case_of(ragged) == "fwd bf16 d64v32 h32x8 top_left s512x600"
    windowed = msgspec.structs.replace(PAPER[0], window_left=1023)
    assert case_of(windowed) == "fwd bf16 d64 h32x32 full s512_window1023:"
    assert case_of(DECODE[6]) == "decode b16 hq32 hkv1 s8192 d128 [GB/s]"
    paged = msgspec.structs.replace(DECODE[6], page_size=16)
    assert case_of(paged) == "fwd bf16 d128 h32x1 full b16 s1x8192_page16"


@pytest.mark.parametrize(
    ("file", "grid"),
    [("nvidia-h200.json", "paper"), ("nvidia-h200.json", "decode"), ("nvidia-h200-fp8.json", "fp8")],
)
def test_saved_figures_cover_every_point_of_a_grid(file: str, grid: str) -> None:
    figures = read_figures((PEERS / file).read_bytes(), file)
    assert figures.source
    assert {case_of(problem) for problem in grid_problems(grid)} <= {entry.case for entry in figures.cases}


def test_figures_may_be_a_bare_list() -> None:
    file = read_figures(b'[{"case": "fwd d64 full s512", "cudnn": 100, "fa4": 120.5}]', "mine.json")
    assert file.source == "mine.json"
    assert not file.absolute
    assert file.cases[0].best() == ("fa4", 120.5)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "null",
        "\xff",
        '[{"case": "a"}]',
        '[{"case": "a", "cudnn": 0}]',
        '[{"case": "a", "cudnn": 1, "mine": 2}]',
        '[{"case": "a", "cudnn": 1}, {"case": "a", "cudnn": 2}]',
        '{"source": "x", "cases": [{"case": 1, "cudnn": 2}]}',
    ],
)
def test_damaged_figures_are_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match=r"mine\.json"):
        read_figures(text.encode("latin-1"), "mine.json")


def test_ratios_are_over_each_peer_and_over_the_best_of_each_problem() -> None:
    slower = {**SPEEDS, OURS: 450.0, "flash-attn-4": 400.0}
    by_peer = {entry.peer: entry for entry in ratios([a_bench(PAPER[0]), a_bench(PAPER[1], slower)])}
    assert set(by_peer) == {ANY_PEER, "sdpa-cudnn", "sdpa-flash", "flash-attn-4"}
    assert [point.ratio for point in by_peer["sdpa-cudnn"].points] == pytest.approx([1.2, 0.9])
    assert by_peer["sdpa-cudnn"].geometric_mean == pytest.approx(math.sqrt(1.2 * 0.9))
    assert by_peer["sdpa-cudnn"].worst.problem == PAPER[1].key
    assert [point.ratio for point in by_peer[ANY_PEER].points] == pytest.approx([0.8, 0.9])


def figures_of(problem: Problem, *, absolute: bool = False, **speeds: float) -> PeerFile:
    text = json.dumps(
        {"source": "a test", "absolute": absolute, "cases": [{"case": case_of(problem), **speeds}]}
    )
    return read_figures(text.encode(), "test")


def test_published_figures_are_relative_to_cudnn() -> None:
    # 1.2 times cuDNN here, and the best peer 1.1 times there, on a machine twice as slow.
    result = against(
        [a_bench(PAPER[0]), a_bench(PAPER[1])], figures_of(PAPER[0], cudnn=250, fa4=275, fa2=100)
    )
    assert result is not None
    assert len(result.points) == 1
    assert result.worst.best == "fa4"
    assert result.geometric_mean == pytest.approx(1.2 / 1.1)
    assert [point.seqlen for point in result.worst_by_length()] == [512]


def test_absolute_figures_need_no_cudnn() -> None:
    bench = a_bench(PAPER[0], {OURS: 600.0})
    assert against([bench], figures_of(PAPER[0], cudnn=1200)) is None
    result = against([bench], figures_of(PAPER[0], absolute=True, cudnn=1200))
    assert result is not None
    assert result.worst.best == "cudnn"
    assert result.geometric_mean == pytest.approx(0.5)


def test_absolute_figures_of_decoding_are_bandwidths() -> None:
    bench = a_reading_bench(DECODE[0], {OURS: 1800.0})
    result = against([bench], figures_of(DECODE[0], absolute=True, cudnn=1500))
    assert result is not None
    assert result.worst.ours == pytest.approx(1800)
    assert result.geometric_mean == pytest.approx(1.2)


def test_decoding_is_compared_with_a_copy_of_the_same_run() -> None:
    run = a_run(a_reading_bench(DECODE[0], {OURS: 3000.0}), a_bench(PAPER[0]))
    (result,) = of_copy(run)
    assert result.gbps == pytest.approx(3000)
    assert result.share == pytest.approx(0.75)
    assert of_copy(msgspec.structs.replace(run, copy=None)) == ()


def test_comparison_requires_a_row_of_flashtune() -> None:
    assert against([a_bench(PAPER[0], {"sdpa-cudnn": 500.0})], figures_of(PAPER[0], cudnn=250)) is None


def test_report_round_trips() -> None:
    left = (LeftOut("flex", None, "it says no"), LeftOut("unfused", 2.5))
    run = a_run(a_bench(PAPER[0], left_out=left), a_bench(PAPER[1], throttled=True))
    saved = msgspec.json.encode(report_of(run, figures_of(PAPER[0], cudnn=250)))
    assert read_report(saved, "saved.json") == run


@pytest.mark.parametrize("damage", ["", "[]", "{}", "benches", "unknown"])
def test_invalid_report_is_a_usage_error(damage: str) -> None:
    report = msgspec.to_builtins(report_of(a_run(a_bench(PAPER[0])), None))
    if damage == "benches":
        report["run"]["benches"] = []
    elif damage == "unknown":
        report["run"]["more"] = 1
    content = json.dumps(report) if damage in ("benches", "unknown") else damage
    with pytest.raises(UsageError, match=r"saved\.json"):
        read_report(content.encode(), "saved.json")
