"""FlexAttention on a problem's inputs, as its users call it: compiled for each shape, with one mask."""

import functools
import operator
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from flashtune.core.features.masks import seen_blocks
from flashtune.core.features.table import FEATURES
from flashtune.core.problem import Bias, BlockLists, Causal, Feature, Problem
from flashtune.tuner.execution.inputs import Tensors

# Features that FlexAttention cannot express, or only with copies of the cache. With sinks, its rounded output
# would be multiplied and rounded again, so that the error exceeds the tolerance.
REFUSED = frozenset(
    {Feature.PAGES, Feature.QUANTIZED_KV, Feature.MLA, Feature.DROPOUT, Feature.SINKS, Feature.TREE}
)
# Masks of these differ between sequences, or between heads.
OF_SEQUENCES = frozenset({Feature.KV_LENGTHS, Feature.PREFIX})
OF_HEADS = frozenset({Feature.BIAS, Feature.BLOCK_MASK})

# Functions of the numbers of a batch element, a head, a query and a key.
Visible = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Score = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


class Place(NamedTuple):
    """A query and a key within their sequences."""

    sequence: Tensor  # Number of the query's sequence.
    query: Tensor  # Position of the query among the keys of its sequence.
    key: Tensor  # Position of the key.
    inside: Tensor | None  # Whether the key belongs to the sequence; None if all do.


Locate = Callable[[Tensor, Tensor, Tensor], Place]


def flex_run(problem: Problem, tensors: Tensors) -> Callable[[], Tensor]:
    """Returns a run of FlexAttention.

    Compilations of earlier shapes are dropped first: torch counts all of them against one limit, and does not
    compile beyond it.
    """
    torch.compiler.reset()
    locate = _packed_places(problem, tensors) if problem.packed else _dense_places(problem, tensors)
    return functools.partial(
        torch.compile(flex_attention, dynamic=False, fullgraph=True),
        tensors.q,
        tensors.k,
        tensors.v,
        block_mask=_block_mask(problem, tensors, locate),
        score_mod=_score(problem, tensors, locate),
        scale=tensors.scale,
        enable_gqa=problem.group_size > 1,
    )


def _dense_places(problem: Problem, tensors: Tensors) -> Locate:
    lengths, diagonal = tensors.side.seqlens_kv, problem.diagonal
    from_top = problem.causal is Causal.TOP_LEFT

    def locate(batch: Tensor, query: Tensor, key: Tensor) -> Place:
        if lengths is None:
            return Place(batch, query + diagonal, key, None)
        keys = lengths[batch]
        return Place(batch, query if from_top else query + (keys - problem.seqlen_q), key, key < keys)

    return locate


def _packed_places(problem: Problem, tensors: Tensors) -> Locate:
    starts_q, starts_k = tensors.side.cu_seqlens_q, tensors.side.cu_seqlens_kv
    assert starts_q is not None
    assert starts_k is not None
    lengths, keys = starts_q.diff(), starts_k.diff()
    diagonals = torch.zeros_like(keys) if problem.causal is Causal.TOP_LEFT else keys - lengths
    sequences = torch.arange(len(keys), device=keys.device).repeat_interleave(lengths)
    first, end = starts_k[sequences], starts_k[sequences + 1]
    shift = diagonals[sequences] - starts_q[sequences]

    def locate(batch: Tensor, query: Tensor, key: Tensor) -> Place:
        del batch  # all sequences are one batch element
        inside = (key >= first[query]) & (key < end[query])
        return Place(sequences[query], query + shift[query], key - first[query], inside)

    return locate


def mask_pairs(problem: Problem, tensors: Tensors) -> int:
    """Returns the pairs for which FlexAttention evaluates the mask to find the visible blocks."""
    batch, heads = _mask_extents(problem, tensors)
    return (batch or 1) * (heads or 1) * tensors.q.shape[2] * tensors.k.shape[2] if _has_mask(problem) else 0


def _block_mask(problem: Problem, tensors: Tensors, locate: Locate) -> BlockMask | None:
    """Returns FlexAttention's mask, None if all queries see all keys."""
    if not _has_mask(problem):
        return None
    extents = *_mask_extents(problem, tensors), tensors.q.shape[2], tensors.k.shape[2]
    return create_block_mask(_visible(problem, tensors, locate), *extents, device=tensors.q.device)


def _mask_extents(problem: Problem, tensors: Tensors) -> tuple[int | None, int | None]:
    """Returns the batch elements and heads of the mask, None where all share one."""
    side, features = tensors.side, problem.features
    own = [tensor for tensor in (side.bias, side.block_counts) if tensor is not None and tensor.stride(0)]
    differ = own or (features & OF_SEQUENCES and not problem.packed)
    return tensors.q.shape[0] if differ else None, problem.heads if features & OF_HEADS else None


def _has_mask(problem: Problem) -> bool:
    masks = {feature for feature in problem.features if FEATURES[feature].is_mask}
    return problem.is_causal or bool(masks - ({Feature.BIAS} if problem.bias is Bias.ADDITIVE else set()))


def _visible(problem: Problem, tensors: Tensors, locate: Locate) -> Visible:
    """Returns a function of whether a query sees a key, by the definitions in `core/features/masks.py`."""
    side, right = tensors.side, 0 if problem.is_causal else problem.window_right
    left, chunk, size = problem.window_left, problem.chunk, problem.block_mask
    bias = side.bias if problem.bias is Bias.BOOLEAN else None
    blocks, sharing = None, problem.group_size if problem.block_lists is BlockLists.GROUP else 1
    if side.block_counts is not None and side.block_indices is not None:
        blocks = seen_blocks(side.block_counts, side.block_indices, -(-problem.seqlen_kv // size))

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        position = locate(batch, query, key)
        near = []
        if left is not None:
            near.append(position.key >= position.query - left)
        if chunk:
            near.append(position.key // chunk == position.query // chunk)
        seen = [_all(near) | (position.key < problem.sink_tokens)] if problem.sink_tokens and near else near
        if right is not None:
            seen = [*seen, position.key <= position.query + right]
        if side.prefix is not None and seen:
            seen = [_all(seen) | (position.key < side.prefix[position.sequence])]
        if position.inside is not None:
            seen = [*seen, position.inside]
        if bias is not None:
            seen = [*seen, bias[batch, head, query, key]]
        if blocks is not None:
            seen = [*seen, blocks[batch, head // sharing, query // size, key // size]]
        return _all(seen) if seen else key >= 0

    return visible


def _all(conditions: list[Tensor]) -> Tensor:
    return functools.reduce(operator.and_, conditions)


def _score(problem: Problem, tensors: Tensors, locate: Locate) -> Score | None:
    """Returns a function of the changed score, None if no feature changes scores."""
    side = tensors.side
    bias = side.bias if problem.bias is Bias.ADDITIVE else None
    if side.softcap is None and side.slopes is None and bias is None:
        return None

    def changed(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if side.softcap is not None:
            score = side.softcap * torch.tanh(score / side.softcap)
        if side.slopes is not None:
            position = locate(batch, query, key)
            score = score - side.slopes[position.sequence, head] * (position.query - position.key).abs()
        if bias is not None:
            score = score + bias[batch, head, query, key]
        return score

    return changed
