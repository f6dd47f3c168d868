"""Tests of the split backward family: configs, arguments and compiled kernels."""

import functools
import math
from typing import Any

import pytest
import torch

from flashtune import testing
from flashtune.core.expressions.nodes import NO_FUNCTIONS
from flashtune.core.kernel import Alignment, Specialization
from flashtune.core.problem import Bias, BlockLists, Causal, Direction, Problem
from flashtune.core.target import Target, find_target
from flashtune.dispatch.lookup import default_selection
from flashtune.launch.compilation import compile_kernel
from flashtune.request.functions.tracing import trace
from flashtune.templates.backward_split.space import SplitConfig
from flashtune.templates.common.model.sram import backward_chunks
from flashtune.templates.family import unsupported_reason
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render
from flashtune.tuner.binary.resources import read_resources

FAMILY = find_family("backward_split")
H100, A100 = find_target("h100"), find_target("a100")
PLAIN = Specialization()
CONFIG = SplitConfig(
    block_m=64, block_n=64, num_warps=4, num_stages=2, dq_block_m=64, dq_block_n=64, dq_warps=4, dq_stages=2
)
ASKED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "scores": {"softcap": True, "alibi": True, "bias": Bias.ADDITIVE},
    "packed": {"packed": 512, "chunk": 128, "alibi": True},
}


a_problem = functools.partial(
    testing.problem, "heads=8,kv_heads=2,seqlen=512,head_dim=64,dtype=bf16,causal,batch=2,backward"
)


def modelled(problem: Problem, config: SplitConfig, target: Target, assumed: Specialization = PLAIN) -> int:
    return sum(item.bytes for item in FAMILY.sram_items(problem, config, target, assumed))


def usual(problem: Problem, target: Target) -> SplitConfig:
    config = FAMILY.default(problem, target)
    assert isinstance(config, SplitConfig)
    return config


def test_unsupported_problems() -> None:
    assert unsupported_reason(FAMILY, a_problem(direction=Direction.FORWARD), H100, PLAIN) is not None
    assert unsupported_reason(FAMILY, a_problem(page_size=16), H100, PLAIN) is not None
    assert FAMILY.supports(a_problem(packed=512, bias=Bias.BOOLEAN), H100) is not None
    assert FAMILY.supports(a_problem(head_dim=512, value_head_dim=64), H100) is not None
    assert unsupported_reason(FAMILY, a_problem(deterministic=True), H100, PLAIN) is None


@pytest.mark.parametrize("target", [H100, A100])
@pytest.mark.parametrize("lists", BlockLists)
def test_deterministic_gradients_of_block_masks_use_no_atomics(lists: BlockLists, target: Target) -> None:
    table = torch.rand(8)
    scores = (None, lambda s, b, h, q, k: s * table[h], lambda s, b, h, q, k: s * table[(q - k) % 8])
    traced = [trace(score, lambda b, h, q, k: q >= k).functions for score in scores]
    for functions in (NO_FUNCTIONS, *traced):
        trained = functions.with_gradients(range(len(functions.tables)))
        problem = a_problem(
            causal=Causal.NONE, block_mask=128, block_lists=lists, deterministic=True, functions=trained
        )
        record = default_selection(problem, target, PLAIN).record
        assert record.family == FAMILY.name
        assert record.config is not None
        assert "atomic_" not in render(FAMILY, problem, record.config, PLAIN).source


def test_tiles_of_16_bits_are_at_least_64_wide() -> None:
    problem = a_problem(head_dim=40, value_head_dim=32)
    for config in FAMILY.space(problem, H100).configs():
        assert isinstance(config, SplitConfig)
        assert all(
            chunk.width >= 64
            for chunks in backward_chunks(problem, config.split_head_dim)
            for chunk in chunks
        )


def test_sinks_change_nothing() -> None:
    plain, sunk = (render(FAMILY, a_problem(sinks=sinks), CONFIG, PLAIN) for sinks in (False, True))
    assert plain.digest == sunk.digest
    assert sunk.all_side == ()


def test_steps_receive_only_the_tensors_they_use() -> None:
    problem = a_problem(alibi=True, bias=Bias.ADDITIVE)
    kernel = render(FAMILY, problem, CONFIG, Specialization(lse=True))
    assert kernel.prologue is not None
    assert kernel.epilogue is not None
    names = [
        {argument.name for argument in step.arguments} for step in (kernel.prologue, kernel, kernel.epilogue)
    ]
    assert [{"dlse", "lse"} <= step_names for step_names in names] == [True, False, False]
    assert [{"dk", "dv"} <= step_names for step_names in names] == [False, True, False]
    assert [{"dq", "dbias", "dslopes"} <= step_names for step_names in names] == [False, False, True]
    assert kernel.all_side == ("slopes", "bias")


def test_time_and_traffic_grow_with_visible_pairs() -> None:
    config = usual(a_problem(), H100)
    long = {"seqlen_q": 8192, "seqlen_kv": 8192}
    causal, full = a_problem(**long), a_problem(**long, causal=Causal.NONE)
    assert 1.5 < FAMILY.makespan_ms(full, config, H100) / FAMILY.makespan_ms(causal, config, H100) < 2.1
    moved = [sum(item.bytes for item in FAMILY.hbm_items(problem, config)) for problem in (causal, full)]
    assert moved[0] < moved[1]
    cached = sum(item.bytes for item in FAMILY.hbm_items(full, config, H100))
    assert full.minimal_bytes() <= cached < moved[1]
    # The kernel that keeps keys has as little to do behind a window as the one that keeps queries.
    windowed = FAMILY.makespan_ms(a_problem(**long, window_left=128), config, H100)
    assert windowed < FAMILY.makespan_ms(causal, config, H100) / 4
    # The fixed cost of a launch is not multiplied by the heads that share keys.
    small = {"batch": 1, "seqlen_q": 16, "seqlen_kv": 16, "kv_heads": 1}
    alone, shared = (FAMILY.makespan_ms(a_problem(**small, heads=heads), config, H100) for heads in (1, 8))
    assert alone < shared < 3 * alone
    for changes in (
        {"window_left": 128},
        {"seqlen_q": 0},
        {"seqlen_kv": 0},
        {"seqlen_q": 9, "seqlen_kv": 8192},
    ):
        assert 0 < FAMILY.makespan_ms(a_problem(**changes), config, H100) < math.inf


@pytest.mark.slow
@pytest.mark.parametrize("changes", ASKED.values(), ids=ASKED.keys())
def test_compiled_sram_on_hopper_matches_the_model(changes: dict[str, Any]) -> None:
    problem = a_problem(**changes)
    kernel = render(FAMILY, problem, CONFIG, PLAIN)
    main, _, epilogue = kernel.parts
    assert all("wgmma" in compile_kernel(part, H100).asm["ptx"] for part in (main, epilogue))
    sram_bytes = read_resources(kernel, H100).sram_bytes
    assert 0.7 * sram_bytes < modelled(problem, CONFIG, H100) <= sram_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "changes", "assumed"),
    [
        (A100, {}, PLAIN),
        (
            A100,
            {"head_dim": 80, "value_head_dim": 64, "window_left": 64},
            Specialization(Alignment.ANY, 64, True),
        ),
        (find_target("b200"), {"softcap": True}, PLAIN),
    ],
    ids=["a100", "misaligned", "b200"],
)
def test_compiled_sram_on_other_gpus_matches_the_model(
    target: Target, changes: dict[str, Any], assumed: Specialization
) -> None:
    problem = a_problem(**changes)
    resources = read_resources(render(FAMILY, problem, CONFIG, assumed), target)
    assert 0 < modelled(problem, CONFIG, target, assumed) <= resources.sram_bytes
    assert FAMILY.tensor_memory_columns(problem, CONFIG, target) <= resources.tensor_memory_columns


@pytest.mark.slow
@pytest.mark.parametrize("width", [64, 128])
def test_sums_stay_in_registers(width: int) -> None:
    problem = a_problem(head_dim=width, value_head_dim=width)
    resources = read_resources(render(FAMILY, problem, usual(problem, H100), PLAIN), H100)
    assert not resources.serialized_wgmma
    assert resources.spill_bytes <= 64
