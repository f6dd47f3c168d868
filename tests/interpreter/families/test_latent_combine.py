"""Tests of the combine kernel of MLA decoding in the interpreter."""

import pytest
import torch

from flashtune import testing
from flashtune.core.kernel import Specialization
from flashtune.launch.compilation import load_module
from flashtune.templates.decode_latent_hopper.space import LatentConfig
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render

BATCH, HEADS, QUERIES, WIDTH = 2, 3, 2, 512


@pytest.mark.tritons
@pytest.mark.parametrize("splits", [2, 16, 31, 128])
def test_splits_are_weighted_by_their_sums(splits: int) -> None:
    torch.manual_seed(0)
    shape = f"heads={HEADS},kv_heads=1,head_dim=576,value_head_dim={WIDTH},batch={BATCH},mla"
    problem = testing.problem(f"{shape},seqlen_q={QUERIES},seqlen_kv={64 * splits}")
    config = LatentConfig(num_warps=4, num_stages=2, num_splits=splits)
    module = load_module(
        render(find_family("decode_latent_hopper"), problem, config, Specialization(lse=True))
    )
    rows = BATCH * HEADS * QUERIES
    parts, sums = torch.randn(splits, rows, WIDTH), 3 * torch.randn(splits, rows)
    # One row saw nothing, and others nothing in some of the parts: these were not written.
    sums[:, 5] = -torch.inf
    sums[1, ::2] = -torch.inf
    parts[sums == -torch.inf] = torch.nan
    out = torch.full((BATCH, QUERIES, HEADS, WIDTH), torch.nan).transpose(1, 2)
    lse = torch.full((BATCH, HEADS, QUERIES), torch.nan)
    q, k = torch.empty(BATCH, HEADS, QUERIES, 576), torch.empty(BATCH, 1, 64 * splits, 576)
    grid, integers = module.epilogue_plan(q, k, k[..., :WIDTH], out)
    module.combine[grid](out, lse, parts, sums, *integers)
    weights = sums.double().mul(torch.log(torch.tensor(2.0).double())).softmax(0).nan_to_num(0.0)
    expected = (weights[..., None] * parts.double().nan_to_num(0.0)).sum(0)
    torch.testing.assert_close(
        out.double(), expected.view(BATCH, HEADS, QUERIES, WIDTH), atol=1e-5, rtol=1e-5
    )
    logs = torch.logsumexp(sums.double() * torch.log(torch.tensor(2.0).double()), 0)
    torch.testing.assert_close(lse.double(), logs.view(BATCH, HEADS, QUERIES), atol=1e-5, rtol=1e-5)
