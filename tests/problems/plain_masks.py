"""A float64 reference of every feature, for one sequence at a time.

Tensors and side inputs are as kernels are given them: dense, packed, or in pages. Nothing here is fast, and
nothing here knows of tiles.
"""

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from flashtune.core.expressions.evaluation import evaluate
from flashtune.core.features.functions import captured_values
from flashtune.core.features.records import ExtraInputs
from flashtune.core.problem import Bias, Causal, KvScale, Problem
from flashtune.request.dropout import kept_weights


class Sequence(NamedTuple):
    """One sequence of a call, in float64."""

    number: int  # Which of the call it is.
    batch: int  # Where its rows are in q and out, along the first dimension.
    first_row: int  # Likewise along the third.
    q: Tensor  # [heads, queries, head_dim].
    k: Tensor  # [kv_heads, keys, head_dim], what stored keys stand for.
    v: Tensor  # [kv_heads, keys, value_head_dim], likewise.


def largest_error(results: Iterable[Tensor], expected: Iterable[Tensor], absent: float = math.nan) -> float:
    """The largest difference of results, infinite for NaNs. Rows of no sequence must be `absent`."""
    worst = 0.0
    for result, exact in zip(results, expected, strict=True):
        right = exact.nan_to_num(nan=absent, neginf=-math.inf)
        error = torch.where(result == right, 0.0, (result - right).abs()).nan_to_num(nan=math.inf)
        worst = max(worst, float(error.max()))
    return worst


def plain_attention(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, side: ExtraInputs, scale: float
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp, in float64 and in the shapes of a kernel's.

    Rows of packed tensors that no sequence has are NaN.

    Args:
        problem: What is computed.
        q: [batch, heads, seqlen_q, head_dim], or [1, heads, all queries, head_dim] of packed sequences.
        k: [batch, kv_heads, seqlen_kv, head_dim], [1, kv_heads, all keys, head_dim] of packed sequences, or
            [pages, kv_heads, page_size, head_dim].
        v: Likewise, of value_head_dim.
        side: The side inputs that the problem names.
        scale: Factor of the products of q and k.
    """
    out = torch.full((*q.shape[:3], v.shape[-1]), torch.nan, dtype=torch.float64)
    lse = torch.full(q.shape[:3], torch.nan, dtype=torch.float64)
    for sequence in sequences(problem, q, k, v, side):
        rows = slice(sequence.first_row, sequence.first_row + sequence.q.shape[1])
        out[sequence.batch, :, rows], lse[sequence.batch, :, rows] = _attend(problem, sequence, side, scale)
    return out, lse


def visible(problem: Problem, queries: int, keys: int, prefix: int = 0) -> Tensor:
    """The visible keys of each query of a sequence without the bias: bool [queries, keys]."""
    diagonal = 0 if problem.causal is Causal.TOP_LEFT else keys - queries
    position = torch.arange(queries)[:, None] + diagonal
    key = torch.arange(keys)[None, :]
    causal = problem.causal is not Causal.NONE
    seen = torch.ones(queries, keys, dtype=torch.bool)
    near = seen.clone()
    if causal:
        seen &= key <= position
    if problem.window_right is not None:
        seen &= key <= position + problem.window_right
    if problem.window_left is not None:
        near &= key >= position - problem.window_left
    if problem.chunk:
        query_chunk, key_chunk = (
            torch.div(index, problem.chunk, rounding_mode="floor") for index in (position, key)
        )
        near &= key_chunk >= query_chunk if causal else key_chunk == query_chunk
    return seen & (near | (key < problem.sink_tokens)) | (key < prefix)


def listed(problem: Problem, side: ExtraInputs, sequence: int, heads: int, queries: int, keys: int) -> Tensor:
    """The keys in the blocks of a block mask's lists: bool [heads, queries, keys]."""
    assert side.block_counts is not None
    assert side.block_indices is not None
    size = problem.block_mask
    seen = torch.zeros(heads, queries, keys, dtype=torch.bool)
    for head in range(heads):
        row = head * side.block_counts.shape[1] // heads
        for block in range(-(-queries // size)):
            count = int(side.block_counts[sequence, row, block])
            for number in side.block_indices[sequence, row, block, :count].tolist():
                rows = slice(block * size, (block + 1) * size)
                seen[head, rows, number * size : (number + 1) * size] = True
    return seen


def sequences(problem: Problem, q: Tensor, k: Tensor, v: Tensor, side: ExtraInputs) -> Iterator[Sequence]:
    """The sequences of a call, each cut out of its tensors."""
    for index in range(_count(q, side)):
        batch, first_row, queries = index, 0, q.shape[2]
        if side.cu_seqlens_q is not None:
            batch, first_row = 0, int(side.cu_seqlens_q[index])
            queries = int(side.cu_seqlens_q[index + 1]) - first_row
        own = q[batch, :, first_row : first_row + queries].double()
        own_k = _keys(problem, k, index, side, side.k_scale)
        own_v = _keys(problem, v, index, side, side.v_scale)
        yield Sequence(index, batch, first_row, own, own_k, own_v)


def _count(q: Tensor, side: ExtraInputs) -> int:
    return q.shape[0] if side.cu_seqlens_q is None else len(side.cu_seqlens_q) - 1


def _keys(problem: Problem, stored: Tensor, index: int, side: ExtraInputs, scale: Tensor | None) -> Tensor:
    """The keys or values of one sequence: [kv_heads, keys, width]."""
    if side.block_table is not None:
        assert side.seqlens_kv is not None
        length, size = int(side.seqlens_kv[index]), stored.shape[2]
        used = [int(page) for page in side.block_table[index, : -(-length // size)]]
        pages = [_scaled(problem, stored[page], page, scale) for page in used]
        empty = torch.empty(stored.shape[1], 0, stored.shape[3], dtype=torch.float64)
        return torch.cat([empty, *pages], 1)[:, :length]
    batch, first, length = index, 0, stored.shape[2]
    if side.cu_seqlens_kv is not None:
        batch, first = 0, int(side.cu_seqlens_kv[index])
        length = int(side.cu_seqlens_kv[index + 1]) - first
    if side.seqlens_kv is not None:
        length = int(side.seqlens_kv[index])
    return _scaled(problem, stored[batch, :, first : first + length], index, scale)


def _scaled(problem: Problem, stored: Tensor, index: int, scale: Tensor | None) -> Tensor:
    """Returns [kv_heads, keys, width] of a cache times its scale, by index of the page or of the sequence."""
    values = stored.to(torch.float64)
    if scale is None:
        return values
    shared = problem.kv_scale is not KvScale.PAGE and scale.stride(0) == 0
    return values * scale[0 if shared else index].double()[:, None, None]


def _by_functions(
    problem: Problem, number: int, side: ExtraInputs, seen: Tensor, scores: Tensor
) -> tuple[Tensor, Tensor]:
    """The visible keys and the scores of one sequence after the functions. Queries of pages are positions."""
    functions, (heads, queries, keys) = problem.functions, scores.shape
    first = keys - queries if problem.page_size else 0
    places = (
        torch.tensor(number),
        torch.arange(heads)[:, None, None],
        first + torch.arange(queries)[:, None],
        torch.arange(keys),
    )
    values = captured_values(functions, side, places, scores)
    if functions.mask >= 0:
        shown = evaluate(functions, values, functions.mask)
        if problem.block_mask:
            full = side._replace(block_counts=side.full_counts)
            shown = shown | listed(problem, full, number, heads, queries, keys)
        seen = seen & shown
    if functions.score >= 0:
        scores = evaluate(functions, values, functions.score).expand_as(scores)
    return seen, scores


def _attend(problem: Problem, sequence: Sequence, side: ExtraInputs, scale: float) -> tuple[Tensor, Tensor]:
    heads, queries, _ = sequence.q.shape
    keys = sequence.k.shape[1]
    group = heads // sequence.k.shape[0]
    k, v = (tensor.repeat_interleave(group, 0) for tensor in (sequence.k, sequence.v))
    prefix = 0 if side.prefix is None else int(side.prefix[sequence.number])
    seen = visible(problem, queries, keys, prefix).expand(heads, queries, keys)
    scores = scale * sequence.q @ k.mT
    if problem.softcap:
        assert side.softcap is not None
        scores = side.softcap * torch.tanh(scores / side.softcap)
    if side.slopes is not None:
        diagonal = 0 if problem.causal is Causal.TOP_LEFT else keys - queries
        distance = torch.arange(queries)[:, None] + diagonal - torch.arange(keys)[None, :]
        scores = scores - side.slopes[sequence.number].double()[:, None, None] * distance.abs()
    if side.bias is not None:
        laid = side.bias[sequence.number, :, :queries, :keys]
        if problem.bias is Bias.BOOLEAN:
            seen = seen & laid
        else:
            # Autograd has NaNs in rows of minus infinity, except for hidden ones.
            seen, scores = seen & ~laid.isneginf(), scores + laid.double()
    if problem.block_mask:
        seen = seen & listed(problem, side, sequence.number, heads, queries, keys)
    if problem.functions:
        seen, scores = _by_functions(problem, sequence.number, side, seen, scores)
    if side.tree is not None:
        seen = seen.clone()
        # The newest keys, of which the first rows and columns of the mask decide.
        newest = min(keys, queries)
        seen[..., keys - newest :] &= side.tree[sequence.number, :queries, queries - newest : queries]
    scores = scores.masked_fill(~seen, -torch.inf)
    sinks = torch.full((heads,), -torch.inf) if side.sinks is None else side.sinks
    sink = sinks.double()[:, None, None].expand(heads, queries, 1)
    all_scores = torch.cat([scores, sink], -1)
    lse = torch.logsumexp(all_scores, -1)
    # Not by the log-sum-exp, which loses the number of keys where scores are large.
    weights = torch.nan_to_num(torch.softmax(all_scores, -1)[..., :-1])
    if side.seed is not None:
        assert side.dropout is not None
        number = sequence.batch * heads + torch.arange(heads)
        rows = sequence.first_row + torch.arange(queries)
        stay = kept_weights(side.seed, number, rows, keys, side.dropout)
        weights = weights * stay / (1.0 - side.dropout)
    return weights @ v, lse
