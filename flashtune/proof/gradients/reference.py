"""Gradients in float64, and the same computed plainly in low precision, on the device that holds the inputs.

Both are made of the forward pass in float64. The plain computation rounds where unfused low-precision code
rounds (`gate.py` says where) and takes its products exactly. Pairs of a sequence and a KV head are worked on
some at a time, and large ones in slices of query rows, so that memory stays bounded: what keys
get of each slice is added up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from flashtune.dtypes import TORCH_DTYPES
from flashtune.proof.gradients.gate import (
    QueryErrors,
    RowFigures,
    Sizes,
    allowed_key_error,
    allowed_query_error,
    least_element,
    query_errors,
)
from flashtune.proof.gradients.pairs import Pairs, Piece, pieces
from flashtune.proof.gradients.weights import Given, Weights, Wide, finite, rounded, weights_of, widened

if TYPE_CHECKING:
    from torch import Tensor

    from flashtune.problem import Problem


class Gradient(NamedTuple):
    """What a right kernel writes of one gradient, and how far it may be off; in float64.

    Attributes:
        exact: [pairs, rows, columns].
        allowed: [pairs, rows].
    """

    exact: Tensor
    allowed: Tensor


class Expected(NamedTuple):
    """What comes in of the forward pass, and what a right backward pass makes of it.

    Rows of queries are those of all heads of a pair, one head behind the other.

    Attributes:
        out: The output, rounded once, [pairs, group, seqlen_q, value_head_dim].
        lse: The log-sum-exp in float32, [pairs, group, seqlen_q].
        dq: Rows are queries of all heads that share keys.
        dk: Rows are keys.
        dv: Likewise.
    """

    out: Tensor
    lse: Tensor
    dq: Gradient
    dk: Gradient
    dv: Gradient


class Scores(NamedTuple):
    """P and dS of some rows, [pairs, group · rows, keys]: exact ones, or rounded ones, in float64."""

    weights: Tensor
    slopes: Tensor


class OfKeys(NamedTuple):
    """What some rows add to the gradients of keys; all [pairs, keys, ...] and additive.

    Attributes:
        dk, dv: Exact.
        plain_dk, plain_dv: Of rounded scores.
        dk_spread, dv_spread: Squares of typical errors, column by column.
        queries: How many rows see each key, [pairs, keys].
    """

    dk: Tensor
    dv: Tensor
    plain_dk: Tensor
    plain_dv: Tensor
    dk_spread: Tensor
    dv_spread: Tensor
    queries: Tensor


class OfRows(NamedTuple):
    """What some rows come to: the forward pass, dq, and roundoffs of their weights; as in `Expected`."""

    out: Tensor
    lse: Tensor
    dq: Gradient
    steps: Tensor


def expect_gradients(problem: Problem, given: Given, chosen: Pairs) -> Expected:
    """The gradients of the chosen pairs, and what a kernel's error may be there.

    Args:
        problem: Shape, type, masks, and what else is laid over scores.
        given: Inputs.
        chosen: Pairs of a sequence and a KV head.
    """
    device = given.q.device.type
    parts = [_of_pairs(problem, given, piece) for piece in pieces(problem, chosen, device)]
    out, lse, *gradients = zip(*parts, strict=True)
    joined = (Gradient(*map(torch.cat, zip(*some, strict=True))) for some in gradients)
    return Expected(torch.cat(out), torch.cat(lse), *joined)


def _of_pairs(problem: Problem, given: Given, piece: Piece) -> Expected:
    parts: list[OfRows] = []
    of_keys: OfKeys | None = None
    for rows in piece.rows:
        part, more = _of_rows(problem, given, piece.pairs, rows)
        of_keys = more if of_keys is None else OfKeys(*map(torch.add, of_keys, more))
        parts.append(part)
    assert of_keys is not None
    group = problem.group_size

    def stacked(tensors: list[Tensor]) -> Tensor:
        return torch.cat([tensor.unflatten(1, (group, -1)) for tensor in tensors], 2)

    dq = Gradient(
        stacked([part.dq.exact for part in parts]).flatten(1, 2),
        stacked([part.dq.allowed for part in parts]).flatten(1, 2),
    )
    steps = torch.cat([part.steps for part in parts], 1).amax(1, keepdim=True)
    return Expected(
        stacked([part.out for part in parts]),
        stacked([part.lse for part in parts]),
        dq,
        *_of_keys(problem, given, of_keys, steps),
    )


def _of_rows(problem: Problem, given: Given, pairs: Pairs, rows: Tensor) -> tuple[OfRows, OfKeys]:
    """Some query rows of some pairs, and what they add to the gradients of keys."""
    wide = widened(problem, given, pairs, rows)
    weights = weights_of(problem, given, wide, pairs, rows)
    low_out, low_lse = rounded(weights.out, problem), weights.lse.float()
    products = wide.dout @ wide.v.mT
    exact_delta = (wide.dout * weights.out).sum(-1) - wide.dlse
    exact = Scores(weights.exact, _slopes(weights.exact, products, exact_delta, weights.slope))
    plain_delta = ((wide.dout * low_out.double()).sum(-1) - wide.dlse).float()
    plain = _plain(problem, weights, low_lse, products.float(), plain_delta)
    errors = query_errors(problem, _sizes(given, wide, weights), given.side.softcap or 0.0)
    dq = (exact.slopes @ wide.k).mul_(given.scale)
    plain_dq = _once((plain.slopes @ wide.k).mul_(given.scale), problem)
    figures = RowFigures(
        plain=_largest(plain_dq - dq),
        typical=given.scale * _typical_of_queries(problem, wide, exact, errors),
        largest=_largest(dq),
        terms=weights.keys,
        steps=errors.steps,
    )
    of_keys = OfKeys(
        dk=exact.slopes.mT @ wide.q,
        dv=exact.weights.mT @ wide.dout,
        plain_dk=plain.slopes.mT @ wide.q,
        plain_dv=plain.weights.mT @ wide.dout,
        **_spreads_of_keys(problem, wide, exact, errors),
        queries=weights.queries,
    )
    allowed = allowed_query_error(figures, problem)
    return OfRows(low_out, low_lse, Gradient(dq, allowed), errors.steps), of_keys


def _slopes(weights: Tensor, products: Tensor, delta: Tensor, slope: Tensor | None) -> Tensor:
    """dS, in the type of the weights."""
    slopes = (products - delta[..., None]).mul_(weights)
    return slopes if slope is None else slopes.mul_(slope)


def _plain(problem: Problem, weights: Weights, lse: Tensor, products: Tensor, delta: Tensor) -> Scores:
    """P and dS as unfused code in low precision has them, both rounded to the inputs' type."""
    low = TORCH_DTYPES[problem.dtype]
    p = (weights.scores.float() - finite(lse)[..., None]).exp_()
    slope = None if weights.slope is None else weights.slope.float()
    slopes = _slopes(p, products, delta, slope)
    return Scores(p.to(low).double(), slopes.to(low).double())


def _sizes(given: Given, wide: Wide, weights: Weights) -> Sizes:
    return Sizes(
        score=given.scale * _norm(wide.q) * _norm(wide.k).amax(-1, keepdim=True),
        lse=finite(weights.lse).abs(),
        added=weights.added,
        product=_norm(wide.dout) * _norm(wide.v).amax(-1, keepdim=True),
        delta=_norm(wide.dout * weights.out),
    )


def _typical_of_queries(problem: Problem, wide: Wide, exact: Scores, errors: QueryErrors) -> Tensor:
    """Typical error of each row of dq but for the scale, [pairs, group · rows]."""
    squares = wide.k.square()
    spread = errors.weight[..., None] * (exact.slopes.square() @ squares)
    spread += errors.product.square()[..., None] * (exact.weights.square() @ squares)
    spread += least_element(problem) ** 2 * squares.sum(-2, keepdim=True)
    alike = (errors.delta + errors.product) * _largest(exact.weights @ wide.k)
    return spread.amax(-1).sqrt() + alike


def _spreads_of_keys(problem: Problem, wide: Wide, exact: Scores, errors: QueryErrors) -> dict[str, Tensor]:
    """Squares of typical errors of dk, but for the scale, and of dv: [pairs, keys, columns] each."""
    weight, least = errors.weight[..., None], least_element(problem) ** 2
    q, dout = wide.q.square(), wide.dout.square()
    squares = exact.weights.square()
    of_product = (errors.delta.square() + errors.product.square())[..., None] * q
    dk = exact.slopes.square().mT @ (weight * q) + squares.mT @ of_product
    dv = squares.mT @ (weight * dout)
    dk += least * q.sum(-2, keepdim=True)
    dv += least * dout.sum(-2, keepdim=True)
    return {"dk_spread": dk, "dv_spread": dv}


def _of_keys(problem: Problem, given: Given, sums: OfKeys, steps: Tensor) -> tuple[Gradient, Gradient]:
    """The gradients of keys and values of some pairs, once all their query rows are added up."""
    dk, plain_dk = sums.dk * given.scale, sums.plain_dk * given.scale
    everywhere = steps.expand(sums.queries.shape)
    gradients = []
    for exact, plain, spread, factor in (
        (dk, plain_dk, sums.dk_spread, given.scale),
        (sums.dv, sums.plain_dv, sums.dv_spread, 1.0),
    ):
        figures = RowFigures(
            plain=_largest(_once(plain, problem) - exact),
            typical=factor * spread.amax(-1).sqrt(),
            largest=_largest(exact),
            terms=sums.queries,
            steps=everywhere,
        )
        gradients.append(Gradient(exact, allowed_key_error(figures, problem)))
    return gradients[0], gradients[1]


def _once(gradient: Tensor, problem: Problem) -> Tensor:
    """A gradient as float32 sums rounded once to the inputs' type."""
    return gradient.float().to(TORCH_DTYPES[problem.dtype]).double()


def _largest(tensor: Tensor) -> Tensor:
    return tensor.abs().amax(-1)


def _norm(vectors: Tensor) -> Tensor:
    return vectors.square().sum(-1).sqrt()
