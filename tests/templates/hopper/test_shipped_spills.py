"""Tests of spilled registers and serialised products of shipped Hopper kernels."""

import pytest

from tests.templates.hopper.shipped_spills import FAMILIES, GPUS, shipped_kernels

KERNELS = list(shipped_kernels())
# The most bytes that a shipped kernel of a family spills.
SPILLED = {"forward_hopper": 56, "backward_hopper": 24}


def test_no_shipped_kernel_has_serialised_products() -> None:
    assert {(row.gpu, row.family) for row in KERNELS} == {(gpu, name) for gpu in GPUS for name in FAMILIES}
    assert [row for row in KERNELS if row.resources.serialized_wgmma] == []


@pytest.mark.parametrize("family", FAMILIES)
def test_shipped_kernels_spill_few_bytes(family: str) -> None:
    spilled = [row for row in KERNELS if row.family == family]
    assert [row for row in spilled if row.resources.spill_bytes > SPILLED[family]] == []
