"""Tests of emulated Hopper kernels with keys in pages against a reference."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from flashtune.core.features.records import ExtraInputs
from flashtune.core.kernel import Kernel
from flashtune.core.problem import Causal, KvDtype, KvScale, Problem
from tests.emulator import hardware
from tests.emulator.hardware import Array, BarrierError
from tests.emulator.program import emulate
from tests.problems.plain_masks import plain_attention
from tests.templates.hopper.test_hopper_emulated import (
    ALONE,
    CONFIGS,
    SMALL,
    UNTOUCHED,
    a_small,
    broken,
    kernel_of,
)

Lengths = list[tuple[int, int]]
# Queries and keys of each sequence.
MIXED = [(65, 230), (1, 1), (130, 320), (40, 0), (0, 64), (64, 129), (100, 70)]
EQUAL = [(70, keys) for keys in (320, 0, 63, 257, 64)]
SPARE = 100


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
            else [torch.full((*shape, one), math.nan, dtype=torch.float64) for one in (columns, values)]
        )
        parts = [pools[0][..., :columns], pools[0][..., columns:]] if width else pools
        self.views = [one if layout == "hnd" else one.transpose(1, 2) for one in parts]
        order = list(range(1, pages))
        random.Random(2).shuffle(order)
        self.table = torch.full((len(used), most), -1_000_000, dtype=torch.int32)
        chance = torch.Generator().manual_seed(1)
        for sequence, length in enumerate(used):
            for number in range(-(-length // page)):
                at = order[sequence * most + number]
                self.table[sequence, number] = at
                for view in self.views:
                    view[at, :, : min(page, length - number * page)].normal_(generator=chance)
        offsets = (0, columns) if width else (0, 0)
        self.memory = [
            pool.flatten()[start:].numpy() for pool, start in zip((pools[0], pools[-1]), offsets, strict=True)
        ]


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
    queries, keys = ([one[axis] for one in lengths] for axis in (0, 1))
    pools = Pools(problem, keys, layout)
    side = ExtraInputs(seqlens_kv=torch.tensor(keys, dtype=torch.int32), block_table=pools.table)
    if problem.kv_dtype:
        scales = [torch.rand(1, problem.kv_heads, generator=chance).add(0.5) for _ in range(2)]
        side = side._replace(k_scale=scales[0].expand(len(keys), -1), v_scale=scales[1].expand(len(keys), -1))
    if problem.prefix:
        prefixes = [count * (number % 4) // 5 for number, count in enumerate(keys, 1)]
        side = side._replace(prefix=torch.tensor(prefixes, dtype=torch.int32))
    if problem.softcap:
        side = side._replace(softcap=1.5)
    if problem.sinks:
        side = side._replace(sinks=torch.linspace(-1.0, 3.0, problem.heads, dtype=torch.float64))
    batch, rows = len(lengths), queries[0]
    if problem.total_q:
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
    stored = torch.float8_e4m3fn if problem.kv_dtype else torch.bfloat16
    like = tuple(
        torch.empty_strided(one.shape, one.stride(), dtype=dtype, device="meta")
        for one, dtype in zip(
            (q, *pools.views, out), (torch.bfloat16, stored, stored, torch.bfloat16), strict=True
        )
    )
    memory: tuple[Array, ...] = (q.flatten().numpy(), *pools.memory, out.view(-1).numpy())
    extra_inputs = tuple(one.numpy() for one in side.tensors)
    numbers = (1.5,) if problem.softcap else ()
    emulate(kernel, like, memory, extra_inputs, lse.reshape(-1), scale, programs, numbers=numbers)
    worst = 0.0
    for got, meant in ((out, expected[0]), (torch.from_numpy(lse), expected[1])):
        # Rows that no sequence has are as they were.
        right = meant.nan_to_num(nan=UNTOUCHED, neginf=-math.inf)
        error = torch.where(got == right, 0.0, (got - right).abs()).nan_to_num(nan=math.inf)
        worst = max(worst, float(error.max()))
    return worst


def a_paged(page_size: int, *, packed: bool, causal: Causal = Causal.BOTTOM_RIGHT, **changes: Any) -> Problem:
    shape = {"heads": 4, "kv_heads": 2, "batch": 1, "seqlen_kv": -(-320 // page_size) * page_size, **changes}
    return msgspec.structs.replace(a_small(causal), page_size=page_size, total_q=int(packed), **shape)


@pytest.mark.slow
@CONFIGS
@pytest.mark.parametrize("page_size", [8, 16, 32, 64, 128, 256])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "dense"])
def test_page_sizes(config: dict[str, Any], page_size: int, packed: bool) -> None:
    problem = a_paged(page_size, packed=packed)
    lengths = MIXED if packed else EQUAL
    assert worst_error(kernel_of(problem, **config), problem, lengths) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["nhd", "hnd", "side by side"])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "dense"])
def test_strides_of_caches(layout: str, packed: bool) -> None:
    lengths = MIXED if packed else EQUAL
    for page_size, widths in ((16, (16, 16)), (64, (32, 16)), (128, (96, 80))):
        problem = a_paged(page_size, packed=packed, head_dim=widths[0], value_head_dim=widths[1])
        for config in ({**SMALL, "block_n": 128}, {**ALONE, "rows_per_group": 64}):
            assert worst_error(kernel_of(problem, **config), problem, lengths, 2, layout) < 1e-12, page_size


@pytest.mark.slow
@CONFIGS
@pytest.mark.parametrize("causal", list(Causal))
@pytest.mark.parametrize(
    "window", [{}, {"window_left": 70}, {"window_left": 0}, {"window_right": 30}], ids=str
)
def test_masks(config: dict[str, Any], causal: Causal, window: dict[str, int]) -> None:
    for page_size, packed in ((16, True), (32, False), (128, True)):
        problem = a_paged(page_size, packed=packed, causal=causal, **window)
        lengths = MIXED if packed else EQUAL
        assert worst_error(kernel_of(problem, **config), problem, lengths, 5) < 1e-12, page_size


@pytest.mark.slow
@pytest.mark.parametrize("causal", [Causal.NONE, Causal.BOTTOM_RIGHT])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "dense"])
@pytest.mark.parametrize("page_size", [16, 64])
def test_lengths_out_of_bounds_are_clamped(causal: Causal, packed: bool, page_size: int) -> None:
    problem = a_paged(page_size, packed=packed, causal=causal, seqlen_kv=192)
    lengths = [(50, 192), (50, 192), (50, 0), (50, 70)]
    kernel = kernel_of(problem, **SMALL)
    assert worst_error(kernel, problem, lengths, passed=[193, 2**31 - 1, -(2**31), 70]) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "dense"])
@pytest.mark.parametrize("scale", [KvScale.TENSOR, KvScale.HEAD])
@pytest.mark.parametrize("window", [{}, {"window_left": 70}], ids=["all", "window"])
def test_eight_bit_caches(packed: bool, scale: KvScale, window: dict[str, Any]) -> None:
    for page_size, columns, config in (
        (16, 64, {**SMALL, "block_n": 128}),
        (64, 128, SMALL),
        (256, 64, ALONE),
    ):
        widths: dict[str, Any] = {
            "head_dim": columns,
            "value_head_dim": columns,
            "kv_dtype": KvDtype.E4M3,
            "kv_scale": scale,
        }
        problem = a_paged(page_size, packed=packed, **widths, **window)
        lengths = MIXED if packed else EQUAL
        assert worst_error(kernel_of(problem, **{**config, "num_stages": 2}), problem, lengths, 5) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "dense"])
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
def test_features_of_eight_bit_caches(packed: bool, features: dict[str, Any]) -> None:
    stored: dict[str, Any] = {"kv_dtype": KvDtype.E4M3, "kv_scale": KvScale.HEAD}
    problem = a_paged(16, packed=packed, head_dim=64, value_head_dim=64, **stored, **features)
    kernel = kernel_of(problem, **SMALL)
    assert worst_error(kernel, problem, MIXED if packed else EQUAL, 5) < 1e-12


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


@pytest.mark.slow
def test_emulator_detects_broken_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = a_paged(16, packed=True)
    kernel = kernel_of(problem, **SMALL)
    for right, wrong in (
        ("tile.seqlen_kv - first // PAGE * PAGE", "PAGE"),
        ("FAR - tile.seqlen_kv + first", "FAR - tile.seqlen_kv + key"),
        ("mask=keys < tile.seqlen_kv", "mask=keys < tile.seqlen_kv - 16"),
        ("n_last - step - 1", "n_last - step"),
        (
            "v_pages = k_pages\n            k_pages = next_pages",
            "k_pages = next_pages\n            v_pages = k_pages",
        ),
        (".slice(copy * COPIED, COPIED, 3)", ".slice(0, COPIED, 3)"),
        ("+ tile.kv_head * head_step", ""),
    ):
        assert not worst_error(broken(kernel, right, wrong), problem, MIXED) < 1e-3, wrong
    monkeypatch.setattr(hardware, "WAIT_TIMEOUT_S", 0.5)
    with pytest.raises(BarrierError):
        worst_error(
            broken(kernel, "for copy in gl.static_range(COPIES)", "for copy in gl.static_range(2)"),
            problem,
            MIXED,
        )
