"""Tests of masks of heads and the mask probe: visible keys next to hidden keys, and block lists."""

import functools
from typing import Any

import msgspec
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from flashtune import testing
from flashtune.core.features.records import NO_EXTRA_INPUTS, ExtraInputs
from flashtune.core.features.table import usual_inputs
from flashtune.core.problem import Bias, BlockLists, Causal
from flashtune.runtime.unfused import unfused_attention
from flashtune.verification.inputs.side_inputs import make_side
from flashtune.verification.lengths import Lengths, equal_lengths
from flashtune.verification.mask_boundary_probes import _borders, _drawn, _neighbours
from flashtune.verification.probes import Probe
from flashtune.verification.reference.forward import expect, sample
from flashtune.verification.reference.masks import (
    FEW_COMPARISONS,
    Rows,
    compared_on,
    distinct_masks,
    unhidden_keys,
)
from tests.problems.plain_masks import listed, visible

PROBLEM = testing.problem(
    "heads=4,kv_heads=2,seqlen_q=37,seqlen_kv=53,head_dim=64,dtype=bf16,causal,batch=2,window=9,sink_tokens=3"
)


@pytest.mark.parametrize("lengths", [equal_lengths(PROBLEM), Lengths((37, 20), (53, 31))], ids=str)
def test_probed_keys_are_visible_and_adjacent_to_hidden_ones(lengths: Lengths) -> None:
    visible, hidden = _neighbours(PROBLEM, lengths, NO_EXTRA_INPUTS, torch.Generator().manual_seed(0))
    number = torch.arange(PROBLEM.batch * PROBLEM.heads)
    rows = Rows(number // PROBLEM.heads, number % PROBLEM.heads, torch.arange(PROBLEM.seqlen_q))
    seen = unhidden_keys(PROBLEM, lengths, NO_EXTRA_INPUTS, rows, torch.device("cpu")).expand(
        len(number), -1, -1
    )
    # No row sees the key behind the last.
    seen = torch.cat([seen, torch.zeros_like(seen[..., :1])], -1)
    visible, hidden = visible.flatten(0, 1), hidden.flatten(0, 1)
    asks = seen.any(-1)
    assert asks.sum() > 200
    assert torch.equal((visible - hidden).abs()[asks], torch.ones_like(hidden)[asks])
    assert seen.gather(-1, visible[..., None])[..., 0][asks].all()
    assert not seen.gather(-1, hidden[..., None])[..., 0][asks].any()


def test_every_mask_edge_of_a_row_is_drawn() -> None:
    seen = torch.tensor([[[True, True, False, True, False, False, True]]])
    drawn = torch.linspace(0, 1 - 2**-53, 997, dtype=torch.float64)[:, None]
    (borders,) = _borders(seen)
    visible, hidden = _drawn(borders, drawn)
    pairs = set(zip(visible.flatten().tolist(), hidden.flatten().tolist(), strict=True))
    # Of a hidden key between two that are seen the left one is asked for.
    assert pairs == {(1, 2), (3, 4), (6, 5), (6, 7)}


@pytest.mark.parametrize("seen", [False, True])
def test_rows_without_edges_probe_keys_within_bounds(seen: bool) -> None:
    rows = torch.full((1, 2, 5), seen)
    (borders,) = _borders(rows)
    for key in _drawn(borders, torch.full((3, 2), 0.5, dtype=torch.float64)):
        assert key.shape == (3, 2)
        assert int(key.min()) >= 0
        assert int(key.max()) <= 5


CPU = torch.device("cpu")
SMALL = testing.problem("heads=2,kv_heads=1,seqlen_q=5,seqlen_kv=7,head_dim=16,dtype=fp32,causal,batch=3")
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
    problem = msgspec.structs.replace(SMALL, **features)
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
