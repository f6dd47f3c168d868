"""Tests of the precision of float32 products: default configs and compiled kernels use Tensor Cores."""

import re

import msgspec
import pytest

from flashtune import testing
from flashtune.core.kernel import Specialization
from flashtune.core.problem import Dtype, Problem
from flashtune.core.target import find_target
from flashtune.launch.compilation import compile_kernel
from flashtune.templates.common.precision import InputPrecision
from flashtune.templates.family import Family
from flashtune.templates.registry import families, find_family
from flashtune.templates.rendering import render
from flashtune.tuner.perf_model.prediction import estimated, scheduled_ms

TARGET = find_target("h200")
FAMILIES = [family for family in families() if "input_precision" in family.config_type.__struct_fields__]


def float32_problem(dtype: Dtype, family: Family, head_dim: int = 128) -> Problem:
    return testing.problem(
        "heads=16,seqlen=4096,head_dim=64,batch=2", dtype=dtype, head_dim=head_dim, direction=family.direction
    )


@pytest.mark.parametrize("target", ["a100", "h100", "h200"])
@pytest.mark.parametrize("dtype", [Dtype.FP32, Dtype.TF32])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_no_search_or_default_on_nvidia_is_without_tensor_cores(
    family: Family, dtype: Dtype, target: str
) -> None:
    problem, gpu = float32_problem(dtype, family), find_target(target)
    axis = next(axis for axis in family.space(problem, gpu).axes if axis.name == "input_precision")
    assert dict(family.default(problem, gpu).items())["input_precision"] in axis.values
    assert InputPrecision.IEEE not in axis.values


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_tf32_renders_as_float32_of_another_precision(family: Family) -> None:
    problem = float32_problem(Dtype.TF32, family, head_dim=64)
    config = family.default(problem, TARGET)
    kernel = render(family, problem, config, Specialization())
    assert kernel.arguments[0].type == "*fp32"
    assert 'input_precision="bf16x3"' in kernel.source


@pytest.mark.parametrize("dtype", [Dtype.FP32, Dtype.TF32])
def test_the_default_of_hopper_uses_warp_group_instructions(dtype: Dtype) -> None:
    family = find_family("forward_q_outer")
    problem = float32_problem(dtype, family, head_dim=64)
    kernel = render(family, problem, family.default(problem, TARGET), Specialization())
    ptx = compile_kernel(kernel, TARGET).asm["ptx"]
    assert re.search(r"wgmma\.mma_async[\w.]*\.f32\.bf16\.bf16", ptx)


def test_ordinary_arithmetic_is_expected_to_be_slow() -> None:
    family = find_family("forward_q_outer")
    problem = float32_problem(Dtype.FP32, family)
    default = family.default(problem, TARGET)
    times = {}
    for precision in (InputPrecision.IEEE, InputPrecision.BF16X6, InputPrecision.BF16X3):
        config = msgspec.structs.replace(default, input_precision=precision)
        times[precision] = scheduled_ms(
            problem, family, config, estimated(problem, config, 0, TARGET), TARGET
        )
    assert times[InputPrecision.BF16X3] < times[InputPrecision.BF16X6] < times[InputPrecision.IEEE] / 20
