"""Tests of 16-bit kernels in the interpreter: they compute only on float32 tensors."""

import msgspec
import pytest
import torch

from flashtune.core.kernel import Kernel, Specialization
from flashtune.core.target import find_target
from flashtune.launch.compilation import load_module
from flashtune.templates.family import Family
from flashtune.templates.registry import families
from flashtune.templates.rendering import render
from flashtune.tuner.tables.kernel_choice import change_config
from flashtune.tuner.workloads.shapes import parse_shape
from tests.support.golden_kernels import kernel_of

TARGET = find_target("h200")
(PROBLEM,) = parse_shape("heads=4,kv_heads=2,seqlen=48,head_dim=64,dtype=bf16,causal,batch=2")
INTERPRETED = [family for family in families() if family.interpreted]


def kernel_for(family: Family) -> Kernel:
    problem = msgspec.structs.replace(PROBLEM, direction=family.direction)
    if family.name == "decode_split_kv":
        problem = msgspec.structs.replace(problem, seqlen_q=8)
    if family.name == "forward_masked":
        # A window as wide as the sequence.
        problem = msgspec.structs.replace(problem, window_left=64)
    assert family.supports(problem, TARGET) is None
    config = change_config(family.default(problem, TARGET), "block_n=32")
    return render(family, problem, config, Specialization(lse=not problem.is_backward))


@pytest.mark.parametrize("family", INTERPRETED, ids=lambda family: family.name)
def test_16_bit_kernel_accepts_only_float32_tensors(family: Family) -> None:
    torch.manual_seed(0)
    module = load_module(kernel_for(family))
    rows = 8 if family.name == "decode_split_kv" else 48
    shapes = (2, 4, rows, 64), (2, 2, 48, 64), (2, 2, 48, 64)
    q, k, v = (torch.randn(shape, requires_grad=True) for shape in shapes)
    scores = q @ k.repeat_interleave(2, 1).mT / 8
    scores = scores.masked_fill(torch.ones(rows, 48).triu(49 - rows).bool(), -torch.inf)
    out = scores.softmax(-1) @ v.repeat_interleave(2, 1)
    dout = torch.randn_like(out)
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    q, k, v, out, lse = (tensor.detach() for tensor in (q, k, v, out, scores.logsumexp(-1)))
    message = "^q has dtype torch.bfloat16, expected float32: TRITON_INTERPRET corrupts 16-bit products$"
    if hasattr(module, "attention"):
        with pytest.raises(ValueError, match=message):
            module.attention(*(tensor.bfloat16() for tensor in (q, k, v)))
        results = module.attention(q, k, v)
        expected: tuple[torch.Tensor, ...] = out, lse
    else:
        with pytest.raises(ValueError, match=message):
            module.attention_backward(*(tensor.bfloat16() for tensor in (q, k, v, out)), lse, dout.bfloat16())
        results = module.attention_backward(q, k, v, out, lse, dout)
        expected = gradients
    for result, reference in zip(results, expected, strict=True):
        torch.testing.assert_close(result, reference, rtol=1e-4, atol=1e-4)


def test_a_kernel_of_quantized_keys_is_refused() -> None:
    """It multiplies in fp16 whatever its queries are."""
    module = load_module(kernel_of("decode_bf16_d128_e4m3"))
    q, k = torch.zeros(2, 4, 8, 128), torch.zeros(2, 2, 48, 128, dtype=torch.float8_e4m3fn)
    scales = torch.ones(2, 2)
    with pytest.raises(ValueError, match=r"^TRITON_INTERPRET is set, and Triton's interpreter corrupts"):
        module.attention(q, k, k, k_scale=scales, v_scale=scales)


def test_inputs_that_are_no_tensors_are_named() -> None:
    module = load_module(kernel_of("masked_bf16_d64_window_sinks"))
    q = torch.zeros(2, 4, 8, 64)
    sinks = torch.zeros(4)
    with pytest.raises(TypeError, match=r"^k is a list, expected a tensor$"):
        module.attention(q, [1.0], q, sinks=sinks)
    with pytest.raises(TypeError, match=r"^sinks is a list, expected a tensor$"):
        module.attention(q, q, q, sinks=[0.0] * 4)
