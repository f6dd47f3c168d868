"""GPU tests of block masks in `backward_hopper`."""

from typing import Any

import msgspec
import pytest
import torch

import flashtune
from flashtune import testing
from flashtune.core.kernel import Specialization
from flashtune.core.problem import BlockLists, Causal
from flashtune.core.target import device_target
from flashtune.verification.cases import Level
from flashtune.verification.check import check_kernel
from flashtune.verification.inputs import side_inputs
from tests.gpu.marks import ON_HOPPER
from tests.problems.hopper_backward import FAMILY

pytestmark = [pytest.mark.gpu, ON_HOPPER]

SHAPE = "heads=8,kv_heads=2,batch=2,seqlen_q=1000,seqlen_kv=1300,head_dim=64,dtype=bf16,backward"
ORDERS: tuple[dict[str, Any], ...] = (
    {"alternate_dq": False, "defer_dq": False, "early_dk": False, "init_accumulators": False},
    {"alternate_dq": False, "defer_dq": True},
)


def verify(head_dim: int, config: dict[str, Any], level: Level = Level.QUICK, **changes: Any) -> None:
    problem = testing.problem(SHAPE, head_dim=head_dim, value_head_dim=head_dim, **changes)
    target, device = device_target(), torch.device("cuda", 0)
    chosen = msgspec.structs.replace(FAMILY.default(problem, target), **config)
    verdict = check_kernel(FAMILY, problem, chosen, Specialization(), target, device, level)
    assert verdict.passed, verdict.failed


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("causal", Causal)
@pytest.mark.parametrize("lists", BlockLists)
def test_kernels_pass_the_verification(head_dim: int, size: int, causal: Causal, lists: BlockLists) -> None:
    verify(head_dim, {}, block_mask=size, causal=causal, block_lists=lists)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("size", [64, 128])
def test_kernels_pass_the_full_verification(head_dim: int, size: int) -> None:
    verify(head_dim, {}, Level.FULL, block_mask=size)


def test_blocks_of_queries_with_two_blocks_of_the_mask_pass_the_verification() -> None:
    config = {"block_m": 128, "num_stages": 2, "do_stages": 2}
    verify(64, config, block_mask=64, causal=Causal.BOTTOM_RIGHT)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("config", ORDERS, ids=str)
def test_other_orders_pass_the_verification(head_dim: int, size: int, config: dict[str, Any]) -> None:
    verify(head_dim, config, block_mask=size, causal=Causal.BOTTOM_RIGHT)


@pytest.mark.parametrize("share", [0.9, 1.0])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_empty_lists_give_zeros(head_dim: int, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_inputs, "EMPTY_LISTS", share)
    verify(head_dim, {}, block_mask=64, block_lists=BlockLists.HEAD)


@pytest.mark.parametrize("feature", ["softcap", "sinks", "dropout"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_other_features_pass_the_verification(head_dim: int, feature: str) -> None:
    changes: dict[str, Any] = {feature: True}
    verify(head_dim, {}, block_mask=64, **changes)


@pytest.mark.parametrize("size", [64, 128])
def test_calls_use_the_kernel(size: int) -> None:
    device = torch.device("cuda", 0)
    q, k, v = (
        torch.randn(1, 4, 1024, 128, dtype=torch.bfloat16, device=device).requires_grad_() for _ in range(3)
    )
    blocks = 1024 // size
    visible = torch.rand(1, 4, blocks, blocks, device=device) < 0.4
    mask = flashtune.BlockMask.from_blocks(visible, size)
    explained = flashtune.explain(q, k, v, block_mask=mask, prefer="generated").backward
    assert explained is not None
    assert explained.selection is not None
    assert explained.selection.record.family == "backward_hopper"
    out = flashtune.attention(q, k, v, block_mask=mask, prefer="generated")
    dout = torch.randn_like(out)
    own = torch.autograd.grad(out, (q, k, v), dout)
    shown = visible.repeat_interleave(size, -1).repeat_interleave(size, -2)
    wide = [tensor.detach().double().requires_grad_() for tensor in (q, k, v)]
    scores = (wide[0] @ wide[1].mT * 128**-0.5).masked_fill(~shown, -torch.inf)
    exact = torch.autograd.grad(scores.softmax(-1).nan_to_num() @ wide[2], wide, dout.double())
    for gradient, right in zip(own, exact, strict=True):
        torch.testing.assert_close(gradient.double(), right, atol=2e-2, rtol=2e-2)
