"""How Hopper kernels are launched: descriptors as they were declared, the grid, and who works on what."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from triton.language import str_to_ty
from triton.runtime.jit import mangle_type

from flashtune.compilation import load_module
from flashtune.dtypes import TORCH_DTYPES
from flashtune.kernel import Kernel
from flashtune.problem import Causal, Dtype, Problem
from flashtune.templates.forward_hopper.space import HopperConfig
from flashtune.templates.rendering import render
from tests.hopper import FAMILY, PLAIN, a_config, a_problem, sampled_configs

MULTIPROCESSORS = 132
DESCRIBED = [
    a_problem(64, kv_heads=1),
    a_problem(128, dtype=Dtype.FP16, kv_heads=2, causal=Causal.BOTTOM_RIGHT),
    a_problem(96, 80, kv_heads=4),
    a_problem(40, 24),
    a_problem(192, 128),
    a_problem(256, causal=Causal.TOP_LEFT),
    a_problem(128, dtype=Dtype.E4M3),
    a_problem(96, 80, dtype=Dtype.E4M3),
    a_problem(256, dtype=Dtype.E4M3, causal=Causal.TOP_LEFT),
]


def kernel_of(problem: Problem, config: HopperConfig) -> Kernel:
    return render(FAMILY, problem, config, PLAIN)


# ---- descriptors -----------------------------------------------------------------------------------


def like(problem: Problem, layout: str = "bhsd") -> tuple[torch.Tensor, ...]:
    """q, k, v and out as kernels see them: no data, and v as the prologue leaves it."""

    def empty(heads: int, length: int, width: int, dtype: Dtype) -> torch.Tensor:
        sides = (problem.batch, heads, length) if layout == "bhsd" else (problem.batch, length, heads)
        tensor = torch.empty(*sides, width, dtype=TORCH_DTYPES[dtype], device="meta")
        return tensor if layout == "bhsd" else tensor.transpose(1, 2)

    dtype, keys, values = problem.dtype, problem.seqlen_kv, problem.value_head_dim
    return (
        empty(problem.heads, problem.seqlen_q, problem.head_dim, dtype),
        empty(problem.kv_heads, keys, problem.head_dim, dtype),
        empty(problem.kv_heads, *((values, keys) if dtype.is_quantized else (keys, values)), dtype),
        empty(problem.heads, problem.seqlen_q, problem.value_head_dim, dtype.out),
    )


@pytest.mark.parametrize("problem", DESCRIBED, ids=lambda problem: problem.key)
def test_arguments_are_typed_as_the_descriptors_that_the_host_makes(problem: Problem) -> None:
    tensors = like(problem)
    for config in (a_config(problem), *sampled_configs(problem, 5)):
        kernel = kernel_of(problem, config)
        made = load_module(kernel).descriptors(*tensors)
        flat = [descriptor for parts in made for descriptor in parts]
        declared = [argument for argument in kernel.arguments if argument.type.startswith("tensordesc")]
        # Triton's own name of a descriptor's type, against ours: element, tile and layout.
        types = [str_to_ty(mangle_type(descriptor), None) for descriptor in flat]
        assert types == [str_to_ty(argument.type, None) for argument in declared]
        assert kernel.arguments[: len(declared)] == tuple(declared)
        assert [argument.name[0] for argument in declared] == [
            name for name, parts in zip("qkvo", made, strict=True) for _ in parts
        ]


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_descriptors_span_their_tensors_as_they_lie(layout: str) -> None:
    problem = a_problem(96, 80, seqlen_q=100, seqlen_kv=300, kv_heads=2)
    tensors = like(problem, layout)
    config = a_config(problem, pack=4)
    made = load_module(kernel_of(problem, config)).descriptors(*tensors)
    for tensor, parts in zip(tensors, made, strict=True):
        for descriptor in parts:
            assert descriptor.base is tensor
            assert tuple(descriptor.shape) == tuple(tensor.shape)
            assert tuple(descriptor.strides) == tensor.stride()
            assert descriptor.padding == "zero"
    # Four heads of a group of queries share a tile.
    assert [descriptor.block_shape for descriptor in made[0]] == [[1, 4, 16, 64], [1, 4, 16, 32]]
    assert [descriptor.block_shape for descriptor in made[1]] == [[1, 1, 128, 64], [1, 1, 128, 32]]
    assert [descriptor.block_shape for descriptor in made[3]] == [[1, 4, 16, 64], [1, 4, 16, 16]]


def test_halves_and_transposed_values() -> None:
    halved = a_problem(256)
    made = load_module(kernel_of(halved, a_config(halved))).descriptors(*like(halved))
    assert made[3][0].block_shape == [1, 1, 64, 128]
    quantised = a_problem(128, 64, dtype=Dtype.E4M3)
    made = load_module(kernel_of(quantised, a_config(quantised))).descriptors(*like(quantised))
    assert made[2][0].block_shape == [1, 1, 64, 128]
    assert [made[index][0].layout.swizzle_byte_width for index in range(4)] == [128, 128, 128, 128]


# ---- the plan --------------------------------------------------------------------------------------


@pytest.fixture
def on_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = SimpleNamespace(multi_processor_count=MULTIPROCESSORS)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: facts)


def plan(problem: Problem, **changes: Any) -> Any:
    """The plan of tensors on a GPU, of which only the shape is asked."""
    module = load_module(kernel_of(problem, a_config(problem, **changes)))
    on_gpu = [SimpleNamespace(shape=tensor.shape, device=None, is_cuda=True) for tensor in like(problem)]
    if problem.dtype.is_quantized:
        on_gpu[2].shape = (*on_gpu[1].shape[:3], problem.value_head_dim)
    return module.launch_plan(*on_gpu)


@pytest.mark.usefixtures("on_h200")
@pytest.mark.parametrize(
    ("changes", "lengths", "tiles"),
    [
        ({}, (1024, 1024), 2 * 8 * 8),
        ({}, (1025, 77), 2 * 8 * 9),
        ({}, (1, 1), 2 * 8),
        ({"pack": 4}, (1024, 1024), 2 * 2 * 32),
        ({"groups": 1, "ping_pong": False}, (1024, 1024), 2 * 8 * 16),
        ({"groups": 3}, (1024, 1024), 2 * 8 * 6),
    ],
)
def test_the_grid_is_as_many_programs_as_run_at_once(
    changes: dict[str, Any], lengths: tuple[int, int], tiles: int
) -> None:
    problem = a_problem(64, kv_heads=2, seqlen_q=lengths[0], seqlen_kv=lengths[1])
    (programs,), workspaces, integers = plan(problem, **{"groups": 2, "section": 0, **changes, "even": False})
    assert programs == min(tiles, MULTIPROCESSORS)
    assert workspaces == ()
    packs = 16 // changes.get("pack", 1)
    assert integers == (8, 4, 16, *lengths, packs)
    (programs,), _, _ = plan(problem, **{"groups": 2, **changes, "even": True})
    rounds = math.ceil(tiles / MULTIPROCESSORS)
    assert math.ceil(tiles / programs) == rounds
    assert programs == 1 or math.ceil(tiles / (programs - 1)) > rounds


@pytest.mark.usefixtures("on_h200")
def test_sections_are_counted_in_packs_and_hold_no_more_than_there_are() -> None:
    problem = a_problem(64, kv_heads=2)
    for section, pack, expected in ((0, 1, 16), (4, 1, 4), (64, 1, 16), (4, 4, 4), (8, 4, 4), (0, 4, 4)):
        assert plan(problem, section=section, pack=pack)[2][-1] == expected


@pytest.mark.usefixtures("on_h200")
@pytest.mark.parametrize(("keys", "kept"), [(1, 16), (16, 16), (17, 32), (1000, 1008)])
def test_transposed_values_have_room_for_whole_groups_of_keys(keys: int, kept: int) -> None:
    problem = a_problem(128, 64, dtype=Dtype.E4M3, kv_heads=2, seqlen_kv=keys)
    (shape,) = plan(problem)[1]
    assert shape[:3] == (2, 2, 64)
    # Bytes of keys, in a workspace of float32.
    assert 4 * shape[3] == kept
    v = torch.empty(2, keys, 2, 64, device="meta").transpose(1, 2)
    module = load_module(kernel_of(problem, a_config(problem)))
    grid, integers = module.prologue_plan(v, v, v, v)
    assert grid == (math.ceil(keys / 64), 4)
    assert integers == (*v.stride()[:3], 2, keys)


def test_the_kernel_is_told_its_integers_in_order() -> None:
    problem = a_problem(64)
    kernel = kernel_of(problem, a_config(problem))
    names = [argument.name for argument in kernel.arguments]
    assert names[-7:] == ["scale", "heads", "group_size", "all_heads", "seqlen_q", "seqlen_kv", "section"]
    assert {argument.type for argument in kernel.arguments[-6:]} == {"i32"}


# ---- who works on what -----------------------------------------------------------------------------


def in_python(kernel: Kernel, name: str) -> Callable[..., Any]:
    """A function of the kernel's source that only counts, as Python computes it."""
    (function,) = (node for node in ast.parse(kernel.source).body if getattr(node, "name", "") == name)
    assert isinstance(function, ast.FunctionDef)
    function.decorator_list = []
    gl = SimpleNamespace(where=lambda test, yes, no: yes if test else no, minimum=min, maximum=max)
    module: ModuleType = load_module(kernel)
    names: dict[str, Any] = {"gl": gl, "BLOCK_N": module.BLOCK_N.value}
    exec(compile(ast.Module([function], []), name, "exec"), names)
    found: Callable[..., Any] = names[name]
    return found


CAUSAL = a_problem(64, causal=Causal.BOTTOM_RIGHT)
LOCATES = {
    order: in_python(kernel_of(CAUSAL, a_config(CAUSAL, order=order)), "locate")
    for order in ("linear", "long_first", "alternate")
}


@given(
    st.sampled_from(sorted(LOCATES)),
    st.integers(1, 40),
    st.integers(1, 12),
    st.integers(1, 4),
    st.integers(1, 9),
    st.integers(1, 40),
)
def test_every_tile_is_worked_on_once(
    order: str, most_workers: int, tiles: int, batch: int, packs: int, section: int
) -> None:
    all_packs = batch * packs
    total = tiles * all_packs
    section, workers = min(section, all_packs), min(most_workers, total)
    found = [
        LOCATES[order](index, workers, total, tiles, section, all_packs, packs) for index in range(total)
    ]
    assert sorted(found) == [
        (tile, sequence, pack) for tile in range(tiles) for sequence in range(batch) for pack in range(packs)
    ]
    if order == "linear":
        # Heads of a section are done before those of the next, tile by tile.
        ranks = [((sequence * packs + pack) // section, tile) for tile, sequence, pack in found]
        assert ranks == sorted(ranks)
    if order == "long_first":
        ranks = [((sequence * packs + pack) // section, -tile) for tile, sequence, pack in found]
        assert ranks == sorted(ranks)


def test_who_had_a_long_tile_gets_a_short_one() -> None:
    workers, tiles, packs = 8, 32, 4
    found = [LOCATES["alternate"](index, workers, 128, tiles, packs, packs, packs)[0] for index in range(128)]
    work = [sum(found[worker::workers]) for worker in range(workers)]
    straight = [
        LOCATES["long_first"](index, workers, 128, tiles, packs, packs, packs)[0] for index in range(128)
    ]
    unbalanced = [sum(straight[worker::workers]) for worker in range(workers)]
    assert max(work) - min(work) < max(unbalanced) - min(unbalanced)


COUNTS = {
    causal: in_python(kernel_of(problem, a_config(problem)), "count_blocks")
    for causal in Causal
    for problem in [a_problem(64, causal=causal)]
}


@given(
    st.sampled_from(list(Causal)),
    st.integers(0, 20),
    st.sampled_from([16, 64, 128]),
    st.integers(1, 3),
    st.integers(1, 700),
    st.integers(1, 700),
)
def test_blocks_are_those_that_some_query_sees(
    causal: Causal, tile: int, rows: int, groups: int, seqlen_q: int, seqlen_kv: int
) -> None:
    problem = a_problem(64, causal=causal, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv)
    size = groups * rows
    first = tile % math.ceil(seqlen_q / size) * size

    def seen(start: int, count: int) -> int:
        """Blocks of 128 keys, by the definition; rows past the end are those of a longer sequence."""
        if causal is Causal.NONE:
            return math.ceil(seqlen_kv / 128)
        last = min(start + count + problem.diagonal, seqlen_kv)
        return max(math.ceil(last / 128), 1)

    count = COUNTS[causal]
    whole = count(first, size, seqlen_q, seqlen_kv)
    assert whole == seen(first, size)
    for group in range(groups):
        own = count(first + group * rows, rows, seqlen_q, seqlen_kv)
        assert own == seen(first + group * rows, rows)
        # What a group passes by is what is left: all take as many tiles as the producer copies.
        assert 1 <= own <= whole
