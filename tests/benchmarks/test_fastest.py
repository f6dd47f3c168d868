"""Tests of the comparison of default attention with SDPA: shapes, ratios and report."""

import msgspec

from benchmarks.kernels.fastest import (
    MASKS,
    TUNED,
    UNTUNED,
    Case,
    cases,
)
from benchmarks.saved import ROOT
from flashtune.core.problem import Bias, Dtype, Problem
from flashtune.core.target import find_target
from flashtune.dispatch.lookup import default_selection
from flashtune.tuner.candidates import contiguous_specialization
from flashtune.tuner.workloads.shapes_file import read_shapes_file
from tests.support.records import shipped_table_of


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


def test_models_with_features_are_served_by_kernels_for_hopper() -> None:
    problems = read_shapes_file(ROOT / "benchmarks/kernels/feature_shapes.txt")
    assert len(problems) >= 30
    for problem in problems:
        served = default_selection(problem, find_target("h200"), contiguous_specialization(problem))
        assert served.record.family in ("forward_hopper", "backward_hopper"), problem.key
