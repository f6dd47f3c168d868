"""Tests of the extra inputs that a check draws."""

import pytest
import torch

from flashtune.core.problem import Bias, Problem
from flashtune.tuner.workloads.shapes import parse_shape
from flashtune.verification.inputs.side_inputs import make_side
from flashtune.verification.lengths import equal_lengths
from flashtune.verification.probes import Probe

ROWS, KEYS = 128, 64


def tiles(problem: Problem) -> torch.Tensor:
    """Returns, for each tile, the elements that change nothing and those that hide keys."""
    generator = torch.Generator().manual_seed(0)
    bias = make_side(Probe.RANDOM, problem, equal_lengths(problem), KEYS, generator).bias
    assert bias is not None
    is_boolean = problem.bias is Bias.BOOLEAN
    both = torch.stack((bias, ~bias) if is_boolean else (bias == 0, bias == -torch.inf))
    split: torch.Tensor = both.unflatten(4, (-1, KEYS)).unflatten(3, (-1, ROWS))
    return split.transpose(4, 5).flatten(5)


@pytest.mark.parametrize("bias", ["boolean", "additive"])
def test_some_tiles_of_a_mask_are_empty_and_some_full(bias: str) -> None:
    (problem,) = parse_shape(f"heads=4,seqlen=1024,head_dim=128,batch=2,bias={bias}")
    is_full, is_empty = tiles(problem).all(-1)
    assert is_full.float().mean() > 0.1
    assert is_empty.float().mean() > 0.1
    assert (~is_full & ~is_empty).float().mean() > 0.4
    # The first tiles of each head are partial, so that no head is hidden or plain as a whole.
    assert not (is_full | is_empty)[:, :, :2, 0].all(-1).any()


@pytest.mark.parametrize("bias", ["boolean", "additive"])
def test_full_and_empty_tiles_follow_each_other(bias: str) -> None:
    (problem,) = parse_shape(f"heads=4,seqlen=1024,head_dim=128,batch=2,bias={bias}")
    is_full, is_empty = tiles(problem).all(-1)
    for kind in (is_full, is_empty):
        assert (kind[..., 1:] & kind[..., :-1]).any(), "several tiles in a row"
        assert (kind[..., 1:] & ~kind[..., :-1]).any(), "after a partial one"


@pytest.mark.parametrize("bias", ["boolean", "additive"])
def test_some_rows_of_a_long_mask_have_no_keys(bias: str) -> None:
    (problem,) = parse_shape(f"heads=4,seqlen=2048,head_dim=128,batch=1,bias={bias}")
    _, is_hidden = tiles(problem)
    rows = is_hidden.unflatten(-1, (ROWS, KEYS)).all(-1).all(-2)
    assert 0.01 < rows.float().mean() < 0.1
