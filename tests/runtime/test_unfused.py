"""Tests of unfused attention against float64."""

import itertools

import pytest
import torch
from torch import Tensor

from flashtune.core.problem import Causal
from flashtune.verification.reference.forward import expect, sample
from flashtune.verification.tolerance import worst_ratio
from tests.support.unfused import problem_of, unfused

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LENGTHS = [(1, 1), (1, 9), (9, 1), (12, 12), (7, 19), (19, 7)]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def tensors(
    lengths: tuple[int, int], heads: tuple[int, int], dtype: torch.dtype, layout: str, device: str
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v with head dims 24, 24, 16 and a batch of 2."""
    shapes = ((heads[0], lengths[0], 24), (heads[1], lengths[1], 24), (heads[1], lengths[1], 16))
    made = []
    for head, seqlen, width in shapes:
        if layout == "bhsd":
            tensor = torch.randn(2, head, seqlen, width, device=device)
        else:
            tensor = torch.randn(2, seqlen, head, width + 1, device=device)[..., 1:].transpose(1, 2)
        made.append(
            tensor.to(dtype) if layout == "bhsd" else tensor.to(dtype, memory_format=torch.preserve_format)
        )
    return made[0], made[1], made[2]


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal", list(Causal))
def test_unfused_attention_is_within_kernel_tolerances(
    causal: Causal, dtype: torch.dtype, device: str
) -> None:
    torch.manual_seed(0)
    choices = itertools.product(LENGTHS, [(2, 2), (4, 2), (3, 1)], ["bhsd", "bshd"], [0.2, -0.7, 0.0, 3.0])
    for lengths, heads, layout, scale in choices:
        q, k, v = tensors(lengths, heads, dtype, layout, device)
        problem = problem_of(q, k, v, causal)
        out, lse = unfused(q, k, v, scale=scale, causal=causal, return_lse=True)
        assert lse is not None
        assert (out.dtype, lse.dtype) == (dtype, torch.float32)
        everything = sample(problem, torch.Generator(device).manual_seed(0))
        # The reference, as kernels do, takes the sign of a scale with the queries.
        expected = expect(problem, -q if scale < 0 else q, k, v, abs(scale), everything)
        assert worst_ratio(out.flatten(0, 1), expected.out, expected.allowed) <= 1
        lse_ratio = worst_ratio(lse.flatten(0, 1)[..., None], expected.lse[..., None], expected.lse_allowed)
        assert lse_ratio <= 1


@pytest.mark.parametrize(("seqlen_q", "seqlen_kv", "batch"), [(0, 5, 2), (5, 0, 2), (0, 0, 2), (5, 6, 0)])
def test_empty_problems(seqlen_q: int, seqlen_kv: int, batch: int) -> None:
    q, k, v = tensors((seqlen_q, seqlen_kv), (4, 2), torch.bfloat16, "bhsd", "cpu")
    out, lse = unfused(q[:batch], k[:batch], v[:batch], scale=0.2, return_lse=True)
    assert torch.equal(out, torch.zeros(batch, 4, seqlen_q, 16, dtype=torch.bfloat16))
    assert lse is not None
    assert torch.equal(lse, torch.full((batch, 4, seqlen_q), -torch.inf))


def test_large_scores_of_float16_do_not_overflow() -> None:
    q, k, v = (tensor * 100 for tensor in tensors((6, 6), (1, 1), torch.float16, "bhsd", "cpu"))
    out, lse = unfused(q, k, v, scale=1.0, return_lse=True)
    assert lse is not None
    assert torch.isfinite(out).all()
    assert lse.max() > torch.finfo(torch.float16).max


@pytest.mark.parametrize("lengths", [(5, 7), (7, 5)])
@pytest.mark.parametrize("causal", list(Causal))
def test_inputs_are_not_modified_and_get_gradients(lengths: tuple[int, int], causal: Causal) -> None:
    torch.manual_seed(0)
    inputs = [tensor.requires_grad_() for tensor in tensors(lengths, (4, 2), torch.float32, "bhsd", "cpu")]
    copies = [tensor.detach().clone() for tensor in inputs]
    q, k, v = inputs
    out, lse = unfused(q, k, v, scale=0.2, causal=causal, return_lse=True)
    assert lse is not None
    (out.square().sum() + lse[lse.isfinite()].sum()).backward()
    for tensor, copy in zip(inputs, copies, strict=True):
        assert torch.equal(tensor.detach(), copy)
        assert tensor.grad is not None
        assert torch.isfinite(tensor.grad).all()
        assert tensor.grad.abs().sum() > 0
