"""Tests of spilled registers and serialised products of shipped Hopper kernels."""

from __future__ import annotations

import pytest

from tests.templates.hopper.shipped_spills import FAMILIES, GPUS, shipped_kernels

KERNELS = list(shipped_kernels())
# The most bytes that a shipped kernel of a family spills.
SPILLED = {"forward_hopper": 56, "backward_hopper": 24}


def test_no_shipped_kernel_has_serialised_products() -> None:
    assert {(one.gpu, one.family) for one in KERNELS} == {(gpu, name) for gpu in GPUS for name in FAMILIES}
    assert [one for one in KERNELS if one.resources.serialized_wgmma] == []


@pytest.mark.parametrize("family", FAMILIES)
def test_shipped_kernels_spill_few_bytes(family: str) -> None:
    spilled = [one for one in KERNELS if one.family == family]
    assert [one for one in spilled if one.resources.spill_bytes > SPILLED[family]] == []
