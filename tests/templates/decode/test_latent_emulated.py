"""Tests of emulated MLA Hopper kernels against a reference."""

import functools
import math
import random
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from flashtune import testing
from flashtune.core.features.records import NO_EXTRA_INPUTS, ExtraInputs
from flashtune.core.kernel import Kernel, Specialization
from flashtune.core.problem import Causal, Problem
from flashtune.templates.decode_latent_hopper.space import LatentConfig, row_tiles
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render
from tests.emulator.program import emulate
from tests.problems.plain_masks import largest_error, plain_attention

FAMILY = find_family("decode_latent_hopper")
UNTOUCHED = 777.0
LENGTHS = (0, 1, 63, 64, 65, 230, 320, 129)
EARLY = {"overlap_pv": False}
LATE = {"overlap_pv": True}
SPLIT = {"overlap_pv": True, "num_splits": 3}


# The keys are narrow: a kernel that is right for these is right for wider ones.
a_problem = functools.partial(
    testing.problem,
    "heads=64,kv_heads=1,seqlen_q=1,seqlen_kv=200,head_dim=144,value_head_dim=128,dtype=bf16,causal,batch=2,mla",
)


def kernel_of(problem: Problem, **changes: Any) -> Kernel:
    config = LatentConfig(**{"num_warps": 4, "num_stages": 2, **changes})
    return render(FAMILY, problem, config, Specialization(lse=True))


def combined(parts: torch.Tensor, logs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Combines parts [splits, rows, columns] by their log-sum-exps in log2, as the epilogue does."""
    lse = torch.logsumexp(logs * math.log(2), 0)
    weights = torch.exp(logs * math.log(2) - lse).nan_to_num()
    unseen = torch.isneginf(logs)[..., None]
    return (weights[..., None] * parts.masked_fill(unseen, 0.0)).sum(0), lse


def worst_error(
    kernel: Kernel,
    problem: Problem,
    lengths: tuple[int, ...] = (),
    splits: int = 1,
    passed: tuple[int, ...] = (),
) -> float:
    """Returns the largest difference between a kernel's results and plain attention.

    Inputs are random, and NaN where no sequence has a key. `passed` are the lengths that the kernel is given
    where these are not the right ones.
    """
    chance = torch.Generator().manual_seed(1)
    side, page = NO_EXTRA_INPUTS, problem.page_size
    batch, keys = problem.batch, problem.seqlen_kv
    tokens = torch.tensor(lengths, dtype=torch.int32)
    k = torch.randn(batch, 1, keys, problem.head_dim, generator=chance, dtype=torch.float64)
    if page:
        most = keys // page
        k = torch.full((batch * most + 1, 1, page, problem.head_dim), math.nan, dtype=torch.float64)
        order = list(range(1, batch * most + 1))
        random.Random(2).shuffle(order)
        table = torch.full((batch, most), -1_000_000, dtype=torch.int32)
        for sequence, length in enumerate(lengths):
            for number in range(-(-length // page)):
                table[sequence, number] = order[sequence * most + number]
                used = min(page, length - number * page)
                k[int(table[sequence, number]), 0, :used].normal_(generator=chance)
        side = ExtraInputs(seqlens_kv=tokens, block_table=table)
    elif lengths:
        side = ExtraInputs(seqlens_kv=tokens)
        for sequence, length in enumerate(lengths):
            k[sequence, :, length:] = math.nan
    q = torch.randn(
        batch, problem.heads, problem.seqlen_q, problem.head_dim, generator=chance, dtype=torch.float64
    )
    # Scores so far apart that maxima are outgrown.
    q *= 12
    v = k[..., : problem.value_head_dim]
    out = torch.full((*q.shape[:3], problem.value_head_dim), UNTOUCHED, dtype=torch.float64)
    lse = np.full(q.shape[:3], UNTOUCHED)
    scale = problem.head_dim**-0.5
    expected = plain_attention(problem, q, k, v, side, scale)
    rows = batch * problem.heads * problem.seqlen_q
    parts = np.full((splits, rows, problem.value_head_dim), math.nan), np.full((splits, rows), math.nan)
    like = tuple(torch.empty(tensor.shape, dtype=torch.bfloat16, device="meta") for tensor in (q, k, v, out))
    flat = (*(tensor.flatten().numpy() for tensor in (q, k, v)), out.view(-1).numpy())
    config = LatentConfig(num_warps=4, num_stages=2, num_splits=splits, queries=queries_of(kernel))
    programs = row_tiles(problem, config) * batch * splits
    workspaces = parts if splits > 1 else ()
    passed_side = side._replace(seqlens_kv=torch.tensor(passed, dtype=torch.int32)) if passed else side
    extra_inputs = tuple(tensor.numpy() for tensor in passed_side.tensors)
    emulate(kernel, like, flat, extra_inputs, lse.reshape(-1), scale, programs, workspaces)
    got = out, torch.from_numpy(lse)
    if splits > 1:
        of_parts = combined(*(torch.from_numpy(part) for part in parts))
        got = of_parts[0].view(out.shape), of_parts[1].view(lse.shape)
    return largest_error(got, expected)


def queries_of(kernel: Kernel) -> int:
    """Queries of a tile, by the box of its descriptor."""
    return int(kernel.arguments[0].type.split("[")[1].split(", ")[2])


SHAPES = ((64, 1, 1), (128, 1, 1), (16, 3, 4), (9, 4, 2))
# Each shape with each config and each mask.
DENSE = [
    (config, list(Causal)[(row + column) % 3], shape)
    for row, config in enumerate((EARLY, LATE, SPLIT))
    for column, shape in enumerate(SHAPES)
]


@pytest.mark.slow
@pytest.mark.parametrize(("config", "causal", "shape"), DENSE)
def test_dense(config: dict[str, Any], causal: Causal, shape: tuple[int, int, int]) -> None:
    heads, queries, tile = shape
    problem = a_problem(causal=causal, heads=heads, seqlen_q=queries, batch=1)
    kernel = kernel_of(problem, queries=tile, **config)
    for keys in (200, 64, 2):
        shaped = msgspec.structs.replace(problem, seqlen_kv=keys)
        assert worst_error(kernel, shaped, splits=config.get("num_splits", 1)) < 1e-12, keys


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize(("config", "queries"), [(EARLY, 2), (LATE, 1), (SPLIT, 2)])
@pytest.mark.parametrize("page", [0, 16, 32, 64, 128])
def test_lengths_on_the_device(config: dict[str, Any], queries: int, page: int) -> None:
    problem = a_problem(
        batch=len(LENGTHS), seqlen_q=queries, heads=32, seqlen_kv=384, page_size=page, kv_lengths=not page
    )
    kernel = kernel_of(problem, queries=2, **config)
    assert worst_error(kernel, problem, LENGTHS, config.get("num_splits", 1)) < 1e-12


@pytest.mark.parametrize("page", [16, 32])
def test_block_tables_that_end_within_a_block(page: int) -> None:
    """Behind the pages of the last sequence there is no entry to read."""
    problem = a_problem(seqlen_kv=96, page_size=page)
    assert worst_error(kernel_of(problem, overlap_pv=True), problem, (70, 96)) < 1e-12


def test_more_stages_and_head_dims_of_deepseek() -> None:
    assert worst_error(kernel_of(a_problem(), num_stages=3), a_problem()) < 1e-12
    wide = a_problem(head_dim=576, value_head_dim=512, batch=1)
    assert worst_error(kernel_of(wide, overlap_pv=True), wide) < 1e-12


def test_small_pages_of_other_head_dims() -> None:
    wide = a_problem(head_dim=576, value_head_dim=512, batch=1, page_size=16, seqlen_kv=256)
    assert worst_error(kernel_of(wide, overlap_pv=True), wide, (197,)) < 1e-12
    narrow = a_problem(head_dim=288, value_head_dim=256, page_size=32, seqlen_kv=256)
    assert worst_error(kernel_of(narrow, num_stages=3), narrow, (7, 241)) < 1e-12


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("config", [EARLY, SPLIT], ids=["early", "split"])
@pytest.mark.parametrize("causal", [Causal.NONE, Causal.BOTTOM_RIGHT])
@pytest.mark.parametrize("page", [0, 16, 64])
def test_lengths_out_of_bounds_are_clamped(config: dict[str, Any], causal: Causal, page: int) -> None:
    problem = a_problem(
        batch=4, heads=32, seqlen_kv=192, page_size=page, kv_lengths=not page, mla=True, causal=causal
    )
    splits = config.get("num_splits", 1)
    error = worst_error(
        kernel_of(problem, **config), problem, (192, 192, 0, 70), splits, passed=(193, 5000, -1000, 70)
    )
    assert error < 1e-12
