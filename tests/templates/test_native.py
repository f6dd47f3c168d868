"""Tests of a native Gluon family: its description, rendering and compilation."""

import msgspec
import pytest

from flashtune import testing
from flashtune.core.kernel import Alignment, Specialization
from flashtune.core.problem import Dtype
from flashtune.core.target import find_target
from flashtune.launch.compilation import compile_kernel
from flashtune.templates.family import Family, unsupported_reason
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render

H200 = find_target("h200")
PROBLEM = testing.problem("heads=8,seqlen=512,head_dim=128,dtype=bf16")


def test_family_renders_and_compiles_for_its_gpu(native: Family) -> None:
    kernel = render(native, PROBLEM, native.default(PROBLEM, H200), Specialization())
    assert ".target sm_90a" in compile_kernel(kernel, H200).asm["ptx"]


def test_unsupported_reasons_depend_on_problem_and_tensors(native: Family) -> None:
    aligned, misaligned = Specialization(), Specialization(Alignment.ANY)
    assert unsupported_reason(native, PROBLEM, H200, aligned) is None
    assert "cannot address" in str(unsupported_reason(native, PROBLEM, H200, misaligned))
    assert "sm_90 alone" in str(unsupported_reason(native, PROBLEM, find_target("a100"), aligned))
    wide = msgspec.structs.replace(PROBLEM, dtype=Dtype.FP32)
    assert "no fp32" in str(unsupported_reason(native, wide, H200, aligned))


@pytest.mark.parametrize("name", ["forward_q_outer", "forward_kv_outer"])
def test_portable_families_support_all_tensors_and_the_interpreter(name: str) -> None:
    family = find_family(name)
    assert family.interpreted
    assert unsupported_reason(family, PROBLEM, H200, Specialization(Alignment.ANY, 64)) is None
