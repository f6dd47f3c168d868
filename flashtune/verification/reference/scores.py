"""Reference scores before the softmax, in chunks of heads: inputs in float64 and masks.

Chunks bound the memory. Each head has its own scores, and a float64 copy of its keys and values. With latent
keys, many query heads share a KV head. Copies for each of these heads would take most of the memory, so they
share one.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flashtune.core.expressions.nodes import MINUS_INFINITY, Op
from flashtune.core.features.description import Changed, ScoreRows
from flashtune.core.features.records import ExtraInputs, FeatureFields
from flashtune.core.features.table import FEATURES
from flashtune.core.problem import Bias, Causal, Problem
from flashtune.verification.inputs.placement import is_all
from flashtune.verification.lengths import Lengths
from flashtune.verification.reference.masks import (
    COMPARISONS_OF_A_MASK,
    Rows,
    bias_of,
    compared_on,
    counted,
    distinct_masks,
    places,
    unhidden_keys,
)
from flashtune.verification.tolerance import heaviest

# Scores of a chunk, in elements. A few float64 copies of them exist at once.
CHUNK_SCORES = {"cuda": 2**24, "cpu": 2**21}
# Keys and values of a chunk, in elements. They exist in float64, with their squares.
CHUNK_KEYS = {"cuda": 2**28, "cpu": 2**25}

# Features that change scores or hide keys. Without them, the number of visible keys of a row determines these
# keys.
ON_SCORES = frozenset(feature for feature, entry in FEATURES.items() if entry.is_mask or entry.change)


# A bias that absorbs all scores, in float64 too. Hidden scores are lower.
FINITE_MASK = -(2.0**98)


class Chunk(NamedTuple):
    """Some heads of a reference."""

    heads: Tensor  # [heads], each `batch index · heads of a sequence + head`; int64.
    # Number of float64 copies of KV heads: one for each head, or a single one that all heads share.
    copies: int


def chunked(problem: Problem, heads: Tensor, rows: int, device: str) -> list[Chunk]:
    """Divides heads in ascending order into chunks of bounded scores, keys and values."""
    by_scores = max(1, CHUNK_SCORES[device] // max(1, rows * problem.seqlen_kv))
    elements = problem.seqlen_kv * (problem.head_dim + problem.value_head_dim)
    by_keys = max(1, CHUNK_KEYS[device] // max(1, elements))
    step = min(by_scores, by_keys)
    if by_keys >= by_scores or by_keys >= min(problem.group_size, len(heads)):
        return [Chunk(some, len(some)) for some in heads.split(step)]
    _, counts = torch.unique_consecutive(heads // problem.group_size, return_counts=True)
    sharing = heads.split(counts.tolist())
    return [Chunk(some, 1) for group in sharing for some in group.split(by_scores)]


def together(parts: Sequence[Tensor], axis: int = 0) -> Tensor:
    """Concatenates tensors. A single tensor is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts), axis)


def widened(
    problem: Problem, chunk: Chunk, rows: Tensor, tensors: tuple[Tensor, Tensor, Tensor], side: ExtraInputs
) -> list[Tensor]:
    """Returns q, k and v of a chunk in float64, multiplied by their scales: [heads or copies, ..., width]."""
    heads, copies = chunk
    group = problem.group_size
    factors = side.scales
    if copies == len(heads) and is_all(problem, heads, rows):
        return [
            _all_widened(tensor, factor, times)
            for tensor, factor, times in zip(tensors, factors, (1, group, group), strict=True)
        ]
    q, k, v = tensors
    batch, head = heads // problem.heads, heads % problem.heads
    of_keys = batch[:copies], head[:copies] // group
    return [
        _widened(q, factors[0], batch, head, rows),
        _widened(k, factors[1], *of_keys),
        _widened(v, factors[2], *of_keys),
    ]


def _all_widened(tensor: Tensor, factor: Tensor | None, times: int) -> Tensor:
    """Returns all heads in float64, each `times` times. Copies only, so no indexing kernels are loaded."""

    def widened(narrow: Tensor) -> Tensor:
        repeated = narrow[:, :, None].expand(-1, -1, times, *narrow.shape[2:])
        return repeated.to(torch.float64, memory_format=torch.contiguous_format).flatten(0, 2)

    wide = widened(tensor)
    return wide if factor is None else wide.mul_(widened(factor).reshape(len(wide), -1, 1))


def _widened(
    tensor: Tensor, factor: Tensor | None, batch: Tensor, head: Tensor, rows: Tensor | None = None
) -> Tensor:
    """Returns some heads in float64, with the given rows or all."""
    picked = tensor[batch, head]
    wide = (picked if rows is None else picked[:, rows]).double()
    return wide if factor is None else wide * factor[batch, head].double().reshape(len(batch), -1, 1)


class RowMasks(NamedTuple):
    """The hidden keys of rows, and the number of visible keys."""

    # Boolean [heads, rows, keys], possibly without the dimension of heads, or of heads and rows.
    hidden: Tensor
    keys: Tensor  # Float64 [heads, rows], possibly without the same dimensions.


def seen_by(
    problem: Problem, lengths: Lengths, side: ExtraInputs, some: Rows, device: torch.device
) -> RowMasks:
    """Returns the hidden keys, and the number of visible keys, of some rows."""
    pairs = len(some.rows) * problem.seqlen_kv
    if not problem.features & ON_SCORES:
        where = compared_on(pairs, device)
        visible = _visible_counts(problem, some.rows)
        hidden = torch.arange(problem.seqlen_kv, device=where) >= visible[:, None].to(where)
        return RowMasks(hidden.to(device), visible.double().to(device))
    masks = distinct_masks(lengths, side, some, problem.functions.mask >= 0)
    where = compared_on(COMPARISONS_OF_A_MASK * len(masks.rows.batch) * pairs, device)
    seen = unhidden_keys(problem, lengths, side, masks.rows, where)
    hidden, keys = ~seen, counted(seen)
    if len(seen) > 1 and not masks.one_each:
        hidden, keys = hidden[masks.of_head], keys[masks.of_head]
    return RowMasks(hidden.to(device), keys.to(device))


def finite_scores(problem: Problem, changed: Changed, seen: RowMasks) -> tuple[Changed, RowMasks]:
    """Returns finite scores, and masks that hide the keys to which a score function gives minus infinity.

    Captured values of a check are finite, so that infinite scores come from constants and logarithms.
    """
    nodes = problem.functions.nodes if problem.functions.score >= 0 else ()
    if not any(node.op is Op.LOG or node == MINUS_INFINITY for node in nodes):
        return changed, seen
    hidden = seen.hidden | (changed.scores == -torch.inf)
    added = None if changed.added is None else torch.where(hidden, 0.0, changed.added)
    scores = changed.scores.nan_to_num(math.nan, math.inf, 0.0)
    return Changed(scores, added), RowMasks(hidden, counted(~hidden))


def stretched(bound: Tensor, slope: Tensor | None, weights: Tensor) -> Tensor:
    """Returns bounds of rows' scores, times the largest derivative of the changed scores if that is above 1.

    Derivatives of keys without weight are ignored. A product's error is in proportion to the bound, and
    `error_terms` has errors in proportion to the score alone.
    """
    if slope is None:
        return bound
    return bound * heaviest(slope.abs().nan_to_num(posinf=0.0), weights).clamp(min=1.0)


def _visible_counts(problem: Problem, rows: Tensor) -> Tensor:
    """Returns the number of visible keys of each row, counted from the first key: [rows]."""
    if problem.causal is Causal.NONE:
        return torch.full_like(rows, problem.seqlen_kv)
    return (rows + problem.diagonal + 1).clamp(0, problem.seqlen_kv)


def score_rows(
    problem: Problem, lengths: Lengths, side: ExtraInputs, some: Rows, device: torch.device
) -> ScoreRows[FeatureFields, ExtraInputs]:
    """Returns some rows for the arithmetic of features: [heads | 1, rows | 1, keys | 1] in float64."""

    def of_heads(tensor: Tensor) -> Tensor:
        return tensor.cpu()[some.batch, some.head].double()[:, None, None].to(device)

    def of_pairs(bias: Tensor) -> Tensor:
        # Keys with a bias of -inf are hidden by the mask. Their magnitude must not count.
        return bias_of(problem, bias, some).double().nan_to_num(neginf=0.0)

    def positions() -> Tensor:
        position: Tensor = (
            places(problem, lengths, some.batch, some.rows, some.batch.device).double().to(device)
        )
        return position

    def distances() -> Tensor:
        return (positions() - torch.arange(problem.seqlen_kv, dtype=torch.float64).to(device)).abs_()

    return ScoreRows(problem, side, of_heads, of_pairs, positions, distances)


def levelled(problem: Problem, scores: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Returns scores less the level of their row, and the levels, [heads, rows], or None if all are 0.

    The level is FINITE_MASK in rows whose keys all have it. Their softmax then has ordinary numbers.
    """
    if problem.bias is not Bias.ADDITIVE or sinks is not None:
        return scores, None
    largest = scores.amax(-1)
    is_masked = (largest < FINITE_MASK / 2) & (largest > FINITE_MASK * 2)
    levels = FINITE_MASK * is_masked.double()
    return scores - levels[..., None], levels


def sinks_of(side: ExtraInputs, some: Rows, device: torch.device) -> Tensor | None:
    """Returns the sinks of some heads, [heads, 1] in float64, or None without sinks."""
    return None if side.sinks is None else side.sinks.cpu()[some.head].double()[:, None].to(device)
