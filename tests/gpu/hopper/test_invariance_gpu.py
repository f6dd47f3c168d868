"""Tests on a Hopper GPU that rows have the same bits in all surroundings."""

import time

import pytest
import torch

from benchmarks.kernels.invariance import KINDS, compared, transformer
from flashtune.core.target import device_target

pytestmark = pytest.mark.gpu
SECONDS = 300.0


def is_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


@pytest.mark.skipif(not is_hopper(), reason="batch-invariant kernels need sm_90")
def test_rows_have_the_same_bits_in_all_surroundings() -> None:
    device = torch.device("cuda", 0)
    report = compared(len(KINDS), len(KINDS), time.monotonic() + SECONDS, device_target(0), device)
    assert report.problems == len(KINDS)
    assert report.differing == {}
    assert not any(transformer(device).values())
