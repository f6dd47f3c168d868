"""Tests of emulated Hopper kernels with keys in pages against a reference."""

import itertools
import math
import random
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from flashtune.core.kernel import Kernel
from flashtune.core.layouts import STORED_DTYPES
from flashtune.core.problem import Causal, Dtype, KvDtype, KvScale, Problem
from flashtune.templates.forward_hopper.space import SMALLEST_COPY
from tests.emulator.hardware import Array, BarrierError
from tests.emulator.program import emulate
from tests.emulator.splits import empty_parts, put_together
from tests.problems.plain_masks import largest_error, plain_attention
from tests.templates.hopper.emulated.test_hopper_emulated import (
    ALONE,
    SMALL,
    THREE,
    UNTOUCHED,
    a_small,
    broken,
    kernel_of,
    score_inputs,
)

Lengths = list[tuple[int, int]]
# Queries and keys of each sequence.
MIXED = [(65, 230), (1, 1), (130, 320), (40, 0), (0, 64), (64, 129), (100, 70)]
EQUAL = [(70, keys) for keys in (320, 0, 63, 257, 64)]
SPARE = 100
# Caches with a scale of each head, and with scales of pages.
UNSCALED: dict[str, Any] = {"kv_dtype": KvDtype.E4M3, "kv_scale": KvScale.HEAD}
SCALED: dict[str, Any] = {"kv_dtype": KvDtype.INT8, "kv_scale": KvScale.PAGE}
# Standard deviation of integers of 8 bits.
INTEGER_SPREAD = 40.0


class Pools:
    """Keys and values in random pages, NaN where no sequence has a key.

    Attributes:
        views: Keys and values as [pages, kv_heads, page_size, width].
        memory: Flat arrays that begin where the views do.
    """

    def __init__(self, problem: Problem, used: list[int], layout: str) -> None:
        heads, page = problem.kv_heads, problem.page_size
        columns, values = problem.head_dim, problem.value_head_dim
        most = problem.seqlen_kv // page
        pages = len(used) * most + 1
        shape = (pages, heads, page) if layout == "hnd" else (pages, page, heads)
        width = columns + values if layout == "side by side" else 0
        pools = (
            [torch.full((*shape, width), math.nan, dtype=torch.float64)]
            if width
            else [torch.full((*shape, size), math.nan, dtype=torch.float64) for size in (columns, values)]
        )
        parts = [pools[0][..., :columns], pools[0][..., columns:]] if width else pools
        self.views = [tensor if layout == "hnd" else tensor.transpose(1, 2) for tensor in parts]
        order = list(range(1, pages))
        random.Random(2).shuffle(order)
        self.table = torch.full((len(used), most), -1_000_000, dtype=torch.int32)
        chance = torch.Generator().manual_seed(1)
        for sequence, length in enumerate(used):
            for number in range(-(-length // page)):
                at = order[sequence * most + number]
                self.table[sequence, number] = at
                for view in self.views:
                    rows = view[at, :, : min(page, length - number * page)]
                    rows.normal_(generator=chance)
                    if problem.kv_dtype is KvDtype.INT8:
                        rows.mul_(INTEGER_SPREAD).round_().clamp_(-128, 127)
        offsets = (0, columns) if width else (0, 0)
        self.memory = [
            pool.flatten()[start:].numpy() for pool, start in zip((pools[0], pools[-1]), offsets, strict=True)
        ]


def scale_of(problem: Problem, pools: Pools, sequences: int, chance: torch.Generator) -> torch.Tensor:
    """Returns random scales of keys or values. Those of unused pages are NaN."""
    by_page = problem.kv_scale is KvScale.PAGE
    pages = len(pools.views[0])
    scale = torch.rand(pages if by_page else 1, problem.kv_heads, generator=chance).add_(0.5)
    if problem.kv_dtype is KvDtype.INT8:
        scale /= INTEGER_SPREAD
    if not by_page:
        return scale.expand(sequences, -1)
    unused = torch.ones(pages, dtype=torch.bool)
    unused[pools.table[pools.table >= 0].long()] = False
    scale[unused] = math.nan
    return scale


def worst_error(
    kernel: Kernel,
    problem: Problem,
    lengths: Lengths,
    programs: int = 3,
    layout: str = "nhd",
    passed: list[int] | None = None,
) -> float:
    """Returns the largest difference between a kernel's results and plain attention.

    `passed` are the numbers of keys that the kernel is given where these are not the right ones.
    """
    chance = torch.Generator().manual_seed(3)
    queries, keys = ([pair[axis] for pair in lengths] for axis in (0, 1))
    pools = Pools(problem, keys, layout)
    side = score_inputs(problem, lengths)
    side = side._replace(seqlens_kv=torch.tensor(keys, dtype=torch.int32), block_table=pools.table)
    if problem.kv_dtype:
        k_scale, v_scale = (scale_of(problem, pools, len(keys), chance) for _ in range(2))
        side = side._replace(k_scale=k_scale, v_scale=v_scale)
    batch, rows = len(lengths), queries[0]
    if problem.packed:
        starts = torch.tensor([0, *itertools.accumulate(queries)], dtype=torch.int32)
        side = side._replace(cu_seqlens_q=starts)
        batch, rows = 1, sum(queries) + SPARE
    shape = (batch, problem.heads, rows, problem.head_dim)
    q = torch.randn(shape, generator=chance, dtype=torch.float64)
    out = torch.full((*shape[:3], problem.value_head_dim), UNTOUCHED, dtype=torch.float64)
    lse = np.full(shape[:3], UNTOUCHED)
    scale = problem.head_dim**-0.5
    k, v = pools.views
    expected = plain_attention(problem, q, k, v, side, scale)
    if passed:
        side = side._replace(seqlens_kv=torch.tensor(passed, dtype=torch.int32))
    stored = STORED_DTYPES[problem.kv_dtype] if problem.kv_dtype else torch.bfloat16
    like = tuple(
        torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="meta")
        for tensor, dtype in zip(
            (q, *pools.views, out), (torch.bfloat16, stored, stored, torch.bfloat16), strict=True
        )
    )
    memory: tuple[Array, ...] = (q.flatten().numpy(), *pools.memory, out.view(-1).numpy())
    extra_inputs = tuple(tensor.numpy() for tensor in side.tensors)
    numbers = tuple(number for number in side.numbers if number is not None)
    parts = empty_parts(kernel, like, side)
    emulate(kernel, like, memory, extra_inputs, lse.reshape(-1), scale, programs, parts, numbers)
    row_lse = torch.from_numpy(lse)
    put_together(parts, out, row_lse, side)
    return largest_error((out, row_lse), expected, UNTOUCHED)


def a_paged(page_size: int, *, packed: bool, causal: Causal = Causal.BOTTOM_RIGHT, **changes: Any) -> Problem:
    shape = {"heads": 4, "kv_heads": 2, "batch": 1, "seqlen_kv": -(-320 // page_size) * page_size, **changes}
    return msgspec.structs.replace(a_small(causal), page_size=page_size, packed=int(packed), **shape)


def a_scaled(page_size: int, *, packed: bool, **changes: Any) -> Problem:
    """Integers with scales of pages."""
    return a_paged(page_size, packed=packed, head_dim=64, value_head_dim=64, **SCALED, **changes)


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize(("config", "packed"), [(SMALL, True), (THREE, False), (ALONE, True)])
@pytest.mark.parametrize("page_size", [1, 2, 4, 8, 16, 32, 64, 128, 256])
def test_page_sizes(config: dict[str, Any], page_size: int, packed: bool) -> None:
    problem = a_paged(page_size, packed=packed)
    lengths = MIXED if packed else EQUAL
    assert worst_error(kernel_of(problem, **config), problem, lengths) < 1e-12


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("layout", ["nhd", "hnd", "side by side"])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "dense"])
def test_strides_of_caches(layout: str, packed: bool) -> None:
    lengths = MIXED if packed else EQUAL
    config = {**SMALL, "block_n": 128} if packed else {**ALONE, "rows_per_group": 64}
    for page_size, widths in ((1, (96, 80)), (2, (40, 24)), (16, (16, 16)), (64, (32, 16)), (128, (96, 80))):
        problem = a_paged(page_size, packed=packed, head_dim=widths[0], value_head_dim=widths[1])
        assert worst_error(kernel_of(problem, **config), problem, lengths, 2, layout) < 1e-12, page_size


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize(
    ("causal", "config"),
    [(Causal.NONE, SMALL), (Causal.TOP_LEFT, THREE), (Causal.BOTTOM_RIGHT, ALONE)],
    ids=list(Causal),
)
@pytest.mark.parametrize(
    "window", [{}, {"window_left": 70}, {"window_left": 0}, {"window_right": 30}], ids=str
)
def test_masks(config: dict[str, Any], causal: Causal, window: dict[str, int]) -> None:
    """Pages that several fill, that are, and that are larger than a block."""
    for page_size, packed in ((16, True), (32, False), (128, True)):
        problem = a_paged(page_size, packed=packed, causal=causal, **window)
        lengths = MIXED if packed else EQUAL
        assert worst_error(kernel_of(problem, **config), problem, lengths, 5) < 1e-12, page_size


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("causal", [Causal.NONE, Causal.BOTTOM_RIGHT])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "dense"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_lengths_out_of_bounds_are_clamped(causal: Causal, packed: bool, page_size: int) -> None:
    problem = a_paged(page_size, packed=packed, causal=causal, seqlen_kv=192)
    lengths = [(50, 192), (50, 192), (50, 0), (50, 70)]
    kernel = kernel_of(problem, **SMALL)
    assert worst_error(kernel, problem, lengths, passed=[193, 2**31 - 1, -(2**31), 70]) < 1e-12


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize(
    ("packed", "window"), [(True, {}), (False, {"window_left": 70})], ids=["packed", "dense, window"]
)
@pytest.mark.parametrize("scale", list(KvScale))
@pytest.mark.parametrize("stored", list(KvDtype))
def test_eight_bit_caches(packed: bool, stored: KvDtype, scale: KvScale, window: dict[str, Any]) -> None:
    small, large = ((1, 64, SMALL), (64, 128, SMALL)) if packed else ((4, 128, ALONE), (256, 64, ALONE))
    for page_size, columns, config in (small, (16, 64, {**SMALL, "block_n": 128}), large):
        widths: dict[str, Any] = {
            "head_dim": columns,
            "value_head_dim": columns,
            "kv_dtype": stored,
            "kv_scale": scale,
        }
        if scale is KvScale.PAGE and page_size < SMALLEST_COPY:
            continue
        problem = a_paged(page_size, packed=packed, **widths, **window)
        lengths = MIXED if packed else EQUAL
        assert worst_error(kernel_of(problem, **{**config, "num_stages": 2}), problem, lengths, 5) < 1e-12


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize(("packed", "stored"), [(True, UNSCALED), (False, SCALED)], ids=["packed", "dense"])
@pytest.mark.parametrize(
    "features",
    [
        {"softcap": True},
        {"sinks": True},
        {"softcap": True, "sinks": True, "window_left": 70},
        {"prefix": True},
        {"prefix": True, "window_left": 50, "sink_tokens": 3},
    ],
    ids=str,
)
def test_features_of_eight_bit_caches(packed: bool, stored: dict[str, Any], features: dict[str, Any]) -> None:
    problem = a_paged(16, packed=packed, head_dim=64, value_head_dim=64, **stored, **features)
    assert worst_error(kernel_of(problem, **SMALL), problem, MIXED if packed else EQUAL, 5) < 1e-12


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("page_size", [8, 32, 128])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "dense"])
def test_scales_of_pages(page_size: int, packed: bool) -> None:
    problem = a_scaled(page_size, packed=packed)
    for config in (SMALL, {**ALONE, "num_stages": 2, "block_n": 128}):
        assert worst_error(kernel_of(problem, **config), problem, MIXED if packed else EQUAL, 5) < 1e-12


def test_loads_outside_of_tensors_are_errors() -> None:
    problem = a_scaled(8, packed=False, window_left=20, sink_tokens=4)
    kernel = kernel_of(problem, **SMALL)
    assert worst_error(kernel, problem, EQUAL) < 1e-12
    # The block before the first one that a window sees, and the scales of pages that do not exist.
    for right, wrong in (
        (
            "gl.maximum(get_block(further, n_block_min, n_lifted), 0)",
            "get_block(further, n_block_min, n_lifted)",
        ),
        ("mask=pages >= 0", "mask=pages >= -1"),
    ):
        with pytest.raises((AssertionError, BarrierError)):
            worst_error(broken(kernel, right, wrong), problem, EQUAL)


def test_a_stage_keeps_its_scales_until_it_is_released() -> None:
    problem = a_scaled(16, packed=True)
    lines = kernel_of(problem, **SMALL).source.splitlines()
    reads = [number for number, line in enumerate(lines) if "= read_scales(" in line]
    assert len(reads) == 2
    for number in reads:
        assert "warpgroup_mma_wait(" in lines[number - 1]
        assert "k.release(k_state)" in lines[number + 2]


def an_integer_cache(dtype: Dtype) -> Problem:
    stored: dict[str, Any] = {"kv_dtype": KvDtype.INT8, "kv_scale": KvScale.HEAD}
    return a_paged(16, packed=True, head_dim=64, value_head_dim=64, dtype=dtype, **stored)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [Dtype.FP16, Dtype.BF16])
def test_int8_caches_match_the_reference(dtype: Dtype) -> None:
    problem = an_integer_cache(dtype)
    assert worst_error(kernel_of(problem, **SMALL), problem, MIXED) < 1e-12


@pytest.mark.slow
def test_eight_bit_caches_with_outputs_in_halves() -> None:
    stored: dict[str, Any] = {"kv_dtype": KvDtype.E4M3, "kv_scale": KvScale.TENSOR}
    problem = a_paged(16, packed=True, head_dim=128, value_head_dim=128, **stored)
    kernel = kernel_of(problem, **SMALL, split_epilogue=True)
    assert worst_error(kernel, problem, MIXED, 5) < 1e-12


def test_packed_heads_and_one_query() -> None:
    problem = a_paged(16, packed=False, heads=12)
    kernel = kernel_of(problem, **{**SMALL, "pack_gqa": 4})
    assert worst_error(kernel, problem, [(1, keys) for keys in (320, 0, 63, 257, 64)]) < 1e-12


@pytest.mark.slow
def test_orders_and_parts_of_heads() -> None:
    changes: dict[str, Any]
    for widths, changes in (
        ((16, 16), {"order": "serpentine", "head_swizzle": 4, "balanced_grid": True}),
        ((96, 80), {"split_head_dim": True}),
        ((128, 128), {"split_epilogue": True, "num_stages": 3}),
    ):
        for packed in (True, False):
            problem = a_paged(16, packed=packed, head_dim=widths[0], value_head_dim=widths[1])
            kernel = kernel_of(problem, **{**SMALL, **changes})
            assert worst_error(kernel, problem, MIXED if packed else EQUAL, 5) < 1e-12
