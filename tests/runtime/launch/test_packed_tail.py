"""Tests of the kernel that clears rows after the last packed sequence."""

import pytest

from flashtune.core.target import find_target
from flashtune.launch import packed_tail
from flashtune.launch.compilation import interpreting


@pytest.mark.skipif(interpreting(), reason="compiles")
@pytest.mark.parametrize("target", ["h200", "a100"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_the_kernel_compiles_without_scratch_memory(target: str, dtype: str) -> None:
    metadata = packed_tail._compiled(dtype, find_target(target)).metadata
    assert metadata.shared == 0
    assert metadata.global_scratch_size == 0
