"""Tests of the gradients of sinks, by kernels or by torch."""

import pytest
import torch

from flashtune import testing
from flashtune.core.features.records import NO_EXTRA_INPUTS
from flashtune.core.kernel import Specialization
from flashtune.core.layouts import Layout
from flashtune.core.target import find_target
from flashtune.runtime.autograd import with_side
from flashtune.runtime.gradients import BackwardInputs, Gradients
from flashtune.templates.registry import find_family
from flashtune.templates.rendering import render

TENSORS = [torch.randn(2, 3, 5, 8) for _ in range(5)]


@pytest.mark.parametrize("wanted", [(), ("sinks",)])
@pytest.mark.parametrize("from_kernel", [False, True])
def test_gradients_of_sinks_are_summed_over_sequences(wanted: tuple[str, ...], from_kernel: bool) -> None:
    q, k, v, out, dout = TENSORS
    lse, sinks = torch.randn(2, 3, 5), torch.randn(3)
    by_sequence = -(torch.exp(sinks[:, None] - lse) * (out * dout).sum(-1)).sum(-1)

    def backward(_: BackwardInputs) -> Gradients:
        return Gradients(q, k, v, by_sequence if from_kernel else None)

    run = with_side(backward, Layout.BHSD, wanted)
    gradient = run(
        BackwardInputs(q, k, v, out, lse, dout, None, None, NO_EXTRA_INPUTS._replace(sinks=sinks))
    ).dsinks
    if not wanted:
        assert gradient is None
        return
    assert gradient is not None
    torch.testing.assert_close(gradient, by_sequence.sum(0))


@pytest.mark.parametrize(("family", "writes"), [("backward_hopper", True), ("backward_split", False)])
def test_hopper_kernels_write_gradients_of_sinks(family: str, writes: bool) -> None:
    problem = testing.problem("heads=2,kv_heads=1,seqlen=8,head_dim=64,dtype=bf16,backward", sinks=True)
    hopper = find_family(family)
    kernel = render(hopper, problem, hopper.default(problem, find_target("h200")), Specialization())
    assert kernel.writes("dsinks") is writes
