"""Tests of the Hopper backward family: supported problems, defaults and launch plans."""

import math
from typing import Any

import pytest
import torch
from triton.language import str_to_ty
from triton.runtime.jit import mangle_type

from flashtune.core.kernel import Alignment, Specialization
from flashtune.core.problem import Causal, Direction, Dtype, Problem
from flashtune.core.target import find_target
from flashtune.launch.compilation import load_module
from flashtune.templates.family import unsupported_reason
from tests.problems.hopper_backward import FAMILY, H200, PLAIN, a_problem, kernel_of, like

PLANNED = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")


@pytest.mark.parametrize(
    "problem",
    [
        a_problem(),
        a_problem(64, dtype=Dtype.FP16),
        a_problem(40, 56),
        a_problem(96, 80),
        a_problem(256),
        a_problem(136, dtype=Dtype.FP16),
    ],
)
def test_descriptors_match_the_declaration_of_the_kernel(problem: Problem) -> None:
    kernel, planned = kernel_of(problem), like(problem)
    module = load_module(kernel)
    _, shapes, _ = module.launch_plan(*planned)
    workspaces = [torch.empty(shape, device="meta") for shape in shapes]
    made = module.descriptors(*planned, *workspaces)
    declared = [argument for argument in kernel.arguments if argument.type.startswith("tensordesc")]
    flat = [descriptor for parts in made.values() for descriptor in parts]
    # Triton's own name of a descriptor's type, against ours: element, tile and layout.
    types = [str_to_ty(mangle_type(descriptor), None) for descriptor in flat]
    assert types == [str_to_ty(argument.type, None) for argument in declared]
    assert kernel.arguments[: len(declared)] == tuple(declared)
    assert list(made) == ["q", "k", "v", "dout", "workspace_0", "dk", "dv"]
    named = {**dict(zip(PLANNED, planned, strict=True)), "workspace_0": workspaces[0]}
    for name, (descriptor,) in made.items():
        assert descriptor.base is named[name]
        assert tuple(descriptor.shape) == tuple(named[name].shape)
        assert tuple(descriptor.strides) == named[name].stride()
        assert descriptor.padding == "zero"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head_dim", "block_m", "blocks"), [(64, 128, 9), (128, 64, 9), (192, 64, 18), (256, 64, 18)]
)
@pytest.mark.parametrize(("causal", "diagonal"), [("none", 0), ("top_left", 0), ("bottom_right", 100)])
@pytest.mark.parametrize("deterministic", [False, True])
def test_launch_grids_follow_lengths(
    head_dim: int, block_m: int, blocks: int, causal: str, diagonal: int, deterministic: bool
) -> None:
    problem = a_problem(head_dim, causal=Causal(causal), deterministic=deterministic)
    module, planned = load_module(kernel_of(problem)), like(problem)
    grid, workspaces, integers = module.launch_plan(*planned)
    assert grid == (blocks * 2 * 2,)
    tiles = math.ceil(1000 / block_m)
    sums = (16, tiles, 16384 if head_dim > 128 else 8192)
    # A counter for each half of a block of sums, or for all; heads that fill the GPU twice or four times.
    counters = ((16, tiles, 2 if head_dim > 128 else 1),) if deterministic else ()
    interleaved = (math.ceil((264 if causal == "none" else 528) / blocks),) if deterministic else ()
    if not deterministic and causal != "none" and head_dim <= 128:
        interleaved = (8,)  # the queries are grouped
    assert workspaces == ((32, tiles * block_m), sums, *counters)
    assert integers == (blocks, 2, 4, 1000, 1100, diagonal, *interleaved)
    assert module.prologue_plan(*planned) == (
        (tiles * 16,),
        (*planned[3].stride()[:3], *planned[4].stride()[:3], 8, 1000),
    )
    assert module.epilogue_plan(*planned) == ((tiles * 16,), (*planned[5].stride()[:3], 8, 1000))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"head_dim": 264, "value_head_dim": 264}, "from 16 to 256 in steps of 8"),
        ({"head_dim": 68, "value_head_dim": 64}, "from 16 to 256 in steps of 8"),
        ({"head_dim": 192, "value_head_dim": 128}, "head dims of q and v above 128 only where they are one"),
        ({"dtype": Dtype.FP32}, "bf16 and fp16"),
        ({"alibi": True}, "has no alibi"),
        ({"softcap": True, "dropout": True}, "drops weights without a softcap"),
        ({"head_dim": 192, "value_head_dim": 192, "dropout": True}, "drops weights of head dims up to 128"),
        ({"direction": Direction.FORWARD}, "computes the backward pass"),
    ],
)
def test_unsupported_problems_have_reasons(changes: dict[str, Any], reason: str) -> None:
    assert reason in (unsupported_reason(FAMILY, a_problem(**changes), H200, PLAIN) or "")


def test_other_gpus_and_unaligned_strides_are_unsupported() -> None:
    assert "sm_90 alone" in (unsupported_reason(FAMILY, a_problem(), find_target("a100"), PLAIN) or "")
    odd = Specialization(Alignment.ANY)
    assert "cannot address" in (unsupported_reason(FAMILY, a_problem(), H200, odd) or "")
    assert (
        unsupported_reason(FAMILY, a_problem(72, 40), H200, Specialization(Alignment.EIGHT, 64, True)) is None
    )
