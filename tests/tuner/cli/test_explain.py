"""Tests of flashtune explain: a problem, and a whole model's attention over sequence length."""

import json
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import msgspec
import pytest

from flashtune.core.errors import KernelError, UsageError
from flashtune.core.problem import Causal, Dtype, Problem
from flashtune.core.record import Outcome, Provenance, Record
from flashtune.core.target import find_target
from flashtune.runtime.unfused import standard_hbm_items
from flashtune.templates.registry import find_family
from flashtune.tuner.analysis.explain import explain, rank, roofline
from flashtune.tuner.analysis.model_overview import Overview, overviews
from flashtune.tuner.candidates import contiguous_specialization
from flashtune.tuner.tables.kernel_choice import change_config, choose
from flashtune.tuner.workloads.model_sizes import ModelSizes, Phase
from flashtune.tuner.workloads.presets import find_model
from flashtune.tuner.workloads.shapes import parse_shape
from tests.support.families import Ship
from tests.tuner.cli.conftest import Run

Stored = tuple[Record, ...]
H200 = find_target("h200")
Q_OUTER = find_family("forward_q_outer")


def test_explain_compares_the_selection_with_other_candidates(run: Run, stored: Stored, shape: str) -> None:
    result = run("explain", "--shape", shape, "--target", "h200")
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    for part in (
        "block_m=128",
        "Selected in the database. 0.5000 ms, measured.",
        "capacity 232,448",
        "compiled 49,152",
        "Roofline: at least",
        "forward_kv_outer",
        "unfused",
        "warps on a multiprocessor, limited by",
        "sdpa-cudnn 0.6000",
        "1 infeasible, 1 wrong_result",
    ):
        assert part in text


def test_json_explains_in_full(run: Run, stored: Stored, shape: str) -> None:
    (told,) = json.loads(run("explain", "--shape", shape, "--target", "h200", "--json").stdout)
    assert told["source"] == "database"
    assert told["failures"] == {"infeasible": 1, "wrong_result": 1}
    assert [rival["ms"] for rival in told["candidates"]] == [0.5, 0.6, 0.7, 0.9, 0.9]
    assert told["sram"]["modelled"] == sum(item["bytes"] for item in told["sram"]["items"])
    assert told["sram"]["compiled"] == 49_152
    assert {way["name"] for way in told["traffic"]} >= {"forward_q_outer", "forward_kv_outer", "unfused"}


def test_explain_uses_the_default_without_a_database(
    run: Run, shape: str, compiler: mock.Mock, tmp_path: Path
) -> None:
    result = run("explain", "--shape", shape, "--target", "a100", "--json")
    assert result.exit_code == 0, result.output
    (told,) = json.loads(result.stdout)
    assert (told["source"], told["ms"], told["candidates"]) == ("default", None, [])
    assert told["sram"]["capacity"] == find_target("a100").sram_per_block
    assert told["occupancy"]["blocks"] >= 1
    assert not (tmp_path / "flashtune.sqlite").exists()


def test_explain_names_the_order_of_a_batch_invariant_kernel(run: Run, compiler: mock.Mock) -> None:
    shape = "heads=8,seqlen=512,head_dim=256,batch_invariant"
    arguments = ("explain", "--shape", shape, "--target", "h200")
    (explained,) = json.loads(run(*arguments, "--json").stdout)
    assert explained["order"] | {"split_keys": 2048, "block_n": 64} == explained["order"]
    assert "Order of arithmetic: split_keys=2048, block_n=64" in run(*arguments).stdout


def test_explain_accepts_a_config(run: Run, stored: Stored, shape: str, compiler: mock.Mock) -> None:
    arguments = ("explain", "--shape", shape, "--target", "h200", "--json", "--config", "block_n=32")
    (told,) = json.loads(run(*arguments).stdout)
    assert told["source"] == "command line"
    assert (told["config"]["block_m"], told["config"]["block_n"]) == (128, 32)
    assert told["sram"]["compiled"] == 50_000


def test_explain_supports_kernels_that_do_not_compile(run: Run, shape: str, compiler: mock.Mock) -> None:
    compiler.side_effect = KernelError("RuntimeError: [PassManager::run failed]")
    result = run("explain", "--shape", shape, "--target", "h200")
    assert result.exit_code == 0, result.output
    assert "[PassManager::run failed]" in result.stdout


@pytest.mark.slow
def test_explain_compiles_where_no_resources_are_stored(run: Run, shape: str) -> None:
    (told,) = json.loads(run("explain", "--shape", shape, "--target", "h100", "--json").stdout)
    assert told["resources"]["sram_bytes"] >= told["sram"]["modelled"] > 0


def test_prefill_is_compute_bound_and_decoding_is_memory_bound() -> None:
    (long,) = parse_shape("heads=32,seqlen=8192,head_dim=128,causal")
    (decode,) = parse_shape("heads=32,kv_heads=8,seqlen_q=1,seqlen_kv=8192,head_dim=128")
    assert roofline(long, H200).bound_by == "matrix units"
    bound = roofline(decode, H200)
    assert bound.bound_by == "memory"
    assert bound.intensity < bound.ridge
    assert bound.bound_ms == pytest.approx(1e3 * decode.minimal_bytes() / 4.8e12)


def test_unfused_attention_has_more_traffic_on_long_sequences(compiler: mock.Mock) -> None:
    (long,) = parse_shape("heads=16,seqlen=8192,head_dim=64")
    told = explain(choose(long, find_target("a100"), None, "forward_q_outer"), ())
    ways = {way.name: way.bytes for way in told.traffic}
    assert ways["forward_q_outer"] < ways["forward_kv_outer"]
    assert ways["forward_q_outer"] * 10 < ways["unfused"]
    assert ways["unfused"] == sum(item.bytes for item in standard_hbm_items(long))


def test_other_families_use_best_records_measured_before_predicted(
    make_record: Callable[..., Record],
) -> None:
    records = (
        make_record("block_m=64", ms=0.8),
        make_record("block_m=64", ms=0.7),
        make_record("block_m=32", ms=0.1, provenance=Provenance.PREDICTED),
        make_record("block_m=16", ms=None, outcome=Outcome.TIMEOUT),
    )
    ranked = rank(records)
    assert [(rival.ms, rival.provenance.value) for rival in ranked] == [
        (0.6, "measured"),
        (0.7, "measured"),
        (0.9, "measured"),
        (0.1, "predicted"),
    ]


def test_given_family_uses_its_best_record_or_default(stored: Stored, problem: Problem, run: Run) -> None:
    best = choose(problem, H200, None, "forward_q_outer")
    assert best.config == stored[1].config
    other = choose(problem, H200, None, "forward_kv_outer")
    assert (other.family.name, other.source) == ("forward_kv_outer", "default")


def test_near_shape_uses_its_own_specialization(
    stored: Stored, problem: Problem, run: Run, ship: Ship
) -> None:
    ship()
    near = msgspec.structs.replace(problem, seqlen_q=2048, seqlen_kv=2048)
    chosen = choose(near, H200, None)
    assert (chosen.source, chosen.record, chosen.tuned_for) == ("estimated", None, problem)
    assert chosen.config == stored[1].config


def test_equivalent_mask_finds_the_same_selection(stored: Stored, problem: Problem, run: Run) -> None:
    other = msgspec.structs.replace(problem, causal=Causal.TOP_LEFT)
    chosen = choose(other, H200, None)
    assert (chosen.source, chosen.record, chosen.problem) == ("database", stored[1], problem)


def test_contiguous_tensors_have_the_alignment_of_their_head_dim() -> None:
    (sixteen,) = parse_shape("heads=4,seqlen=128,head_dim=64")
    (eight,) = parse_shape("heads=4,seqlen=128,head_dim=40")
    (odd,) = parse_shape("heads=4,seqlen=127,head_dim=33")
    (wide,) = parse_shape("heads=128,seqlen=131072,head_dim=256,batch=2")
    alignments = [contiguous_specialization(problem).alignment for problem in (sixteen, eight, odd)]
    assert alignments == [16, 8, 1]
    assert contiguous_specialization(wide).index_bits == 64


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("block=64", "did you mean 'block_"),
        ("block_m=-64", "cannot be used"),
        ("block_m=64x", "cannot be used"),
        ("block_m=99999999999999999999999", "cannot be used"),
        ("loads=telepathy", "cannot be used"),
        ("block_m=64,block_m=32", "given twice"),
        ("__class__=1", "has no"),
    ],
)
def test_invalid_configs_are_refused(problem: Problem, text: str, part: str) -> None:
    with pytest.raises(UsageError, match=part):
        change_config(Q_OUTER.default(problem, H200), text)


def test_configs_accept_numbers_words_and_switches(problem: Problem) -> None:
    base = Q_OUTER.default(problem, H200)
    changed = change_config(base, " block_m = 64 , overlap_qk, loads=descriptor, split_masked_loop=false ")
    values = msgspec.to_builtins(changed)
    assert (values["block_m"], values["overlap_qk"], values["loads"], values["split_masked_loop"]) == (
        64,
        True,
        "descriptor",
        False,
    )
    assert change_config(base, "") == base


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
