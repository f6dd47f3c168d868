"""Tests of masks of heads: equal masks are shared, and small ones are computed on the CPU."""

from typing import Any

import msgspec
import pytest
import torch

from flashtune import testing
from flashtune.core.features.records import ExtraInputs
from flashtune.core.problem import Bias, Causal
from flashtune.verification.lengths import Lengths
from flashtune.verification.reference.masks import (
    FEW_COMPARISONS,
    Rows,
    compared_on,
    distinct_masks,
    unhidden_keys,
)

CPU = torch.device("cpu")
PROBLEM = testing.problem("heads=2,kv_heads=1,seqlen_q=5,seqlen_kv=7,head_dim=16,dtype=fp32,causal,batch=3")
# All rows of all heads.
SOME = Rows(torch.arange(6) // 2, torch.arange(6) % 2, torch.arange(5))
EQUAL, OWN = Lengths((5, 5, 5), (7, 7, 7)), Lengths((5, 5, 5), (7, 2, 4))


def boolean() -> torch.Tensor:
    return torch.rand(3, 2, 5, 7, generator=torch.Generator().manual_seed(1)) < 0.5


@pytest.mark.parametrize(
    ("features", "lengths", "side", "count"),
    [
        ({}, EQUAL, ExtraInputs(), 1),
        ({"window_left": 2}, EQUAL, ExtraInputs(), 1),
        ({"alibi": True}, EQUAL, ExtraInputs(slopes=torch.rand(3, 2)), 1),
        ({"kv_lengths": True}, OWN, ExtraInputs(), 3),
        ({"prefix": True}, EQUAL, ExtraInputs(prefix=torch.tensor([0, 3, 7], dtype=torch.int32)), 3),
        ({"bias": Bias.BOOLEAN, "causal": Causal.NONE}, EQUAL, ExtraInputs(bias=boolean()), 6),
        ({"bias": Bias.ADDITIVE}, EQUAL, ExtraInputs(bias=boolean().float().log()), 6),
    ],
)
def test_equal_masks_are_shared_by_heads(
    features: dict[str, Any], lengths: Lengths, side: ExtraInputs, count: int
) -> None:
    problem = msgspec.structs.replace(PROBLEM, **features)
    masks = distinct_masks(lengths, side, SOME)
    seen = unhidden_keys(problem, lengths, side, masks.rows, CPU)
    assert seen.shape == (count, 5, 7)
    assert masks.one_each == (count == 6)
    for head in range(6):
        row = Rows(SOME.batch[head : head + 1], SOME.head[head : head + 1], SOME.rows)
        assert torch.equal(unhidden_keys(problem, lengths, side, row, CPU)[0], seen[masks.of_head[head]])


def test_few_comparisons_load_no_kernels() -> None:
    device = torch.device("meta")
    assert compared_on(FEW_COMPARISONS, device) == CPU
    assert compared_on(FEW_COMPARISONS + 1, device) == device
