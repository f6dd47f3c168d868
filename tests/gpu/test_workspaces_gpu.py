"""Tests of the workspaces of split-KV decoding: streams, threads and CUDA graphs keep theirs apart."""

import threading

import pytest
import torch
from torch import Tensor

import flashtune
from tests.gpu.marks import SERVED

pytestmark = SERVED

CALLS = 200


def decode(q: Tensor, kept: tuple[Tensor, ...]) -> Tensor:
    return flashtune.attention(q, *kept, prefer="generated")


@pytest.fixture
def kept() -> tuple[Tensor, Tensor]:
    torch.manual_seed(5)
    k, v = (torch.randn(1, 8, 8192, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return k, v


@pytest.fixture
def queries(kept: tuple[Tensor, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Queries and their attention, each computed alone."""
    pairs = []
    for _ in range(4):
        q = torch.randn(1, 32, 1, 128, dtype=torch.bfloat16, device="cuda")
        out = decode(q, kept)
        torch.cuda.synchronize()
        pairs.append((q, out))
    return pairs


@pytest.mark.parametrize("own_streams", [False, True])
def test_threads_share_no_workspace(
    kept: tuple[Tensor, Tensor], queries: list[tuple[Tensor, Tensor]], own_streams: bool
) -> None:
    wrong: list[int] = []
    start = threading.Barrier(len(queries))

    def run(q: Tensor, expected: Tensor) -> None:
        stream = torch.cuda.Stream() if own_streams else torch.cuda.default_stream()
        start.wait()
        with torch.cuda.stream(stream):
            results = [decode(q, kept) for _ in range(CALLS)]
            stream.synchronize()
            wrong.append(sum(not torch.equal(out, expected) for out in results))

    threads = [threading.Thread(target=run, args=pair) for pair in queries]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [0] * len(queries)


def test_graph_and_other_calls_share_no_workspace(
    kept: tuple[Tensor, Tensor], queries: list[tuple[Tensor, Tensor]]
) -> None:
    (captured, expected), (q, other) = queries[:2]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode(captured, kept)
    side = torch.cuda.Stream()
    results = []
    for _ in range(CALLS):
        with torch.cuda.stream(side):
            graph.replay()
        results.append(decode(q, kept))
    torch.cuda.synchronize()
    assert torch.equal(out, expected)
    assert all(torch.equal(result, other) for result in results)


def test_calls_allocate_only_their_output(
    kept: tuple[Tensor, Tensor], queries: list[tuple[Tensor, Tensor]]
) -> None:
    q, _ = queries[0]
    decode(q, kept)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    out = decode(q, kept)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before + 1
    assert out.shape == q.shape


def test_compiled_calls_in_graphs_leave_nothing_in_the_pool(
    kept: tuple[Tensor, Tensor], queries: list[tuple[Tensor, Tensor]]
) -> None:
    """The first call of a new stream comes from the warm-up of `torch.compile`'s graphs."""
    q, expected = queries[0]
    compiled = torch.compile(lambda *inputs: 1 * decode(inputs[0], inputs[1:]), mode="reduce-overhead")
    for _ in range(4):
        out = compiled(q, *kept)
        assert torch.equal(out, expected)
