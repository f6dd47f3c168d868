"""GPU tests of additive biases and their gradients in `backward_hopper`."""

from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

import flashtune
from flashtune import testing
from flashtune.core.kernel import Specialization
from flashtune.core.problem import Bias, Causal
from flashtune.core.target import device_target
from flashtune.verification.cases import Level
from flashtune.verification.check import check_kernel
from tests.gpu.marks import ON_HOPPER
from tests.problems.hopper_backward import FAMILY

pytestmark = [pytest.mark.gpu, ON_HOPPER]

SHAPE = "heads=8,kv_heads=2,batch=2,seqlen_q=1000,seqlen_kv=1304,dtype=bf16,backward"
TRAINED, CONSTANT = Specialization(), Specialization(constant_bias=True)
ORDERS: tuple[dict[str, Any], ...] = (
    {"alternate_dq": False, "defer_dq": False, "early_dk": False, "early_dv": False},
    {"alternate_dq": False, "defer_dq": True, "stagger_start": False},
)
# Batches, heads and queries of a bias of 2 sequences, 4 heads and 1000 queries.
SHAPES = ((2, 4, 1000), (1, 4, 1000), (2, 1, 1000), (1, 1, 1000), (1, 4, 1), (1, 1, 1))


def verify(head_dim: int, level: Level, specialization: Specialization = TRAINED, **changes: Any) -> None:
    config = changes.pop("config", {})
    widths = {"head_dim": head_dim, "value_head_dim": head_dim}
    problem = testing.problem(f"{SHAPE},head_dim={head_dim}", bias=Bias.ADDITIVE, **widths, **changes)
    target, device = device_target(), torch.device("cuda", 0)
    chosen = msgspec.structs.replace(FAMILY.default(problem, target), **config)
    verdict = check_kernel(FAMILY, problem, chosen, specialization, target, device, level)
    assert verdict.passed, verdict.failed


@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("causal", Causal)
@pytest.mark.parametrize("specialization", [TRAINED, CONSTANT], ids=["trained", "constant"])
def test_kernels_pass_the_verification(head_dim: int, causal: Causal, specialization: Specialization) -> None:
    verify(head_dim, Level.FULL, specialization, causal=causal)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_kernels_pass_the_strict_verification(head_dim: int) -> None:
    verify(head_dim, Level.STRICT, causal=Causal.BOTTOM_RIGHT)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("config", ORDERS, ids=str)
def test_other_orders_pass_the_verification(head_dim: int, config: dict[str, Any]) -> None:
    verify(head_dim, Level.QUICK, config=config, causal=Causal.TOP_LEFT)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_gradients_of_calls_are_those_of_float64(
    head_dim: int, causal: bool, trained: bool, shape: tuple[int, int, int]
) -> None:
    """One row of each bias has -1e9 in all elements, and a twentieth of the others hides keys."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, device="cuda", dtype=torch.bfloat16, generator=generator)

    q, k, v = (normal(2, 4, length, head_dim).requires_grad_() for length in (1000, 1000, 1000))
    bias = normal(*shape, 1000)
    if shape[2] > 1:
        # Each query sees its own key.
        hides = torch.rand(bias.shape, device="cuda", generator=generator) < 0.05
        bias.masked_fill_(hides & ~torch.eye(1000, dtype=torch.bool, device="cuda"), -torch.inf)
        bias[..., 7, :] = -1e9
    bias.requires_grad_(trained)
    inputs = (q, k, v, bias) if trained else (q, k, v)
    options: dict[str, Any] = {"attn_bias": bias, "causal": causal, "prefer": "generated"}
    explained = flashtune.explain(q, k, v, **options).backward
    assert explained is not None
    assert explained.selection is not None
    # TMA does not repeat rows.
    assert (explained.selection.record.family == "backward_hopper") is (shape[2] > 1)
    out = flashtune.attention(q, k, v, **options)
    dout = torch.randn_like(out)
    own = torch.autograd.grad(out, inputs, dout)
    wide = [tensor.detach().double().requires_grad_() for tensor in (q, k, v, bias)]
    hidden = torch.ones(1000, 1000, dtype=torch.bool, device="cuda").triu(1) & causal
    scores = (wide[0] @ wide[1].mT * head_dim**-0.5 + wide[3]).masked_fill(hidden, -torch.inf)
    # A bias of -1e9 absorbs scores in float32.
    scores = scores.float().double()
    exact = torch.autograd.grad(scores.softmax(-1) @ wide[2], wide[: len(inputs)], dout.double())
    for gradient, right in zip(own, exact, strict=True):
        size = right.abs().max().item()
        torch.testing.assert_close(gradient.double(), right, atol=2e-2 * size, rtol=2e-2)
