"""GPU tests of the kernel that lists the blocks of mask functions, and of calls that use its lists."""

from typing import Any

import pytest
import torch

import flashtune
from flashtune.runtime.visible_lists import _listing
from tests.gpu.marks import ON_HOPPER
from tests.interpreter.test_visible_blocks import blocks_of, error_of, hiding
from tests.problems.random_masks import random_mask
from tests.support.fuzzing import fuzz_count

pytestmark = [pytest.mark.gpu, ON_HOPPER]

DEVICE = torch.device("cuda", 0)


@pytest.mark.parametrize("seed", range(fuzz_count(20, 500)))
def test_no_listed_block_is_wrong(seed: int) -> None:
    functions, ints, tables = random_mask(seed)
    assert blocks_of(functions, ints, tables, device=DEVICE).are_sound


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_calls_list_blocks_anew(dtype: torch.dtype, head_dim: int) -> None:
    """New captured numbers, lengths, and elements of captured tensors need no other kernel."""
    places = torch.arange(2000, device=DEVICE)
    documents, size = places // 300, 100

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (documents[q] == documents[k]) & (q - k < size) & (k <= q + h)

    _listing.cache_clear()
    bound = 0.05 if dtype is torch.bfloat16 else 1e-3
    for length in (2000, 1111):
        tensors = tuple(torch.randn(2, 4, length, head_dim, device=DEVICE).to(dtype) for _ in range(3))
        assert error_of(mask, tensors) < bound
        documents.copy_(places // 700)
        assert error_of(mask, tensors) < bound
        size += 200
        assert error_of(mask, tensors) < bound
    assert _listing.cache_info().misses == 1


def test_a_graph_lists_blocks_in_each_replay() -> None:
    places = torch.arange(1024, device=DEVICE)
    documents = places // 128
    score = hiding(lambda b, h, q, k: documents[q] == documents[k])
    q, k, v = (torch.randn(1, 4, 1024, 64, dtype=torch.bfloat16, device=DEVICE) for _ in range(3))
    flashtune.flex_attention(q, k, v, score)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flashtune.flex_attention(q, k, v, score)
    for length in (128, 300, 1024):
        documents.copy_(places // length)
        graph.replay()
        torch.testing.assert_close(out, flashtune.flex_attention(q, k, v, score))
