"""Hopper's own backward pass as rendered, compared byte by byte with files in tests/golden and read as text.

After a template was changed on purpose: `pytest tests/templates --update-golden`, and read `git diff --text`.
"""

from __future__ import annotations

import ast
from functools import partial
from pathlib import Path

import pytest

from flashtune.core.kernel import Specialization
from flashtune.core.problem import Causal, Dtype
from tests import golden_files
from tests.problems.hopper_backward import a_problem, kernel_of

GOLDEN = Path(__file__).parents[2] / "golden" / "backward"
MAX_LINE = 130
GOLDENS = {
    "hopper_bf16_d128_causal": partial(
        kernel_of, a_problem(causal=Causal.BOTTOM_RIGHT), Specialization(lse=True)
    ),
    "hopper_fp16_d64_delay": partial(kernel_of, a_problem(64, dtype=Dtype.FP16), alternate_dq=False),
    "hopper_bf16_d96_v80_plain": partial(
        kernel_of,
        a_problem(96, 80),
        init_accumulators=False,
        early_dv=True,
        defer_dp_wait=False,
        early_dk=False,
        defer_dq=False,
        alternate_dq=False,
        num_stages=3,
    ),
    "hopper_bf16_d96_v80": partial(kernel_of, a_problem(96, 80), Specialization(lse=True)),
    "hopper_fp16_d64_turns": partial(kernel_of, a_problem(64, dtype=Dtype.FP16)),
    "hopper_bf16_d128_dropout": partial(
        kernel_of,
        a_problem(causal=Causal.BOTTOM_RIGHT, dropout=True), Specialization(lse=True)
    ),
    "hopper_bf16_d256_causal": partial(
        kernel_of,
        a_problem(256, causal=Causal.BOTTOM_RIGHT), Specialization(lse=True)
    ),
    "hopper_bf16_d128_ordered": partial(kernel_of, a_problem(causal=Causal.BOTTOM_RIGHT, deterministic=True)),
    "hopper_bf16_d128_ordered_dropout": partial(
        kernel_of,
        a_problem(causal=Causal.BOTTOM_RIGHT, dropout=True, deterministic=True),
        early_dk=False,
        defer_dq=False,
        alternate_dq=False,
    ),
    "hopper_fp16_d256_ordered": partial(kernel_of, a_problem(256, dtype=Dtype.FP16, deterministic=True)),
    "hopper_bf16_d128_window_softcap": partial(
        kernel_of,
        a_problem(causal=Causal.BOTTOM_RIGHT, window_left=1023, softcap=True),
        Specialization(lse=True),
    ),
    "hopper_bf16_d128_packed": partial(
        kernel_of, a_problem(causal=Causal.BOTTOM_RIGHT, total_q=1, sinks=True), Specialization(lse=True)
    ),
    "hopper_fp16_d96_packed_full": partial(kernel_of, a_problem(96, dtype=Dtype.FP16, total_q=1)),
    "hopper_bf16_d64_packed_window_ordered": partial(
        kernel_of,
        a_problem(64, total_q=1, window_left=100, window_right=50, deterministic=True),
        alternate_dq=False,
    ),
    "hopper_bf16_d256_packed_window_softcap": partial(
        kernel_of, a_problem(256, causal=Causal.TOP_LEFT, total_q=1, window_left=512, softcap=True)
    ),
    "hopper_bf16_d256_packed_ordered": partial(kernel_of, a_problem(256, total_q=1, deterministic=True)),
    "hopper_bf16_d128_sinks_ordered": partial(
        kernel_of, a_problem(sinks=True, deterministic=True), Specialization(lse=True)
    ),
    "hopper_bf16_d256_packed_full": partial(kernel_of, a_problem(256, total_q=1)),
    "hopper_bf16_d128_window_ordered": partial(
        kernel_of, a_problem(causal=Causal.BOTTOM_RIGHT, window_left=512, deterministic=True)
    ),
    "hopper_fp16_d192_plain": partial(kernel_of, a_problem(192, dtype=Dtype.FP16), init_accumulators=False),
}  # fmt: skip


def test_kernels_match_golden_files(updates_golden: bool) -> None:
    golden_files.check(GOLDEN, {name: golden().source for name, golden in GOLDENS.items()}, updates_golden)


@pytest.mark.parametrize("name", GOLDENS)
def test_golden_files_are_readable(name: str) -> None:
    kernel = GOLDENS[name]()
    lines = kernel.source.split("\n")
    assert [line for line in lines if line != line.rstrip() or len(line) > MAX_LINE] == []
    assert "\n\n\n\n" not in kernel.source
    found = {node.name: node for node in ast.parse(kernel.source).body if isinstance(node, ast.FunctionDef)}
    assert {"launch_plan", "prologue_plan", "epilogue_plan", "descriptors", "attention_backward"} <= set(
        found
    )
    for one in kernel.parts:
        parameters = [argument.arg for argument in found[one.entry].args.args]
        assert parameters == [argument.name for argument in one.arguments]
