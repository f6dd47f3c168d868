"""Tests of emulated Hopper backward kernels with score and mask functions, against autograd in float64."""

from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from flashtune.core.expressions.derivative import derivatives
from flashtune.core.expressions.evaluation import Values, evaluate
from flashtune.core.expressions.nodes import Functions, Kind
from flashtune.core.features.functions import function_tensors, integers_of
from flashtune.core.features.records import NO_EXTRA_INPUTS, TABLES, ExtraInputs
from flashtune.core.problem import Direction, Dtype, Problem
from flashtune.request.functions.tracing import trace
from flashtune.templates.common.args.gluon_table_gradients import can_add_elements
from tests.emulator.backward import as_array, emulate_backward
from tests.emulator.step_lists import kinds_of_blocks, steps_of_blocks
from tests.interpreter.test_flex_attention import BATCH, CASES, HEADS, KEYS, QUERIES, Case
from tests.problems.block_lists import visible_blocks, with_lists
from tests.problems.random_functions import FLOATS, INTS, random_functions, random_tables
from tests.support.fuzzing import fuzz_count
from tests.templates.backward.test_backward_hopper_emulated import (
    FAMILY,
    H200,
    SCALE,
    dq_of,
    kernel_of,
    row_places,
    statistics,
)

KV_HEADS = 2
# The emulator computes in float64.
ALLOWED = 1e-11
# Captured tensors, ints and floats.
Captured = tuple[list[Tensor], list[int], list[float]]


def error_of(
    functions: Functions,
    captured: Captured,
    head_dim: int,
    mistake: tuple[str, str] = ("", ""),
    **changes: Any,
) -> float:
    """Returns the largest error of gradients, relative to the largest gradient.

    `mistake` is a text of the kernel, and another in its place.
    """
    tables, ints, floats = captured
    problem = Problem(
        dtype=Dtype.BF16, head_dim=head_dim, value_head_dim=head_dim, heads=HEADS, kv_heads=KV_HEADS,
        batch=BATCH, seqlen_q=QUERIES, seqlen_kv=KEYS, functions=functions, direction=Direction.BACKWARD,
        deterministic=changes.pop("deterministic", False), block_mask=changes.pop("block_mask", 0),
    )  # fmt: skip
    assert FAMILY.supports(problem, H200) is None
    kernel, config = kernel_of(problem, **changes)
    assert mistake[0] in kernel.source
    if mistake[0]:
        kernel = msgspec.structs.replace(kernel, source=kernel.source.replace(*mistake))
    chance = torch.Generator().manual_seed(1)
    shapes = (HEADS, QUERIES), (KV_HEADS, KEYS), (KV_HEADS, KEYS)
    q, k, v = (
        torch.randn(BATCH, *shape, head_dim, generator=chance, dtype=torch.float64).requires_grad_()
        for shape in shapes
    )
    trained = [place for place, table in enumerate(functions.tables) if table.has_gradient]
    wide = [
        table.detach().double().requires_grad_() if place in trained else table
        for place, table in enumerate(tables)
    ]
    scores = q @ k.repeat_interleave(HEADS // KV_HEADS, 1).mT * SCALE
    extents = (BATCH, (-1, 1, 1, 1)), (HEADS, (-1, 1, 1)), (QUERIES, (-1, 1)), (KEYS, (-1,))
    batch, head, query, key = (torch.arange(extent).view(shape) for extent, shape in extents)
    own = Values(batch, head, query, key, torch.tensor(ints), torch.tensor(floats), tuple(wide), scores)
    if functions.score >= 0:
        scores = evaluate(functions, own, functions.score).expand_as(scores)
    visible = evaluate(functions, own, functions.mask) if functions.mask >= 0 else torch.tensor(True)
    lists = block_lists(problem)
    if problem.block_mask:
        kinds = torch.from_numpy(kinds_of_blocks(problem, lists))
        for axis, length in ((2, QUERIES), (3, KEYS)):
            kinds = kinds.repeat_interleave(problem.block_mask, axis).narrow(axis, 0, length)
        visible = (visible & (kinds > 0)) | (kinds > 1)
    scores = torch.where(visible, scores, -torch.inf)
    lse = scores.logsumexp(-1)
    weights = torch.where(scores == -torch.inf, 0.0, (scores - lse.nan_to_num(neginf=0.0)[..., None]).exp())
    out = weights @ v.repeat_interleave(HEADS // KV_HEADS, 1)
    dout = torch.randn(out.shape, generator=chance, dtype=torch.float64)
    inputs = q, k, v, *(wide[place] for place in trained)
    expected = torch.autograd.grad(out, inputs, dout, allow_unused=True, materialize_grads=True)
    rows = row_places(problem, config.block_m, None, 0)
    of_rows = [part.detach().flatten(0, 1) for part in (lse, (out * dout).sum(-1))]
    stats = statistics(problem, config, of_rows[0], of_rows[1], rows)
    read = {"q": q, "k": k, "v": v, "dout": dout, "workspace_0": stats}
    memory = {name: tensor.detach().flatten().numpy() for name, tensor in read.items()}
    memory |= {name: np.full(k.numel(), np.nan) for name in ("dk", "dv")}
    like = tuple(
        torch.empty(tensor.shape, dtype=torch.bfloat16, device="meta") for tensor in (q, k, v, q, q, q, k, v)
    )
    named: dict[str, Any] = {
        "function_ints": torch.tensor(integers_of(ints, tables), dtype=torch.int32),
        "function_floats": torch.tensor(floats),
        **dict(zip(TABLES, tables, strict=False)),
    }
    needed = function_tensors(problem) - {"full_counts"}
    side = NO_EXTRA_INPUTS._replace(**{name: value for name, value in named.items() if name in needed})
    captured_arrays = tuple(map(as_array, side.tensors))
    dtables = np.zeros(sum(wide[place].numel() for place in trained)) if trained else None
    if not kernel.writes("dtables"):
        assert not any(gradient.any() for gradient in expected[3:])
        dtables = None
    steps = (steps_of_blocks(problem, config, lists),) if problem.block_mask else ()
    like += tuple(tensor.to("meta") for tensor in lists.tensors)
    like_stats = torch.empty(stats.flatten(0, 1).shape, device="meta")
    workspaces = 2 if problem.deterministic else 1
    sums = emulate_backward(
        kernel, like, memory, like_stats, SCALE, workspaces, 2, captured_arrays, (), steps, dtables
    )
    made = (
        dq_of(sums, problem, config, rows),
        *(torch.from_numpy(memory[name]).view(k.shape) for name in ("dk", "dv")),
    )
    if dtables is not None:
        sizes = [wide[place].numel() for place in trained]
        parts = torch.from_numpy(dtables).split(sizes)
        made += tuple(part.view(wide[place].shape) for part, place in zip(parts, trained, strict=True))
    return max(
        ((one - other).abs().nan_to_num(torch.inf).max() / other.abs().max().clamp(min=1.0)).item()
        for one, other in zip(made, expected[: len(made)], strict=True)
    )


def block_lists(problem: Problem) -> ExtraInputs:
    """Random lists of a block mask, with full blocks first if there is a mask function."""
    if not problem.block_mask:
        return NO_EXTRA_INPUTS
    torch.manual_seed(5)
    side = with_lists(NO_EXTRA_INPUTS, visible_blocks(problem, 0.7))
    assert side.block_counts is not None
    if problem.functions.mask < 0:
        return side
    return side._replace(full_counts=side.block_counts // 2)


def error_of_case(name: str, head_dim: int, mistake: tuple[str, str] = ("", ""), **changes: Any) -> float:
    """Returns that of the functions of a case."""
    case = (CASES | MORE)[name]
    traced = trace(case.score, case.mask)
    captured = [table.detach() for table in traced.tables], [*traced.ints], [*traced.floats]
    functions = traced.functions
    if changes.pop("trains", False):
        floats = [place for place, table in enumerate(functions.tables) if table.dtype.kind is Kind.FLOAT]
        functions = functions.with_gradients(floats)
    return error_of(functions, captured, head_dim, mistake, **changes)


PAIRS, TEMPERATURE = torch.randn(HEADS, QUERIES, KEYS), torch.tensor(1.3)
FAR, NEAR = torch.full((BATCH,), 2**30, dtype=torch.int32), torch.full((KEYS,), 5 - 2**30, dtype=torch.int32)
MORE = {
    "far apart": Case(mask=lambda b, h, q, k: q - FAR[b] <= NEAR[k]),
    "pairs": Case(lambda s, b, h, q, k: s + PAIRS[h, q, k]),
    "learned cap": Case(lambda s, b, h, q, k: TEMPERATURE * torch.tanh(s / TEMPERATURE)),
}
TRAINED = (
    *("alibi", "relative bias", "relative bias from the end", "gate", "temperature", "nested", "rows"),
    *(name for name, case in MORE.items() if case.score),
)


@pytest.mark.slow
@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", CASES | MORE)
def test_gradients_are_those_of_autograd(name: str, head_dim: int) -> None:
    # The constants of gelu's derivative are in float32.
    assert error_of_case(name, head_dim) < (1e-8 if name == "activation" else ALLOWED)


@pytest.mark.slow
@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", TRAINED)
def test_gradients_of_captured_tensors_are_those_of_autograd(name: str, head_dim: int) -> None:
    assert error_of_case(name, head_dim, trains=True) < ALLOWED
    assert error_of_case(name, head_dim, trains=True, stagger_start=False, alternate_dq=False) < ALLOWED


@pytest.mark.slow
@pytest.mark.parametrize("name", ["softcap and window", "temperature", "causal", "alibi"])
@pytest.mark.parametrize(
    "changes",
    [{"deterministic": True}, {"stagger_start": False, "alternate_dq": False}, {"init_accumulators": False}],
    ids=["deterministic", "common start", "start at zero"],
)
def test_other_orders(name: str, changes: dict[str, Any]) -> None:
    assert error_of_case(name, 64, **changes) < ALLOWED


@pytest.mark.slow
@pytest.mark.parametrize("name", ["softcap and window", "temperature", "causal", "alibi", "relative bias"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("size", [64, 128])
def test_functions_with_block_masks(name: str, head_dim: int, size: int) -> None:
    assert error_of_case(name, head_dim, block_mask=size, trains=True) < ALLOWED


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(fuzz_count(20, 500)))
def test_random_functions(seed: int) -> None:
    functions, ints, order = random_functions(seed)
    trained = functions.with_gradients(range(len(functions.tables)))
    if seed % 2 and can_add_elements(derivatives(trained)):
        functions = trained
    captured = [random_tables(torch.Generator().manual_seed(seed))[place] for place in order]
    # The constant of the error function's derivative is in float32.
    assert error_of(functions, (captured, [INTS[place] for place in ints], [*FLOATS]), 64) < 1e-6


# A text of a kernel and another one in its place, by the name of the case.
MISTAKES = (
    ("causal", "<= (queries & -7)[None, :]", "< (queries & -7)[None, :]"),
    ("alibi", "head = gl.where(wraps, head + 1, head)", "head = gl.where(wraps, head, head)"),
    ("alibi", "start = (m_start - origin", "start = (m_start + 1 - origin"),
    ("alibi", "element_0 += ", "element_0 = "),
    ("relative bias", "gl.minimum(32, pair_7)", "gl.minimum(31, pair_7)"),
    ("relative bias", "(least == most) & (of_warps", "(of_warps"),
    ("relative bias", "(least != most)[:, None] & (change", "(change"),
    ("softcap and window", "gl.where(p == 0.0, 0.0, p * slope)", "p"),
    ("gate", "term_0.to(gl.float32) * dp", "term_0.to(gl.float32)"),
    (
        "gate",
        "add_to_queries_0(sums_of_queries(change), m_start",
        "add_to_queries_0(sums_of_queries(change), 0",
    ),
    ("temperature", "element_0 = gl.zeros_like(element_0)", "element_0 = element_0"),
    ("documents", "p = hide_by_function(", "_ = hide_by_function("),
)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "text", "wrong"), MISTAKES)
def test_wrong_kernels_have_other_gradients(name: str, text: str, wrong: str) -> None:
    assert not error_of_case(name, 64, (text, wrong), trains=True) < 1e-3
