"""Reference scores before the softmax: masks, softcap, ALiBi and bias."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from flashtune.core.problem import Bias, Causal, Feature, Problem
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

if TYPE_CHECKING:
    from torch import Tensor

    from flashtune.core.extra_inputs import ExtraInputs
    from flashtune.verification.lengths import Lengths

# Features that neither change scores nor hide keys, and all others. Without the others, the number of visible
# keys of a row determines these keys.
BESIDE_SCORES = {Feature.SINKS, Feature.QUANTIZED_KV, Feature.LATENT, Feature.DROPOUT, Feature.DETERMINISTIC}
OVER_SCORES = frozenset(Feature) - BESIDE_SCORES


class RowMasks(NamedTuple):
    """The hidden keys of rows, and the number of visible keys.

    Attributes:
        hidden: Boolean [heads, rows, keys], possibly without the dimension of heads, or of heads and rows.
        keys: Float64 [heads, rows], possibly without the same dimensions.
    """

    hidden: Tensor
    keys: Tensor


class BiasedScores(NamedTuple):
    """Scores with softcap, ALiBi and bias applied.

    Attributes:
        scores: [heads, rows, keys] in float64, finite. Masks are not applied yet.
        added: Magnitude of the terms added to each score, or None without such terms.
    """

    scores: Tensor
    added: Tensor | None


def seen_by(
    problem: Problem, lengths: Lengths, side: ExtraInputs, some: Rows, device: torch.device
) -> RowMasks:
    """Returns the hidden keys, and the number of visible keys, of some rows."""
    pairs = len(some.rows) * problem.seqlen_kv
    if not problem.features & OVER_SCORES:
        where = compared_on(pairs, device)
        visible = _visible_counts(problem, some.rows)
        hidden = torch.arange(problem.seqlen_kv, device=where) >= visible[:, None].to(where)
        return RowMasks(hidden.to(device), visible.double().to(device))
    masks = distinct_masks(lengths, side, some)
    where = compared_on(COMPARISONS_OF_A_MASK * len(masks.rows.batch) * pairs, device)
    seen = unhidden_keys(problem, lengths, side, masks.rows, where)
    hidden, keys = ~seen, counted(seen)
    if len(seen) > 1 and not masks.one_each:
        hidden, keys = hidden[masks.of_head], keys[masks.of_head]
    return RowMasks(hidden.to(device), keys.to(device))


def _visible_counts(problem: Problem, rows: Tensor) -> Tensor:
    """Returns the number of visible keys of each row, counted from the first key: [rows]."""
    if problem.causal is Causal.NONE:
        return torch.full_like(rows, problem.seqlen_kv)
    return (rows + problem.diagonal + 1).clamp(0, problem.seqlen_kv)


def distances(
    problem: Problem, lengths: Lengths, batch: Tensor, rows: Tensor, device: torch.device
) -> Tensor:
    """Returns the distances of rows and keys, [heads | 1, rows, keys] in float64. Arguments: see `places`."""
    place = places(problem, lengths, batch, rows, batch.device).double().to(device)
    return (place - torch.arange(problem.seqlen_kv, dtype=torch.float64).to(device)).abs_()


def sinks_of(side: ExtraInputs, some: Rows, device: torch.device) -> Tensor | None:
    """Returns the sinks of some heads, [heads, 1] in float64, or None without sinks."""
    return None if side.sinks is None else side.sinks.cpu()[some.head].double()[:, None].to(device)


def laid_over(
    problem: Problem, scores: Tensor, lengths: Lengths, side: ExtraInputs, some: Rows
) -> BiasedScores:
    """Applies softcap, ALiBi and bias to scores. May change them in place.

    Scores are [heads, rows, keys] in float64, with the softmax scale.
    """
    added: Tensor | None = None
    if side.softcap is not None:
        scores = scores.div_(side.softcap).tanh_().mul_(side.softcap)
    if side.slopes is not None:
        slopes = side.slopes.cpu()[some.batch, some.head].double()[:, None, None]
        added = slopes.to(scores.device) * distances(problem, lengths, some.batch, some.rows, scores.device)
        scores = scores - added
    if side.bias is not None and problem.bias is Bias.ADDITIVE:
        # Keys with a bias of -inf are hidden by the mask. Their magnitude must not count.
        bias = bias_of(problem, side.bias, some).double().nan_to_num(neginf=0.0)
        scores = scores + bias
        size = bias.abs()
        added = size if added is None else added.abs() + size
    return BiasedScores(scores, added)
