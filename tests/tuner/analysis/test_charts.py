"""Tests of the charts of flashtune analyze: values against hand-computed ones."""

import msgspec
import pytest
import torch

from benchmarks.training.report import saved_memory
from flashtune.core.problem import Problem
from flashtune.core.target import TARGETS, find_target
from flashtune.runtime.unfused import unfused_attention
from flashtune.tuner.analysis.charts import Chart
from flashtune.tuner.analysis.crossover import FASTER_FROM, crossover, faster_from, predicted_times
from flashtune.tuner.analysis.intensity import intensity
from flashtune.tuner.analysis.memory_levels import MEMORIES, memory_levels
from flashtune.tuner.analysis.sram_table import sram_charts
from flashtune.tuner.analysis.training_memory import kept_by_unfused, peaks, training_memory
from flashtune.tuner.candidates import SearchTask, contiguous_specialization, demand, open_spaces
from flashtune.tuner.workloads.model_sizes import ModelSizes, Phase
from flashtune.tuner.workloads.models import LayerCall
from flashtune.tuner.workloads.presets import find_model
from flashtune.tuner.workloads.shapes import parse_shape
from flashtune.tuner.workloads.short_shape import by_length

H100, H200 = find_target("h100"), find_target("h200")


@pytest.fixture
def db(tmp_path: object) -> str:
    """A database that does not exist."""
    return f"{tmp_path}/none.sqlite"


def one(text: str) -> Problem:
    (problem,) = parse_shape(text)
    return problem


def test_intensity_is_that_of_the_formula(db: str) -> None:
    (chart,) = intensity(parse_shape("heads=16,seqlen=1024|2048,head_dim=128"), H100, db)
    assert chart.positions == (1024, 2048)
    # 4 n² d operations; 8 n d bytes of q, k, v and the output; 28 bytes a score.
    unfused = [4 * n * n * 128 / (8 * n * 128 + 28 * n * n) for n in chart.positions]
    assert chart.lines["unfused"] == pytest.approx(unfused)
    assert chart.lines["inputs and output once"] == pytest.approx([n / 2 for n in chart.positions])
    # Both lengths fit in L2.
    assert chart.lines["fused"] == pytest.approx([n / 2 for n in chart.positions])
    assert chart.limits["ridge point"] == pytest.approx(989e12 / 3350e9)


def test_unfused_intensity_counts_masked_pairs_and_fused_does_not(db: str) -> None:
    full, causal = intensity(
        [one("heads=16,seqlen=1024,head_dim=128"), one("heads=16,seqlen=1024,head_dim=128,causal")], H100, db
    )
    # A causal mask adds one read and one write of each score.
    n, d = 1024, 128
    assert causal.lines["unfused"] == pytest.approx([4 * n * n * d / (8 * n * d + 36 * n * n)])
    assert full.lines["fused"] == pytest.approx([n / 2])
    assert causal.lines["fused"] == pytest.approx([n / 2 * (n + 1) / (2 * n)])


def test_problems_are_grouped_by_all_but_length() -> None:
    problems = parse_shape("heads=4,seqlen=256|128,head_dim=64,batch=1|2")
    groups = by_length(problems)
    assert list(groups) == ["h4 d64 b1", "h4 d64 b2"]
    assert [problem.seqlen_kv for problem in groups["h4 d64 b1"]] == [128, 256]
    decoding = by_length(parse_shape("heads=4,seqlen_q=1,seqlen_kv=64|32,head_dim=64"))
    assert list(decoding) == ["h4 d64 q1 b1"]


def test_sram_is_the_least_demand_of_a_tile() -> None:
    problem = one("heads=16,seqlen=4096,head_dim=256")
    (chart,) = sram_charts([problem], H100, ("forward_q_outer",))
    # Q, and two stages of K and V, of 2 bytes: the model of a pipelined kernel.
    assert chart.lines["block_m=128"][chart.positions.index(128)] == (128 + 4 * 128) * 256 * 2
    spaces = open_spaces(problem, H100, ("forward_q_outer",))
    task = SearchTask(problem, H100, contiguous_specialization(problem), spaces)
    demands = [demand(task, candidate) for candidate in task.candidates()]
    fitting = sum(not each.message for each in demands)
    assert chart.notes == {"configs that fit": f"{fitting} of {len(demands)}"}
    assert chart.limits == {"capacity of a block": 232_448}


@pytest.mark.parametrize("causal", ["", ",causal"])
def test_kept_bytes_are_those_that_autograd_saves(causal: str) -> None:
    problem = one(f"heads=4,kv_heads=2,seqlen=32,head_dim=24,dtype=bf16{causal}")
    shapes = [(1, heads, 32, 24) for heads in (4, 2, 2)]
    q, k, v = (torch.randn(shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes)
    saved: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        unfused_attention(problem, q, k, v, scale=0.25)
    sizes = [tensor.untyped_storage().nbytes() for tensor in saved.values()]
    squares = [size for size in sizes if size in (4 * 32 * 32 * 4, 4 * 32 * 32 * 2, 32 * 32)]
    scores, others = kept_by_unfused(problem)
    assert scores == sum(squares) == 32 * 32 * (4 * 6 + bool(causal))
    assert others == sum(sizes) - sum(squares)


@pytest.mark.slow
def test_modelled_peaks_of_a_layer_are_the_measured_ones(db: str) -> None:
    for row in saved_memory().rows:
        problem = one(f"heads=16,seqlen={row.seqlen},head_dim=128,causal")
        unfused, _, kernels = peaks((LayerCall(problem, 1),), H200, db)
        measured = {peak.name: peak.bytes for peak in row.peaks}
        assert measured["flashtune"] == pytest.approx(kernels, rel=0.02)
        if measured["unfused"] is not None:
            # The caller holds queries and keys in 16 bits, a quarter of all that is held.
            assert measured["unfused"] == pytest.approx(unfused + row.held / 4, rel=0.02)


def test_all_layers_keep_tensors_and_one_runs_its_backward_pass(db: str) -> None:
    sizes = ModelSizes(Phase.TRAINING, "512|1024")
    memory, saved = training_memory(find_model("llama-3.2-1b"), sizes, H200, db)
    problem = one("heads=32,kv_heads=8,seqlen=1024,head_dim=64,causal")
    layer = peaks((LayerCall(problem, 1),), H200, db)
    kept = sum(kept_by_unfused(problem))
    assert memory.lines["unfused"][1] == layer[0] + 15 * kept
    assert memory.lines["its S x S matrices"][1] == 16 * 1024 * 1024 * (32 * 6 + 1)
    kernels = memory.lines["kernels"][1]
    assert kernels is not None
    assert saved.lines["saved"][1] == pytest.approx(100 * (1 - kernels / (layer[0] + 15 * kept)))


def test_crossover_is_the_length_from_which_fused_always_wins() -> None:
    lengths = (16, 32, 64, 128)
    assert faster_from(lengths, (1.0, 3.0, 1.0, 4.0), (2.0, 2.0, 2.0, 2.0)) == 128
    assert faster_from(lengths, (3.0, 3.0, 3.0, 3.0), (2.0, 2.0, 2.0, 2.0)) == 16
    assert faster_from(lengths, (1.0, 1.0, 1.0, 1.0), (2.0, 2.0, 2.0, 2.0)) is None
    # Scores that do not fit, and equal times.
    assert faster_from(lengths, (1.0, 2.0, 3.0, None), (2.0, 2.0, 2.0, 2.0)) == 64


def test_prediction_counts_operators_and_traffic(db: str) -> None:
    problems = parse_shape("heads=16,seqlen=16|4096,head_dim=128,causal")
    times = predicted_times(problems, H200, db)
    # Two products, scale, mask, softmax and rounding.
    assert times[problems[0]][0] == pytest.approx(6 * 0.0037, rel=0.02)
    scores = 36 * 16 * 4096**2
    tensors = 8 * 16 * 4096 * 128
    assert times[problems[1]][0] == pytest.approx(6 * 0.0037 + (scores + tensors) / 4800e6)
    (chart,) = crossover(times, "predicted for h200")
    assert "predicted" in chart.title
    assert chart.notes == {FASTER_FROM: 16, "times": "predicted for h200"}


def test_every_target_has_its_memory_and_a_source() -> None:
    assert set(MEMORIES) == {target.name for target in TARGETS}
    whole, one_sm, rates = memory_levels()
    h100 = whole.positions.index("h100")
    assert whole.lines["registers"][h100] == 132 * 256 * 1024
    assert whole.lines["SRAM"][h100] == 132 * 228 * 1024
    assert one_sm.lines["SRAM of a block"][h100] == 227 * 1024
    # 132 SMs, 128 bytes a clock, 1.98 GHz.
    assert rates.lines["SRAM"][h100] == pytest.approx(33_454, rel=1e-4)
    assert rates.lines["L2"][h100] is None
    assert all(f"HBM of {name}" in whole.notes for name in whole.positions)


def test_charts_have_a_stable_schema() -> None:
    fields = ["title", "across", "positions", "unit", "lines", "limits", "beyond", "log", "notes"]
    assert list(Chart.__struct_fields__) == fields
    (chart,) = crossover({one("heads=1,seqlen=16,head_dim=64"): (None, 1.0)}, "measured")
    assert list(msgspec.json.decode(msgspec.json.encode(chart))) == fields
