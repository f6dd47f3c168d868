"""Tests of the portable backward families in the interpreter, against float64 autograd."""

import functools
import itertools
import random
from typing import Any

import msgspec
import pytest
import torch

from flashtune.core.config import Config
from flashtune.core.kernel import Kernel, Specialization
from flashtune.core.problem import Bias, Causal, Problem
from flashtune.launch.compilation import load_module
from flashtune.templates.backward_fused.space import Reduction
from flashtune.templates.common.precision import InputPrecision
from flashtune.templates.family import Family, unsupported_reason
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render
from flashtune.verification import check as proof
from flashtune.verification.cases import Level
from tests.interpreter.families.kernel_calls import small_config
from tests.problems import backward_calls
from tests.problems.backward_calls import (
    SCALE,
    TARGET,
    Call,
    a_problem,
    check_gradients,
    combined,
    make_call,
)
from tests.problems.kernel_cases import BOTH_PASSES
from tests.support.values import present

SPLIT, FUSED = (find_family(name) for name in ("backward_split", "backward_fused"))
CPU = torch.device("cpu")
BY_FAMILY = pytest.mark.parametrize("family", [SPLIT, FUSED], ids=lambda family: family.name)
CAUSAL = pytest.mark.parametrize("causal", list(Causal))


def check(
    family: Family, problem: Problem, seed: str, *, dlse: bool = False, index_bits: int = 32, **config: Any
) -> None:
    """Compares gradients for small tiles in any order."""
    call = make_call(problem, with_dlse=dlse)
    check_gradients(family, problem, small_config(family, seed, **config), call, index_bits)


@pytest.mark.sampled
@BY_FAMILY
@CAUSAL
@pytest.mark.parametrize("split_masked_loop", [False, True])
@pytest.mark.parametrize("lengths", [(35, 53), (53, 35), (64, 64), (1, 40)], ids=str)
def test_lengths(family: Family, causal: Causal, split_masked_loop: bool, lengths: tuple[int, int]) -> None:
    problem = a_problem(causal=causal, seqlen_q=lengths[0], seqlen_kv=lengths[1])
    check(family, problem, f"{causal} {lengths}", split_masked_loop=split_masked_loop)


@pytest.mark.sampled
@BY_FAMILY
@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (6, 2), (3, 1)], ids=str)
def test_heads(family: Family, heads: tuple[int, int]) -> None:
    problem = a_problem(heads=heads[0], kv_heads=heads[1], causal=Causal.BOTTOM_RIGHT)
    check(family, problem, str(heads), dlse=True, index_bits=64)


WIDTHS = [(SPLIT, widths) for widths in ((16, 16), (64, 32), (40, 80), (8, 24), (160, 96), (256, 256))]
WIDTHS += [(FUSED, widths) for widths in ((64, 32), (10, 80), (160, 96))]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("family", "widths"), [pytest.param(*row, id=f"{row[0].name}-{row[1]}") for row in WIDTHS]
)
@pytest.mark.parametrize("split_head_dim", [False, True])
def test_head_dims(family: Family, widths: tuple[int, int], split_head_dim: bool) -> None:
    problem = a_problem(head_dim=widths[0], value_head_dim=widths[1], causal=Causal.TOP_LEFT)
    check(family, problem, str(widths), split_head_dim=split_head_dim)


@pytest.mark.sampled
@BY_FAMILY
@pytest.mark.parametrize("name", BOTH_PASSES)
@CAUSAL
def test_each_feature(family: Family, name: str, causal: Causal) -> None:
    heads = {"heads": 3, "kv_heads": 3 if causal is Causal.NONE else 1}
    problem = present(combined(family, name, causal=causal, head_dim=16, **heads))
    # Without a second phase all blocks are masked alike.
    check(family, problem, f"{name} {causal}", split_masked_loop=causal is not Causal.TOP_LEFT)


# All of them passed; some are enough from day to day.
PAIRS = random.Random(0).sample(list(itertools.combinations(BOTH_PASSES, 2)), 8)


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_pairs_of_features(pair: tuple[str, str]) -> None:
    seed = "-".join(pair)
    pick = random.Random(seed)
    problem = combined(SPLIT, *pair, causal=pick.choice(list(Causal)), head_dim=16)
    if problem is None:
        assert {"packed"} & set(pair) or len({*BOTH_PASSES[pair[0]], *BOTH_PASSES[pair[1]]}) < 4
        return
    check(SPLIT, problem, seed, dlse=pick.choice((True, False)), index_bits=64)


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
    problem = present(combined(FUSED, *names, head_dim=16, causal=Causal.BOTTOM_RIGHT))
    check(FUSED, problem, "-".join(names), dlse=True, index_bits=64)


@BY_FAMILY
def test_gradient_of_a_constant_bias_is_not_written(family: Family) -> None:
    problem = a_problem(bias=Bias.ADDITIVE, causal=Causal.BOTTOM_RIGHT)
    call = make_call(problem)
    expected = {name: gradient for name, gradient in call.expected.items() if name != "dbias"}
    call = Call(call.tensors._replace(dbias=None), call.side, expected)
    check_gradients(family, problem, small_config(family, "constant"), call)


def test_keys_hidden_by_a_bias_are_masked() -> None:
    problem = a_problem(bias=Bias.BOOLEAN, causal=Causal.BOTTOM_RIGHT)
    masked = make_call(problem)
    seen = present(masked.side.bias)
    hiding = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
    tensors = masked.tensors._replace(dbias=torch.full_like(hiding, torch.nan))
    call = Call(tensors, masked.side._replace(bias=hiding), masked.expected)
    hidden = msgspec.structs.replace(problem, bias=Bias.ADDITIVE)
    check_gradients(SPLIT, hidden, small_config(SPLIT, "hiding"), call)
    assert not present(tensors.dbias)[~seen].any()


def test_runs_are_deterministic() -> None:
    problem = a_problem(deterministic=True, kv_heads=2)
    runs = []
    for _ in range(2):
        call = make_call(problem)
        check_gradients(SPLIT, problem, small_config(SPLIT, "bits"), call)
        runs.append(call.tensors)
    assert all(torch.equal(getattr(runs[0], name), getattr(runs[1], name)) for name in ("dq", "dk", "dv"))


@BY_FAMILY
def test_products_in_parts(family: Family) -> None:
    problem = a_problem(head_dim=16, batch=1)
    check(family, problem, "parts", input_precision=InputPrecision.TF32X3)


def test_default_tiles() -> None:
    problem = a_problem(head_dim=64, value_head_dim=64, heads=1, batch=1, seqlen_q=66, seqlen_kv=70)
    check_gradients(SPLIT, problem, SPLIT.default(problem, TARGET), make_call(problem))


def test_out_of_bounds_keys_do_not_contribute() -> None:
    # A log-sum-exp far below zero: the weight of a score of zero is infinite.
    problem = a_problem(seqlen_kv=37)
    inputs = backward_calls.make_inputs(problem)
    inputs.q[..., 0], inputs.k[..., 0] = 18.5, -18.5
    followed = backward_calls.differentiate(inputs)
    assert followed.tensors.lse.max() < -89
    for split_masked_loop in (True, False):
        written = {
            name: torch.full_like(getattr(followed.tensors, name), torch.nan) for name in followed.expected
        }
        again = followed._replace(tensors=followed.tensors._replace(**written))
        config = small_config(FUSED, "", block_m=16, block_n=32, split_masked_loop=split_masked_loop)
        check_gradients(FUSED, problem, config, again, tolerance=1e-3)


def _proven(problem: Problem, config: Config, kernel: Kernel) -> bool:
    return proof.check_rendered(kernel, problem, config, TARGET, CPU, Level.QUICK, seed=5).passed


@pytest.mark.parametrize("broken", ["", "dq_tile = tl.dot", "nothing = tl.zeros", "+ start // BLOCK_M"])
def test_verification_accepts_only_correct_kernels(broken: str) -> None:
    problem = a_problem(seqlen_q=40, seqlen_kv=40, causal=Causal.BOTTOM_RIGHT)
    config = small_config(FUSED, "", (16, 16), transpose_dq=False, reduction=Reduction.ATOMICS)
    kernel = render(FUSED, problem, config, Specialization())
    instead = {
        "dq_tile = tl.dot": "dq_tile = 0.99 * tl.dot",
        "nothing = tl.zeros": "nothing = 1e-2 + tl.zeros",
        "+ start // BLOCK_M": "",
    }
    source = kernel.source.replace(broken, instead[broken]) if broken else kernel.source
    kernel = msgspec.structs.replace(kernel, source=source)
    assert _proven(problem, config, kernel) == (not broken)


def test_deterministic_gradients_are_unsupported() -> None:
    reason = unsupported_reason(FUSED, a_problem(deterministic=True), TARGET, Specialization())
    assert reason == "backward_fused has no deterministic"


@pytest.mark.tritons
@pytest.mark.sampled
@BY_FAMILY
@pytest.mark.parametrize("features", [{}, {"dropout": True, "alibi": True}], ids=str)
def test_rendered_module_is_standalone(family: Family, features: dict[str, bool]) -> None:
    problem = a_problem(head_dim=16, kv_heads=2, **features)
    call = make_call(problem)
    q, k, v, out, lse, dout, *_ = call.tensors
    kernel = render(family, problem, small_config(family, "alone"), Specialization())
    extra = {name: getattr(call.side, name) for name in kernel.all_side}
    backward = functools.partial(load_module(kernel).attention_backward, **extra)
    gradients = backward(q, k, v, out, lse, dout, SCALE)
    for gradient, right in zip(gradients, call.expected.values(), strict=True):
        torch.testing.assert_close(gradient.double(), right.double(), atol=1e-4, rtol=1e-4)
    # The same scores: both the queries and their factor are negated.
    negated = backward(-q, k, v, out, lse, dout, -SCALE)
    torch.testing.assert_close(negated[0], -gradients[0])
    nothing = backward(q[:, :, :0], k, v, out[:, :, :0], lse[:, :, :0], dout[:, :, :0])
    assert not nothing[1].any()
