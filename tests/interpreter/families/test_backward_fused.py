"""Tests of the fused backward family in the interpreter, against float64 autograd."""

from __future__ import annotations

import functools
import random
from typing import Any

import msgspec
import pytest
import torch

from flashtune.core.kernel import Kernel, Specialization
from flashtune.core.problem import Bias, Causal, Problem
from flashtune.launch.compilation import load_module
from flashtune.templates.backward_fused.space import FusedConfig, Reduction
from flashtune.templates.common.precision import InputPrecision
from flashtune.templates.family import unsupported_reason
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render
from flashtune.verification import check as proof
from flashtune.verification.cases import Level
from tests.problems import backward_calls
from tests.problems.backward_calls import FEATURES, SCALE, TARGET, Call, a_problem, make_call

FAMILY = find_family("backward_fused")
CPU = torch.device("cpu")
check = functools.partial(backward_calls.check_gradients, FAMILY)
combined = functools.partial(backward_calls.combined, FAMILY)


def a_config(seed: str, **changes: Any) -> FusedConfig:
    """Small tiles in any order."""
    pick = random.Random(seed)
    config = FusedConfig(
        block_m=pick.choice((16, 32)),
        block_n=pick.choice((16, 32)),
        num_warps=4,
        num_stages=1,
        reduction=pick.choice(tuple(Reduction)),
        split_masked_loop=pick.choice((True, False)),
        transpose_dq=pick.choice((False, True)),
        split_head_dim=pick.choice((False, True)),
        heads_innermost=pick.choice((False, True)),
    )
    return msgspec.structs.replace(config, **changes)


@pytest.mark.parametrize("causal", list(Causal))
@pytest.mark.parametrize("lengths", [(35, 53), (53, 35), (1, 40)], ids=str)
def test_lengths(causal: Causal, lengths: tuple[int, int]) -> None:
    problem = a_problem(causal=causal, seqlen_q=lengths[0], seqlen_kv=lengths[1])
    check(problem, a_config(f"{causal} {lengths}"), make_call(problem))


@pytest.mark.parametrize("shape", [(6, 2, 64, 32), (3, 3, 10, 80), (2, 1, 160, 96)], ids=str)
def test_heads_and_head_dims(shape: tuple[int, int, int, int]) -> None:
    heads, kv_heads, head_dim, value_head_dim = shape
    problem = a_problem(heads=heads, kv_heads=kv_heads, head_dim=head_dim, value_head_dim=value_head_dim)
    check(problem, a_config(str(shape)), make_call(problem, with_dlse=True), 64)


@pytest.mark.parametrize("name", FEATURES)
def test_each_feature(name: str) -> None:
    pick = random.Random(name)
    problem = combined(name, causal=pick.choice(list(Causal)), head_dim=16)
    assert problem is not None
    check(problem, a_config(name), make_call(problem))


@pytest.mark.parametrize(
    "names",
    [
        ("packed", "lengths", "alibi", "window"),
        ("additive", "chunk", "softcap", "lengths"),
        ("prefix", "first_tokens", "boolean", "sinks"),
        ("packed", "dropout", "alibi", "window_right"),
    ],
    ids="-".join,
)
def test_features_together(names: tuple[str, ...]) -> None:
    problem = combined(*names, head_dim=16, causal=Causal.BOTTOM_RIGHT)
    assert problem is not None
    check(problem, a_config("-".join(names)), make_call(problem, with_dlse=True), 64)


def test_out_of_bounds_keys_do_not_contribute() -> None:
    # A log-sum-exp far below zero: the weight of a score of zero is infinite.
    problem = a_problem(seqlen_kv=37)
    inputs = backward_calls.make_inputs(problem)
    inputs.q[..., 0], inputs.k[..., 0] = 18.5, -18.5
    followed = backward_calls.differentiate(inputs)
    assert followed.tensors.lse.max() < -89
    for split_masked_loop in (True, False):
        tensors = {name: torch.full_like(one, torch.nan) for name, one in _written(followed)}
        again = followed._replace(tensors=followed.tensors._replace(**tensors))
        check(
            problem,
            a_config("missing", block_m=16, block_n=32, split_masked_loop=split_masked_loop),
            again,
            32,
            1e-3,
        )


def _written(call: backward_calls.Call) -> list[tuple[str, torch.Tensor]]:
    return [(name, getattr(call.tensors, name)) for name in call.expected]


def _proven(problem: Problem, config: FusedConfig, kernel: Kernel) -> bool:
    return proof.check_rendered(kernel, problem, config, TARGET, CPU, Level.QUICK, seed=5).passed


@pytest.mark.parametrize("broken", ["", "dq_tile = tl.dot", "nothing = tl.zeros", "+ start // BLOCK_M"])
def test_verification_accepts_only_correct_kernels(broken: str) -> None:
    problem = a_problem(seqlen_q=40, seqlen_kv=40, causal=Causal.BOTTOM_RIGHT)
    config = a_config("proof", block_m=16, block_n=16, transpose_dq=False, reduction=Reduction.ATOMICS)
    kernel = render(FAMILY, problem, config, Specialization())
    instead = {
        "dq_tile = tl.dot": "dq_tile = 0.99 * tl.dot",
        "nothing = tl.zeros": "nothing = 1e-2 + tl.zeros",
        "+ start // BLOCK_M": "",
    }
    source = kernel.source.replace(broken, instead[broken]) if broken else kernel.source
    kernel = msgspec.structs.replace(kernel, source=source)
    assert _proven(problem, config, kernel) == (not broken)


def test_deterministic_gradients_are_unsupported() -> None:
    asked = a_problem(deterministic=True)
    assert (
        unsupported_reason(FAMILY, asked, TARGET, Specialization()) == "backward_fused has no deterministic"
    )


def test_gradient_of_a_constant_bias_is_not_written() -> None:
    problem = a_problem(bias=Bias.ADDITIVE, causal=Causal.BOTTOM_RIGHT)
    call = make_call(problem)
    expected = {name: one for name, one in call.expected.items() if name != "dbias"}
    check(problem, a_config("constant"), Call(call.tensors._replace(dbias=None), call.side, expected))


def test_products_in_two_halves() -> None:
    problem = a_problem(head_dim=16, batch=1)
    check(problem, a_config("halves", input_precision=InputPrecision.TF32X3), make_call(problem))


@pytest.mark.tritons
def test_rendered_module_is_standalone() -> None:
    problem = a_problem(head_dim=16, kv_heads=2, alibi=True, dropout=True)
    call = make_call(problem)
    q, k, v, out, lse, dout, *_ = call.tensors
    kernel = render(FAMILY, problem, a_config("alone"), Specialization())
    module = load_module(kernel)
    backward = functools.partial(
        module.attention_backward, **{name: getattr(call.side, name) for name in kernel.all_side}
    )
    found = backward(q, k, v, out, lse, dout, SCALE)
    for gradient, right in zip(found, call.expected.values(), strict=True):
        torch.testing.assert_close(gradient.double(), right.double(), atol=1e-4, rtol=1e-4)
    nothing = backward(q[:, :, :0], k, v, out[:, :, :0], lse[:, :, :0], dout[:, :, :0])
    assert not nothing[1].any()
