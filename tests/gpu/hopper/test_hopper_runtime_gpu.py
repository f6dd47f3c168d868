"""Tests of Hopper kernels on their GPU: graphs, streams, threads, many addresses, huge outputs."""

import threading

import pytest
import torch
from torch import Tensor

import flashtune
from flashtune.launch.tma_descriptors import MAX_ADDRESSES
from tests.gpu.hopper.hopper_calls import NATIVE, TOLERANCE, assert_right, attention, tensors
from tests.gpu.marks import ON_HOPPER, SERVED

pytestmark = [
    *SERVED,
    # Nothing interrupts a thread that waits for the GPU: a hang ends the whole run, and says where it was.
    pytest.mark.timeout(300, method="thread"),
    ON_HOPPER,
]


# ---- graphs, streams, threads ----------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [64, 128])
def test_captured_call_replays_with_new_values(head_dim: int) -> None:
    q, k, v = tensors(head_dim)
    planned = flashtune.plan(q, k, v, causal=True, prefer="generated")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # Tensors of the graph's own pool: their descriptors are made while it is captured.
        copied = q * 1.0
        out = planned(copied, k, v)
        again = planned(q, k, v)
    for step in range(3):
        for tensor, fresh in zip((q, k, v), tensors(head_dim, seed=step + 1), strict=True):
            tensor.copy_(fresh)
        graph.replay()
        assert_right(out, q, k, v)
        assert torch.equal(out, again)
    # Descriptors that are made in between do not change the captured graph.
    attention(*tensors(head_dim, seed=9))
    graph.replay()
    assert_right(out, q, k, v)


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


def test_two_concurrent_threads() -> None:
    inputs = [tensors(seed=seed) for seed in range(2)]
    expected = [attention(*each) for each in inputs]
    torch.cuda.synchronize()
    together = threading.Barrier(len(inputs))
    wrong: list[str] = []

    def work(number: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                together.wait()
                for turn in range(200):
                    # Addresses that the other thread has just given back are met as well.
                    fresh = [tensor.clone() for tensor in inputs[number]]
                    if not torch.equal(attention(*fresh), expected[number]):
                        wrong.append(f"thread {number}, turn {turn}")
        except Exception as error:  # noqa: BLE001 - told below: pytest does not see into threads
            wrong.append(f"thread {number}: {error}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_more_addresses_than_the_descriptor_cache_holds() -> None:
    q, k, v = tensors(64, length=64)
    expected = attention(q, k, v)
    room = torch.empty(MAX_ADDRESSES + 40, *q.shape, dtype=q.dtype, device="cuda").copy_(q)
    outs = [attention(each, k, v) for each in room]
    assert all(torch.equal(out, expected) for out in outs)
    assert torch.equal(attention(q, k, v), expected)


# ---- huge tensors ----------------------------------------------------------------------------------


@pytest.mark.alone
@pytest.mark.slow
def test_outputs_of_more_than_two_to_the_31_elements() -> None:
    if torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("needs 20 GiB of GPU memory")
    heads, length = 33, 2**20
    q = torch.empty(1, heads, length, 64, dtype=torch.bfloat16, device="cuda").normal_()
    k, v = (torch.randn(1, 1, 48, 64, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    assert q.numel() > 2**31
    told = flashtune.explain(q, k, v, prefer="generated", return_lse=True)
    assert told.selection is not None
    assert told.selection.record.family == NATIVE
    out, lse = flashtune.attention(q, k, v, prefer="generated", return_lse=True)
    for start in (0, length // 2, length - 300):
        rows = slice(start, start + 300)
        scores = q[:, :, rows].double() @ k.double().mT * 64**-0.5
        expected = scores.softmax(-1) @ v.double()
        torch.testing.assert_close(out[:, :, rows].double(), expected, atol=TOLERANCE, rtol=TOLERANCE)
        torch.testing.assert_close(lse[:, :, rows].double(), scores.logsumexp(-1), atol=1e-4, rtol=1e-4)
    # Nothing between is left unwritten, head by head: the whole would not fit in float64.
    assert all(bool(out[:, head].isfinite().all()) for head in range(heads))
