"""Tests of the float64 reference with block masks, and of the lists of verification and of searches."""

import functools

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from flashtune import testing
from flashtune.core.features.records import ExtraInputs
from flashtune.core.features.table import usual_inputs
from flashtune.core.problem import BlockLists, Causal
from flashtune.runtime.unfused import unfused_attention
from flashtune.verification.inputs.side_inputs import make_side
from flashtune.verification.lengths import equal_lengths
from flashtune.verification.probes import Probe
from flashtune.verification.reference.forward import expect, sample
from tests.problems.plain_masks import listed, visible

CPU = torch.device("cpu")
LISTS = pytest.mark.parametrize("lists", list(BlockLists))
CAUSAL = pytest.mark.parametrize("causal", list(Causal))
a_problem = functools.partial(
    testing.problem,
    "heads=4,kv_heads=2,seqlen_q=150,seqlen_kv=330,head_dim=16,value_head_dim=8,dtype=fp32,batch=2,block_mask=64",
)


@LISTS
@CAUSAL
def test_reference_is_dense_attention_with_the_expanded_mask(causal: Causal, lists: BlockLists) -> None:
    problem = a_problem(causal=causal, block_lists=lists)
    generator = torch.Generator().manual_seed(3)
    side = make_side(Probe.RANDOM, problem, equal_lengths(problem), 64, generator)
    q = torch.randn(2, 4, 150, 16, generator=generator)
    k, v = torch.randn(2, 2, 330, 16, generator=generator), torch.randn(2, 2, 330, 8, generator=generator)
    mask = torch.stack([listed(problem, side, number, 4, 150, 330) for number in range(2)])
    mask &= visible(problem, 150, 330)
    right = scaled_dot_product_attention(
        q.double(), k.double(), v.double(), attn_mask=mask, scale=0.3, enable_gqa=True
    )
    rows = mask.any(-1)
    right = torch.where(rows[..., None], right, 0.0)
    expected = expect(problem, q, k, v, 0.3, sample(problem, generator), side)
    torch.testing.assert_close(expected.out.view(right.shape), right)
    assert torch.equal(expected.lse.view(rows.shape) == -torch.inf, ~rows)
    out, _ = unfused_attention(problem, q.double(), k.double(), v.double(), side, scale=0.3)
    torch.testing.assert_close(out, right)


@LISTS
@CAUSAL
@pytest.mark.parametrize("extents", [(640, 640), (200, 1000), (1000, 200), (1, 70)], ids=str)
def test_usual_lists_are_a_quarter_of_visible_blocks(
    causal: Causal, lists: BlockLists, extents: tuple[int, int]
) -> None:
    queries, keys = extents
    problem = a_problem(causal=causal, block_lists=lists, seqlen_q=queries, seqlen_kv=keys)
    made = usual_inputs(problem, problem.features, (keys, keys), torch.float32, CPU)
    side = ExtraInputs(**made)
    assert side.block_counts is not None
    assert side.block_counts.shape[1] == (4 if lists is BlockLists.HEAD else 2)
    seen = listed(problem, side, 0, 4, queries, keys) & visible(problem, queries, keys)
    # Lists are rounded up to whole blocks, of which the last one may be shorter.
    share = int(seen[0].sum()) - problem.visible_pairs()
    assert -64 * queries <= share <= 2 * 64**2 * side.block_counts.shape[2]


def test_lists_of_verification_are_valid_and_differ() -> None:
    problem = a_problem(seqlen_q=1000, seqlen_kv=1000)
    generator = torch.Generator().manual_seed(3)
    side = make_side(Probe.RANDOM, problem, equal_lengths(problem), 64, generator)
    assert side.block_counts is not None
    assert side.block_indices is not None
    counts = side.block_counts
    assert int(counts.min()) == 0
    assert int(counts.max()) == 16
    assert len({tuple(row) for row in counts.flatten(0, 1).tolist()}) == 8
    for count, row in zip(counts.flatten().tolist(), side.block_indices.flatten(0, 2).tolist(), strict=True):
        assert row[:count] == sorted(row[:count])
        # Hidden blocks follow.
        assert sorted(row) == list(range(16))
