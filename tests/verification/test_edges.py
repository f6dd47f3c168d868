"""Tests of the mask probe: visible keys next to hidden keys."""

import pytest
import torch

from flashtune import testing
from flashtune.core.features.records import NO_EXTRA_INPUTS
from flashtune.verification.lengths import Lengths, equal_lengths
from flashtune.verification.mask_boundary_probes import _borders, _drawn, _neighbours
from flashtune.verification.reference.masks import Rows, unhidden_keys

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
