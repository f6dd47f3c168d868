"""Tests of the files of kernels_generated/, and of the grid of the H200's table."""

from typing import Any

import msgspec
import pytest
import torch
from triton.runtime.jit import JITFunction

from flashtune import testing
from flashtune.core.kernel import Kernel, Specialization
from flashtune.core.problem import Dtype
from flashtune.launch.compilation import load_module
from flashtune.templates.rendering import render
from scripts.kernels import FOLDER, files, shipped_records
from tests.problems import hopper, latent

SHIPPED = shipped_records()


def test_folder_contains_exactly_the_examples() -> None:
    written = {
        path.relative_to(FOLDER).as_posix(): path.read_text(encoding="utf-8")
        for path in FOLDER.rglob("*")
        if path.is_file()
    }
    expected = files(SHIPPED)
    assert written.keys() == expected.keys(), "make kernels"
    assert written == expected, "make kernels"
    # No two examples are the same kernel.
    assert len({text.partition('"""')[2] for text in written.values()}) == len(written)
    assert sum(text.count("\n") for text in written.values()) < 8000


def test_examples_and_index_do_not_depend_on_times() -> None:
    untimed = [msgspec.structs.replace(record, measurement=None) for record in SHIPPED]
    assert files(untimed) == files(SHIPPED)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", ["none", "bottom_right"])
def test_h200_table_covers_its_grid(dtype: str, head_dim: int, causal: str) -> None:
    lengths = {
        (record.problem.heads != record.problem.kv_heads, record.problem.seqlen_q)
        for record in SHIPPED
        if (record.target, record.problem.dtype, record.problem.head_dim, record.problem.causal)
        == ("nvidia-h200", dtype, head_dim, causal)
    }
    # At lengths between, fp16 uses the config of the nearest shape.
    expected = range(7, 15) if dtype == "bf16" else (9, 11, 13)
    assert lengths >= {(gqa, 2**power) for gqa in (False, True) for power in expected}


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
