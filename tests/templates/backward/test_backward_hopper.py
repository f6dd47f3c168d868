"""Tests of the Hopper backward family: problems, search space, launch plans and compiled kernels."""

import math
import re
from typing import Any

import pytest
import torch
from triton.language import str_to_ty
from triton.runtime.jit import mangle_type

from flashtune.core.kernel import Alignment, Specialization
from flashtune.core.problem import Bias, Causal, Direction, Dtype, Problem
from flashtune.core.target import find_target
from flashtune.launch.compilation import compile_kernel, load_module
from flashtune.templates.backward_hopper.space import HopperBackwardConfig
from flashtune.templates.family import unsupported_reason
from flashtune.templates.rendering import render
from flashtune.tuner.binary.resources import read_parts
from tests.problems.hopper_backward import FAMILY, H200, PLAIN, a_problem, config_of, kernel_of, like

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
        ({"bias": Bias.BOOLEAN}, "an additive bias without other features"),
        ({"bias": Bias.ADDITIVE, "softcap": True, "seqlen_kv": 1104}, "additive bias without other features"),
        ({"bias": Bias.ADDITIVE, "seqlen_kv": 1100}, "numbers of keys in steps of 8"),
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


@pytest.mark.parametrize(
    ("head_dim", "dropout", "turns"),
    [
        (64, False, True),
        (64, True, False),
        (72, False, True),
        (128, True, True),
        (136, False, False),
        (256, False, False),
    ],
)
def test_alternate_dq_requires_deferred_dq(head_dim: int, dropout: bool, turns: bool) -> None:
    problem = a_problem(head_dim, dropout=dropout)
    assert config_of(problem).alternate_dq is turns
    configs = list(FAMILY.space(problem, H200).configs())
    pairs = {
        (config.defer_dq, config.alternate_dq)
        for config in configs
        if isinstance(config, HopperBackwardConfig)
    }
    late = {(True, False)}
    assert pairs == (late if head_dim > 128 else late | {(False, False), (True, True)})


@pytest.mark.parametrize("dropout", [False, True])
def test_dropout_excludes_early_dv(dropout: bool) -> None:
    problem = a_problem(dropout=dropout)
    configs = FAMILY.space(problem, H200).configs()
    values = {
        config.early_dv
        for config in configs
        if isinstance(config, HopperBackwardConfig) and config.alternate_dq
    }
    assert values == ({False} if dropout else {False, True})
    assert config_of(problem).early_dv is not dropout


def test_alternate_dq_has_a_shorter_predicted_time() -> None:
    problem = a_problem(batch=16, seqlen_q=2048, seqlen_kv=2048)
    halves, wholes = (
        FAMILY.makespan_ms(problem, config_of(problem, alternate_dq=turns), H200) for turns in (False, True)
    )
    assert 0.88 < wholes / halves < 0.95


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("deterministic", [False, True])
def test_alternating_group_computes_a_whole_dq_block(head_dim: int, deterministic: bool) -> None:
    problem = a_problem(head_dim, deterministic=deterministic)
    kernel = kernel_of(problem, defer_dq=True, alternate_dq=True, early_dv=head_dim == 128)
    main = read_parts(kernel, H200)[0].resources
    assert not main.serialized_wgmma
    assert main.spill_bytes <= (16 if head_dim == 64 else 0)
    ptx = str(compile_kernel(kernel, H200).asm["ptx"])
    # 64 registers of each of two groups, in the loop and behind it.
    assert ptx.count("red.relaxed.gpu.global.add.v4.f32") == 64
    halves = ptx.count("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16")
    wholes = ptx.count("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16")
    if head_dim == 64:
        # dv and dk of 128 queries; scores, before the loop and in it, dp, and dq, in it and behind it.
        assert (halves, wholes) == (32, 2 * (4 * 3 + 8 * 2))
    else:
        # Scores, before the loop and in it, and dp; dv and dk of 64 queries, and dq, in it and behind it.
        assert (halves, wholes) == (2 * 8 * 3, 2 * (4 * 2 + 8 * 2))


CAUSAL: tuple[dict[str, Any], ...] = ({}, {"causal": Causal.BOTTOM_RIGHT})
ORDERED: tuple[dict[str, Any], ...] = ({}, {"deterministic": True})
FEATURES: tuple[dict[str, Any], ...] = (
    {"causal": Causal.BOTTOM_RIGHT, "window_left": 1023},
    {"window_left": 512, "window_right": 511, "packed": 1},
    {"causal": Causal.BOTTOM_RIGHT, "softcap": True},
    {"causal": Causal.BOTTOM_RIGHT, "softcap": True, "packed": 1, "sinks": True},
    {"packed": 1},
)
BLOCKS: tuple[dict[str, Any], ...] = tuple(
    {"block_mask": size, "causal": causal}
    for size in (64, 128)
    for causal in (Causal.NONE, Causal.BOTTOM_RIGHT)
)


def check_default_config(problem: Problem, spilled: int, specialization: Specialization = PLAIN) -> None:
    """Compiles the default config, of which `spilled` bytes may be spilled."""
    kernel = kernel_of(problem, specialization)
    main, prologue, epilogue = (part.resources for part in read_parts(kernel, H200))
    model = sum(item.bytes for item in FAMILY.sram_items(problem, FAMILY.default(problem, H200), H200, PLAIN))
    # The compiler adds the exchange between roles and aligns what it allocates.
    assert 0 <= main.sram_bytes - model <= 1024
    assert main.sram_bytes <= H200.sram_per_block
    # Two groups of four warps; the producer's warp, and those that keep the order, are rounded up to four.
    assert main.warps == 12
    assert not main.serialized_wgmma
    assert main.spill_bytes <= spilled
    # The prologue of a block mask holds the lists of many blocks in a loop, and that of a bias sums scores.
    assert prologue.spill_bytes <= (40 if problem.block_mask else 24 if problem.bias is Bias.ADDITIVE else 0)
    assert epilogue.spill_bytes == 0


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("order", ORDERED, ids=str)
@pytest.mark.parametrize("causal", CAUSAL, ids=str)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_default_config_has_asynchronous_wgmma(
    head_dim: int, causal: dict[str, Any], order: dict[str, Any]
) -> None:
    check_default_config(a_problem(head_dim, **causal, **order), 16, Specialization(lse=True))


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
@pytest.mark.parametrize("blocks", BLOCKS, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_block_masks_have_asynchronous_wgmma(head_dim: int, blocks: dict[str, Any]) -> None:
    check_default_config(a_problem(head_dim, **blocks), 16)


@pytest.mark.slow
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("causal", CAUSAL, ids=str)
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_biases_have_asynchronous_wgmma(head_dim: int, causal: dict[str, Any], trained: bool) -> None:
    problem = a_problem(head_dim, bias=Bias.ADDITIVE, **causal)
    specialization = PLAIN if trained else Specialization(constant_bias=True)
    check_default_config(problem, 24 if head_dim == 64 else 8, specialization)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_tiles_of_a_bias_are_loaded_and_stored_transposed(head_dim: int) -> None:
    ptx = str(compile_kernel(kernel_of(a_problem(head_dim, bias=Bias.ADDITIVE)), H200).asm["ptx"])
    # A warp of each of two groups has 16 keys. An instruction moves four matrices of 8 by 8.
    matrices = 2 * (128 if head_dim == 64 else 64) // 16
    assert ptx.count("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16") == matrices
    assert ptx.count("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16") == matrices


def test_a_shared_bias_is_described_once() -> None:
    problem = a_problem(64, bias=Bias.ADDITIVE, seqlen_kv=1104)
    shared = torch.empty(1, 1, 1000, 1120, dtype=torch.bfloat16, device="meta")[..., :1104]
    planned = (*like(problem), shared.expand(2, 8, -1, -1))
    kernel = kernel_of(problem)
    # Its descriptor is the only argument without a causal mask.
    assert kernel.writes("dbias")
    module = load_module(kernel)
    assert module.launch_plan(*planned)[2][-2:] == (1, 1)
    made = module.descriptors(*planned, *[torch.empty(8, 8, device="meta")] * 2)
    (bias,), (gradient,) = made["bias"], made["dbias"]
    assert (bias.shape, bias.strides[2:]) == ([1, 1, 1000, 1104], [1120, 1])
    assert (gradient.shape, gradient.strides) == ([2, 8, 1000, 1104], [8 * 1104000, 1104000, 1104, 1])
    declared = [argument for argument in kernel.arguments if argument.type.startswith("tensordesc")]
    flat = [descriptor for parts in made.values() for descriptor in parts]
    types = [str_to_ty(mangle_type(descriptor), None) for descriptor in flat]
    assert types == [str_to_ty(argument.type, None) for argument in declared]


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
