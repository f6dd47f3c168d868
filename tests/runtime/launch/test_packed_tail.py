"""Tests of the kernel that clears rows after the last packed sequence."""

import pytest
import torch

from flashtune.core.target import find_target
from flashtune.launch.compilation import interpreting
from flashtune.launch.packed_tail import compile_clear


@pytest.mark.skipif(interpreting(), reason="compiles")
@pytest.mark.parametrize("target", ["h200", "a100"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_kernel_compiles_without_scratch_memory(target: str, dtype: torch.dtype) -> None:
    metadata = compile_clear(dtype, find_target(target)).metadata
    assert metadata.shared == 0
    assert metadata.global_scratch_size == 0
