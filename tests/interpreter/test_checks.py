"""Tests of arguments that rendered modules refuse in the interpreter."""

import pytest
import torch

from flashtune.launch.compilation import load_module
from tests.support.golden_kernels import kernel_of


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
