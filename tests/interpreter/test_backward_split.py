"""The split backward family, run on the CPU and compared with what autograd makes of plain float64."""

from __future__ import annotations

import functools
import itertools
import random
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from torch import Tensor

from flashtune.backward import BackwardTensors, bind_backward
from flashtune.compilation import load_module
from flashtune.features import Bias
from flashtune.kernel import Specialization, specialization_of
from flashtune.problem import Causal, Direction, Dtype, Problem
from flashtune.side import Side
from flashtune.target import find_target
from flashtune.templates.backward_split.space import Products, SplitConfig
from flashtune.templates.family import why_not
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render
from tests.plain_masks import plain_attention

TARGET = find_target("h200")
FAMILY = find_family("backward_split")
SCALE = 0.3
# Queries and keys of packed sequences: empty ones, and on borders.
LENGTHS = ((19, 40), (0, 12), (7, 0), (16, 33), (33, 17))
# Hides keys that are seen otherwise, and has a gradient.
LEAST = -40.0
CAUSAL = pytest.mark.parametrize("causal", list(Causal))


class Call(NamedTuple):
    """What a backward pass is given, and the gradients that autograd finds."""

    tensors: BackwardTensors
    side: Side
    expected: dict[str, Tensor]


def a_problem(**changes: Any) -> Problem:
    problem = Problem(
        dtype=Dtype.FP32,
        head_dim=24,
        value_head_dim=16,
        heads=2,
        kv_heads=1,
        batch=2,
        seqlen_q=35,
        seqlen_kv=53,
        direction=Direction.BACKWARD,
    )
    return msgspec.structs.replace(problem, **changes)


def make_call(problem: Problem, *, with_dlse: bool = False) -> Call:
    """Tensors of a problem; what is written is NaN before. Packed sequences are those of `LENGTHS`."""
    torch.manual_seed(0)
    batch, queries, keys = problem.batch, problem.seqlen_q, problem.seqlen_kv
    side = Side(softcap=1.5 if problem.softcap else None)
    if problem.dropout:
        side = side._replace(seed=torch.randint(2**63 - 1, (1,)), dropout=0.3)
    sequences = batch
    if problem.packed:
        batch, sequences = 1, len(LENGTHS)
        own_q, own_k = ([one[axis] for one in LENGTHS] for axis in (0, 1))
        queries, keys = sum(own_q), sum(own_k)
        side = side._replace(cu_seqlens_q=starts(own_q), cu_seqlens_kv=starts(own_k))
    if problem.lengths:
        counts = [own - 5 * (own > 5) for own in own_k] if problem.packed else [keys - 7, 0, 16][:batch]
        side = side._replace(seqlens_kv=torch.tensor(counts, dtype=torch.int32))
    bias = torch.randn(batch, problem.heads, queries, keys) if problem.bias is not Bias.NONE else None
    if bias is not None:
        # Rows and blocks that nobody sees, the first of a row among them.
        hidden = torch.rand(bias.shape) < 0.3
        hidden[:, 0, 3:9] = True
        hidden[..., :20] = True
        bias = ~hidden if problem.bias is Bias.BOOLEAN else bias.masked_fill(hidden, LEAST)
    prefix = torch.tensor([23, 0, 5, 9, 70][:sequences], dtype=torch.int32)
    side = side._replace(
        slopes=torch.rand(sequences, problem.heads) if problem.alibi else None,
        bias=bias,
        sinks=torch.randn(problem.heads) * 3 if problem.sinks else None,
        prefix=prefix if problem.prefix else None,
    )
    q = torch.randn(batch, queries, problem.heads, problem.head_dim).transpose(1, 2)
    k = torch.randn(batch, keys, problem.kv_heads, problem.head_dim).transpose(1, 2)
    v = torch.randn(batch, keys, problem.kv_heads, problem.value_head_dim).transpose(1, 2)
    return differentiate(problem, (q, k, v), side, with_dlse=with_dlse)


def starts(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def differentiate(
    problem: Problem, given: tuple[Tensor, Tensor, Tensor], side: Side, *, with_dlse: bool
) -> Call:
    """Runs the forward pass and its gradient in float64."""
    leaves = {name: one.detach().requires_grad_() for name, one in zip("qkv", given, strict=True)}
    laid = {"slopes": side.slopes, "bias": side.bias if problem.bias is Bias.ADDITIVE else None}
    leaves |= {name: one.detach().requires_grad_() for name, one in laid.items() if one is not None}
    followed = side._replace(slopes=leaves.get("slopes"), bias=leaves.get("bias", side.bias))
    out, lse = plain_attention(problem, leaves["q"], leaves["k"], leaves["v"], followed, SCALE)
    dout = torch.randn(out.shape)
    dlse = torch.randn(lse.shape) if with_dlse else None
    seen = ~lse.isneginf()
    loss = (out * dout).sum() + (0 if dlse is None else (lse[seen] * dlse[seen]).sum())
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    written = [f"d{name}" for name in leaves]
    tensors = BackwardTensors(
        *given,
        out.detach().float(),
        lse.detach().float(),
        dout,
        **{name: torch.full_like(one, torch.nan) for name, one in zip(written, leaves.values(), strict=True)},
        dlse=dlse,
    )
    return Call(tensors, side, dict(zip(written, gradients, strict=True)))


def check(problem: Problem, config: SplitConfig, call: Call, index_bits: int = 32) -> None:
    tensors, side, expected = call
    found = specialization_of(tensors.planned, tensors.dlse is not None)
    specialization = msgspec.structs.replace(found, index_bits=max(found.index_bits, index_bits))
    assert why_not(FAMILY, problem, TARGET, specialization) is None
    kernel = render(FAMILY, problem, config, specialization)
    bind_backward(kernel, TARGET, tensors, side)(tensors, SCALE, side)
    for name, right in expected.items():
        given = getattr(tensors, name).double()
        torch.testing.assert_close(
            given, right.double(), atol=1e-4, rtol=1e-4, msg=functools.partial("{}: {}".format, name)
        )


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
        two_phases=pick.choice((True, False)),
        decomposed=pick.choice((False, True)),
        long_first=pick.choice((False, True)),
        heads_inner=pick.choice((False, True)),
    )
    return msgspec.structs.replace(config, **changes)


@CAUSAL
@pytest.mark.parametrize("two_phases", [False, True])
@pytest.mark.parametrize("lengths", [(35, 53), (53, 35), (64, 64), (1, 40)], ids=str)
def test_lengths(causal: Causal, two_phases: bool, lengths: tuple[int, int]) -> None:
    problem = a_problem(causal=causal, seqlen_q=lengths[0], seqlen_kv=lengths[1])
    check(problem, a_config(f"{causal} {lengths}", two_phases=two_phases), make_call(problem))


@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (6, 2), (3, 1)], ids=str)
def test_heads(heads: tuple[int, int]) -> None:
    problem = a_problem(heads=heads[0], kv_heads=heads[1], causal=Causal.BOTTOM_RIGHT)
    check(problem, a_config(str(heads)), make_call(problem, with_dlse=True), 64)


@pytest.mark.parametrize("widths", [(16, 16), (64, 32), (40, 80), (8, 24), (160, 96), (256, 256)], ids=str)
@pytest.mark.parametrize("decomposed", [False, True])
def test_head_dims(widths: tuple[int, int], decomposed: bool) -> None:
    problem = a_problem(head_dim=widths[0], value_head_dim=widths[1], causal=Causal.TOP_LEFT)
    check(problem, a_config(str(widths), decomposed=decomposed), make_call(problem))


FEATURES: dict[str, dict[str, Any]] = {
    "window": {"window_left": 11},
    "window_right": {"window_left": 21, "window_right": 6},
    "right_alone": {"window_right": 3},
    "wide_window": {"window_left": 2**31 - 1, "window_right": 2**31 - 1},
    "first_tokens": {"window_left": 9, "first_tokens": 4},
    "chunk": {"chunk": 16},
    "odd_chunk": {"chunk": 13, "first_tokens": 18},
    "prefix": {"prefix": True},
    "softcap": {"softcap": True},
    "alibi": {"alibi": True},
    "additive": {"bias": Bias.ADDITIVE},
    "boolean": {"bias": Bias.BOOLEAN},
    "sinks": {"sinks": True},
    "dropout": {"dropout": True},
    "packed": {"packed": 75},
    "lengths": {"lengths": True},
}


def combined(*names: str, **changes: Any) -> Problem | None:
    """A problem of several features, or None where they contradict each other."""
    asked: dict[str, Any] = {}
    for name in names:
        for field, value in FEATURES[name].items():
            if asked.setdefault(field, value) != value:
                return None
    problem = a_problem(**asked, **changes)
    return None if FAMILY.supports(problem, TARGET) else problem


@pytest.mark.parametrize("name", FEATURES)
@CAUSAL
def test_each_feature(name: str, causal: Causal) -> None:
    problem = combined(name, causal=causal, heads=3, kv_heads=3 if causal is Causal.NONE else 1)
    assert problem is not None
    # Without a second phase all blocks are masked alike.
    two_phases = causal is not Causal.TOP_LEFT
    check(problem, a_config(f"{name} {causal}", two_phases=two_phases), make_call(problem))


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


def test_keys_that_a_bias_hides_are_as_good_as_masked_ones() -> None:
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


def test_every_run_gives_the_same_bits() -> None:
    problem = a_problem(deterministic=True, kv_heads=2)
    runs = []
    for _ in range(2):
        call = make_call(problem)
        check(problem, a_config("bits"), call)
        runs.append(call.tensors)
    assert all(torch.equal(getattr(runs[0], name), getattr(runs[1], name)) for name in ("dq", "dk", "dv"))


def test_the_usual_tiles() -> None:
    problem = a_problem(head_dim=64, value_head_dim=64, heads=1, batch=1, seqlen_q=66, seqlen_kv=70)
    config = FAMILY.default(problem, TARGET)
    assert isinstance(config, SplitConfig)
    check(problem, msgspec.structs.replace(config, products=Products.TF32X3), make_call(problem))


@pytest.mark.parametrize("asked", [{}, {"dropout": True}, {"dropout": True, "alibi": True}], ids=str)
def test_a_kernel_stands_alone(asked: dict[str, bool]) -> None:
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
