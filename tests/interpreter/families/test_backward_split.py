"""Tests of the split backward family in the interpreter, against float64 autograd."""

from __future__ import annotations

import functools
import itertools
import random
from typing import Any

import msgspec
import pytest
import torch

from flashtune.core.kernel import Specialization
from flashtune.core.problem import Bias, Causal
from flashtune.launch.compilation import load_module
from flashtune.templates.backward_split.space import SplitConfig
from flashtune.templates.common.precision import InputPrecision
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render
from tests.problems import backward_calls
from tests.problems.backward_calls import FEATURES, SCALE, TARGET, Call, a_problem, make_call

FAMILY = find_family("backward_split")
check = functools.partial(backward_calls.check_gradients, FAMILY)
combined = functools.partial(backward_calls.combined, FAMILY)
CAUSAL = pytest.mark.parametrize("causal", list(Causal))


def a_config(seed: str, **changes: Any) -> SplitConfig:
    """Small tiles in any order."""
    pick = random.Random(seed)
    config = SplitConfig(
        block_m=pick.choice((16, 32)),
        block_n=pick.choice((16, 32)),
        num_warps=4,
        num_stages=1,
        dq_block_m=pick.choice((16, 32)),
        dq_block_n=pick.choice((16, 32)),
        dq_warps=4,
        dq_stages=1,
        split_masked_loop=pick.choice((True, False)),
        split_head_dim=pick.choice((False, True)),
        lpt=pick.choice((False, True)),
        heads_innermost=pick.choice((False, True)),
    )
    return msgspec.structs.replace(config, **changes)


@pytest.mark.sampled
@CAUSAL
@pytest.mark.parametrize("split_masked_loop", [False, True])
@pytest.mark.parametrize("lengths", [(35, 53), (53, 35), (64, 64), (1, 40)], ids=str)
def test_lengths(causal: Causal, split_masked_loop: bool, lengths: tuple[int, int]) -> None:
    problem = a_problem(causal=causal, seqlen_q=lengths[0], seqlen_kv=lengths[1])
    check(problem, a_config(f"{causal} {lengths}", split_masked_loop=split_masked_loop), make_call(problem))


@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (6, 2), (3, 1)], ids=str)
def test_heads(heads: tuple[int, int]) -> None:
    problem = a_problem(heads=heads[0], kv_heads=heads[1], causal=Causal.BOTTOM_RIGHT)
    check(problem, a_config(str(heads)), make_call(problem, with_dlse=True), 64)


@pytest.mark.parametrize("widths", [(16, 16), (64, 32), (40, 80), (8, 24), (160, 96), (256, 256)], ids=str)
@pytest.mark.parametrize("split_head_dim", [False, True])
def test_head_dims(widths: tuple[int, int], split_head_dim: bool) -> None:
    problem = a_problem(head_dim=widths[0], value_head_dim=widths[1], causal=Causal.TOP_LEFT)
    check(problem, a_config(str(widths), split_head_dim=split_head_dim), make_call(problem))


@pytest.mark.sampled
@pytest.mark.parametrize("name", FEATURES)
@CAUSAL
def test_each_feature(name: str, causal: Causal) -> None:
    problem = combined(name, causal=causal, heads=3, kv_heads=3 if causal is Causal.NONE else 1)
    assert problem is not None
    # Without a second phase all blocks are masked alike.
    split_masked_loop = causal is not Causal.TOP_LEFT
    check(problem, a_config(f"{name} {causal}", split_masked_loop=split_masked_loop), make_call(problem))


# All of them passed; some are enough from day to day.
PAIRS = random.Random(0).sample(list(itertools.combinations(FEATURES, 2)), 24)


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_pairs_of_features(pair: tuple[str, str]) -> None:
    seed = "-".join(pair)
    pick = random.Random(seed)
    problem = combined(*pair, causal=pick.choice(list(Causal)), head_dim=16)
    if problem is None:
        assert {"packed"} & set(pair) or len({*FEATURES[pair[0]], *FEATURES[pair[1]]}) < 4
        return
    check(problem, a_config(seed), make_call(problem, with_dlse=pick.choice((True, False))), 64)


def test_keys_hidden_by_a_bias_are_masked() -> None:
    problem = a_problem(bias=Bias.BOOLEAN, causal=Causal.BOTTOM_RIGHT)
    masked = make_call(problem)
    seen = masked.side.bias
    assert seen is not None
    hiding = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
    tensors = masked.tensors._replace(dbias=torch.full_like(hiding, torch.nan))
    call = Call(tensors, masked.side._replace(bias=hiding), masked.expected)
    check(msgspec.structs.replace(problem, bias=Bias.ADDITIVE), a_config("hiding"), call)
    assert tensors.dbias is not None
    assert not tensors.dbias[~seen].any()


def test_gradient_of_a_constant_bias_is_not_written() -> None:
    problem = a_problem(bias=Bias.ADDITIVE, causal=Causal.BOTTOM_RIGHT)
    call = make_call(problem)
    expected = {name: one for name, one in call.expected.items() if name != "dbias"}
    check(problem, a_config("constant"), Call(call.tensors._replace(dbias=None), call.side, expected))


def test_runs_are_deterministic() -> None:
    problem = a_problem(deterministic=True, kv_heads=2)
    runs = []
    for _ in range(2):
        call = make_call(problem)
        check(problem, a_config("bits"), call)
        runs.append(call.tensors)
    assert all(torch.equal(getattr(runs[0], name), getattr(runs[1], name)) for name in ("dq", "dk", "dv"))


def test_default_tiles() -> None:
    problem = a_problem(head_dim=64, value_head_dim=64, heads=1, batch=1, seqlen_q=66, seqlen_kv=70)
    config = FAMILY.default(problem, TARGET)
    assert isinstance(config, SplitConfig)
    check(problem, msgspec.structs.replace(config, input_precision=InputPrecision.TF32X3), make_call(problem))


@pytest.mark.tritons
@pytest.mark.parametrize("asked", [{}, {"dropout": True}, {"dropout": True, "alibi": True}], ids=str)
def test_rendered_module_is_standalone(asked: dict[str, bool]) -> None:
    problem = a_problem(head_dim=16, kv_heads=2, **asked)
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
    # The same scores: both the queries and their factor are negated.
    turned = backward(-q, k, v, out, lse, dout, -SCALE)
    torch.testing.assert_close(turned[0], -found[0])
    nothing = backward(q[:, :, :0], k, v, out[:, :, :0], lse[:, :, :0], dout[:, :, :0])
    assert not nothing[1].any()
