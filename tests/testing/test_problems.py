"""Tests of `flashtune.testing.problem` and of the fake GPU."""

import pytest
import torch

from flashtune import testing
from flashtune.core.errors import ProblemError, UsageError
from flashtune.core.problem import Bias, Causal, Dtype, Problem
from flashtune.core.target import device_target, find_target

SHAPE = "heads=8,kv_heads=2,seqlen=512,head_dim=128,dtype=bf16,causal,batch=2"


def test_shape_becomes_a_problem() -> None:
    assert testing.problem(SHAPE) == Problem(
        dtype=Dtype.BF16,
        head_dim=128,
        value_head_dim=128,
        heads=8,
        kv_heads=2,
        batch=2,
        seqlen_q=512,
        seqlen_kv=512,
        causal=Causal.BOTTOM_RIGHT,
    )


def test_changes_replace_fields() -> None:
    changed = testing.problem(SHAPE, seqlen=64, seqlen_q=3, head_dim=64, causal="top_left", bias=Bias.BOOLEAN)
    assert (changed.seqlen_q, changed.seqlen_kv) == (3, 64)
    assert (changed.head_dim, changed.value_head_dim) == (64, 64)
    assert (changed.causal, changed.bias) == (Causal.TOP_LEFT, Bias.BOOLEAN)
    assert type(changed.causal) is Causal


def test_value_head_dim_stays_if_it_differs() -> None:
    changed = testing.problem("heads=1,seqlen=1,head_dim=192,value_head_dim=128", head_dim=64)
    assert (changed.head_dim, changed.value_head_dim) == (64, 128)


def test_several_problems_are_refused() -> None:
    with pytest.raises(UsageError, match="is 2 problems: give each key one value"):
        testing.problem("heads=8,seqlen=64|128,head_dim=64")


def test_unknown_and_invalid_changes_are_refused() -> None:
    with pytest.raises(UsageError, match="no field 'width'"):
        testing.problem(SHAPE, width=3)
    with pytest.raises(ProblemError, match="batch"):
        testing.problem(SHAPE, batch=-1)
    with pytest.raises(ProblemError, match="8 query heads do not divide among 3 KV heads"):
        testing.problem(SHAPE, kv_heads=3)


@pytest.mark.parametrize("name", ["h100", "h200", "a100", "mi300x"])
def test_fake_gpu_has_the_properties_of_its_target(name: str) -> None:
    with testing.fake_gpu(name) as target:
        assert target == find_target(name)
        assert torch.cuda.get_device_properties(0).multi_processor_count == target.sm_count
        # Architectures of AMD are read from torch's build for ROCm only.
        if target.is_nvidia:
            assert device_target(0) == target
