"""Tests of the builders of block masks, against masks of elements."""

import pytest
import torch
from torch import Tensor

from flashtune import BlockMask, ProblemError
from flashtune.core.features.masks import seen_blocks

SIZES = pytest.mark.parametrize("size", [64, 128])


def blocks_of(mask: Tensor, size: int) -> Tensor:
    """The blocks with a visible element of a mask [rows, columns], block by block."""
    rows, columns = (-(-extent // size) for extent in mask.shape)
    visible = torch.zeros(rows, columns, dtype=torch.bool)
    for row in range(rows):
        for column in range(columns):
            tile = mask[row * size : (row + 1) * size, column * size : (column + 1) * size]
            visible[row, column] = bool(tile.any())
    return visible


def check(mask: BlockMask, visible: Tensor) -> None:
    """Checks types, order and blocks of a mask with one list per query block."""
    assert mask.counts.dtype is torch.int32
    assert mask.indices.dtype is torch.int32
    assert mask.indices.shape[:3] == mask.counts.shape
    keys = visible.shape[-1]
    assert int(mask.indices.min()) >= 0
    assert int(mask.indices.max()) < keys
    for count, row in zip(mask.counts.flatten().tolist(), mask.indices.flatten(0, 2), strict=True):
        assert row[:count].tolist() == sorted(set(row[:count].tolist()))
    wanted = visible[(None,) * (4 - visible.dim())]
    assert torch.equal(mask.visible_blocks(keys), wanted)


@pytest.mark.parametrize("shape", [(3, 7), (2, 4, 1), (2, 3, 5, 9)])
def test_from_blocks(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    visible = torch.rand(shape) < 0.4
    visible[..., 0, :] = False
    check(BlockMask.from_blocks(visible, 64), visible)
    check(BlockMask.from_blocks(torch.ones_like(visible)), torch.ones_like(visible))


@SIZES
@pytest.mark.parametrize("extents", [(1, 1), (130, 257), (256, 128), (63, 65)])
def test_from_mask(size: int, extents: tuple[int, int]) -> None:
    torch.manual_seed(0)
    mask = torch.rand(extents) < 0.0003
    blocks = BlockMask.from_mask(mask, size)
    assert blocks.block_size == size
    check(blocks, blocks_of(mask, size))


def test_from_mask_of_heads() -> None:
    mask = torch.zeros(2, 3, 100, 200, dtype=torch.bool)
    mask[1, 2, 99, 150] = True
    visible = torch.zeros(2, 3, 2, 4, dtype=torch.bool)
    visible[1, 2, 1, 2] = True
    check(BlockMask.from_mask(mask, 64), visible)


def test_from_csr() -> None:
    torch.manual_seed(0)
    visible = torch.rand(2, 3, 4, 6) < 0.5
    visible[0, 0] = False
    visible[-1, -1, -1] = True
    columns = visible.nonzero()[:, -1].int()
    counts = visible.sum(-1).view(2, 3, 4)
    ends = counts.flatten().cumsum(0).view(2, 3, 4)
    offsets = torch.cat([ends[..., :1] - counts[..., :1], ends], -1).int()
    mask = BlockMask.from_csr(offsets, columns, 6, 64)
    assert torch.equal(mask.visible_blocks(6), visible)
    empty = BlockMask.from_csr(torch.zeros(5, dtype=torch.int32), columns[:0], 6, 64)
    assert empty.counts.tolist() == [[[0, 0, 0, 0]]]


@SIZES
@pytest.mark.parametrize("window", [(100, 0), (-1, 0), (70, 30), (0, -1), (-1, -1), (0, 0)])
@pytest.mark.parametrize("extents", [(300, 300), (100, 390), (390, 100), (1, 257)])
@pytest.mark.parametrize("top_left", [False, True])
def test_from_window(size: int, window: tuple[int, int], extents: tuple[int, int], top_left: bool) -> None:
    queries, keys = extents
    position = torch.arange(queries)[:, None] + (0 if top_left else keys - queries)
    key = torch.arange(keys)
    left, right = window
    mask = torch.ones(queries, keys, dtype=torch.bool)
    if left >= 0:
        mask &= key >= position - left
    if right >= 0:
        mask &= key <= position + right
    blocks = BlockMask.from_window(queries, keys, window, size, top_left=top_left)
    check(blocks, blocks_of(mask, size))


@SIZES
def test_from_documents(size: int) -> None:
    torch.manual_seed(0)
    lengths = [40, 3, 200, 1, 1, 300, 64, 128, 5]
    documents = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    tokens = len(documents)
    visible = blocks_of(documents[:, None] == documents, size)
    check(BlockMask.from_documents(documents, block_size=size), visible)
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    check(BlockMask.from_cu_seqlens(offsets, tokens, block_size=size), visible)
    both = torch.stack([documents, documents.new_zeros(tokens)])
    blocks = BlockMask.from_documents(both, block_size=size)
    assert blocks.counts.shape == (2, 1, len(visible))
    assert torch.equal(blocks.visible_blocks(len(visible))[:, 0], torch.stack([visible, visible | True]))


def test_from_documents_of_other_keys() -> None:
    offsets_q, offsets_k = torch.tensor([0, 64, 200]).int(), torch.tensor([0, 128, 129]).int()
    blocks = BlockMask.from_cu_seqlens(offsets_q, 200, offsets_k, 129, 64)
    documents_q, documents_k = torch.zeros(200), torch.zeros(129)
    documents_q[64:], documents_k[128:] = 1, 1
    check(blocks, blocks_of(documents_q[:, None] == documents_k, 64))


@pytest.mark.parametrize("top_k", [1, 3, 100])
def test_from_scores(top_k: int) -> None:
    torch.manual_seed(0)
    scores = torch.randn(2, 2, 4, 7)
    scores[0, 0, 0] = -torch.inf
    scores[0, 0, 1, 2:] = -torch.inf
    blocks = BlockMask.from_scores(scores, top_k, 64)
    assert blocks.indices.shape[-1] == min(top_k, 7)
    visible = torch.zeros(scores.shape, dtype=torch.bool)
    for row, kept in zip(scores.flatten(0, 2), visible.flatten(0, 2), strict=True):
        order = sorted(range(7), key=lambda block: -float(row[block]))
        kept[[block for block in order[:top_k] if row[block] > -torch.inf]] = True
    check(blocks, visible)


def test_seen_blocks_ignores_elements_after_the_end() -> None:
    counts = torch.tensor([[1], [0]], dtype=torch.int32)
    indices = torch.tensor([[[2, 1, -5]], [[0, 2**30, 1]]], dtype=torch.int32)
    assert seen_blocks(counts, indices, 3).tolist() == [[[False, False, True]], [[False, False, False]]]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: BlockMask.from_blocks(torch.ones(3)), "visible is torch.float32 .*: pass a bool tensor"),
        (lambda: BlockMask.from_blocks(torch.ones(1, 1, 1, 1, 1) > 0), "of two to four dimensions"),
        (lambda: BlockMask.from_mask([True]), "mask is list: pass a bool tensor"),  # type: ignore[arg-type]
        (lambda: BlockMask.from_scores(torch.ones(3), 2), "scores is .*: pass a tensor"),
        (lambda: BlockMask.from_csr(torch.ones(3), torch.ones(1, 1), 2), "offsets has shape .*columns"),
    ],
)
def test_wrong_arguments(build: object, message: str) -> None:
    assert callable(build)
    with pytest.raises(ProblemError, match=message):
        build()
