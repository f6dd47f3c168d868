"""The masks of features: which keys a query sees, in torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flashtune.core.features.plain_problem import Causal

if TYPE_CHECKING:
    from flashtune.core.features.records import ExtraInputs, FeatureFields


def seen_keys(fields: FeatureFields, positions: Tensor, keys: Tensor, prefix: Tensor | None) -> Tensor:
    """Returns whether queries see keys, apart from a bias and the ends of sequences.

    `positions` are those of the queries among the keys, [batch | 1, rows, 1]. `keys` are positions, [keys].
    `prefix` has the lengths of the prefixes, [batch | 1, 1, 1], or is None without prefixes.
    """
    is_causal = fields.causal is not Causal.NONE
    near = torch.ones(1, 1, 1, dtype=torch.bool, device=positions.device)
    if fields.window_left is not None:
        near = both(near, keys >= positions - fields.window_left)
    if fields.chunk:
        chunk, own = keys // fields.chunk, positions // fields.chunk
        near = both(near, chunk >= own if is_causal else chunk == own)
    seen = near | (keys < fields.sink_tokens)
    if is_causal:
        seen = both(seen, keys <= positions)
    elif fields.window_right is not None:
        seen = both(seen, keys <= positions + fields.window_right)
    return seen if prefix is None else seen | (keys < prefix)


def both(first: Tensor, other: Tensor) -> Tensor:
    """Returns the broadcast `and` of two masks, by bytes. Booleans take the CPU thirty times as long."""
    return (first.view(torch.uint8) & other.view(torch.uint8)).view(torch.bool)


def seen_pairs(fields: FeatureFields, inputs: ExtraInputs, rows: Tensor, keys: int) -> Tensor:
    """Returns whether a block mask leaves pairs visible, bool [batch, heads, rows, keys].

    `inputs` have the lists of all sequences. `rows` are the numbers of the queries, [rows]; `keys` is the
    number of keys.
    """
    counts, indices, size = inputs.block_counts, inputs.block_indices, fields.block_mask
    assert counts is not None
    assert indices is not None
    blocks = seen_blocks(counts, indices, -(-keys // size))
    blocks = blocks.repeat_interleave(fields.heads // counts.shape[1], 1)
    return blocks[:, :, rows // size].repeat_interleave(size, -1)[..., :keys]


def seen_newest(tree: Tensor, places: Tensor) -> Tensor:
    """Returns whether rows see keys by a tree mask, bool [sequences, rows, keys].

    `tree` has the rows, [sequences, rows, seqlen_q]. `places` are the numbers of the keys relative to the
    first of the newest ones, [sequences | 1, 1, keys].
    """
    columns = places.clamp(0, max(0, tree.shape[-1] - 1)).expand(*tree.shape[:2], -1)
    return tree.gather(-1, columns) | (places < 0)


def seen_blocks(counts: Tensor, indices: Tensor, key_blocks: int) -> Tensor:
    """Returns whether blocks of queries see blocks of keys, bool [..., query blocks, key_blocks].

    `counts` are the lengths of the lists, [..., query blocks]. `indices` are the lists, [..., query blocks,
    blocks of the longest]. Elements after a list's end are ignored.
    """
    own = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    # Elements after the end go to an additional block.
    places = indices.long().masked_fill(~own, key_blocks)
    seen = torch.zeros(*indices.shape[:-1], key_blocks + 1, dtype=torch.bool, device=indices.device)
    return seen.scatter_(-1, places, True)[..., :key_blocks]
