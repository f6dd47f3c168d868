"""Tests of emulated Hopper backward kernels against the reference, with and without dropout."""

import math
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from flashtune import testing
from flashtune.core.features.records import NO_EXTRA_INPUTS, ExtraInputs
from flashtune.core.kernel import Kernel
from flashtune.core.problem import Causal, Problem
from flashtune.request.dropout import row_states
from flashtune.templates.backward_hopper.space import HopperBackwardConfig, width_of
from flashtune.templates.rendering import render
from tests.emulator.gradients import emulate_backward
from tests.problems.hopper_backward import FAMILY, H200, PLAIN, a_problem, like

SEED = torch.tensor([0x7123456789ABCDEF])
# A number that has an exact spelling in float32.
DROPOUT = 0.3125
SCALE = 0.2


def a_small(head_dim: int, causal: Causal, **changes: Any) -> Problem:
    shape = {"heads": 2, "kv_heads": 1, "batch": 1, "seqlen_q": 150, "seqlen_kv": 200, **changes}
    return a_problem(head_dim, causal=causal, **shape)


def worst_error(kernel: Kernel, problem: Problem, config: HopperBackwardConfig) -> float:
    """Between what a kernel makes of random tensors and the reference, of dq, dk and dv."""
    chance = torch.Generator().manual_seed(1)
    planned = [torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for tensor in like(problem)]
    q, k, v, _, dout, *_ = (
        torch.randn(tensor.shape, generator=chance, dtype=torch.float64) for tensor in planned
    )
    extra = ExtraInputs(seed=SEED, dropout=DROPOUT) if problem.dropout else NO_EXTRA_INPUTS
    expected = testing.reference(testing.Inputs(problem, q, k, v, SCALE, extra, dout))
    out, lse = expected.out.exact, expected.lse.exact
    # The values that `prepare` writes; another test checks `prepare`.
    heads = problem.batch * problem.heads
    tiles = math.ceil(problem.seqlen_q / config.block_m)
    stats = torch.zeros(heads, 4 if problem.dropout else 2, tiles * config.block_m, dtype=torch.float64)
    share = 1 - DROPOUT if problem.dropout else 1.0
    lengths = slice(problem.seqlen_q)
    row_lse = lse.reshape(heads, -1) + math.log(share)
    stats[:, 0] = -math.inf
    stats[:, 0, lengths] = -row_lse / SCALE if config.init_accumulators else -row_lse / math.log(2)
    stats[:, 1, lengths] = -(out * dout).sum(-1).reshape(heads, -1) * share
    if problem.dropout:
        places = torch.arange(stats.shape[2])
        for row, words in enumerate(row_states(SEED, torch.arange(heads)[:, None], places), start=2):
            stats[:, row] = words.double()
    memory = {name: tensor.numpy().reshape(-1) for name, tensor in zip("qkv", (q, k, v), strict=True)}
    memory |= {"dout": dout.numpy().reshape(-1), "workspace_0": stats.numpy().reshape(-1)}
    memory |= {"dk": np.full(k.numel(), np.nan), "dv": np.full(v.numel(), np.nan)}
    width = width_of(problem)
    numbers = (SCALE, DROPOUT) if problem.dropout else (SCALE,)
    side = (torch.empty(1, device="meta"),) if problem.dropout else ()
    sums = emulate_backward(kernel, (*planned, *side), memory, numbers, config, width)
    dq = sums[:, lengths, : problem.head_dim] * SCALE
    made = {"dq": dq, "dk": memory["dk"], "dv": memory["dv"]}
    worst = 0.0
    for gradient in (expected.dq, expected.dk, expected.dv):
        assert gradient is not None
        error = float(np.abs(made[gradient.name].reshape(-1) - gradient.exact.numpy().reshape(-1)).max())
        worst = max(worst, math.inf if math.isnan(error) else error)
    return worst


def config_of(problem: Problem, **changes: Any) -> HopperBackwardConfig:
    default = FAMILY.default(problem, H200)
    return msgspec.convert({**msgspec.to_builtins(default), **changes}, HopperBackwardConfig)


CHANGES: tuple[dict[str, Any], ...] = (
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
def test_gradients_match_the_reference(head_dim: int, causal: Causal, dropout: bool) -> None:
    problem = a_small(head_dim, causal, dropout=dropout)
    for changes in CHANGES:
        config = config_of(problem, **changes)
        kernel = render(FAMILY, problem, config, PLAIN)
        assert worst_error(kernel, problem, config) < 1e-11, changes


def test_batches_have_independent_dropout() -> None:
    problem = a_small(64, Causal.NONE, dropout=True, batch=2, seqlen_q=70, seqlen_kv=70)
    config = config_of(problem)
    assert worst_error(render(FAMILY, problem, config, PLAIN), problem, config) < 1e-11


@pytest.mark.slow
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("(n_start + keys).to(gl.uint32)", "keys.to(gl.uint32)"),
        ("[stat + 3, row]", "[stat + 2, row]"),
        ("gl.abs(p) *", "gl.maximum(p, 0.0) *"),
        ("p_low = gl.maximum(p, 0.0)", "p_low = gl.abs(p)"),
        ("DOUT_BYTES = gl.constexpr(", "DOUT_BYTES = gl.constexpr(0 * "),
    ],
)
def test_emulator_detects_broken_kernels(right: str, wrong: str) -> None:
    problem = a_small(64, Causal.NONE, dropout=True)
    config = config_of(problem)
    kernel = render(FAMILY, problem, config, PLAIN)
    assert right in kernel.source
    broken = msgspec.structs.replace(kernel, source=kernel.source.replace(right, wrong))
    try:
        error = worst_error(broken, problem, config)
    except RuntimeError:
        return
    assert not error < 1e-3
