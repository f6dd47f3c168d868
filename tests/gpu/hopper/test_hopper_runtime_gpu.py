"""Tests of Hopper kernels on their GPU: graphs, streams, threads, many addresses, huge outputs."""

import pytest
import torch
from torch import Tensor

from flashtune.launch.tma_descriptors import MAX_ADDRESSES
from tests.gpu.hopper.hopper_calls import attention, tensors
from tests.gpu.marks import ON_HOPPER, SERVED

pytestmark = [
    *SERVED,
    # Nothing interrupts a thread that waits for the GPU: a hang ends the whole run, and says where it was.
    pytest.mark.timeout(300, method="thread"),
    ON_HOPPER,
]


# ---- graphs, streams, threads ----------------------------------------------------------------------


def test_alternating_streams() -> None:
    inputs = [tensors(seed=seed) for seed in range(2)]
    expected = [attention(*each) for each in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    outs: list[list[Tensor]] = [[], []]
    for _ in range(50):
        for stream, each, kept in zip(streams, inputs, outs, strict=True):
            with torch.cuda.stream(stream):
                kept.append(attention(*each))
    torch.cuda.synchronize()
    for kept, right in zip(outs, expected, strict=True):
        assert all(torch.equal(out, right) for out in kept)


def test_more_addresses_than_the_descriptor_cache_holds() -> None:
    q, k, v = tensors(64, length=64)
    expected = attention(q, k, v)
    room = torch.empty(MAX_ADDRESSES + 40, *q.shape, dtype=q.dtype, device="cuda").copy_(q)
    outs = [attention(each, k, v) for each in room]
    assert all(torch.equal(out, expected) for out in outs)
    assert torch.equal(attention(q, k, v), expected)


# ---- huge tensors ----------------------------------------------------------------------------------
