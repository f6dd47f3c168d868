"""Tests of the comparison of default attention with SDPA: shapes, ratios and report."""

import msgspec
import pytest
import torch

from benchmarks.kernels import fastest
from benchmarks.kernels.fastest import (
    MASKS,
    TUNED,
    UNTUNED,
    Case,
    Report,
    Row,
    cases,
    faults,
    judged,
    summary,
)
from benchmarks.saved import ROOT
from flashtune.core.mask_sharing import MaskSharing
from flashtune.core.problem import Bias, Causal, Dtype, Problem
from flashtune.core.target import find_target
from flashtune.dispatch.lookup import default_selection
from flashtune.tuner.candidates import contiguous_specialization
from flashtune.tuner.execution.inputs import make_tensors
from flashtune.tuner.workloads.shapes_file import read_shapes_file
from tests.support.records import shipped_table_of


def a_row(**changes: object) -> Row:
    fields: dict[str, object] = {
        "group": TUNED,
        "problem": "forward_a",
        "mask": "own",
        "server": "forward_hopper",
        "ms": 1.0,
        "peers": {"sdpa-cudnn": 1.1, "sdpa-flash": 2.0},
        "ratio": 1.1,
    }
    return Row(**(fields | changes))  # type: ignore[arg-type]


def a_problem(**changes: object) -> Problem:
    fields: dict[str, object] = {
        "dtype": Dtype.FP32,
        "head_dim": 16,
        "value_head_dim": 16,
        "heads": 4,
        "kv_heads": 4,
        "batch": 2,
        "seqlen_q": 40,
        "seqlen_kv": 40,
        "bias": Bias.BOOLEAN,
    }
    return Problem(**(fields | changes))  # type: ignore[arg-type]


def test_every_tuned_forward_shape_that_sdpa_computes_is_timed() -> None:
    table = shipped_table_of("nvidia-h200")
    listed = cases(table.records, 0, 0)
    timed = {case.problem for case in listed if case.group == TUNED}
    for record in table.records:
        problem = record.problem
        peers = record.measurement.peers if record.measurement else ()
        by_sdpa = any(peer.name.startswith("sdpa") for peer in peers)
        # benchmarks/kernels/dropout.py times dropout.
        elsewhere = problem.is_backward or problem.dropout
        assert problem in timed or elsewhere or not by_sdpa, problem.key
    assert len(timed) > 200
    assert all(not problem.is_backward and not problem.dtype.is_quantized for problem in timed)


def test_masks_come_first_with_every_distinct_sharing() -> None:
    table = shipped_table_of("nvidia-h200")
    masked = a_problem()
    record = table.records[0]
    records = (record, msgspec.structs.replace(record, problem=masked))
    listed = cases(records, 2, 0)
    assert listed[0] == Case(TUNED, masked)
    ways = ["heads", "batch", "heads and rows", "batch and heads"]
    assert [case.mask for case in listed if case.group == MASKS] == ways
    assert len([case for case in listed if case.group == UNTUNED]) == 2
    alone = msgspec.structs.replace(record, problem=a_problem(batch=1))
    assert [case.mask for case in cases((alone,), 0, 0)] == ["own", "heads", "heads and rows"]


def timer(*ratios: float) -> fastest.Timer:
    times = iter(ratios)
    return lambda: (1.0, {"sdpa-cudnn": next(times), "sdpa-efficient": 9.0})


def test_pairs_below_the_bound_are_timed_again_for_a_median() -> None:
    assert judged(timer(0.99)) == (1.0, {"sdpa-cudnn": 0.99, "sdpa-efficient": 9.0}, 0.99, ())
    *_, ratio, again = judged(timer(0.9, 0.97, 1.01, 0.99))
    assert (ratio, again) == (0.99, (0.97, 1.01, 0.99))
    assert judged(timer(0.9, 0.97, 0.96, 1.2))[2] == 0.97


@pytest.mark.parametrize(
    ("row", "count"),
    [
        ({}, 0),
        ({"ratio": 0.979}, 1),
        ({"ratio": 0.9, "group": UNTUNED}, 0),
        ({"ratio": 0.9, "group": MASKS, "mask": "heads"}, 1),
        ({"failed": "RuntimeError: out of memory", "peers": {}, "ratio": 0.0}, 1),
    ],
)
def test_faults_depend_on_tuned_shapes_with_all_masks(row: dict[str, object], count: int) -> None:
    assert len(faults(Report((a_row(), a_row(**row)), 0, 1.0, "9.19.0"))) == count


def test_summary_has_a_line_for_each_group() -> None:
    rows = (
        a_row(ratio=1.21),
        a_row(ratio=1.0, server="sdpa", problem="forward_b"),
        a_row(group=MASKS, mask="heads", ratio=0.5, again=(0.5, 0.4, 0.6)),
        a_row(group=UNTUNED, failed="RuntimeError: no"),
    )
    text = "\n".join(summary(Report(rows, 0, 9.0, "")))
    assert "| tuned | 2 | 1 | 1.100 | 1.000 | 0 | 0 |" in text
    assert "| shared masks | 1 | 0 | 0.500 | 0.500 | 1 | 0 |" in text


@pytest.mark.parametrize("way", list(MaskSharing))
@pytest.mark.parametrize("kind", [Bias.ADDITIVE, Bias.BOOLEAN])
def test_sdpa_receives_the_unchanged_mask(way: MaskSharing, kind: Bias) -> None:
    problem = a_problem(bias=kind)
    tensors = fastest._sharing(make_tensors(problem, torch.device("cpu")), way)
    expected = [1 if index in way.dimensions else size for index, size in enumerate((2, 4, 40, 40))]
    assert list(tensors.side.bias.shape) == expected
    attend = fastest._sdpa(problem, tensors)
    assert attend is not None
    assert attend.keywords["attn_mask"] is tensors.side.bias  # type: ignore[attr-defined]
    assert attend().shape == tensors.out.shape
    causal = fastest._sdpa(a_problem(bias=kind, causal=Causal.TOP_LEFT), tensors)
    assert causal is not None
    assert causal().shape == tensors.out.shape


def test_models_with_features_are_served_by_kernels_for_hopper() -> None:
    problems = read_shapes_file(ROOT / "benchmarks/kernels/feature_shapes.txt")
    assert len(problems) >= 30
    for problem in problems:
        served = default_selection(problem, find_target("h200"), contiguous_specialization(problem))
        assert served.record.family in ("forward_hopper", "backward_hopper"), problem.key
