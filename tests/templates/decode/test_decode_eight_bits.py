"""Tests of 8-bit caches in rendered and compiled kernels of the split-KV family."""

from typing import Any

import pytest

from benchmarks.exhaustive.inner_loop import read_loop
from flashtune.core.kernel import Alignment, Specialization
from flashtune.core.problem import Dtype, KvDtype, KvScale
from flashtune.core.target import find_target
from flashtune.launch.compilation import compile_kernel
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render
from tests.problems.decode import LATENT, a_config, a_problem

FAMILY, H200 = find_family("decode_split_kv"), find_target("h200")


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(KvDtype))
def test_eight_bits_need_half_the_sram(kind: KvDtype) -> None:
    """No copy of widened values: three programs fit a multiprocessor where two of 16 bits do not."""
    problem = a_problem(kv_dtype=kind, kv_scale=KvScale.HEAD)
    config = a_config(block_n=128, num_splits=1)
    kernel = render(FAMILY, problem, config, Specialization())
    binary = compile_kernel(kernel, H200)
    in_flight = 2 * 128 * (128 + 128)
    assert in_flight <= binary.metadata.shared <= in_flight + 16 * 1024
    assert "ldmatrix.sync.aligned.m8n8.x4.trans" in binary.asm["ptx"]
    loop = read_loop(binary.asm["cubin"])
    assert loop is not None
    # One conversion, or two steps of arithmetic, for two numbers of a thread's 256, and what weights take.
    named = "F2FP" if kind is KvDtype.E4M3 else "HADD2"
    assert 128 <= loop.instructions[named] <= 128 + 16


@pytest.mark.parametrize(
    ("changes", "config", "alignment", "expected"),
    [
        ({}, {}, Alignment.SIXTEEN, True),
        ({}, {}, Alignment.EIGHT, True),
        ({}, {}, Alignment.ANY, False),
        ({}, {"num_warps": 8}, Alignment.SIXTEEN, True),
        ({}, {"block_m": 64}, Alignment.SIXTEEN, False),
        ({"head_dim": 64, "value_head_dim": 64}, {"num_warps": 8}, Alignment.SIXTEEN, False),
        ({"head_dim": 32, "value_head_dim": 32}, {"num_warps": 2}, Alignment.SIXTEEN, False),
        ({"head_dim": 96, "value_head_dim": 96}, {"split_head_dim": True}, Alignment.SIXTEEN, False),
        ({"head_dim": 127, "value_head_dim": 128}, {}, Alignment.SIXTEEN, False),
        ({"dtype": Dtype.FP32}, {"block_n": 32}, Alignment.SIXTEEN, False),
        (LATENT, {"block_m": 64}, Alignment.SIXTEEN, True),
    ],
)
def test_caches_that_are_read_in_pairs(
    changes: dict[str, Any], config: dict[str, Any], alignment: Alignment, expected: bool
) -> None:
    problem = a_problem(kv_dtype=KvDtype.E4M3, **changes)
    kernel = render(FAMILY, problem, a_config(**config), Specialization(alignment))
    assert ("PAIR" in kernel.source) is expected
