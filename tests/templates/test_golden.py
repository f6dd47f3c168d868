"""Rendered kernels, compared byte by byte with the files in tests/golden and read as text.

After a template was changed on purpose: `pytest tests/templates --update-golden`, and read the diff.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from flashtune.compilation import compile_kernel
from flashtune.kernel import Alignment, Kernel, Specialization
from flashtune.problem import Causal, Dtype, Problem
from flashtune.target import find_target
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render

GOLDEN = Path(__file__).parents[1] / "golden"
MAX_LINE = 120

Q, KV = "forward_q_outer", "forward_kv_outer"
SMALL = {"block_m": 32, "block_n": 32, "num_warps": 4, "num_stages": 1}
WIDE = {"block_m": 128, "block_n": 64, "num_warps": 8, "num_stages": 3}
TALL = {"block_m": 64, "block_n": 64, "num_warps": 4, "num_stages": 1}
DESCRIPTORS = {**WIDE, "loads": "descriptor"}
PLAIN = Specialization()
ROW_SUMS = Specialization(lse=True)
ANYWHERE = Specialization(Alignment.ANY, 64, True)

# Name of the file: family, dtype, (head dim, value head dim), causal, config, specialisation.
COMBINATIONS: dict[str, tuple[str, str, tuple[int, int], str, dict[str, Any], Specialization]] = {
    "q_outer_bf16_d64": (Q, "bf16", (64, 64), "none", WIDE, PLAIN),
    "q_outer_bf16_d128_descriptors": (Q, "bf16", (128, 128), "none", DESCRIPTORS, PLAIN),
    "q_outer_fp16_d128_causal_ahead": (
        Q, "fp16", (128, 128), "bottom_right", {**DESCRIPTORS, "qk_ahead": True}, ROW_SUMS,
    ),
    "q_outer_bf16_d128_causal_one_phase": (
        Q, "bf16", (128, 128), "top_left", {**WIDE, "two_phases": False}, PLAIN,
    ),
    "q_outer_bf16_d64_causal_long_first": (
        Q, "bf16", (64, 64), "bottom_right", {**DESCRIPTORS, "long_first": True, "heads_inner": True}, PLAIN,
    ),
    "q_outer_fp16_d96_v80_decomposed": (Q, "fp16", (96, 80), "none", {**TALL, "decomposed": True}, ROW_SUMS),
    "q_outer_fp32_d40_unaligned": (Q, "fp32", (40, 40), "bottom_right", SMALL, ANYWHERE),
    "kv_outer_bf16_d64": (KV, "bf16", (64, 64), "none", TALL, PLAIN),
    "kv_outer_bf16_d128_causal": (KV, "bf16", (128, 128), "bottom_right", TALL, ROW_SUMS),
    "kv_outer_fp16_d128_v64_top_left": (KV, "fp16", (128, 64), "top_left", TALL, PLAIN),
    "kv_outer_fp16_d96_v80_decomposed": (
        KV, "fp16", (96, 80), "none", {**TALL, "decomposed": True}, ROW_SUMS,
    ),
    "kv_outer_fp32_d40_unaligned": (KV, "fp32", (40, 40), "bottom_right", SMALL, ANYWHERE),
}  # fmt: skip
COMPILED = ["q_outer_bf16_d128_descriptors", "q_outer_fp16_d96_v80_decomposed", "kv_outer_bf16_d128_causal"]


def kernel_of(name: str) -> Kernel:
    family_name, dtype, widths, causal, values, specialization = COMBINATIONS[name]
    family = find_family(family_name)
    problem = Problem(
        dtype=Dtype(dtype),
        head_dim=widths[0],
        value_head_dim=widths[1],
        heads=8,
        kv_heads=4,
        batch=2,
        seqlen_q=1024,
        seqlen_kv=1024,
        causal=Causal(causal),
    )
    return render(family, problem, msgspec.convert(values, family.config_type), specialization)


@pytest.fixture(params=COMBINATIONS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_rendered_as_before(name: str, updates_golden: bool) -> None:
    path = GOLDEN / f"{name}.py"
    source = kernel_of(name).source
    if updates_golden:
        path.write_text(source, encoding="utf-8")
    assert source == path.read_text(encoding="utf-8"), "if meant: pytest tests/templates --update-golden"


def test_no_golden_file_is_left_over() -> None:
    assert {path.stem for path in GOLDEN.glob("*.py")} == set(COMBINATIONS)


def test_a_person_can_read_it(name: str) -> None:
    source = kernel_of(name).source
    ast.parse(source)
    lines = source.split("\n")
    assert [line for line in lines if line != line.rstrip() or "\t" in line] == []
    assert [line for line in lines if len(line) > MAX_LINE] == []
    assert source.endswith("\n")
    assert not source.endswith("\n\n")
    assert "\n\n\n\n" not in source
    # Two blank lines are for the borders of functions.
    assert re.findall(r"\n\n\n(?!@|def )", source) == []


def test_the_kernel_uses_every_name_that_it_sets(name: str) -> None:
    kernel = kernel_of(name)
    body = next(node for node in ast.parse(kernel.source).body if getattr(node, "name", "") == kernel.entry)
    names = [node for node in ast.walk(body) if isinstance(node, ast.Name)]
    read = {node.id for node in names if isinstance(node.ctx, ast.Load)}
    assert {node.id for node in names if isinstance(node.ctx, ast.Store)} - read == set()


def test_the_header_says_what_it_is(name: str) -> None:
    kernel = kernel_of(name)
    header = ast.get_docstring(ast.parse(kernel.source)) or ""
    _, dtype, widths, causal, values, _ = COMBINATIONS[name]
    assert f"{dtype}, head dim {widths[0]}, value head dim {widths[1]}, causal: {causal}" in header
    assert f"block_m {values['block_m']}, block_n {values['block_n']}, {values['num_warps']} warps" in header
    assert kernel.family in header


def test_it_depends_on_torch_and_triton_alone(name: str) -> None:
    tree = ast.parse(kernel_of(name).source)
    imported = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    assert imported == ["torch", "triton", "triton.language"]
    assert not any(isinstance(node, ast.ImportFrom) for node in ast.walk(tree))


def test_arguments_are_those_of_the_function(name: str) -> None:
    kernel = kernel_of(name)
    functions = {
        node.name: node for node in ast.parse(kernel.source).body if isinstance(node, ast.FunctionDef)
    }
    assert set(functions) == {kernel.entry, "launch_plan", "attention"}
    parameters = [argument.arg for argument in functions[kernel.entry].args.args]
    assert parameters == [argument.name for argument in kernel.arguments]


@pytest.mark.parametrize("compiled", COMPILED)
def test_it_compiles_for_hopper(compiled: str) -> None:
    target = find_target("h100")
    binary = compile_kernel(kernel_of(compiled), target)
    assert 0 < binary.metadata.shared <= target.sram_per_block
    assert "wgmma" in binary.asm["ptx"]
