"""Tests of exported Hopper kernels with Triton's launcher, which makes an integer of 1 a constant."""

from typing import Any

import pytest
import torch
from triton.runtime.jit import JITFunction

from flashtune import testing
from flashtune.core.kernel import Kernel, Specialization
from flashtune.core.problem import Dtype
from flashtune.launch.compilation import load_module
from flashtune.templates.rendering import render
from tests.problems import hopper, latent


class OnGpu(torch.Tensor):
    """A tensor in host memory with a true `is_cuda`."""

    is_cuda = True


def constants_of(
    kernel: Kernel, *tensors: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> dict[str, list[str]]:
    """Returns the integer parameters that would become constants in a call of an exported file, by kernel."""
    constants: dict[str, list[str]] = {}

    def run(function: JITFunction[Any], *arguments: Any, grid: Any, warmup: bool, **_: Any) -> None:
        pairs = zip(function.params, arguments, strict=True)
        ones = [parameter for parameter, value in pairs if type(value) is int and value == 1]
        assert ones
        constants[function.__name__] = [param.name for param in ones if not param.do_not_specialize]

    monkeypatch.setattr(JITFunction, "run", run)
    with testing.fake_gpu("h200"):
        load_module(kernel).attention(*(tensor.as_subclass(OnGpu) for tensor in tensors))
    return constants


@pytest.mark.parametrize("dtype", [Dtype.BF16, Dtype.E4M3])
def test_one_head_of_one_sequence_is_no_constant(dtype: Dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = hopper.a_problem(128, dtype=dtype, heads=1, kv_heads=1, batch=1)
    kernel = render(
        hopper.FAMILY, problem, hopper.a_config(problem, head_swizzle=1), Specialization(lse=True)
    )
    q = torch.zeros(1, 1, 256, 128, dtype=torch.float8_e4m3fn if dtype.is_quantized else torch.bfloat16)
    constants = constants_of(kernel, q, q, q, monkeypatch=monkeypatch)
    assert constants["forward_hopper"] == []


@pytest.mark.parametrize("splits", [1, 2])
def test_one_query_is_no_constant(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = latent.kernel_of(latent.a_problem(batch=1), queries=1, num_splits=splits)
    q, k = (
        torch.zeros(1, 128, 1, 576, dtype=torch.bfloat16),
        torch.zeros(1, 1, 256, 576, dtype=torch.bfloat16),
    )
    constants = constants_of(kernel, q, k, k[..., :512], monkeypatch=monkeypatch)
    assert constants["decode_latent_hopper"] == []
