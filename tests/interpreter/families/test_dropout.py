"""Tests of dropout in the interpreter: masks and their reproducibility."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import flashtune
from flashtune import testing
from flashtune.core.errors import ProblemError
from flashtune.core.features.records import ExtraInputs
from flashtune.core.kernel import specialization_of
from flashtune.core.problem import Causal
from flashtune.core.target import find_target
from flashtune.launch.binding import bind
from flashtune.launch.tensors import ForwardTensors
from flashtune.request.dropout import kept_weights
from flashtune.templates.forward_masked.space import MaskedConfig
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render

TARGET = find_target("h200")
FAMILY = find_family("forward_masked")
BATCH, HEADS, QUERIES, KEYS = 2, 4, 21, 32

Triple = tuple[Tensor, Tensor, Tensor]
pytestmark = pytest.mark.usefixtures("fresh_runtime")


def tensors(dtype: torch.dtype = torch.float32) -> Triple:
    torch.manual_seed(3)
    q = torch.randn(BATCH, HEADS, QUERIES, 16).to(dtype)
    k, v = (torch.randn(BATCH, HEADS // 2, KEYS, 16).to(dtype) for _ in range(2))
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


def attend(q: Tensor, k: Tensor, v: Tensor, *, dropout_p: float = 0.3, **options: Any) -> Tensor:
    torch.manual_seed(17)
    out: Tensor = flashtune.attention(q, k, v, causal=True, dropout_p=dropout_p, **options)
    return out


def shown_mask(config: MaskedConfig, causal: Causal, seed: Tensor, dropout: float) -> Tensor:
    """Which of equal weights a kernel keeps, [batch, heads, queries, keys]: values are unit vectors."""
    shape = f"heads={HEADS},kv_heads=1,batch={BATCH},seqlen_q={QUERIES},seqlen_kv={KEYS},dropout"
    problem = testing.problem(f"{shape},head_dim=16,value_head_dim={KEYS},dtype=fp32", causal=causal)
    q, k = torch.zeros(BATCH, HEADS, QUERIES, 16), torch.zeros(BATCH, 1, KEYS, 16)
    v = torch.eye(KEYS).expand(BATCH, 1, KEYS, KEYS).contiguous()
    out = torch.empty(BATCH, HEADS, QUERIES, KEYS)
    side = ExtraInputs(seed=seed, dropout=dropout)
    kernel = render(FAMILY, problem, config, specialization_of((q, k, v, out), False))
    bind(kernel, TARGET, ForwardTensors(q, k, v, out), side)((q, k, v, out, None), 1.0, side)
    return out > 0


@pytest.mark.parametrize("dropout", [0.1, 0.97])
def test_configs_drop_the_same_elements(dropout: float) -> None:
    for seed, causal in ((7, Causal.NONE), (-(2**40) - 5, Causal.BOTTOM_RIGHT)):
        drawn = torch.tensor([seed])
        numbers = torch.arange(BATCH * HEADS)
        stay = kept_weights(drawn, numbers, torch.arange(QUERIES), KEYS, dropout)
        expected = stay.view(BATCH, HEADS, QUERIES, KEYS)
        if causal is not Causal.NONE:
            expected = expected.tril(KEYS - QUERIES)
        for sides in ((16, 16), (32, 16), (16, 32)):
            config = MaskedConfig(block_m=sides[0], block_n=sides[1], num_warps=4, num_stages=1)
            assert torch.equal(shown_mask(config, causal, drawn, dropout), expected)


@pytest.mark.sampled
@pytest.mark.parametrize("options", [{}, {"layout": "bshd"}, {"window": (9, 0), "softcap": 2.0}], ids=str)
@pytest.mark.parametrize("deterministic", [False, True])
def test_both_passes_agree_with_float64(options: dict[str, Any], deterministic: bool) -> None:
    """The float64 path computes the same mask from the same seed, and is differentiable."""
    gradients = []
    for dtype in (torch.float32, torch.float64):
        inputs = tensors(dtype)
        laid = [tensor.transpose(1, 2) if "layout" in options else tensor for tensor in inputs]
        prefer = "generated" if dtype is torch.float32 else "fastest"
        out = attend(*laid, deterministic=deterministic, prefer=prefer, **options)
        gradients.append((out, *torch.autograd.grad(out.square().sum(), inputs)))
    for result, right in zip(*gradients, strict=True):
        torch.testing.assert_close(result.double(), right, atol=2e-4, rtol=1e-4)


def test_dropout_depends_on_the_generator() -> None:
    q, k, v = tensors()
    with torch.no_grad():
        first, same = attend(q, k, v), attend(q, k, v)
        other = flashtune.attention(q, k, v, causal=True, dropout_p=0.3)
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    assert torch.equal(attend(q, k, v), first)


def test_checkpointing_repeats_the_dropout_mask() -> None:
    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flashtune.attention(q, k, v, dropout_p=0.3)

    inputs = tensors()
    torch.manual_seed(5)
    plain = torch.autograd.grad(block(*inputs).square().sum(), inputs)
    torch.manual_seed(5)
    out = checkpoint(block, *inputs, use_reentrant=False)
    # Random numbers drawn in between do not change the numbers that are drawn again.
    torch.rand(3)
    saved = torch.autograd.grad(out.square().sum(), inputs)
    for gradient, right in zip(saved, plain, strict=True):
        assert torch.equal(gradient, right)


def test_compiled_calls_have_dropout() -> None:
    inputs = tensors()
    compiled = torch.compile(flashtune.attention, backend="aot_eager", fullgraph=True)
    ways = []
    for call in (flashtune.attention, compiled):
        torch.manual_seed(5)
        out = call(*inputs, dropout_p=0.3)
        again = call(*inputs, dropout_p=0.3)
        assert not torch.equal(out, again)
        ways.append((out, again, *torch.autograd.grad(out.square().sum(), inputs)))
    for result, right in zip(*ways, strict=True):
        torch.testing.assert_close(result, right)


def test_plans_draw_a_seed_for_each_call() -> None:
    q, k, v = (tensor.detach() for tensor in tensors())
    plan = flashtune.plan(q, k, v, causal=True, dropout_p=0.3)
    torch.manual_seed(17)
    first, second = plan(q, k, v), plan(q, k, v)
    assert torch.equal(first, attend(q, k, v))
    assert not torch.equal(first, second)


def test_dropout_rates_near_0_and_1() -> None:
    q, k, v = tensors()
    assert torch.equal(attend(q, k, v, dropout_p=0.0), flashtune.attention(q, k, v, causal=True))
    out = attend(q, k, v, dropout_p=1.0 - 2.0**-24)
    assert not out.any()
    # The log-sum-exp is of all weights.
    _, lse = flashtune.attention(q, k, v, dropout_p=0.999, return_lse=True)
    torch.testing.assert_close(lse, flashtune.attention(q, k, v, return_lse=True)[1])


@pytest.mark.parametrize("wrong", [1.0, -0.1, float("nan"), "0.1", 1.0 - 2.0**-30])
def test_invalid_dropout_rates_are_refused(wrong: Any) -> None:
    q, k, v = tensors()
    with pytest.raises(ProblemError, match="dropout_p cannot be"):
        flashtune.attention(q, k, v, dropout_p=wrong)
