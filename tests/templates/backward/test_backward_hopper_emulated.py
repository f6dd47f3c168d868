"""Tests of emulated Hopper backward kernels: gradients, the order of dq sums, and features."""

import itertools
import math
from collections.abc import Iterator
from typing import Any, TypeAlias

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from flashtune import testing
from flashtune.core.features.records import NO_EXTRA_INPUTS, ExtraInputs
from flashtune.core.kernel import Kernel, Specialization
from flashtune.core.problem import Bias, Causal, Problem
from flashtune.core.target import find_target
from flashtune.launch.compilation import load_module
from flashtune.request.dropout import row_states
from flashtune.templates.backward_hopper.arguments import starts_at_lse
from flashtune.templates.backward_hopper.space import HopperBackwardConfig, has_own_steps, width_of
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render
from tests.emulator.backward import BackwardProgram, Sums, emulate_backward
from tests.emulator.hardware import Array
from tests.emulator.program import functions_of
from tests.emulator.step_lists import steps_of_blocks
from tests.problems.block_lists import visible_blocks, with_lists
from tests.problems.plain_masks import plain_attention

FAMILY = find_family("backward_hopper")
H200 = find_target("h200")
SCALE = 0.2
# Rows before the first packed sequence.
BEFORE = 200
# About the size of the scores.
CAP = 3.0
SEED = torch.tensor([0x7123456789ABCDEF])
# A number that has an exact spelling in float32.
DROPOUT = 0.3125
# The emulator computes in float64.
ALLOWED: dict[str, Any] = {"rtol": 0.0, "atol": 1e-11}
Lengths: TypeAlias = list[tuple[int, int]]


def a_problem(head_dim: int, **changes: Any) -> Problem:
    return testing.problem(
        "heads=2,kv_heads=1,seqlen_q=150,seqlen_kv=190,head_dim=64,dtype=bf16,backward",
        head_dim=head_dim,
        **changes,
    )


def kernel_of(problem: Problem, **changes: Any) -> tuple[Kernel, HopperBackwardConfig]:
    default = msgspec.to_builtins(FAMILY.default(problem, H200))
    config = msgspec.convert({**default, **changes}, HopperBackwardConfig)
    return render(FAMILY, problem, config, Specialization()), config


def row_places(problem: Problem, block_m: int, lengths: Lengths | None, spare: int) -> tuple[Tensor, int]:
    """Of each query, its row in the blocks of a head's sums and statistics; and the number of blocks."""
    if lengths is None:
        return torch.arange(problem.seqlen_q), math.ceil(problem.seqlen_q / block_m)
    located, start = [], BEFORE
    for sequence, (queries, _) in enumerate(lengths):
        located.append((start // block_m + sequence) * block_m + torch.arange(queries))
        start += queries
    return torch.cat(located), (start + spare) // block_m + len(lengths)


def dq_of(sums: Sums, problem: Problem, config: HopperBackwardConfig, places: tuple[Tensor, int]) -> Tensor:
    """The sums of all blocks, put in order: [heads, queries, columns]."""
    width, block_m = width_of(problem), config.block_m
    tiles = places[-1]
    dq = torch.zeros(problem.batch * problem.heads * tiles, block_m, width, dtype=torch.float64)
    half_columns = max(64, width // 2)
    for address, additions in sums.added.items():
        block, rest = divmod(address, block_m * width * 4)
        half, odd = divmod(rest, block_m * width * 2)
        assert odd == 0
        part = torch.from_numpy(np.sum([term.values for term in additions], axis=0))
        # Groups that take turns make all of a block, others half of it.
        has_all = config.alternate_dq or has_own_steps(problem)
        assert part.shape == (64, min(128, block_m * width // 64) if has_all else half_columns)
        own = slice(half * half_columns, half * half_columns + part.shape[1])
        # Narrow tiles are made transposed, in halves of queries; wide ones in halves of columns.
        if width == 64:
            dq[block, own] = part.T
        else:
            dq[block, :, own] = part
    rows = dq.reshape(problem.batch, problem.heads, tiles * block_m, width)
    return rows[:, :, places[0], : problem.head_dim] * SCALE


def with_spare(tensor: Tensor, spare: int) -> Tensor:
    """A tensor of packed rows with NaNs behind them."""
    return torch.nn.functional.pad(tensor.detach(), (0, 0, 0, spare), value=math.nan)


def places(kernel: Kernel, problem: Problem) -> Iterator[tuple[int, int, int]]:
    """Of each program by number: block of keys, batch and KV head."""
    like = [
        torch.empty(problem.batch, heads, length, problem.head_dim, device="meta")
        for heads, length in ((problem.heads, problem.seqlen_q), (problem.kv_heads, problem.seqlen_kv))
    ]
    q, k = like
    module = load_module(kernel)
    (programs,), _, integers = module.launch_plan(q, k, k, q, q, q, k, k)
    for number in range(programs):
        names = BackwardProgram(number, programs, module, Sums()).names()
        exec(functions_of(kernel, names), names)
        *counts, seqlen_kv, diagonal, interleaved = integers
        yield names["TileScheduler"](*counts, interleaved, seqlen_kv, diagonal).get_tile()


def extra_inputs(problem: Problem, lengths: Lengths | None) -> ExtraInputs:
    """The side inputs that a problem names."""
    side = NO_EXTRA_INPUTS
    if lengths is not None:
        starts = [
            torch.tensor([*itertools.accumulate(sizes, initial=BEFORE)]).int()
            for sizes in zip(*lengths, strict=True)
        ]
        side = side._replace(cu_seqlens_q=starts[0], cu_seqlens_kv=starts[1])
    if problem.softcap:
        side = side._replace(softcap=CAP)
    if problem.sinks:
        side = side._replace(sinks=torch.linspace(-1.0, 4.0, problem.heads))
    if problem.dropout:
        side = side._replace(seed=SEED, dropout=DROPOUT)
    if problem.bias is Bias.ADDITIVE:
        side = side._replace(bias=a_bias(problem))
    return with_lists(side, listed_blocks(problem)) if problem.block_mask else side


def a_bias(problem: Problem) -> Tensor:
    """A bias that batches share, and heads if they are odd. It hides keys and a row. Its rows are padded."""
    heads = 1 if problem.heads % 2 else problem.heads
    chance = torch.Generator().manual_seed(2)
    bias = torch.randn(
        1, heads, problem.seqlen_q, problem.seqlen_kv + 8, generator=chance, dtype=torch.float64
    )
    bias[bias > 1.5] = -math.inf
    bias[:, :, 3] = -math.inf
    return bias[..., :-8].expand(problem.batch, problem.heads, -1, -1).requires_grad_()


def listed_blocks(problem: Problem) -> Tensor:
    """Random blocks with an empty row, a full row, and keys that no query sees."""
    torch.manual_seed(problem.seqlen_q)
    visible = visible_blocks(problem)
    visible[:, 0, 0] = True
    visible[:, 0, 1:2] = False
    visible[:, :, :, 2 * 128 // problem.block_mask : 3 * 128 // problem.block_mask] = False
    return visible


def statistics(
    problem: Problem, config: HopperBackwardConfig, lse: Tensor, delta: Tensor, places: tuple[Tensor, int]
) -> Tensor:
    """Returns the rows that the prologue writes, [batch * heads, 2 to 4, queries in whole blocks].

    `lse` and `delta`, the sum of out * dout, are [batch * heads, queries].
    """
    kinds = 4 if problem.dropout else 3 if problem.bias is Bias.ADDITIVE else 2
    stats = torch.zeros(len(lse), kinds, places[1] * config.block_m, dtype=torch.float64)
    share = 1 - DROPOUT if problem.dropout else 1.0
    seen = torch.where(lse.isinf(), math.inf, lse + math.log(share))
    cap = CAP if problem.softcap else 0.0
    stats[:, 0] = -math.inf
    stats[:, 0, places[0]] = (
        -seen / SCALE if starts_at_lse(problem, config) else (cap - seen) * math.log2(math.e)
    )
    if problem.bias is Bias.ADDITIVE:
        # In natural units, less a part of the third row.
        stats[:, 0, places[0]], stats[:, 2] = 0.25 - seen, -0.25 * math.log2(math.e)
    stats[:, 1, places[0]] = -delta * share
    if problem.dropout:
        heads, rows = torch.arange(len(lse))[:, None], torch.arange(stats.shape[2])
        stats[:, 2:] = torch.stack(row_states(SEED, heads, rows), 1).double()
    return stats


def emulated(
    problem: Problem,
    at_once: int,
    lengths: Lengths | None = None,
    spare: int = 0,
    rendered: tuple[Kernel, HopperBackwardConfig] | None = None,
    **changes: Any,
) -> Sums:
    """Emulates a kernel and holds its gradients against those of plain attention.

    Packed sequences have these lengths of queries and keys. `spare` rows of NaN follow them. Without
    `rendered`, the kernel is that of the default config with `changes`.
    """
    kernel, config = rendered or kernel_of(problem, **changes)
    chance = torch.Generator().manual_seed(1)
    queries, keys = (problem.heads, problem.seqlen_q), (problem.kv_heads, problem.seqlen_kv)
    if lengths is not None:
        totals = (BEFORE + sum(sizes) for sizes in zip(*lengths, strict=True))
        queries, keys = ((side[0], total) for side, total in zip((queries, keys), totals, strict=True))
    q, k, v = (
        torch.randn(
            problem.batch, *side, problem.head_dim, generator=chance, dtype=torch.float64
        ).requires_grad_()
        for side in (queries, keys, keys)
    )
    side = extra_inputs(problem, lengths)
    out, lse = plain_attention(problem, q, k, v, side, SCALE)
    dout = torch.randn(out.shape, generator=chance, dtype=torch.float64)
    biases = () if side.bias is None else (side.bias,)
    dq, dk, dv, *dbias = torch.autograd.grad(out, (q, k, v, *biases), dout)
    places = row_places(problem, config.block_m, lengths, spare)
    own = slice(0 if lengths is None else BEFORE, None)
    lse, delta = (rows.detach().flatten(0, 1)[:, own] for rows in (lse, (out * dout).sum(-1)))
    stats = statistics(problem, config, lse, delta, places)
    read = {"q": q, "k": k, "v": v, "dout": dout, "workspace_0": stats}
    memory = {name: tensor.detach().flatten().numpy() for name, tensor in read.items()}
    if spare:
        # Rows behind the last sequence have any contents.
        padded = {name: with_spare(tensor, spare) for name, tensor in read.items() if name != "workspace_0"}
        memory |= {name: tensor.flatten().numpy() for name, tensor in padded.items()}
    planned = [with_spare(tensor, spare) for tensor in (q, k, v, out, dout, dq, dk, dv)]
    memory |= {
        name: np.full(tensor.numel(), np.nan) for name, tensor in zip(("dk", "dv"), planned[6:], strict=True)
    }
    like = tuple(torch.empty(tensor.shape, dtype=torch.bfloat16, device="meta") for tensor in planned)
    not_passed = (side.sinks, side.block_counts, side.block_indices, side.full_counts, side.seed)
    like += tuple(tensor for tensor in not_passed if tensor is not None)
    for bias in biases:
        held = bias.detach().as_strided((bias.untyped_storage().nbytes() // 8,), (1,))
        memory |= {"bias": held.numpy(), "dbias": cleared(problem, config.block_m)}
        like += (torch.empty_strided(bias.shape, bias.stride(), dtype=torch.bfloat16, device="meta"),)
    of_rows = torch.empty(stats.flatten(0, 1).shape, device="meta")
    workspaces = 2 if problem.deterministic else 1
    beside = tuple(
        offsets.numpy() for offsets in (side.cu_seqlens_q, side.cu_seqlens_kv) if offsets is not None
    )
    numbers = (*((CAP,) if problem.softcap else ()), *((DROPOUT,) if problem.dropout else ()))
    steps = (steps_of_blocks(problem, config, side),) if problem.block_mask else ()
    sums = emulate_backward(kernel, like, memory, of_rows, SCALE, workspaces, at_once, beside, numbers, steps)
    torch.testing.assert_close(dq_of(sums, problem, config, places), dq[:, :, own], **ALLOWED)
    for name, right, full in (("dk", dk, planned[6]), ("dv", dv, planned[7])):
        written = torch.from_numpy(memory[name]).view(full.shape)
        before, end = own.start, right.shape[2]
        torch.testing.assert_close(written[:, :, before:end], right[:, :, before:end], **ALLOWED)
        assert written[:, :, :before].isnan().all()
        assert written[:, :, end:].isnan().all()
    for right in dbias:
        torch.testing.assert_close(torch.from_numpy(memory["dbias"]).view(right.shape), right, **ALLOWED)
    return sums


def cleared(problem: Problem, block_m: int) -> Array:
    """The gradient of a bias after the prologue: NaN without zeros for keys after each block of queries."""
    rows, keys = torch.arange(problem.seqlen_q)[:, None], torch.arange(problem.seqlen_kv)
    is_cut = problem.causal is not Causal.NONE
    diagonal = problem.seqlen_kv - problem.seqlen_q if problem.causal is Causal.BOTTOM_RIGHT else 0
    hidden = is_cut & (keys >= (rows // block_m + 1) * block_m + diagonal)
    gradient = torch.where(hidden, 0.0, math.nan).double()
    return gradient.repeat(problem.batch * problem.heads, 1, 1).flatten().numpy()


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize(
    ("head_dim", "turns"), [(64, False), (64, True), (128, False), (128, True), (256, False)]
)
@pytest.mark.parametrize("causal", [Causal.NONE, Causal.BOTTOM_RIGHT])
@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_match_the_reference(
    head_dim: int, turns: bool, causal: Causal, deterministic: bool
) -> None:
    emulated(a_problem(head_dim, causal=causal, deterministic=deterministic), 2, alternate_dq=turns)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "queries", "stages"), [(1, 40, 2), (1, 70, 2), (3, 150, 2), (3, 150, 3), (2, 300, 4)]
)
@pytest.mark.parametrize("deterministic", [False, True])
def test_either_group_may_take_the_last_turn(
    heads: int, queries: int, stages: int, deterministic: bool
) -> None:
    """After one step, two, nine and ten, with slots that a group meets in every turn, or now and then."""
    problem = a_problem(128, heads=heads, seqlen_q=queries, deterministic=deterministic)
    sums = emulated(problem, 2, ds_stages=stages)
    blocks = math.ceil(problem.seqlen_kv / 128)
    assert len(sums.added) == heads * math.ceil(queries / 64)
    assert all(sorted(term.program for term in added) == [*range(blocks)] for added in sums.added.values())


@pytest.mark.slow
@pytest.mark.parametrize(("delay", "init"), [(False, True), (False, False), (True, False)])
def test_steps_in_other_orders(delay: bool, init: bool) -> None:
    # Queries that see nothing, and blocks of keys that no query sees, are walked as well.
    causal = Causal.BOTTOM_RIGHT if delay else Causal.TOP_LEFT
    problem = a_problem(64, causal=causal, deterministic=True, seqlen_q=270 if delay else 130)
    emulated(problem, 2, defer_dq=delay, init_accumulators=init, alternate_dq=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head_dim", "turns", "causal"),
    [(64, False, Causal.NONE), (128, True, Causal.NONE), (256, False, Causal.BOTTOM_RIGHT)],
)
@pytest.mark.parametrize("at_once", [1, 2, 64], ids=["one", "two", "all"])
def test_deterministic_sums_are_added_in_order_of_key_blocks(
    head_dim: int, turns: bool, causal: Causal, at_once: int
) -> None:
    """With one multiprocessor too: no program waits for one that starts later."""
    problem = a_problem(head_dim, causal=causal, deterministic=True, kv_heads=2, seqlen_kv=260)
    sums = emulated(problem, at_once, alternate_dq=turns)
    blocks = math.ceil(problem.seqlen_kv / (64 if head_dim == 256 else 128))
    longest = 0
    for additions in sums.added.values():
        # Both heads' programs alternate: half of a program's number is its block.
        order = [term.program // problem.heads for term in additions]
        assert order == list(range(len(order)))
        longest = max(longest, len(order))
    assert longest == blocks
    # A counter for each block of queries, or half of it, stands at the number of blocks of keys that see it.
    parts = math.ceil(problem.seqlen_q / (128 if head_dim == 64 else 64)) * (1 if turns else 2)
    assert sorted(sums.counters) == list(range(0, problem.heads * parts * 4, 4))
    assert max(sums.counters.values()) == blocks


@pytest.mark.parametrize(
    ("heads", "keys", "beside"), [(35, 500, 1), (7, 4096, 2), (3, 30000, 1), (1, 130, 4)]
)
def test_programs_of_a_head_are_numbered_in_order(heads: int, keys: int, beside: int) -> None:
    problem = a_problem(64, deterministic=True, heads=heads, kv_heads=heads, seqlen_kv=keys)
    kernel, _ = kernel_of(problem, interleaved_heads=beside)
    blocks = math.ceil(keys / 128)
    together = min(math.ceil(132 * beside / blocks), heads)
    turns = list(places(kernel, problem))
    assert sorted(turns) == [(block, 0, head) for block in range(blocks) for head in range(heads)]
    for head in range(heads):
        numbers = [number for number, turn in enumerate(turns) if turn[2] == head]
        assert [turns[number][0] for number in numbers] == list(range(blocks))
        # The last heads that take turns may be fewer.
        apart = min(together, heads - head // together * together)
        assert {after - before for before, after in itertools.pairwise(numbers)} == {apart}


WINDOWS: tuple[tuple[Causal, dict[str, int]], ...] = (
    (Causal.BOTTOM_RIGHT, {"window_left": 0}),
    (Causal.BOTTOM_RIGHT, {"window_left": 100}),
    (Causal.TOP_LEFT, {"window_left": 64}),
    (Causal.NONE, {"window_left": 70}),
    (Causal.NONE, {"window_right": 30}),
    (Causal.NONE, {"window_left": 65, "window_right": 63}),
)
LENGTHS = ((400, 400), (150, 420), (420, 150))


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize(("causal", "window"), WINDOWS)
@pytest.mark.parametrize(("head_dim", "deterministic"), [(64, True), (128, False), (256, True)])
def test_windows(head_dim: int, causal: Causal, window: dict[str, int], deterministic: bool) -> None:
    for queries, keys in LENGTHS:
        changes: dict[str, Any] = {"seqlen_q": queries, "seqlen_kv": keys, **window}
        problem = a_problem(head_dim, causal=causal, deterministic=deterministic, **changes)
        sums = emulated(problem, 3)
        if deterministic:
            added = sums.added.values()
            assert all(
                [term.program for term in order] == sorted(term.program for term in order) for order in added
            )


@pytest.mark.slow
@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_softcap(head_dim: int, turns: bool) -> None:
    turns = turns and head_dim < 256
    for changes in ({}, {"causal": Causal.BOTTOM_RIGHT}, {"causal": Causal.TOP_LEFT, "window_left": 60}):
        problem = a_problem(head_dim, softcap=True, **changes)
        emulated(problem, 2, alternate_dq=turns)
        if head_dim < 256:
            emulated(problem, 2, alternate_dq=turns, init_accumulators=False, early_dv=turns)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_sinks(head_dim: int) -> None:
    for changes in ({}, {"causal": Causal.BOTTOM_RIGHT, "window_left": 30, "softcap": True}):
        emulated(a_problem(head_dim, sinks=True, heads=4, kv_heads=2, **changes), 2)


BIASED: tuple[dict[str, Any], ...] = (
    {},
    {"alternate_dq": False},
    {"alternate_dq": False, "defer_dq": False, "stagger_start": False, "early_dk": False, "ds_stages": 1},
)


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("config", BIASED, ids=str)
@pytest.mark.parametrize("causal", Causal)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_biases_have_gradients(head_dim: int, causal: Causal, config: dict[str, Any]) -> None:
    for changes in ({}, {"heads": 3, "batch": 2}, {"heads": 4, "kv_heads": 4, "seqlen_kv": 120}):
        problem = a_problem(head_dim, bias=Bias.ADDITIVE, causal=causal, **{"seqlen_kv": 192, **changes})
        emulated(problem, 2, **config)


EQUAL = [(64, 64), (1, 1), (0, 0), (200, 200), (129, 129), (0, 0), (97, 97)]
MIXED = [(30, 0), (70, 300), (0, 9), (150, 40), (5, 131)]


# Each mask with each order of sums, and with two or three head dims.
PACKED = (
    (64, Causal.NONE, True),
    (64, Causal.BOTTOM_RIGHT, False),
    (64, Causal.TOP_LEFT, True),
    (128, Causal.BOTTOM_RIGHT, True),
    (128, Causal.TOP_LEFT, False),
    (256, Causal.NONE, False),
    (256, Causal.BOTTOM_RIGHT, True),
)


@pytest.mark.slow
@pytest.mark.parametrize(("head_dim", "causal", "deterministic"), PACKED)
def test_packed_sequences(head_dim: int, causal: Causal, deterministic: bool) -> None:
    for lengths in (EQUAL, MIXED):
        problem = a_problem(head_dim, causal=causal, deterministic=deterministic, packed=1)
        sums = emulated(problem, 2, lengths, spare=100)
        if deterministic:
            added = sums.added.values()
            assert all(
                [term.program for term in order] == sorted(term.program for term in order) for order in added
            )


@pytest.mark.slow
def test_single_packed_sequence() -> None:
    emulated(a_problem(64, causal=Causal.BOTTOM_RIGHT, packed=1), 2, MIXED[1:2], spare=100)


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize(("head_dim", "deterministic"), [(64, False), (128, True), (256, False)])
@pytest.mark.parametrize(
    "changes",
    [
        {"causal": Causal.BOTTOM_RIGHT, "window_left": 70},
        {"window_left": 20, "window_right": 100, "softcap": True},
        {"causal": Causal.TOP_LEFT, "softcap": True, "sinks": True},
    ],
    ids=["window", "softcap", "sinks"],
)
def test_packed_sequences_with_other_features(
    head_dim: int, deterministic: bool, changes: dict[str, Any]
) -> None:
    problem = a_problem(head_dim, packed=1, heads=4, kv_heads=2, deterministic=deterministic, **changes)
    emulated(problem, 3, MIXED, spare=10)


@pytest.mark.slow
@pytest.mark.parametrize("kv_heads", [3, 10])
def test_interleaved_heads_are_all_computed(kv_heads: int) -> None:
    """Sections of eight heads, of which the last one may have fewer."""
    problem = a_problem(128, causal=Causal.BOTTOM_RIGHT, heads=kv_heads, kv_heads=kv_heads)
    emulated(problem, 2, interleaved_heads=8)


ORDERS: tuple[dict[str, Any], ...] = (
    {},
    {"init_accumulators": False, "early_dv": True, "early_dk": False},
    {"defer_dq": True, "defer_dp_wait": True, "alternate_dq": False},
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head_dim", "causal", "dropout"),
    [
        (64, Causal.NONE, True),
        (64, Causal.BOTTOM_RIGHT, True),
        (128, Causal.NONE, True),
        (128, Causal.TOP_LEFT, True),
        (64, Causal.TOP_LEFT, False),
        (128, Causal.BOTTOM_RIGHT, False),
    ],
)
def test_gradients_match_the_reference_with_dropout_and_other_orders(
    head_dim: int, causal: Causal, dropout: bool
) -> None:
    for order in ORDERS:
        emulated(a_problem(head_dim, causal=causal, dropout=dropout), 2, **order)


def test_batches_have_independent_dropout() -> None:
    emulated(a_problem(64, dropout=True, batch=2, seqlen_q=70, seqlen_kv=70), 2)
