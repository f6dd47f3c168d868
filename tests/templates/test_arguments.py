"""Tests of the arguments of kernels, with the scales of quantised inputs."""

from pathlib import Path

import pytest

from flashtune.core.features.table import FEATURES
from flashtune.core.kernel import Alignment, Argument, Specialization
from flashtune.core.problem import Dtype, Feature
from flashtune.core.target import find_target
from flashtune.launch.binding import compile_binary
from flashtune.templates.common.args.arguments import forward_arguments, transpose_arguments
from flashtune.templates.registry import families
from flashtune.tuner.workloads.shapes import parse_shape
from scripts.reference import feature_table
from tests.problems.plain_e4m3 import MISTAKES, plain_e4m3

PLAIN = Specialization()


def named(arguments: tuple[Argument, ...]) -> dict[str, Argument]:
    return {argument.name: argument for argument in arguments}


def test_scales_and_workspaces_follow_the_log_sum_exp() -> None:
    arguments = forward_arguments(Dtype.E4M3, PLAIN, ("values",))
    names = [argument.name for argument in arguments]
    assert names[:10] == ["q", "k", "v", "out", "lse", "q_scale", "k_scale", "v_scale", "values", "scale"]
    types = [argument.type for argument in arguments[:10]]
    assert types == [*["*fp8e4nv"] * 3, "*bf16", *["*fp32"] * 4, "*fp8e4nv", "fp32"]
    # Scales may be views of larger tensors; what is allocated per call lies on a border.
    assert named(arguments)["q_scale"].divisibility == 1
    assert named(arguments)["values"].divisibility == 16


def test_other_dtypes_have_no_scales() -> None:
    for dtype in (Dtype.BF16, Dtype.FP16, Dtype.FP32):
        arguments = forward_arguments(dtype, PLAIN, ("state",))
        names = [argument.name for argument in arguments]
        assert names[:7] == ["q", "k", "v", "out", "lse", "state", "scale"]
        assert {argument.type for argument in arguments[:4]} == {f"*{dtype}"}
        assert named(arguments)["state"].type == "*fp32"


def test_prologue_and_kernel_have_equal_arguments_of_v() -> None:
    for specialization in (PLAIN, Specialization(Alignment.ANY, 64)):
        kernel = named(forward_arguments(Dtype.E4M3, specialization, ("values",)))
        prologue = transpose_arguments(Dtype.E4M3, specialization, "values")
        assert [argument.name for argument in prologue[:2]] == ["v", "values"]
        assert all(kernel[argument.name] == argument for argument in prologue if argument.name != "kv_heads")


def test_both_kernels_of_a_source_compile_for_hopper() -> None:
    kernel = plain_e4m3()
    binary = compile_binary(kernel, find_target("h200"))
    assert "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3" in str(binary[kernel.entry].asm["ptx"])
    assert "transpose_values" in str(binary["transpose_values"].asm["ptx"])
    assert compile_binary(plain_e4m3(64), find_target("h200"))[kernel.entry].asm["cubin"]


@pytest.mark.parametrize(("old", "new"), MISTAKES)
def test_text_replaced_by_mutants_occurs_once(old: str, new: str) -> None:
    # Without a GPU it is never launched, and its source may have moved on.
    assert plain_e4m3().source.count(old) == 1, new


PAGE = Path(__file__).parents[2] / "docs" / "features.md"


def test_the_table_of_features_is_current() -> None:
    assert feature_table() in PAGE.read_text(encoding="utf-8"), "python -m benchmarks.documents --write"


@pytest.mark.parametrize("feature", Feature)
def test_examples_set_a_field_of_their_feature(feature: Feature) -> None:
    example = FEATURES[feature].example
    # Without a window or chunks, first tokens have no effect.
    window = "" if feature is Feature.WINDOW else "window=8,"
    (problem,) = parse_shape(f"heads=8,seqlen=9000,head_dim=64,{window}{example}")
    assert problem.features - {Feature.WINDOW} == {feature} - {Feature.WINDOW}
    assert feature in problem.features


def test_families_without_features_are_listed() -> None:
    sentence = PAGE.read_text(encoding="utf-8").split("<!-- table features")[0].rsplit("\n\n", 2)[1]
    for family in families():
        if not family.features:
            assert f"`{family.name}`" in sentence
