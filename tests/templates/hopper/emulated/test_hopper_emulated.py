"""Tests of emulated Hopper kernels against a reference: blocks, barriers and bounds."""

import itertools
import math
import random
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from flashtune.core.features.description import UsualCall
from flashtune.core.features.functions import usual_captures
from flashtune.core.features.records import NO_EXTRA_INPUTS, ExtraInputs, FeatureFields
from flashtune.core.kernel import Kernel, Specialization
from flashtune.core.problem import Bias, Causal, Problem
from flashtune.templates.forward_hopper.space import HopperConfig
from flashtune.templates.rendering import render
from tests.emulator.block_lists import block_lists, lists_of_blocks
from tests.emulator.hardware import Array
from tests.emulator.program import emulate
from tests.emulator.splits import empty_parts, put_together
from tests.problems.block_lists import visible_blocks, with_lists
from tests.problems.hopper import FAMILY, a_config, a_problem
from tests.problems.plain_masks import largest_error, plain_attention

UNTOUCHED = 777.0
# A number that has an exact spelling in float32.
DROPOUT = 0.3125
# Whether the kernel of an early wait or a late one is emulated makes no difference here.
SMALL = {
    "num_consumer_groups": 2,
    "rows_per_group": 64,
    "block_n": 64,
    "num_stages": 2,
    "q_stages": 1,
    "ping_pong": True,
    "pack_gqa": 1,
}
THREE = {**SMALL, "num_consumer_groups": 3, "q_stages": 2, "conditional_rescale": False}
ALONE = {**SMALL, "num_consumer_groups": 1, "rows_per_group": 128, "ping_pong": False, "num_stages": 3}
CONFIGS = pytest.mark.parametrize("config", [SMALL, THREE, ALONE], ids=["two", "three", "one"])
RANDOM = random.Random(3)
EQUAL = [(length, length) for length in (64, 1, 0, 200, 129, 0, 97)]
MIXED = [(RANDOM.randint(1, 250), RANDOM.randint(0, 250)) for _ in range(5)]


def kernel_of(problem: Problem, **changes: Any) -> Kernel:
    return render(FAMILY, problem, a_config(problem, **changes), Specialization(lse=True))


def worst_error(
    kernel: Kernel,
    problem: Problem,
    programs: int,
    lengths: list[tuple[int, int]] | None = None,
    spare: int = 0,
    config: HopperConfig | None = None,
) -> float:
    """Between what a kernel makes of random tensors and plain attention, of outputs and log-sum-exps.

    A mask or bias needs the kernel's config for its lists of blocks.
    """
    chance = torch.Generator().manual_seed(1)
    side = score_inputs(problem, lengths)
    batch, rows, keys = problem.batch, problem.seqlen_q, problem.seqlen_kv
    if lengths is not None:
        starts = [
            torch.tensor([0, *itertools.accumulate(sizes)]).int() for sizes in zip(*lengths, strict=True)
        ]
        batch, rows, keys = 1, int(starts[0][-1]) + spare, int(starts[1][-1]) + spare
        side = side._replace(cu_seqlens_q=starts[0], cu_seqlens_kv=starts[1])
    if problem.dropout:
        side = side._replace(seed=torch.tensor([0x7123456789ABCDEF]), dropout=DROPOUT)
    shapes = [
        (batch, heads, length, width)
        for heads, length, width in (
            (problem.heads, rows, problem.head_dim),
            (problem.kv_heads, keys, problem.head_dim),
            (problem.kv_heads, keys, problem.value_head_dim),
        )
    ]
    q, k, v = (torch.randn(shape, generator=chance, dtype=torch.float64) for shape in shapes)
    out = torch.full((*q.shape[:3], v.shape[3]), UNTOUCHED, dtype=torch.float64)
    lse = np.full(batch * problem.heads * rows, UNTOUCHED)
    scale = problem.head_dim**-0.5
    expected = plain_attention(problem, q, k, v, side, scale)
    # Values behind the last key of a sequence must not matter.
    for tensor in (k, v):
        if spare:
            tensor[:, :, keys - spare :] = math.nan
        if problem.kv_lengths and lengths is None:
            assert side.seqlens_kv is not None
            for sequence, length in enumerate(side.seqlens_kv.tolist()):
                tensor[sequence, :, length:] = math.nan
    like = tuple(torch.empty(tensor.shape, dtype=torch.bfloat16, device="meta") for tensor in (q, k, v, out))
    flat = tuple(tensor.flatten().numpy() for tensor in (q, k, v)), out.view(-1).numpy()
    extra_inputs = tuple(tensor.numpy() for tensor in side.tensors)
    numbers = tuple(number for number in side.numbers if number is not None)
    workspaces: tuple[Array, ...] = ()
    memory = (*flat[0], flat[1])
    if side.bias is not None:
        own = tuple(slice(0, 1 if side.bias.stride(axis) == 0 else None) for axis in (0, 1))
        assert config is not None
        workspaces = block_lists(problem, config, side.bias[own]).workspaces
        if problem.bias is Bias.ADDITIVE:
            base = side.bias[own]._base
            assert base is not None
            memory = *memory, base.view(-1).numpy()
    if problem.block_mask:
        assert config is not None
        workspaces = lists_of_blocks(problem, config, side)
    parts = empty_parts(kernel, like, side)
    emulate(kernel, like, memory, extra_inputs, lse, scale, programs, parts or workspaces, numbers)
    row_lse = torch.from_numpy(lse).view(q.shape[:3])
    put_together(parts, out, row_lse, side)
    return largest_error((out, row_lse), expected, UNTOUCHED)


def score_inputs(problem: Problem, lengths: list[tuple[int, int]] | None) -> ExtraInputs:
    """Inputs of the features that change scores or masks: different for each head and sequence."""
    batch = problem.batch if lengths is None else len(lengths)
    keys = [problem.seqlen_kv] * batch if lengths is None else [pair[1] for pair in lengths]
    side = NO_EXTRA_INPUTS
    if problem.kv_lengths:
        keys = [count * (index % 3 + 1) // 3 for index, count in enumerate(keys)]
        side = side._replace(seqlens_kv=torch.tensor(keys).int())
    if problem.prefix:
        prefix = [count * (index % 4) // 5 for index, count in enumerate(keys, 1)]
        side = side._replace(prefix=torch.tensor(prefix).int())
    if problem.tree:
        queries = problem.seqlen_q if lengths is None else max(pair[0] for pair in lengths)
        side = side._replace(tree=a_tree(batch, queries))
    if problem.softcap:
        side = side._replace(softcap=1.5)
    if problem.alibi:
        slopes = 0.03 * torch.arange(1, batch * problem.heads + 1, dtype=torch.float64)
        side = side._replace(slopes=slopes.view(batch, problem.heads))
    if problem.sinks:
        side = side._replace(sinks=torch.linspace(-1.0, 3.0, problem.heads, dtype=torch.float64))
    if problem.bias is not Bias.NONE:
        side = side._replace(bias=a_bias(problem))
    if problem.functions:
        shaped = msgspec.structs.replace(problem, batch=batch)
        call: UsualCall[FeatureFields] = UsualCall(shaped, tuple(keys), torch.float32, torch.device("cpu"))
        side = side._replace(**usual_captures(call))
    return with_lists(side, listed_blocks(problem)) if problem.block_mask else side


def a_tree(batch: int, queries: int) -> torch.Tensor:
    """Random masks of the newest keys, with a row of none and a row of all."""
    seen = torch.rand(batch, queries, queries, generator=torch.Generator().manual_seed(queries)) < 0.5
    seen[:, queries // 3 : queries // 3 + 1] = False
    seen[:, queries // 2 : queries // 2 + 1] = True
    return seen


def listed_blocks(problem: Problem) -> torch.Tensor:
    """Visible blocks of a block mask, which batches or heads share for some lengths."""
    torch.manual_seed(problem.seqlen_q + 2 * problem.seqlen_kv)
    blocks = visible_blocks(problem)
    heads = blocks.shape[1]
    own = blocks[: 1 if problem.seqlen_kv % 3 else None, : 1 if problem.seqlen_q % 3 else None]
    return own.expand(problem.batch, heads, -1, -1)


def a_bias(problem: Problem) -> torch.Tensor:
    """A mask or bias with hidden, whole and partial blocks, of which some heads or batches share one."""
    batch, heads, queries, keys = problem.batch, problem.heads, problem.seqlen_q, problem.seqlen_kv
    chance = torch.Generator().manual_seed(queries + 2 * keys)
    own = (1 if keys % 3 else batch), (1 if keys % 2 else heads)
    kinds = torch.randint(4, (*own, queries // 64 + 1, keys // 64 + 1), generator=chance)
    kinds = kinds.repeat_interleave(64, 2).repeat_interleave(64, 3)[:, :, :queries, :keys]
    some = torch.rand(kinds.shape, generator=chance) < 0.4
    visible = (kinds == 1) | (kinds == 2) & some
    # A group of rows without visible keys, and one that sees the first keys alone.
    visible[:, :, 64:128] = False
    visible[:, :, 130:190, 64:] = False
    if problem.bias is Bias.BOOLEAN:
        return visible.expand(batch, heads, -1, -1)
    # Rows that start at a multiple of 16 bytes.
    rows = torch.full((*own, queries, -(-keys // 8) * 8), math.nan, dtype=torch.float64)
    numbers = torch.randn(kinds.shape, generator=chance, dtype=torch.float64)
    rows[..., :keys] = torch.where(visible | (kinds == 3), torch.where(kinds == 1, 0.0, numbers), -math.inf)
    return rows[..., :keys].expand(batch, heads, -1, -1)


def a_small(causal: Causal = Causal.NONE, **changes: Any) -> Problem:
    shape = {"heads": 2, "kv_heads": 1, "batch": 1, "seqlen_q": 300, "seqlen_kv": 300, **changes}
    return msgspec.structs.replace(a_problem(16, causal=causal), **shape)


@pytest.mark.slow
@CONFIGS
@pytest.mark.parametrize("causal", list(Causal))
def test_dense_attention(config: dict[str, Any], causal: Causal) -> None:
    problem = a_small(causal, seqlen_q=200, kv_heads=2)
    assert worst_error(kernel_of(problem, **config), problem, 2) < 1e-12


@pytest.mark.slow
@pytest.mark.sampled
@CONFIGS
@pytest.mark.parametrize(
    ("causal", "window"),
    [
        (Causal.BOTTOM_RIGHT, {"window_left": 0}),
        (Causal.BOTTOM_RIGHT, {"window_left": 100}),
        (Causal.TOP_LEFT, {"window_left": 64}),
        (Causal.NONE, {"window_left": 70}),
        (Causal.NONE, {"window_right": 30}),
        (Causal.NONE, {"window_left": 65, "window_right": 63}),
        (Causal.NONE, {"window_left": 0, "window_right": 0}),
    ],
)
def test_windows(config: dict[str, Any], causal: Causal, window: dict[str, int]) -> None:
    for queries, keys in ((400, 400), (150, 420), (420, 150)):
        problem = a_small(causal, seqlen_q=queries, seqlen_kv=keys, **window)
        assert worst_error(kernel_of(problem, **config), problem, 2) < 1e-12, (queries, keys)


@pytest.mark.slow
@CONFIGS
@pytest.mark.parametrize(
    ("causal", "window"),
    [(Causal.NONE, {"window_left": 70}), (Causal.BOTTOM_RIGHT, {}), (Causal.TOP_LEFT, {"window_left": 70})],
)
def test_packed_sequences(config: dict[str, Any], causal: Causal, window: dict[str, int]) -> None:
    problem = a_small(causal, packed=1, **window)
    for lengths, programs in ((EQUAL, 3), (MIXED, 8), ([(30, 0), (70, 3), (0, 9), (5, 0)], 2)):
        worst = worst_error(kernel_of(problem, **config), problem, programs, lengths, spare=100)
        assert worst < 1e-12, lengths


@pytest.mark.slow
@CONFIGS
@pytest.mark.parametrize("causal", list(Causal))
def test_dropout(config: dict[str, Any], causal: Causal) -> None:
    for queries, keys, changes in ((200, 300, {"batch": 2}), (150, 420, {"window_left": 70})):
        problem = a_small(causal, seqlen_q=queries, seqlen_kv=keys, dropout=True, **changes)
        assert worst_error(kernel_of(problem, **config), problem, 2) < 1e-12, (queries, keys)


def test_dropout_with_packed_heads() -> None:
    problem = a_small(heads=8, kv_heads=2, seqlen_q=20, dropout=True, batch=2)
    assert worst_error(kernel_of(problem, **{**SMALL, "pack_gqa": 2}), problem, 2) < 1e-12


@pytest.mark.slow
def test_varlen_orders_swizzles_and_head_dims() -> None:
    changes: dict[str, Any]
    for widths, changes in (
        ((16, 16), {"order": "linear", "head_swizzle": 2}),
        ((16, 16), {"order": "serpentine", "head_swizzle": 4, "balanced_grid": True}),
        ((96, 80), {"split_head_dim": True}),
        ((128, 128), {"split_epilogue": True}),
    ):
        shape = {"heads": 4, "kv_heads": 2, "packed": 1}
        problem = msgspec.structs.replace(
            a_small(Causal.BOTTOM_RIGHT), head_dim=widths[0], value_head_dim=widths[1], **shape
        )
        assert worst_error(kernel_of(problem, **{**SMALL, **changes}), problem, 5, EQUAL) < 1e-12


def broken(kernel: Kernel, right: str, wrong: str) -> Kernel:
    assert right in kernel.source
    return msgspec.structs.replace(kernel, source=kernel.source.replace(right, wrong))
