"""Hopper's own backward pass as rendered, as planned for launches, and as the compiler sees it."""

from __future__ import annotations

import ast
import itertools
import math
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor
from triton.language import str_to_ty
from triton.runtime.jit import mangle_type

from flashtune.compilation import compile_kernel, load_module
from flashtune.dtypes import TORCH_DTYPES
from flashtune.kernel import Alignment, Kernel, Specialization
from flashtune.problem import Causal, Direction, Dtype, Problem
from flashtune.target import find_target
from flashtune.templates.backward_hopper.space import HopperBackwardConfig
from flashtune.templates.family import why_not
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render
from flashtune.tuner.resources import read_parts

GOLDEN = Path(__file__).parents[1] / "golden" / "backward"
MAX_LINE = 130
FAMILY = find_family("backward_hopper")
H200 = find_target("h200")
PLAIN = Specialization()
PLANNED = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")


def a_problem(head_dim: int = 128, value_head_dim: int = 0, **changes: Any) -> Problem:
    problem = Problem(
        dtype=Dtype.BF16,
        head_dim=head_dim,
        value_head_dim=value_head_dim or head_dim,
        heads=8,
        kv_heads=2,
        batch=2,
        seqlen_q=1000,
        seqlen_kv=1100,
        direction=Direction.BACKWARD,
    )
    return msgspec.structs.replace(problem, **changes)


def config_of(problem: Problem, **changes: Any) -> HopperBackwardConfig:
    default = FAMILY.default(problem, H200)
    return msgspec.convert({**msgspec.to_builtins(default), **changes}, HopperBackwardConfig)


def kernel_of(problem: Problem, specialization: Specialization = PLAIN, **changes: Any) -> Kernel:
    return render(FAMILY, problem, config_of(problem, **changes), specialization)


def like(problem: Problem) -> tuple[Tensor, ...]:
    """What a launch is planned by, with heads beside one another and no data."""
    dtype = TORCH_DTYPES[problem.dtype]

    def empty(heads: int, length: int, width: int) -> Tensor:
        return torch.empty(problem.batch, length, heads, width, dtype=dtype, device="meta").transpose(1, 2)

    queries, keys = (problem.heads, problem.seqlen_q), (problem.kv_heads, problem.seqlen_kv)
    qk, v = problem.head_dim, problem.value_head_dim
    sides = ((*queries, qk), (*keys, qk), (*keys, v), (*queries, v), (*queries, v))
    return tuple(empty(*side) for side in (*sides, (*queries, qk), (*keys, qk), (*keys, v)))


GOLDENS = {
    "hopper_bf16_d128_causal": kernel_of(a_problem(causal=Causal.BOTTOM_RIGHT), Specialization(lse=True)),
    "hopper_fp16_d64_delay": kernel_of(a_problem(64, dtype=Dtype.FP16), turns=False),
    "hopper_bf16_d96_v80_plain": kernel_of(
        a_problem(96, 80),
        init=False,
        eager=True,
        late_wait=False,
        product_first=False,
        delay=False,
        turns=False,
        num_stages=3,
    ),
    "hopper_bf16_d96_v80": kernel_of(a_problem(96, 80), Specialization(lse=True)),
    "hopper_fp16_d64_turns": kernel_of(a_problem(64, dtype=Dtype.FP16)),
    "hopper_bf16_d128_dropout": kernel_of(
        a_problem(causal=Causal.BOTTOM_RIGHT, dropout=True), Specialization(lse=True)
    ),
    "hopper_bf16_d256_causal": kernel_of(
        a_problem(256, causal=Causal.BOTTOM_RIGHT), Specialization(lse=True)
    ),
    "hopper_bf16_d128_ordered": kernel_of(a_problem(causal=Causal.BOTTOM_RIGHT, deterministic=True)),
    "hopper_fp16_d256_ordered": kernel_of(a_problem(256, dtype=Dtype.FP16, deterministic=True)),
    "hopper_fp16_d192_plain": kernel_of(a_problem(192, dtype=Dtype.FP16), init=False),
}  # fmt: skip


@pytest.mark.parametrize("name", GOLDENS)
def test_rendered_as_before(name: str, updates_golden: bool) -> None:
    path, source = GOLDEN / f"{name}.py", GOLDENS[name].source
    if updates_golden:
        path.write_text(source, encoding="utf-8")
    assert source == path.read_text(encoding="utf-8"), "if meant: pytest tests/templates --update-golden"


def test_no_golden_file_is_left_over() -> None:
    assert {path.stem for path in GOLDEN.glob("hopper_*.py")} == set(GOLDENS)


@pytest.mark.parametrize("name", GOLDENS)
def test_a_person_can_read_it(name: str) -> None:
    kernel = GOLDENS[name]
    lines = kernel.source.split("\n")
    assert [line for line in lines if line != line.rstrip() or len(line) > MAX_LINE] == []
    assert "\n\n\n\n" not in kernel.source
    found = {node.name: node for node in ast.parse(kernel.source).body if isinstance(node, ast.FunctionDef)}
    assert {"launch_plan", "prologue_plan", "epilogue_plan", "descriptors", "attention_backward"} <= set(
        found
    )
    for one in filter(None, (kernel, kernel.first, kernel.last)):
        parameters = [argument.arg for argument in found[one.entry].args.args]
        assert parameters == [argument.name for argument in one.arguments]


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
def test_descriptors_are_those_that_the_kernel_is_declared_with(problem: Problem) -> None:
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


@pytest.mark.parametrize(
    ("head_dim", "block_m", "blocks"), [(64, 128, 9), (128, 64, 9), (192, 64, 18), (256, 64, 18)]
)
@pytest.mark.parametrize(("causal", "diagonal"), [("none", 0), ("top_left", 0), ("bottom_right", 100)])
@pytest.mark.parametrize("deterministic", [False, True])
def test_launches_are_planned_by_lengths(
    head_dim: int, block_m: int, blocks: int, causal: str, diagonal: int, deterministic: bool
) -> None:
    problem = a_problem(head_dim, causal=Causal(causal), deterministic=deterministic)
    module, planned = load_module(kernel_of(problem)), like(problem)
    grid, workspaces, integers = module.launch_plan(*planned)
    assert grid == (blocks * 2 * 2,)
    assert FAMILY.programs(problem, FAMILY.default(problem, H200)) == grid[0]
    tiles = math.ceil(1000 / block_m)
    sums = (16, tiles, 16384 if head_dim > 128 else 8192)
    # A counter for each half of a block of sums, or for all; heads that fill the GPU twice or four times.
    counters = ((16, tiles, 2 if head_dim > 128 else 1),) if deterministic else ()
    beside = (math.ceil((264 if causal == "none" else 528) / blocks),) if deterministic else ()
    assert workspaces == ((32, tiles * block_m), sums, *counters)
    assert integers == (blocks, 2, 4, 1000, 1100, diagonal, *beside)
    assert module.prologue_plan(*planned) == (
        (tiles * 16,),
        (*planned[3].stride()[:3], *planned[4].stride()[:3], 8, 1000),
    )
    assert module.epilogue_plan(*planned) == ((tiles * 16,), (*planned[5].stride()[:3], 8, 1000))


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("causal", [Causal.NONE, Causal.BOTTOM_RIGHT])
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_default_keeps_its_products_asynchronous(
    head_dim: int, causal: Causal, deterministic: bool
) -> None:
    problem = a_problem(head_dim, causal=causal, deterministic=deterministic)
    kernel = kernel_of(problem, Specialization(lse=True))
    main, prologue, epilogue = (part.resources for part in read_parts(kernel, H200))
    model = sum(item.bytes for item in FAMILY.sram_items(problem, FAMILY.default(problem, H200), H200, PLAIN))
    # The compiler adds the exchange between roles and aligns what it allocates.
    assert 0 <= main.sram_bytes - model <= 1024
    assert main.sram_bytes <= H200.sram_per_block
    # Two groups of four warps; the producer's warp, and those that keep the order, are rounded up to four.
    assert main.warps == 12
    assert not main.serialized_wgmma
    assert main.spill_bytes <= 16
    assert prologue.spill_bytes == epilogue.spill_bytes == 0


@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("causal", [Causal.NONE, Causal.BOTTOM_RIGHT])
def test_dropping_weights_costs_no_product_its_neighbour(head_dim: int, causal: Causal) -> None:
    problem = a_problem(head_dim, causal=causal, dropout=True)
    main, prologue, _ = (part.resources for part in read_parts(kernel_of(problem), H200))
    model = sum(item.bytes for item in FAMILY.sram_items(problem, FAMILY.default(problem, H200), H200, PLAIN))
    assert 0 <= main.sram_bytes - model <= 1024
    assert not main.serialized_wgmma
    assert main.spill_bytes <= (64 if head_dim == 64 else 16)
    assert prologue.spill_bytes == 0


@pytest.mark.parametrize("causal", [Causal.NONE, Causal.BOTTOM_RIGHT])
def test_every_config_of_the_widest_tiles_keeps_to_its_registers(causal: Causal) -> None:
    problem = a_problem(256, causal=causal)
    configs = list(FAMILY.space(problem, H200).configs())
    assert len(configs) == (4 if causal is Causal.NONE else 2)
    for config in configs:
        main = read_parts(render(FAMILY, problem, config, PLAIN), H200)[0].resources
        assert main.spill_bytes <= 8
        assert not main.serialized_wgmma
        assert main.sram_bytes <= H200.sram_per_block


@pytest.mark.parametrize("head_dim", [64, 128])
def test_dq_is_added_from_registers_four_at_a_time(head_dim: int) -> None:
    ptx = str(compile_kernel(kernel_of(a_problem(head_dim), delay=False, turns=False), H200).asm["ptx"])
    # 32 registers of each of two groups.
    assert ptx.count("red.relaxed.gpu.global.add.v4.f32") == 16
    # dq's halves in four steps over both groups' keys, and more of this shape at the wider tiles: scores.
    assert ptx.count("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16") >= 16


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_ordered_sums_are_passed_on_when_all_have_added(head_dim: int) -> None:
    ptx = str(compile_kernel(kernel_of(a_problem(head_dim, deterministic=True)), H200).asm["ptx"])
    # A warp for each group waits for its turn and gives it to the next block of keys.
    waits = ptx.count("ld.acquire.gpu.global.u32")
    assert waits == ptx.count("st.release.gpu.global.u32") == 2
    # In the loop and behind it, for each group: all of it meets before one thread says that it has added.
    additions = re.split(r"red\.relaxed\.gpu\.global\.add\.v4\.f32[^\n]*\n", ptx)[1:]
    assert len(additions) == 4
    for behind in additions:
        assert 0 < behind.index("bar.sync") < behind.index("mbarrier.arrive")


def test_groups_divide_the_products_of_the_widest_tiles() -> None:
    ptx = str(compile_kernel(kernel_of(a_problem(256)), H200).asm["ptx"])
    # 64 registers of each of two groups, in the loop and of what is late behind it.
    assert ptx.count("red.relaxed.gpu.global.add.v4.f32") == 64
    # 4 products over 64 queries or keys: dv and dk, and both halves of dq in the loop and behind it.
    assert ptx.count("wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16") == 8
    assert ptx.count("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16") == 16
    # Scores and gradients of weights, over 256 columns.
    assert ptx.count("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16") == 32


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
def test_each_step_adds_to_a_block_of_its_own(head_dim: int, delay: bool, turns: bool) -> None:
    """Triton's frontend decides what a loop carries: an address that it does not is that of one block."""
    carried: dict[str, str] = {}
    inside: list[str] = []
    behind: list[str] = []
    kernel = kernel_of(a_problem(head_dim), delay=delay, turns=turns)
    for line in str(compile_kernel(kernel, H200).asm["ttgir"]).split("\n"):
        if loop := re.search(r"(%\w+):\d+ = scf\.for .*iter_args\((.*?)\) ->", line):
            names = loop[2].split(", ")
            carried = {name.split(" = ")[0]: f"{loop[1]}#{place}" for place, name in enumerate(names)}
        # Addresses, or in the widest tiles the block's number that they are made of.
        pattern = r"arith\.extsi (%[\w#]+) : i32" if head_dim > 128 else r"tt\.splat (%[\w#]+) : i64 ->"
        if address := re.search(pattern, line):
            (inside if address[1] in carried else behind).append(carried.get(address[1], address[1]))
    # Of each of two groups; behind the loop comes what is late.
    assert len(inside) == 2
    assert behind == (inside if delay else [])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"head_dim": 264, "value_head_dim": 264}, "from 16 to 256 in steps of 8"),
        ({"head_dim": 68, "value_head_dim": 64}, "from 16 to 256 in steps of 8"),
        ({"head_dim": 192, "value_head_dim": 128}, "head dims of q and v above 128 only where they are one"),
        ({"dtype": Dtype.FP32}, "bf16 and fp16"),
        ({"window_left": 100}, "has no window"),
        ({"head_dim": 192, "value_head_dim": 192, "dropout": True}, "drops weights of head dims up to 128"),
        ({"direction": Direction.FORWARD}, "computes the backward pass"),
    ],
)
def test_it_says_what_it_does_not_take(changes: dict[str, Any], reason: str) -> None:
    assert reason in (why_not(FAMILY, a_problem(**changes), H200, PLAIN) or "")


def test_it_takes_no_other_gpu_and_no_odd_strides() -> None:
    assert "sm_90 alone" in (why_not(FAMILY, a_problem(), find_target("a100"), PLAIN) or "")
    odd = Specialization(Alignment.ANY)
    assert "cannot address" in (why_not(FAMILY, a_problem(), H200, odd) or "")
    assert why_not(FAMILY, a_problem(72, 40), H200, Specialization(Alignment.EIGHT, 64, True)) is None


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_the_default_is_a_point_of_its_space(head_dim: int) -> None:
    for causal, deterministic in itertools.product(Causal, (False, True)):
        problem = a_problem(head_dim, causal=causal, deterministic=deterministic)
        default = FAMILY.default(problem, H200)
        space = FAMILY.space(problem, H200)
        assert space.contains(default)
        assert all(space.contains(other) for other in FAMILY.spread_otherwise(problem, default, H200))
