"""`flashtune explain --phase`: a whole model's attention over sequence length, as text, JSON and plot."""

import json
from pathlib import Path

import pytest

from flashtune.core.problem import Dtype
from flashtune.core.target import find_target
from flashtune.tuner.analysis.model_overview import Overview, overviews
from flashtune.tuner.workloads.model_sizes import ModelSizes, Phase
from flashtune.tuner.workloads.presets import find_model
from tests.tuner.cli.conftest import Run

H200 = find_target("h200")


def overview_of(model: str, phase: Phase, lengths: str = "1024|8192", **options: str) -> Overview:
    sizes = ModelSizes(phase, lengths, options.get("batch"), options.get("dtype"), options.get("page_size"))
    (overview,) = overviews(find_model(model), sizes, H200, None)
    return overview


@pytest.fixture(autouse=True)
def empty_database(own_database: Path) -> None:
    """Uses only the shipped tables."""


def test_figures_of_a_prefill() -> None:
    overview = overview_of("llama-3.1-8b", Phase.PREFILL)
    short, long = overview.points
    # Keys and values of 8 heads, 128 wide, 2 bytes each, in 32 layers.
    assert short.kv_bytes == 32 * 2 * 8 * 1024 * 128 * 2
    assert long.kv_bytes == 8 * short.kv_bytes
    # Scores in float32, two and a half times over, and the output.
    out = 32 * 1024 * 128 * 2
    assert short.unfused.memory == out + 10 * 32 * 1024**2
    assert short.flash.memory == out + 32 * 1024 * 4
    assert long.unfused.memory > 60 * short.unfused.memory
    assert long.flash.memory == 8 * short.flash.memory
    assert long.unfused.traffic > 10 * long.flash.traffic
    assert (long.unfused.bound_by, long.flash.bound_by) == ("memory", "matrix units")
    assert long.speedup == pytest.approx(long.unfused.bound_ms / long.flash.bound_ms)
    assert long.speedup > 10


def test_figures_of_training() -> None:
    overview = overview_of("llama-3.1-8b", Phase.TRAINING)
    forward = overview_of("llama-3.1-8b", Phase.PREFILL)
    for point, prefill in zip(overview.points, forward.points, strict=True):
        assert point.kv_bytes == prefill.kv_bytes
        # Two and a half times as many operations backward.
        assert point.flash.bound_ms == pytest.approx(3.5 * prefill.flash.bound_ms, rel=0.05)
        rows, keys = 32 * point.seqlen, 8 * point.seqlen
        gradients = 2 * (rows + keys) * 256
        # The backward pass also keeps one or two numbers for each row, and float32 sums of dq.
        kept = point.flash.memory - prefill.flash.memory - gradients
        assert 4 * 128 * rows < kept <= (4 * 128 + 16) * rows
        assert point.unfused.memory == 2 * rows * 128 + gradients + 16 * 32 * point.seqlen**2
    short, long = overview.points
    assert long.flash.memory == 8 * short.flash.memory
    assert overview.points[0].families[1].startswith("backward_")


def test_decode_is_bound_by_kv_cache_reads() -> None:
    overview = overview_of("llama-3.1-8b", Phase.DECODE, "65536", batch="16", page_size="0")
    (point,) = overview.points
    assert point.flash.bound_by == "memory"
    read_once = point.kv_bytes / (H200.hbm_bandwidth * 1e6)
    assert point.flash.bound_ms == pytest.approx(read_once, rel=0.01)
    assert 1 < point.speedup < 3
    assert point.flash.memory < 2**20


def test_model_overview_uses_the_problems_that_a_search_tunes() -> None:
    overview = overview_of("gpt-oss-20b", Phase.DECODE, "8192", batch="16")
    (point,) = overview.points
    assert point.seqlen == 8192
    assert point.kv_bytes == 24 * 16 * 2 * 8 * 8192 * 64 * 2
    # Half of the layers read no more than a window.
    full = overview_of("llama-3.2-1b", Phase.DECODE, "8192", batch="16").points[0]
    assert full.kv_bytes * 24 == point.kv_bytes * 16
    assert point.flash.bound_ms < 0.6 * full.flash.bound_ms * 24 / 16
    assert set(point.families) <= {"decode_split_kv", "forward_masked"}


def test_latent_keys_count_once_for_all_heads() -> None:
    (point,) = overview_of("deepseek-v3", Phase.DECODE, "8192").points
    assert point.kv_bytes == 61 * 8192 * 576 * 2
    assert point.families == ("decode_latent_hopper",)


def test_8_bits_are_compared_with_16_bits() -> None:
    overview = overview_of("llama-3.1-8b", Phase.PREFILL, "4096", dtype="e4m3")
    wide = overview_of("llama-3.1-8b", Phase.PREFILL, "4096")
    assert overview.dtype is Dtype.E4M3
    assert overview.points[0].kv_bytes * 2 == wide.points[0].kv_bytes
    assert overview.points[0].unfused.traffic == wide.points[0].unfused.traffic
    # Values are transposed into memory of their own size.
    assert overview.points[0].flash.memory - wide.points[0].flash.memory == 8 * 4096 * 128


def test_each_batch_size_has_its_own_overview() -> None:
    by_batch = overviews(find_model("gpt2"), ModelSizes(seqlen="512..2048", batch="1|8"), H200, None)
    assert [(overview.batch, [point.seqlen for point in overview.points]) for overview in by_batch] == [
        (1, [512, 1024, 2048]),
        (8, [512, 1024, 2048]),
    ]


def test_text_and_json(run: Run) -> None:
    result = run(
        "explain", "--model", "qwen3-8b", "--phase", "decode", "--page-size", "0", "--target", "h200"
    )
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    assert "qwen3-8b, decode of one new token of each sequence on nvidia-h200: 36 layers, batch 1" in text
    assert "131,072" in text
    assert "not measured" in text
    options = ("--model", "qwen3-8b", "--model", "gpt2", "--phase", "prefill", "--seqlen", "512", "--json")
    told = json.loads(run("explain", *options, "--target", "h100").stdout)
    assert [overview["model"] for overview in told] == ["qwen3-8b", "gpt2"]
    assert told[0]["points"][0]["unfused"]["bound_ms"] > told[0]["points"][0]["flash"]["bound_ms"]


def test_plot_is_one_html_page(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    page = tmp_path / "model.html"
    options = ("--model", "llama-3.2-1b", "--phase", "decode", "--page-size", "0")
    result = run("explain", *options, "--seqlen", "1024..4096", "--target", "h200", "--plot", page)
    assert result.exit_code == 0, result.output
    content = page.read_text(encoding="utf-8")
    assert "llama-3.2-1b decode" in content
    assert "src=" not in content.split("<body>")[1].split("</script>")[0]
