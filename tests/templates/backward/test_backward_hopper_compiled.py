"""Tests of compiled Hopper backward kernels: registers, SRAM and instructions."""

import re
from typing import Any

import pytest

from flashtune.core.kernel import Specialization
from flashtune.core.problem import Causal, Problem
from flashtune.launch.compilation import compile_kernel
from flashtune.templates.rendering import render
from flashtune.tuner.binary.resources import read_parts
from tests.problems.hopper_backward import FAMILY, H200, PLAIN, a_problem, kernel_of

CAUSAL: tuple[dict[str, Any], ...] = ({}, {"causal": Causal.BOTTOM_RIGHT})
ORDERED: tuple[dict[str, Any], ...] = ({}, {"deterministic": True})
FEATURES: tuple[dict[str, Any], ...] = (
    {"causal": Causal.BOTTOM_RIGHT, "window_left": 1023},
    {"window_left": 512, "window_right": 511, "packed": 1},
    {"causal": Causal.BOTTOM_RIGHT, "softcap": True},
    {"causal": Causal.BOTTOM_RIGHT, "softcap": True, "packed": 1, "sinks": True},
    {"packed": 1},
)


def check_default_config(problem: Problem, spilled: int, lse: bool = False) -> None:
    """Compiles the default config, of which `spilled` bytes may be spilled."""
    kernel = kernel_of(problem, Specialization(lse=lse))
    main, prologue, epilogue = (part.resources for part in read_parts(kernel, H200))
    model = sum(item.bytes for item in FAMILY.sram_items(problem, FAMILY.default(problem, H200), H200, PLAIN))
    # The compiler adds the exchange between roles and aligns what it allocates.
    assert 0 <= main.sram_bytes - model <= 1024
    assert main.sram_bytes <= H200.sram_per_block
    # Two groups of four warps; the producer's warp, and those that keep the order, are rounded up to four.
    assert main.warps == 12
    assert not main.serialized_wgmma
    assert main.spill_bytes <= spilled
    assert prologue.spill_bytes == epilogue.spill_bytes == 0


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("order", ORDERED, ids=str)
@pytest.mark.parametrize("causal", CAUSAL, ids=str)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_default_config_has_asynchronous_wgmma(
    head_dim: int, causal: dict[str, Any], order: dict[str, Any]
) -> None:
    check_default_config(a_problem(head_dim, **causal, **order), 16, lse=True)


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("causal", CAUSAL, ids=str)
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_dropout_has_asynchronous_wgmma(head_dim: int, causal: dict[str, Any]) -> None:
    check_default_config(a_problem(head_dim, **causal, dropout=True), 64 if head_dim == 64 else 16)


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("order", ORDERED, ids=str)
@pytest.mark.parametrize("features", FEATURES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_features_have_asynchronous_wgmma(
    head_dim: int, features: dict[str, Any], order: dict[str, Any]
) -> None:
    check_default_config(a_problem(head_dim, **features, **order), 40 if head_dim == 256 else 32)


@pytest.mark.slow
def test_configs_of_the_widest_tiles_do_not_spill() -> None:
    problem = a_problem(256, causal=Causal.BOTTOM_RIGHT)
    configs = list(FAMILY.space(problem, H200).configs())
    assert len(configs) == 4
    for config in configs:
        main = read_parts(render(FAMILY, problem, config, PLAIN), H200)[0].resources
        assert main.spill_bytes <= 8
        assert not main.serialized_wgmma
        assert main.sram_bytes <= H200.sram_per_block


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128])
def test_dq_is_added_from_registers_four_at_a_time(head_dim: int) -> None:
    ptx = str(
        compile_kernel(kernel_of(a_problem(head_dim), defer_dq=False, alternate_dq=False), H200).asm["ptx"]
    )
    # 32 registers of each of two groups.
    assert ptx.count("red.relaxed.gpu.global.add.v4.f32") == 16
    # dq's halves in four steps over both groups' keys, and more of this shape at the wider tiles: scores.
    assert ptx.count("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16") >= 16


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_deterministic_sums_signal_after_all_additions(head_dim: int) -> None:
    ptx = str(compile_kernel(kernel_of(a_problem(head_dim, deterministic=True)), H200).asm["ptx"])
    # A warp for each group waits for its turn and gives it to the next block of keys.
    waits = ptx.count("ld.acquire.gpu.global.u32")
    assert waits == ptx.count("st.release.gpu.global.u32") == 2
    # In the loop and behind it, for each group: all of it meets before one thread says that it has added.
    additions = re.split(r"red\.relaxed\.gpu\.global\.add\.v4\.f32[^\n]*\n", ptx)[1:]
    assert len(additions) == 4
    for behind in additions:
        assert 0 < behind.index("bar.sync") < behind.index("mbarrier.arrive")


def test_warpgroups_share_the_products_of_the_widest_tiles() -> None:
    ptx = str(compile_kernel(kernel_of(a_problem(256)), H200).asm["ptx"])
    # 64 registers of each of two groups, added four at a time, in the loop and for the late block behind it.
    assert ptx.count("red.relaxed.gpu.global.add.v4.f32") == 64
    # 4 products over 64 queries or keys: dv and dk, and both halves of dq in the loop and behind it.
    assert ptx.count("wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16") == 8
    assert ptx.count("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16") == 16
    # Scores and gradients of weights, over 256 columns.
    assert ptx.count("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16") == 32


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head_dim", "delay", "turns"),
    [
        (64, True, False),
        (64, True, True),
        (128, True, True),
        (128, True, False),
        (128, False, False),
        (256, True, False),
    ],
)
def test_each_step_adds_to_its_own_block(head_dim: int, delay: bool, turns: bool) -> None:
    """Triton's frontend decides what a loop carries: an address that it does not is that of one block."""
    carried: dict[str, str] = {}
    inside: list[str] = []
    behind: list[str] = []
    kernel = kernel_of(a_problem(head_dim), defer_dq=delay, alternate_dq=turns)
    for line in str(compile_kernel(kernel, H200).asm["ttgir"]).split("\n"):
        if loop := re.search(r"(%\w+):\d+ = scf\.for .*iter_args\((.*?)\) ->", line):
            names = loop[2].split(", ")
            carried = {name.split(" = ")[0]: f"{loop[1]}#{index}" for index, name in enumerate(names)}
        # Addresses, or in the widest tiles the block's number that they are made of.
        pattern = r"arith\.extsi (%[\w#]+) : i32" if head_dim > 128 else r"tt\.splat (%[\w#]+) : i64 ->"
        if address := re.search(pattern, line):
            (inside if address[1] in carried else behind).append(carried.get(address[1], address[1]))
    # Of each of two groups; behind the loop comes what is late.
    assert len(inside) == 2
    assert behind == (inside if delay else [])
