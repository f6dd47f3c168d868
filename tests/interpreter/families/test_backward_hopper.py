"""Tests of prologue and epilogue of the Hopper backward kernel in the interpreter."""

import itertools
import math
import sys
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from flashtune.core.kernel import Kernel, Specialization
from flashtune.core.problem import Direction, Dtype, Problem
from flashtune.core.target import find_target
from flashtune.launch.compilation import load_module
from flashtune.request.dropout import row_states
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render
from tests.mutants.backward_hopper import backward_hopper_features
from tests.mutants.core import Mutant, broken

FAMILY = find_family("backward_hopper")
TARGET = find_target("h200")
SCALE = 0.3
WIDTHS = pytest.mark.parametrize(
    ("head_dim", "value_head_dim"), [(64, 64), (40, 56), (128, 128), (72, 120), (256, 256), (136, 136)]
)


def kernel_of(
    head_dim: int,
    value_head_dim: int,
    *,
    lse: bool = False,
    deterministic: bool = False,
    dropout: bool = False,
    sinks: bool = False,
    **changes: Any,
) -> Kernel:
    problem = Problem(
        dtype=Dtype.FP16,
        head_dim=head_dim,
        value_head_dim=value_head_dim,
        heads=3,
        kv_heads=1,
        batch=2,
        seqlen_q=150,
        seqlen_kv=70,
        direction=Direction.BACKWARD,
        deterministic=deterministic,
        dropout=dropout,
        sinks=sinks,
    )
    config = msgspec.structs.replace(FAMILY.default(problem, TARGET), **changes)
    return render(FAMILY, problem, config, Specialization(lse=lse))


def tensors_of(head_dim: int, value_head_dim: int) -> tuple[Tensor, ...]:
    """q, k, v, out, dout, dq, dk, dv in BSHD layout."""
    torch.manual_seed(0)

    def made(heads: int, length: int, width: int) -> Tensor:
        return torch.randn(2, length, heads, width, dtype=torch.float16).transpose(1, 2)

    q, k, v = made(3, 150, head_dim), made(1, 70, head_dim), made(1, 70, value_head_dim)
    out, dout = made(3, 150, value_head_dim), made(3, 150, value_head_dim)
    return q, k, v, out, dout, made(3, 150, head_dim), made(1, 70, head_dim), made(1, 70, value_head_dim)


@WIDTHS
@pytest.mark.parametrize("init", [False, True])
@pytest.mark.parametrize("with_dlse", [False, True])
def test_accumulators_are_initialised_with_softmax_terms(
    head_dim: int, value_head_dim: int, init: bool, with_dlse: bool
) -> None:
    kernel = kernel_of(head_dim, value_head_dim, lse=with_dlse, init_accumulators=init)
    module = load_module(kernel)
    tensors = tensors_of(head_dim, value_head_dim)
    out, dout = tensors[3:5]
    lse, dlse = torch.randn(2, 3, 150), torch.randn(2, 3, 150)
    lse[1, 2, 140:] = -math.inf
    _, shapes, _ = module.launch_plan(*tensors)
    stats, sums = (torch.full(shape, math.nan) for shape in shapes)
    grid, integers = module.prologue_plan(*tensors)
    arguments = (out, dout, lse, *((dlse,) if with_dlse else ()), stats, sums, *((SCALE,) if init else ()))
    assert len(arguments) + len(integers) == len(kernel.prologue.arguments)  # type: ignore[union-attr]
    module.prepare[grid](*arguments, *integers)
    assert torch.equal(sums, torch.zeros_like(sums))
    rows = stats.reshape(2, 3, 2, -1)
    # Rows behind the last have no weight, like rows that see nothing, whatever their product is.
    expected = torch.full(rows.shape[:2] + rows.shape[3:], -math.inf)
    expected[..., :150] = -lse / SCALE if init else -lse * math.log2(math.e)
    expected[expected == math.inf] = -math.inf
    torch.testing.assert_close(rows[:, :, 0], expected)
    delta = (out.double() * dout.double()).sum(-1).float() - (dlse if with_dlse else 0)
    torch.testing.assert_close(rows[:, :, 1, :150], -delta, atol=1e-4, rtol=1e-5)
    assert torch.equal(rows[:, :, 1, 150:], torch.zeros_like(rows[:, :, 1, 150:]))


@pytest.mark.tritons
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_counters_and_sums_are_initialised_to_zero(head_dim: int) -> None:
    kernel = kernel_of(head_dim, head_dim, deterministic=True)
    module = load_module(kernel)
    tensors = tensors_of(head_dim, head_dim)
    _, shapes, _ = module.launch_plan(*tensors)
    stats, sums, counters = (torch.full(shape, math.nan) for shape in shapes)
    grid, integers = module.prologue_plan(*tensors)
    arguments = (*tensors[3:5], torch.randn(2, 3, 150), stats, sums, counters, SCALE)
    assert len(arguments) + len(integers) == len(kernel.prologue.arguments)  # type: ignore[union-attr]
    module.prepare[grid](*arguments, *integers)
    assert not counters.view(torch.int32).any()
    assert torch.equal(sums, torch.zeros_like(sums))


@pytest.mark.parametrize("init", [False, True])
def test_rows_of_dropout_assume_scaled_probabilities(init: bool) -> None:
    kernel = kernel_of(64, 64, dropout=True, init_accumulators=init)
    module = load_module(kernel)
    seed, dropout = torch.tensor([2**62 + 12345]), 0.375
    tensors = (*tensors_of(64, 64), seed)
    out, dout = tensors[3:5]
    lse = torch.randn(2, 3, 150)
    _, shapes, _ = module.launch_plan(*tensors)
    stats, sums = (torch.full(shape, math.nan) for shape in shapes)
    grid, integers = module.prologue_plan(*tensors)
    arguments = (out, dout, lse, stats, sums, seed, *((SCALE,) if init else ()), dropout)
    assert len(arguments) + len(integers) == len(kernel.prologue.arguments)  # type: ignore[union-attr]
    module.prepare[grid](*arguments, *integers)
    rows = stats.reshape(6, 4, -1)
    larger = lse.reshape(6, 150) + math.log(1 - dropout)
    torch.testing.assert_close(rows[:, 0, :150], -larger / SCALE if init else -larger * math.log2(math.e))
    assert (rows[:, 0, 150:] == -math.inf).all()
    delta = (out.double() * dout.double()).sum(-1).float().reshape(6, 150)
    torch.testing.assert_close(rows[:, 1, :150], -delta * (1 - dropout), atol=1e-4, rtol=1e-5)
    states = row_states(seed, torch.arange(6)[:, None], torch.arange(rows.shape[2]))
    for row, words in enumerate(states, start=2):
        # Bits, whatever number in float32 they would be.
        assert torch.equal(rows[:, row].contiguous().view(torch.int32).long() & 0xFFFFFFFF, words)


def place_of(row: int, column: int) -> int:
    """Where the matrix instruction keeps a number of a tile of 64 rows, as `red` adds registers to memory.

    Warp w of four has rows 16 w and on. Of eight columns, lane l has columns 2 (l % 4) and the next one, of
    rows l // 4 and l // 4 + 8: four registers, 16 bytes, which lanes, then warps leave side by side.
    """
    warp, rest = divmod(row, 16)
    lower, line = divmod(rest, 8)
    eight, within = divmod(column, 8)
    pair, second = divmod(within, 2)
    thread = 32 * warp + 4 * line + pair
    return 512 * eight + 4 * thread + 2 * lower + second


@WIDTHS
def test_dq_sums_have_register_layout(head_dim: int, value_head_dim: int) -> None:
    module = load_module(kernel_of(head_dim, value_head_dim))
    tensors = tensors_of(head_dim, value_head_dim)
    dq = tensors[5].fill_(math.nan)
    _, (_, shape), _ = module.launch_plan(*tensors)
    width = next(width for width in (64, 128, 256) if head_dim <= width)
    block_m = 128 if width == 64 else 64
    half_columns = max(64, width // 2)
    right = torch.randn(6, shape[1] * block_m, width)
    sums = torch.full(shape, math.nan)
    places = torch.tensor([[place_of(row, column) for column in range(half_columns)] for row in range(64)])
    for head in range(6):
        for tile in range(shape[1]):
            block = right[head, tile * block_m : (tile + 1) * block_m]
            for half in range(2):
                # Narrow tiles are made transposed, in halves of queries; wide ones in halves of columns.
                own = slice(half_columns * half, half_columns * (half + 1))
                part = block[own].T if width == 64 else block[:, own]
                sums[head, tile, 64 * half_columns * half + places] = part
    grid, integers = module.epilogue_plan(*tensors)
    module.finish[grid](sums, dq, SCALE, *integers)
    expected = (right.reshape(2, 3, -1, width)[:, :, :150, :head_dim] * SCALE).half()
    torch.testing.assert_close(dq, expected)


LENGTHS = (70, 0, 130, 1, 64)
# Rows that no sequence has, before the first one and after the last.
BEFORE, BEHIND = 5, 30


def packed_tensors(width: int) -> tuple[tuple[Tensor, ...], Tensor]:
    """q, k, v, out, dout, dq, dk, dv of packed sequences, and the offsets of their rows."""
    torch.manual_seed(0)
    starts = torch.tensor([BEFORE, *(BEFORE + sum(LENGTHS[: end + 1]) for end in range(len(LENGTHS)))]).int()
    rows = int(starts[-1]) + BEHIND
    shapes = [(heads, rows, width) for heads in (3, 1, 1, 3, 3, 3, 1, 1)]
    return tuple(torch.randn(1, *shape, dtype=torch.float16) for shape in shapes), starts


def packed_kernel(width: int, *, lse: bool = False, **changes: Any) -> Kernel:
    problem = Problem(
        dtype=Dtype.FP16,
        head_dim=width,
        value_head_dim=width,
        heads=3,
        kv_heads=1,
        batch=len(LENGTHS),
        seqlen_q=130,
        seqlen_kv=130,
        direction=Direction.BACKWARD,
        packed=1,
        **changes,
    )
    return render(FAMILY, problem, FAMILY.default(problem, TARGET), Specialization(lse=lse))


@pytest.mark.parametrize(
    ("width", "softcap", "times"),
    [(64, False, 1), (64, True, 1), (128, False, 1), (128, True, 1), (128, False, 27)],
)
def test_packed_rows_are_prepared_in_blocks_of_their_sequence(
    width: int, softcap: bool, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Many sequences are searched in two steps.
    monkeypatch.setattr(sys.modules[__name__], "LENGTHS", (*LENGTHS[3:], *LENGTHS[:2]) * times)
    kernel = packed_kernel(width, softcap=softcap)
    module = load_module(kernel)
    tensors, starts = packed_tensors(width)
    planned = (*tensors, starts, starts)
    out, dout = tensors[3:5]
    lse = torch.randn(1, 3, out.shape[2])
    _, shapes, _ = module.launch_plan(*planned)
    stats, sums = (torch.full(shape, math.nan) for shape in shapes)
    grid, integers = module.prologue_plan(*planned)
    cap = 2.5
    arguments = (out, dout, lse, stats, sums, starts, cap if softcap else SCALE)
    assert len(arguments) + len(integers) == len(kernel.prologue.arguments)  # type: ignore[union-attr]
    module.prepare[grid](*arguments, *integers)
    assert torch.equal(sums, torch.zeros_like(sums))
    block_m = 128 if width == 64 else 64
    rows = stats.reshape(3, 2, -1)
    expected = torch.zeros_like(rows)
    expected[:, 0] = -math.inf
    delta = (out.double() * dout.double()).sum(-1).float()[0]
    for sequence, length in enumerate(LENGTHS):
        start = int(starts[sequence])
        first = (start // block_m + sequence) * block_m
        own = lse[0, :, start : start + length]
        expected[:, 0, first : first + length] = (cap - own) * math.log2(math.e) if softcap else -own / SCALE
        expected[:, 1, first : first + length] = -delta[:, start : start + length]
    torch.testing.assert_close(rows, expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("width", [64, 128])
def test_packed_dq_is_written_to_rows_of_sequences_only(width: int) -> None:
    module = load_module(packed_kernel(width))
    tensors, starts = packed_tensors(width)
    planned = (*tensors, starts, starts)
    dq = tensors[5].fill_(math.nan)
    _, (_, shape), _ = module.launch_plan(*planned)
    block_m = 128 if width == 64 else 64
    # Each block has one number, so that the order of registers does not matter.
    numbers = torch.arange(shape[0] * shape[1]).reshape(shape[0], shape[1], 1).float()
    grid, integers = module.epilogue_plan(*planned)
    module.finish[grid](numbers.expand(shape).contiguous(), dq, starts, 0.5, *integers)
    expected = torch.full_like(dq, math.nan)
    for sequence, length in enumerate(LENGTHS):
        start = int(starts[sequence])
        for row in range(length):
            block = start // block_m + sequence + row // block_m
            expected[0, :, start + row] = (numbers[:, block] * 0.5).half()
    torch.testing.assert_close(dq, expected, equal_nan=True)


def sink_errors(kernel: Kernel, width: int, packed: bool) -> float:
    """The largest error of the gradients of sinks, which prologue and epilogue compute; infinite for NaN."""
    sinks = torch.tensor([0.5, -math.inf, 2.0])
    if packed:
        tensors, starts = packed_tensors(width)
        side: tuple[Tensor, ...] = (sinks, starts, starts)
        rows = [(0, slice(int(start), int(end))) for start, end in itertools.pairwise(starts)]
    else:
        tensors, side = tensors_of(width, width), (sinks,)
        rows = [(0, slice(None)), (1, slice(None))]
    module = load_module(kernel)
    planned = (*tensors, *side)
    out, dout = tensors[3:5]
    lse, dlse = torch.randn(out.shape[:3]), torch.randn(out.shape[:3])
    lse[:, 1, 20:30] = -math.inf
    _, shapes, _ = module.launch_plan(*planned)
    workspaces = [torch.full(shape, math.nan) for shape in shapes]
    grid, integers = module.prologue_plan(*planned)
    module.prepare[grid](out, dout, lse, dlse, *workspaces, *side[:2], SCALE, *integers)
    dsinks = torch.full((len(rows), 3), math.nan)
    last_grid, last_integers = module.epilogue_plan(*planned)
    arguments = (workspaces[1], tensors[5], workspaces[-1], dsinks, *side[1:2], SCALE, *last_integers)
    assert len(arguments) == len(kernel.epilogue.arguments)  # type: ignore[union-attr]
    module.finish[last_grid](*arguments)
    delta = (out.double() * dout.double()).sum(-1) - dlse
    taken = torch.exp(sinks[:, None] - lse.double()).masked_fill(lse.isneginf(), 0.0) * delta
    expected = torch.stack([-taken[batch, :, own].sum(-1) for batch, own in rows])
    return float((dsinks - expected).abs().max().nan_to_num(nan=math.inf))


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_of_sinks_are_sums_of_their_sequence(width: int, packed: bool, deterministic: bool) -> None:
    made: Any = packed_kernel(width, lse=True, sinks=True, deterministic=deterministic)
    if not packed:
        made = kernel_of(width, width, lse=True, sinks=True, deterministic=deterministic)
    assert sink_errors(made, width, packed) < 1e-3


@pytest.mark.parametrize("mutant", backward_hopper_features.sinks(), ids=lambda mutant: mutant.name)
def test_wrong_gradients_of_sinks_are_found(mutant: Mutant) -> None:
    problem = mutant.subject.problem
    assert not sink_errors(broken(mutant), problem.head_dim, problem.packed > 0) < 1e-3
