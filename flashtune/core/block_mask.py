"""`BlockMask`: the blocks of keys that each block of queries sees, and its builders.

Builders run on the device of their inputs and do not synchronise with the host.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flashtune.core.errors import ProblemError
from flashtune.core.features.masks import seen_blocks

BLOCK_SIZE = 128


class BlockMask(NamedTuple):
    """The visible blocks of keys of each block of queries, as padded lists.

    Query i is in block i // block_size, and so is key i. The first dimensions may be 1: sequences then share
    lists, or all heads do. With `kv_heads` in place of `heads`, the query heads of one KV head share lists.

    Attributes:
        counts: Number of visible key blocks of each query block: int32 [batch, heads, query blocks].
        indices: Their numbers in ascending order: int32 [batch, heads, query blocks, blocks of the longest
            list]. Elements after the count are ignored.
        block_size: Queries and keys of a block, 64 or 128.
    """

    counts: Tensor
    indices: Tensor
    block_size: int = BLOCK_SIZE

    @staticmethod
    def from_blocks(visible: Tensor, block_size: int = BLOCK_SIZE) -> BlockMask:
        """Returns the mask of visible blocks, bool [..., query blocks, key blocks] of up to four dimensions.

        Raises:
            ProblemError: The tensor is not bool, or has another number of dimensions.
        """
        visible = _four_dimensions("visible", visible, torch.bool)
        blocks = visible.shape[-1]
        # The place of each visible block in its list. Others go to an additional place.
        places = (visible.cumsum(-1) - 1).masked_fill(~visible, blocks)
        numbers = torch.arange(blocks, dtype=torch.int32, device=visible.device).expand(visible.shape)
        lists = torch.zeros(*visible.shape[:-1], blocks + 1, dtype=torch.int32, device=visible.device)
        lists.scatter_(-1, places, numbers)
        return BlockMask(visible.sum(-1, dtype=torch.int32), lists[..., :blocks].contiguous(), block_size)

    @staticmethod
    def from_mask(mask: Tensor, block_size: int = BLOCK_SIZE) -> BlockMask:
        """Returns the blocks with a visible element of a mask, bool [..., seqlen_q, seqlen_kv].

        The mask has up to four dimensions. The result shows all elements of these blocks: pass the mask as
        `attn_mask` too unless blocks are visible in full or not at all.

        Raises:
            ProblemError: The mask is not bool, or has another number of dimensions.
        """
        mask = _four_dimensions("mask", mask, torch.bool)
        rows, columns = (-size % block_size for size in mask.shape[-2:])
        padded = torch.nn.functional.pad(mask, (0, columns, 0, rows))
        tiles = padded.unflatten(-1, (-1, block_size)).unflatten(-3, (-1, block_size))
        return BlockMask.from_blocks(tiles.any(-1).any(-2), block_size)

    @staticmethod
    def from_csr(
        offsets: Tensor, columns: Tensor, key_blocks: int, block_size: int = BLOCK_SIZE
    ) -> BlockMask:
        """Returns the mask of lists in compressed sparse rows.

        Args:
            offsets: Where the list of each query block begins in `columns`, and where the last one ends:
                int32 [..., query blocks + 1] of up to three dimensions.
            columns: The key blocks of all lists, each list in ascending order: int32 [visible blocks].
            key_blocks: Number of key blocks.
            block_size: Queries and keys of a block, 64 or 128.

        Raises:
            ProblemError: `offsets` has another number of dimensions, or `columns` is not one-dimensional.
        """
        if not 1 <= offsets.dim() <= 3 or columns.dim() != 1:
            raise ProblemError(
                f"offsets has shape {list(offsets.shape)} and columns {list(columns.shape)}: pass offsets "
                "[batch, heads, query blocks + 1] and columns [visible blocks]"
            )
        offsets = offsets[(None,) * (3 - offsets.dim())].long()
        places = offsets[..., :-1, None] + torch.arange(key_blocks, device=offsets.device)
        # A list of no blocks has nothing to read.
        lists = torch.nn.functional.pad(columns.to(torch.int32), (0, 1))[places.clamp_(max=columns.numel())]
        return BlockMask(offsets.diff(dim=-1).to(torch.int32), lists, block_size)

    @staticmethod
    def from_window(
        seqlen_q: int,
        seqlen_kv: int,
        window: tuple[int, int],
        block_size: int = BLOCK_SIZE,
        *,
        top_left: bool = False,
        device: torch.device | str | None = None,
    ) -> BlockMask:
        """Returns the blocks with a key in the sliding window (left, right) of one of their queries.

        Bounds of -1 mean no limit. Positions are those of `flashtune.attention`: the last query is at the
        last key, or with `top_left` the first one at the first. Pass the window to the call too for the exact
        mask.
        """
        diagonal = 0 if top_left else seqlen_kv - seqlen_q
        first = torch.arange(-(-seqlen_q // block_size), device=device)[:, None] * block_size
        key = torch.arange(-(-seqlen_kv // block_size), device=device) * block_size
        last = (first + block_size).clamp(max=seqlen_q) - 1 + diagonal
        left, right = window
        visible = torch.ones(len(first), len(key), dtype=torch.bool, device=device)
        if left >= 0:
            visible &= (key + block_size).clamp(max=seqlen_kv) - 1 >= first + diagonal - left
        if right >= 0:
            visible &= key <= last + right
        return BlockMask.from_blocks(visible, block_size)

    @staticmethod
    def from_documents(
        documents_q: Tensor, documents_k: Tensor | None = None, block_size: int = BLOCK_SIZE
    ) -> BlockMask:
        """Returns the blocks that have a document in common.

        Args:
            documents_q: The document of each query, integers that do not decrease along a sequence:
                [seqlen_q] or [batch, seqlen_q].
            documents_k: Those of the keys, [seqlen_kv] or [batch, seqlen_kv]; by default those of queries.
            block_size: Queries and keys of a block, 64 or 128.

        The mask is exact if documents begin at blocks. Otherwise blocks at their borders show both documents.
        """
        documents_k = documents_q if documents_k is None else documents_k
        (first_q, last_q), (first_k, last_k) = (
            _ends(documents, block_size) for documents in (documents_q, documents_k)
        )
        common = (first_q[..., None] <= last_k[..., None, :]) & (first_k[..., None, :] <= last_q[..., None])
        return BlockMask.from_blocks(common if common.dim() == 2 else common[:, None], block_size)

    @staticmethod
    def from_cu_seqlens(
        cu_seqlens_q: Tensor,
        seqlen_q: int,
        cu_seqlens_k: Tensor | None = None,
        seqlen_kv: int | None = None,
        block_size: int = BLOCK_SIZE,
    ) -> BlockMask:
        """Returns `from_documents` of documents that are packed into one sequence.

        Args:
            cu_seqlens_q: Offsets of the documents' queries, and the end of the last one: [documents + 1].
                Queries and keys after this end are one more document.
            seqlen_q: Queries of the sequence.
            cu_seqlens_k: Likewise of the keys; by default those of the queries.
            seqlen_kv: Keys of the sequence; by default as many as queries.
            block_size: Queries and keys of a block, 64 or 128.
        """
        own = _document_ids(cu_seqlens_q, seqlen_q)
        if cu_seqlens_k is None and seqlen_kv is None:
            return BlockMask.from_documents(own, None, block_size)
        offsets = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
        keys = _document_ids(offsets, seqlen_q if seqlen_kv is None else seqlen_kv)
        return BlockMask.from_documents(own, keys, block_size)

    @staticmethod
    def from_scores(scores: Tensor, top_k: int, block_size: int = BLOCK_SIZE) -> BlockMask:
        """Returns the key blocks with the largest scores of each query block.

        Args:
            scores: Scores of blocks, [..., query blocks, key blocks] of up to four dimensions. A score of
                -inf hides a block.
            top_k: Number of blocks that each query block sees, at most.
            block_size: Queries and keys of a block, 64 or 128.

        Raises:
            ProblemError: The scores have another number of dimensions.
        """
        scores = _four_dimensions("scores", scores)
        blocks = scores.shape[-1]
        largest = scores.topk(min(top_k, blocks), -1, sorted=False)
        hidden = largest.values == -torch.inf
        # Hidden blocks go to the end of the list.
        lists = largest.indices.masked_fill(hidden, blocks).sort(-1).values.clamp(max=blocks - 1)
        return BlockMask((~hidden).sum(-1, dtype=torch.int32), lists.to(torch.int32), block_size)

    def visible_blocks(self, key_blocks: int) -> Tensor:
        """Returns the mask as bool [batch, heads, query blocks, key_blocks], for example to combine masks."""
        return seen_blocks(self.counts, self.indices, key_blocks)


def _document_ids(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """Returns the document of each token, int64 [tokens]."""
    places = torch.arange(tokens, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), places, right=True)


def _ends(documents: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Returns the first and the last document of each block, [..., blocks]."""
    starts = torch.arange(0, documents.shape[-1], block_size, device=documents.device)
    lasts = (starts + block_size - 1).clamp(max=documents.shape[-1] - 1)
    return documents[..., starts], documents[..., lasts]


def _four_dimensions(name: str, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Returns a tensor with leading dimensions of 1, so that it has four."""
    if not isinstance(tensor, Tensor) or not 2 <= tensor.dim() <= 4 or dtype not in (None, tensor.dtype):
        kind = f"{tensor.dtype} {list(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
        wanted = "a tensor" if dtype is None else "a bool tensor"
        raise ProblemError(f"{name} is {kind}: pass {wanted} of two to four dimensions")
    return tensor[(None,) * (4 - tensor.dim())]
