"""Tests of the fused backward family compiled for Hopper: registers, SRAM and workspaces."""

from typing import Any

import msgspec
import pytest
import torch

from flashtune import testing
from flashtune.core.kernel import Alignment, Specialization
from flashtune.core.problem import Bias, Causal, Problem
from flashtune.core.target import find_target
from flashtune.launch.compilation import compile_kernel, load_module
from flashtune.templates.backward_fused.space import Reduction, can_copy
from flashtune.templates.common.model.sram import triton_release
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render
from flashtune.tuner.binary.resources import read_resources

FAMILY = find_family("backward_fused")
H200, L4 = find_target("h200"), find_target("l4")


def a_problem(head_dim: int, seqlen: int = 4096) -> Problem:
    return testing.problem(
        "heads=8,seqlen=1,head_dim=64,dtype=bf16,causal,batch=2,backward", head_dim=head_dim, seqlen=seqlen
    )


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_usual_configs_do_not_spill_and_match_the_sram_model(head_dim: int) -> None:
    problem = a_problem(head_dim)
    config = FAMILY.default(problem, H200)
    assert FAMILY.space(problem, H200).contains(config)
    resources = read_resources(render(FAMILY, problem, config, Specialization()), H200)
    if triton_release() == (3, 6):
        assert (resources.spill_bytes, resources.serialized_wgmma) == (0, False)
    assert resources.spill_bytes < 400
    items = FAMILY.sram_items(problem, config, H200, Specialization())
    assert resources.sram_bytes - 1024 <= sum(item.bytes for item in items) <= resources.sram_bytes


def test_tma_reduction_is_used_on_gpus_with_tma_and_aligned_rows() -> None:
    problem = a_problem(64)
    config = FAMILY.default(problem, H200)
    kernel = compile_kernel(render(FAMILY, problem, config, Specialization()), H200)
    assert "cp.reduce.async.bulk.tensor" in kernel.asm["ptx"]
    assert all(
        getattr(candidate, "reduction", None) is Reduction.ATOMICS
        for candidate in FAMILY.space(problem, L4).configs()
    )
    odd = msgspec.structs.replace(problem, head_dim=70)
    assert not can_copy(odd)
    source = render(FAMILY, odd, config, Specialization()).source
    assert "tl.atomic_add(" in source
    assert "make_tensor_descriptor" not in source


@pytest.mark.parametrize("alignment", list(Alignment))
def test_dq_tiles_are_transposed_where_queries_are_prefetched(alignment: Alignment) -> None:
    # Else ptxas 12.8 makes descriptors of wide products from unwritten registers.
    def turned(problem: Problem) -> bool:
        source = render(FAMILY, problem, config, Specialization(alignment=alignment)).source
        assert ("tl.dot(ds_low.T, k_tile" in source) != ("tl.dot(k_tile.T, ds_low" in source)
        return "tl.dot(k_tile.T, ds_low" in source

    problem = a_problem(256)
    config = FAMILY.default(problem, H200)
    assert turned(problem) == (alignment is not Alignment.ANY)
    assert not turned(msgspec.structs.replace(problem, head_dim=129))


@pytest.mark.parametrize(("widths", "turns"), [((160, 160), True), ((129, 160), False), ((160, 129), False)])
def test_transpose_dq_is_searched_where_it_changes_the_kernel(widths: tuple[int, int], turns: bool) -> None:
    problem = msgspec.structs.replace(a_problem(widths[0]), value_head_dim=widths[1])
    space = FAMILY.space(problem, H200)
    assert {getattr(config, "transpose_dq", None) for config in space.configs()} == (
        {False, True} if turns else {False}
    )
    assert space.contains(FAMILY.default(problem, H200))


@pytest.mark.slow
@pytest.mark.parametrize(
    "asked",
    [
        {"bias": Bias.ADDITIVE, "dropout": True, "kv_lengths": True},
        {"bias": Bias.BOOLEAN, "dropout": True, "prefix": True, "softcap": True},
        {"packed": 8192, "dropout": True, "alibi": True, "window_left": 256, "sink_tokens": 4},
    ],
    ids="-".join,
)
def test_features_together_compile(asked: dict[str, Any]) -> None:
    # The interpreter lets a name change its type within a loop; the compiler does not.
    problem = msgspec.structs.replace(a_problem(64), **asked)
    kernel = render(FAMILY, problem, FAMILY.default(problem, H200), Specialization())
    assert len(kernel.parts) == 3
    for part in kernel.parts:
        assert compile_kernel(part, H200).metadata.shared <= H200.sram_per_block


def test_masks_reduce_the_predicted_time() -> None:
    full, causal, window = (
        msgspec.structs.replace(a_problem(128), **asked)
        for asked in ({"causal": Causal.NONE}, {}, {"window_left": 128})
    )
    config = FAMILY.default(full, H200)
    times = [FAMILY.makespan_ms(problem, config, H200) for problem in (full, causal, window)]
    assert 1.5 < times[0] / times[1] < 2.1
    assert times[2] < times[1] / 3


@pytest.mark.parametrize(("batch", "heads"), [(1, 16), (8, 16)])
def test_workspace_is_small_relative_to_inputs_and_gradients(batch: int, heads: int) -> None:
    # Sums in float32 are as large as two of the eight tensors that go in and come out.
    tokens, head_dim = 16384 // batch, 128
    tensors = [torch.empty(batch, heads, tokens, head_dim, dtype=torch.bfloat16, device="meta")] * 8
    problem = a_problem(head_dim, tokens)
    kernel = render(FAMILY, problem, FAMILY.default(problem, H200), Specialization())
    _, shapes, _ = load_module(kernel).launch_plan(*tensors)
    reserved = sum(4 * torch.Size(shape).numel() for shape in shapes)
    assert reserved < 0.3 * sum(tensor.numel() * tensor.element_size() for tensor in tensors)
