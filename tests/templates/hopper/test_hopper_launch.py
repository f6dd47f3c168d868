"""Tests of launches of Hopper kernels: descriptors, grid and workspaces."""

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.language import str_to_ty
from triton.runtime.jit import mangle_type

from flashtune import testing
from flashtune.core.kernel import Kernel
from flashtune.core.layouts import STORED_DTYPES, TORCH_DTYPES
from flashtune.core.problem import Causal, Dtype, KvDtype, KvScale, Problem
from flashtune.launch.compilation import load_module
from flashtune.templates.forward_hopper.space import HopperConfig
from flashtune.templates.rendering import render
from tests.problems.hopper import FAMILY, PLAIN, a_config, a_problem, sampled_configs

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
    a_problem(128, batch=1, kv_heads=2, packed=1),
    a_problem(96, 80, batch=1, causal=Causal.BOTTOM_RIGHT, packed=1),
    a_problem(256, batch=1, packed=1),
    a_problem(128, batch=1, kv_heads=2, packed=1, page_size=16),
    a_problem(96, 80, kv_heads=4, page_size=128, causal=Causal.BOTTOM_RIGHT),
    a_problem(128, kv_heads=4, page_size=1),
    a_problem(128, kv_heads=4, page_size=16, kv_dtype=KvDtype.E4M3),
    a_problem(128, kv_heads=4, page_size=16, kv_dtype=KvDtype.INT8, kv_scale=KvScale.PAGE),
]


def kernel_of(problem: Problem, config: HopperConfig) -> Kernel:
    return render(FAMILY, problem, config, PLAIN)


# ---- descriptors -----------------------------------------------------------------------------------


def like(problem: Problem, layout: str = "bhsd") -> tuple[torch.Tensor, ...]:
    """q, k, v and out as kernels see them: no data, and v as the prologue leaves it."""

    def empty(heads: int, length: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        sides = (problem.batch, heads, length) if layout == "bhsd" else (problem.batch, length, heads)
        tensor = torch.empty(*sides, width, dtype=dtype, device="meta")
        return tensor if layout == "bhsd" else tensor.transpose(1, 2)

    dtype, keys, values = problem.dtype, problem.seqlen_kv, problem.value_head_dim
    stored = STORED_DTYPES[problem.kv_dtype] if problem.kv_dtype else TORCH_DTYPES[dtype]
    return (
        empty(problem.heads, problem.seqlen_q, problem.head_dim, TORCH_DTYPES[dtype]),
        empty(problem.kv_heads, keys, problem.head_dim, stored),
        empty(problem.kv_heads, *((values, keys) if dtype.is_quantized else (keys, values)), stored),
        empty(problem.heads, problem.seqlen_q, problem.value_head_dim, TORCH_DTYPES[dtype.out]),
    )


@pytest.mark.slow
@pytest.mark.parametrize("problem", DESCRIBED, ids=lambda problem: problem.key)
def test_argument_types_match_host_descriptors(problem: Problem) -> None:
    tensors = like(problem)
    for config in (a_config(problem), *sampled_configs(problem, 2)):
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
def test_descriptors_match_shapes_and_strides_of_tensors(layout: str) -> None:
    problem = a_problem(96, 80, seqlen_q=100, seqlen_kv=300, kv_heads=2)
    tensors = q, k, v, out = like(problem, layout)
    made = load_module(kernel_of(problem, a_config(problem, pack_gqa=8))).descriptors(*tensors)
    # Query heads are counted within the group of a KV head, so that a tile ends with its group.
    spans = [tensor.unflatten(1, (2, 4)) for tensor in (q, out)]
    for tensor, span, parts in zip(tensors, (spans[0], k, v, spans[1]), made, strict=True):
        for descriptor in parts:
            assert descriptor.base is tensor
            assert tuple(descriptor.shape) == tuple(span.shape)
            assert tuple(descriptor.strides) == span.stride()
            assert descriptor.padding == "zero"
    assert tiles_of(made[0]) == [[1, 1, 8, 8, 64], [1, 1, 8, 8, 32]]
    assert tiles_of(made[1]) == [[1, 1, 128, 64], [1, 1, 128, 32]]
    assert tiles_of(made[2]) == [[1, 1, 128, 64], [1, 1, 128, 16]]
    assert tiles_of(made[3]) == [[1, 1, 8, 8, 64], [1, 1, 8, 8, 16]]


def tiles_of(parts: tuple[Any, ...]) -> list[list[int]]:
    return [descriptor.block_shape for descriptor in parts]


def test_halves_and_transposed_values() -> None:
    split_epilogue = a_problem(256)
    made = load_module(kernel_of(split_epilogue, a_config(split_epilogue))).descriptors(*like(split_epilogue))
    assert tiles_of(made[3]) == [[1, 1, 1, 64, 128]]
    quantised = a_problem(128, 64, dtype=Dtype.E4M3)
    made = load_module(kernel_of(quantised, a_config(quantised))).descriptors(*like(quantised))
    assert tiles_of(made[2]) == [[1, 1, 64, 128]]
    assert [made[index][0].layout.swizzle_byte_width for index in range(4)] == [128, 128, 128, 128]


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_varlen_rows_end_at_the_sequence_end(name: str, layout: str) -> None:
    problem = a_problem(96, 80, batch=1, kv_heads=2, packed=1)
    module = load_module(kernel_of(problem, a_config(problem)))
    index = ("q", "k", "v", "out").index(name)
    tensor = like(problem, layout)[index]
    far, size = module.FAR.value, tensor.element_size()
    for descriptor in module.descriptors(*like(problem, layout))[index]:
        assert descriptor.block_shape[:3] == [1, 1, 1]
        assert descriptor.shape[2] == tensor.shape[1]
        assert descriptor.shape[4] == tensor.shape[3]
        # The copy engine takes extents of 32 bits, and strides of less than 2^40 bytes.
        assert max(descriptor.shape) < 2**31
        assert all(0 < size * stride < 2**40 for stride in descriptor.strides)
        for start, rows, row, head, column in ((0, 1, 0, 0, 0), (700, 300, 299, 1, 3), (5, 9, 2, 0, 79)):
            coordinates = (far, start + rows, head, far - rows + row, column)
            assert all(at < extent for at, extent in zip(coordinates, descriptor.shape, strict=True))
            reached = sum(at * by for at, by in zip(coordinates, descriptor.strides, strict=True))
            meant = head * tensor.stride(1) + (start + row) * tensor.stride(2) + column
            # Addresses have 64 bits.
            assert size * reached % 2**64 == size * meant
        # One row more is outside.
        assert far - 300 + 300 == descriptor.shape[3]


@pytest.mark.parametrize("page_size", [16, 256])
@pytest.mark.parametrize(
    "strides",
    [
        (4096 * 128, 128, 4 * 128, 1),
        (2 * 4096 * 128, 256 * 128, 128, 1),
        (4096 * 256, 256, 4 * 256, 1),
        (4096 * 128 + 40, 128, 4 * 128, 1),
    ],
    ids=["nhd", "hnd", "rows of two tensors", "padded"],
)
def test_rows_of_pages_end_where_the_sequence_does(page_size: int, strides: tuple[int, ...]) -> None:
    problem = a_problem(128, batch=1, kv_heads=4, page_size=page_size, packed=1)
    module = load_module(kernel_of(problem, a_config(problem)))
    q, _, _, out = like(problem)
    k = torch.empty_strided((9, 4, page_size, 128), strides, dtype=torch.bfloat16, device="meta")
    (descriptor,) = module.descriptors(q, k, k, out)[1]
    _, page_step, head_step = module.page_steps(k)
    assert descriptor.block_shape == [1, 1, 1, min(page_size, 128), 128]
    assert max(descriptor.shape) < 2**31
    assert all(0 < 2 * stride < 2**40 and stride % 8 == 0 for stride in descriptor.strides[:4])
    far = module.FAR.value
    # Keys of the sequence from the page's first row on, and a row of the page.
    for page, head, keys, row in ((0, 0, 1, 0), (8, 3, page_size, page_size - 1), (5, 1, 10**6, 7)):
        coordinates = (far, keys, page * page_step + head * head_step, far - keys + row, 0)
        assert all(at < extent for at, extent in zip(coordinates, descriptor.shape, strict=True))
        reached = sum(at * by for at, by in zip(coordinates, descriptor.strides, strict=True))
        meant = page * strides[0] + head * strides[1] + row * strides[2]
        assert 2 * reached % 2**64 == 2 * meant
    # The first row without a key is outside.
    assert far - 10 + 10 == descriptor.shape[3]


def test_pages_too_far_apart_are_refused() -> None:
    problem = a_problem(128, batch=1, page_size=16, packed=1)
    module = load_module(kernel_of(problem, a_config(problem)))
    q, _, _, out = like(problem)
    strides = (8 * 16 * 128 + 8, 128, 8 * 128, 1)
    k = torch.empty_strided((2 * 10**6, 8, 16, 128), strides, dtype=torch.bfloat16, device="meta")
    with pytest.raises(ValueError, match="pages have strides"):
        module.descriptors(q, k, k, out)


@pytest.mark.parametrize(("dtype", "piece"), [(torch.bfloat16, 8), (torch.float8_e4m3fn, 16)])
def test_steps_of_small_pages_are_counted_in_pieces(dtype: torch.dtype, piece: int) -> None:
    kv_dtype = KvDtype.E4M3 if piece > 8 else None
    problem = a_problem(128, batch=1, kv_heads=4, page_size=2, packed=1, kv_dtype=kv_dtype)
    module = load_module(kernel_of(problem, a_config(problem)))
    q, _, _, out = like(problem)
    k = torch.empty_strided((9, 4, 2, 128), (2048, 256, 1024, 1), dtype=dtype, device="meta")
    assert module.descriptors(q, k, k, out)[1:3] == ((), ())
    assert module.row_steps(k) == [2048 // piece, 256 // piece, 1024 // piece]
    single = torch.empty_strided((9, 1, 2, 128), (2048, 2**40, 1024, 1), dtype=dtype, device="meta")
    assert module.row_steps(single) == [2048 // piece, 0, 1024 // piece]
    far = torch.empty_strided(
        (2**20 + 1, 4, 2, 128), (2**11 * piece, 128, 512, 1), dtype=dtype, device="meta"
    )
    with pytest.raises(ValueError, match="a cache has shape"):
        module.row_steps(far)


# ---- the plan --------------------------------------------------------------------------------------


@pytest.fixture
def on_h200() -> Iterator[None]:
    with testing.fake_gpu("h200"):
        yield


def plan(problem: Problem, **changes: Any) -> Any:
    """The plan of tensors on a GPU, of which only the shape is asked."""
    module = load_module(kernel_of(problem, a_config(problem, **changes)))
    on_gpu = [SimpleNamespace(shape=tensor.shape, device=None, is_cuda=True) for tensor in like(problem)]
    if problem.dtype.is_quantized:
        on_gpu[2].shape = (*on_gpu[1].shape[:3], problem.value_head_dim)
    return module.launch_plan(*on_gpu)


@pytest.mark.slow
@pytest.mark.usefixtures("on_h200")
@pytest.mark.parametrize(
    ("changes", "lengths", "tiles"),
    [
        ({}, (1024, 1024), 2 * 8 * 8),
        ({}, (1025, 77), 2 * 8 * 9),
        ({}, (1, 1), 2 * 8),
        ({"pack_gqa": 4}, (1024, 1024), 2 * 2 * 32),
        # A pack of eight is half empty with a group of four.
        ({"rows_per_group": 128, "pack_gqa": 8}, (100, 100), 2 * 2 * 4),
        ({"num_consumer_groups": 1, "ping_pong": False}, (1024, 1024), 2 * 8 * 16),
        ({"num_consumer_groups": 3}, (1024, 1024), 2 * 8 * 6),
    ],
)
def test_grid_size_is_the_number_of_resident_programs(
    changes: dict[str, Any], lengths: tuple[int, int], tiles: int
) -> None:
    problem = a_problem(64, kv_heads=2, seqlen_q=lengths[0], seqlen_kv=lengths[1])
    changes = {"num_consumer_groups": 2, "pack_gqa": 1, "head_swizzle": 0, **changes}
    (programs,), workspaces, integers = plan(problem, **changes, balanced_grid=False)
    assert programs == min(tiles, MULTIPROCESSORS)
    assert workspaces == ()
    packs = 4 * math.ceil(4 / changes["pack_gqa"])
    assert integers == (8, 4, 16, *lengths, packs)
    (programs,), _, _ = plan(problem, **changes, balanced_grid=True)
    rounds = math.ceil(tiles / MULTIPROCESSORS)
    assert math.ceil(tiles / programs) == rounds
    assert programs == 1 or math.ceil(tiles / (programs - 1)) > rounds


@pytest.mark.usefixtures("on_h200")
def test_head_swizzle_counts_packs_and_is_bounded() -> None:
    problem = a_problem(64, kv_heads=2)
    for section, pack, expected in ((0, 1, 16), (4, 1, 4), (64, 1, 16), (4, 4, 4), (8, 4, 4), (0, 4, 4)):
        assert plan(problem, head_swizzle=section, pack_gqa=pack)[2][-1] == expected


@pytest.mark.usefixtures("on_h200")
@pytest.mark.parametrize(("keys", "kept"), [(1, 16), (16, 16), (17, 32), (1000, 1008)])
def test_transposed_values_are_padded_to_whole_key_groups(keys: int, kept: int) -> None:
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


@pytest.mark.usefixtures("on_h200")
def test_varlen_workspace_has_the_maximum_number_of_tiles() -> None:
    problem = a_problem(64, kv_heads=2, batch=1, seqlen_q=5000, packed=1)
    module = load_module(kernel_of(problem, a_config(problem, head_swizzle=4, balanced_grid=False)))
    on_gpu = [SimpleNamespace(shape=tensor.shape, device=None, is_cuda=True) for tensor in like(problem)]
    for sequences, steps in ((1, 0), (2, 1), (3, 2), (64, 6), (65, 7), (4000, 12)):
        starts = torch.empty(sequences + 1, dtype=torch.int32, device="meta")
        (programs,), workspaces, integers = module.launch_plan(*on_gpu, starts, starts)
        assert programs == min(8 * (5000 // 192 + sequences), MULTIPROCESSORS)
        assert workspaces == ()
        assert integers == (8, 4, 5000, 4, sequences, steps)


@pytest.mark.usefixtures("on_h200")
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "dense"])
def test_plans_of_pages_match_arguments(packed: bool) -> None:
    problem = a_problem(128, batch=1, kv_heads=2, page_size=32, packed=int(packed))
    kernel = kernel_of(problem, a_config(problem))
    side = (("cu_seqlens_q",) if packed else ()) + ("seqlens_kv", "block_table")
    assert kernel.side == side
    starts = torch.empty(4, dtype=torch.int32, device="meta")
    table = torch.empty(3, 50, dtype=torch.int32, device="meta")[:, :40]
    q = SimpleNamespace(shape=(1, 8, 1024, 128), device=None, is_cuda=True)
    k = torch.empty(100, 32, 2, 128, device="meta").transpose(1, 2)
    planned = (*((starts,) if packed else ()), starts[:3], table)
    _, _, integers = load_module(kernel).launch_plan(q, k, k, q, *planned)
    names = [argument.name for argument in kernel.arguments]
    assert names[-len(integers) - 1] == "scale"
    values = dict(zip(names[-len(integers) :], integers, strict=True))
    assert values["seqlen_kv"] == 40 * 32
    assert values["stride_table"] == 50
    assert (values["k_page_step"], values["k_head_step"]) == (64, 1)
    assert (values["heads"], values["group_size"]) == (8, 4)
