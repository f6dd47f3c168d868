"""Tests that each family renders and compiles under every supported Triton."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flashtune.core.kernel import Kernel, Specialization
from flashtune.core.problem import Causal, Dtype, Problem
from flashtune.core.target import find_target
from flashtune.launch.binding import compile_binary
from flashtune.launch.compilation import compile_kernel
from flashtune.request.functions.tracing import trace
from flashtune.templates.registry import family_names, find_family
from flashtune.templates.rendering import render
from tests.problems import hopper_backward
from tests.support import golden_kernels

H200 = find_target("h200")
GOLDEN = {
    "forward_q_outer": "q_outer_bf16_d128_descriptors",
    "forward_kv_outer": "kv_outer_bf16_d128_causal",
    "forward_masked": "masked_bf16_d64_window_sinks",
    "forward_hopper": "hopper_bf16_d64_packed",
    "decode_split_kv": "decode_bf16_d128",
    "decode_latent_hopper": "hopper_bf16_latent_pages",
    "backward_split": "backward_split_bf16_d64_packed",
    "backward_fused": "backward_fused_bf16_d128_causal",
}


def kernel_of(family: str) -> Kernel:
    if family in GOLDEN:
        return golden_kernels.kernel_of(GOLDEN[family])
    return hopper_backward.kernel_of(hopper_backward.a_problem(64, causal=Causal.BOTTOM_RIGHT))


@pytest.mark.tritons
@pytest.mark.slow
@pytest.mark.parametrize("family", family_names())
def test_a_kernel_of_each_family_compiles_for_hopper(family: str) -> None:
    kernel = kernel_of(family)
    assert kernel.family == family

    binary = compile_kernel(kernel, H200)

    assert 0 < binary.metadata.shared <= H200.sram_per_block
    assert "sm_90a" in binary.asm["ptx"]


@pytest.mark.tritons
@pytest.mark.slow
@pytest.mark.parametrize("name", ["forward_masked", "decode_split_kv", "backward_split"])
def test_portable_kernels_compile_for_hopper_if_scores_select_elements(name: str) -> None:
    table, family = torch.rand(8), find_family(name)
    functions = trace(lambda s, b, h, q, k: s + table[(s > 0).to(torch.int32)], None).functions
    problem = Problem(
        dtype=Dtype.BF16, head_dim=64, value_head_dim=64, heads=8, kv_heads=2, batch=2, seqlen_q=512,
        seqlen_kv=512, functions=functions, direction=family.direction,
    )  # fmt: skip
    config = family.default(problem, H200)
    assert compile_binary(render(family, problem, config, Specialization()), H200)
    stages = [axis.values for axis in family.space(problem, H200).axes if axis.name.endswith("stages")]
    assert set(stages) == {(1,)}


@pytest.mark.tritons
@pytest.mark.slow
def test_a_command_that_compiles_gluon_ends_silently(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1"}
    shape = "heads=2,seqlen=512,head_dim=64,dtype=bf16"
    command = ["explain", "--target", "h200", "--shape", shape]
    program = [sys.executable, "-c", "from flashtune.tuner.cli import main; main()", *command]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, check=True)
    assert any(tmp_path.glob("*/forward_hopper.cubin"))
    assert done.stderr == ""
