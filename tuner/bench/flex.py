"""FlexAttention on a problem's inputs, as its users call it: compiled for each shape, with one mask."""

from __future__ import annotations

import functools
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
REFUSED = frozenset({Feature.PAGES, Feature.QUANTIZED_KV, Feature.MLA, Feature.DROPOUT, Feature.SINKS})
# Masks of these differ between sequences, or between heads.
OF_SEQUENCES = frozenset({Feature.SEQLENS_K, Feature.PREFIX, Feature.BIAS, Feature.BLOCK_MASK})
OF_HEADS = frozenset({Feature.BIAS, Feature.BLOCK_MASK})

# Functions of the numbers of a batch element, a head, a query and a key.
Visible = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Score = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


class Place(NamedTuple):
    """A query and a key within their sequences.

    Attributes:
        sequence: Number of the query's sequence.
        query: Position of the query among the keys of its sequence.
        key: Position of the key.
        inside: Whether the key belongs to the sequence.
    """

    sequence: Tensor
    query: Tensor
    key: Tensor
    inside: Tensor


Locate = Callable[[Tensor, Tensor, Tensor], Place]


def flex_run(problem: Problem, tensors: Tensors) -> Callable[[], Tensor]:
    """Returns a run of FlexAttention.

    Compilations of earlier shapes are dropped first: torch counts all of them against one limit, and does not
    compile beyond it.
    """
    torch.compiler.reset()
    locate = _packed_places(problem, tensors) if problem.total_q else _dense_places(problem, tensors)
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
    lengths = tensors.side.seqlens_kv
    from_top = problem.causal is Causal.TOP_LEFT

    def locate(batch: Tensor, query: Tensor, key: Tensor) -> Place:
        keys = problem.seqlen_kv if lengths is None else lengths[batch]
        diagonal = 0 if from_top else keys - problem.seqlen_q
        return Place(batch, query + diagonal, key, key < keys)

    return locate


def _packed_places(problem: Problem, tensors: Tensors) -> Locate:
    starts_q, starts_k = tensors.side.cu_seqlens_q, tensors.side.cu_seqlens_kv
    assert starts_q is not None
    assert starts_k is not None
    lengths, keys = starts_q.diff(), starts_k.diff()
    diagonals = torch.zeros_like(keys) if problem.causal is Causal.TOP_LEFT else keys - lengths
    of_query = torch.arange(len(keys), device=keys.device).repeat_interleave(lengths)

    def locate(batch: Tensor, query: Tensor, key: Tensor) -> Place:
        del batch  # all sequences are one batch element
        sequence = of_query[query]
        own = key - starts_k[sequence]
        inside = (own >= 0) & (own < keys[sequence])
        return Place(sequence, query - starts_q[sequence] + diagonals[sequence], own, inside)

    return locate


def _block_mask(problem: Problem, tensors: Tensors, locate: Locate) -> BlockMask | None:
    """Returns FlexAttention's mask, None if all queries see all keys."""
    if not (problem.is_causal or _has_mask(problem)):
        return None
    features = problem.features
    return create_block_mask(
        _visible(problem, tensors, locate),
        tensors.q.shape[0] if features & OF_SEQUENCES else None,
        problem.heads if features & OF_HEADS else None,
        tensors.q.shape[2],
        tensors.k.shape[2],
        device=tensors.q.device,
    )


def _has_mask(problem: Problem) -> bool:
    masks = {feature for feature in problem.features if FEATURES[feature].is_mask}
    return bool(masks - ({Feature.BIAS} if problem.bias is Bias.ADDITIVE else set()))


def _visible(problem: Problem, tensors: Tensors, locate: Locate) -> Visible:
    """Returns a function of whether a query sees a key, by the definitions in `core/features/masks.py`."""
    side, right = tensors.side, 0 if problem.is_causal else problem.window_right
    left, chunk, size = problem.window_left, problem.attention_chunk, problem.block_mask
    bias = side.bias if problem.bias is Bias.BOOLEAN else None
    blocks, sharing = None, problem.group_size if problem.block_lists is BlockLists.GROUP else 1
    if side.block_counts is not None and side.block_indices is not None:
        blocks = seen_blocks(side.block_counts, side.block_indices, -(-problem.seqlen_kv // size))

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        place = locate(batch, query, key)
        seen = place.inside
        if left is not None:
            seen = seen & (place.key >= place.query - left)
        if chunk:
            seen = seen & (place.key // chunk == place.query // chunk)
        if problem.sink_tokens:
            seen = seen | (place.inside & (place.key < problem.sink_tokens))
        if right is not None:
            seen = seen & (place.key <= place.query + right)
        if side.prefix is not None:
            seen = seen | (place.inside & (place.key < side.prefix[place.sequence]))
        if bias is not None:
            seen = seen & bias[batch, head, query, key]
        if blocks is not None:
            seen = seen & blocks[batch, head // sharing, query // size, key // size]
        return seen

    return visible


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
            place = locate(batch, query, key)
            score = score - side.slopes[place.sequence, head] * (place.query - place.key).abs()
        if bias is not None:
            score = score + bias[batch, head, query, key]
        return score

    return changed
