"""Tests of autograd on a GPU: captured, compiled, checkpointed, and by torch.func."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import flashtune
from tests.gpu.families.gradient_calls import DEVICE, DROPOUT, attend, gradients, leaves
from tests.gpu.marks import SERVED

pytestmark = SERVED

# Rounding moves the products of `same_mask` by some 4e-6 of the norms, another mask by some 1e-3.
SAME = 3e-5


def same_mask(out: Tensor, dout: Tensor, v: Tensor, dv: Tensor) -> None:
    """The output is linear in v, so that both products are one number where both passes drop the same."""
    left, right = (out.double() * dout.double()).sum(), (v.double() * dv.double()).sum()
    assert abs(left - right) <= SAME * out.double().norm() * dout.double().norm()


@pytest.mark.parametrize("options", [{}, {"window": (70, 0)}, {"dropout_p": DROPOUT}], ids=str)
@pytest.mark.parametrize("way", ["plan", "warm_up"])
def test_both_passes_are_captured_and_replayed(way: str, options: dict[str, Any]) -> None:
    q, k, v = leaves(300, 400)
    dout = torch.randn_like(q)
    asked: dict[str, Any] = {"deterministic": True} | options
    call: Callable[[Tensor, Tensor, Tensor], Tensor] = functools.partial(attend, **asked)
    if way == "plan":
        call = flashtune.plan(q, k, v, causal=True, prefer="generated", **asked)
    else:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            gradients(q, k, v, dout, **asked)
        torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(q, k, v)
        captured = torch.autograd.grad(out, (q, k, v), dout)
    outs = []
    for step in range(3):
        with torch.no_grad():
            dout.copy_(torch.randn_like(dout))
            if "dropout_p" not in options:
                q.copy_(torch.randn_like(q) * (step + 1))
        graph.replay()
        outs.append(out.clone())
        same_mask(out, dout, v, captured[2])
        if "dropout_p" not in options:
            for gradient, expected in zip(captured, gradients(q, k, v, dout, **asked), strict=True):
                assert torch.equal(gradient, expected)
    assert not torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[1], outs[2])


@pytest.mark.parametrize("options", [{}, {"window": (70, 0)}, {"dropout_p": DROPOUT}], ids=str)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_compiled_calls(layout: str, options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    q, k, v = leaves(256, 256, heads=4, kv_heads=4)
    dout = torch.randn_like(q)
    asked: dict[str, Any] = {"deterministic": True, "layout": layout} | options

    def loss(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out = attend(q * 1.5, k, v, **asked)
        return (out * dout).sum(), out

    total, out = torch.compile(loss, fullgraph=True)(q, k, v)
    compiled_gradients = torch.autograd.grad(total, (q, k, v))
    same_mask(out.detach(), dout, v.detach(), compiled_gradients[2])
    if "dropout_p" not in options:
        eager = torch.autograd.grad(loss(q, k, v)[0], (q, k, v))
        for gradient, expected in zip(compiled_gradients, eager, strict=True):
            torch.testing.assert_close(gradient, expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("options", [{}, {"dropout_p": DROPOUT}], ids=str)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool, options: dict[str, Any]) -> None:
    q, k, v = leaves(300, 400)

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, deterministic=True, **options).float().square().sum()

    torch.manual_seed(7)
    expected = torch.autograd.grad(loss(q, k, v), (q, k, v))
    torch.manual_seed(7)
    result: Tensor = checkpoint(loss, q, k, v, use_reentrant=reentrant)
    # Random numbers drawn in between do not matter: the forward pass is computed again as it was.
    torch.rand(3, device=DEVICE)
    result.backward()
    for gradient, reference in zip((q.grad, k.grad, v.grad), expected, strict=True):
        assert gradient is not None
        assert torch.equal(gradient, reference)


def test_torch_func() -> None:
    q, k, v = leaves(300, 400)

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, deterministic=True).float().square().sum()

    expected = torch.autograd.grad(loss(q, k, v), (q, k, v))
    inputs = q.detach(), k.detach(), v.detach()
    for transformed in (torch.func.grad(loss, argnums=(0, 1, 2)), by_vjp(loss)):
        for gradient, reference in zip(transformed(*inputs), expected, strict=True):
            assert torch.equal(gradient, reference)


def by_vjp(loss: Any) -> Any:
    def transformed(*inputs: Tensor) -> tuple[Tensor, ...]:
        total, back = torch.func.vjp(loss, *inputs)[:2]
        results: tuple[Tensor, ...] = back(torch.ones_like(total))
        return results

    return transformed
