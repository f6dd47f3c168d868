"""Reference gradients in float64 and their tolerances, computed on the device of the inputs.

Both the exact gradients and those of the low-precision reference are computed from the forward pass in
float64. The low-precision reference rounds where unfused code rounds (see `tolerance.py`). Its products are
exact. To bound the memory, only some pairs of a sequence and a KV head are computed at a time. Large pairs
are computed in slices of query rows, whose contributions to dk and dv are summed.
"""

from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from flashtune.core.expressions.derivative import derivatives
from flashtune.core.features.records import NO_EXTRA_INPUTS
from flashtune.core.problem import Bias, Dtype, Problem
from flashtune.verification.gradients.head_sampling import Pairs, Piece, pieces
from flashtune.verification.gradients.scores import BackwardCase, SinkRows, Work, largest, once, work_on
from flashtune.verification.gradients.tables import OfElements, element_gradient, element_sums
from flashtune.verification.gradients.tolerance import (
    BF16_KEYS_FACTOR,
    FACTOR,
    Gradient,
    RowFigures,
    allowed_error,
)
from flashtune.verification.lengths import Lengths
from flashtune.verification.reference.masks import Rows
from flashtune.verification.reference.scores import score_rows, together
from flashtune.verification.tolerance import larger, squared


class OfHeads(NamedTuple):
    """Partial sums of the gradients of slopes or sinks over rows, [pairs, group]. `steps` is a maximum."""

    exact: Tensor  # The gradients.
    plain: Tensor  # The gradients in the low-precision reference.
    spread: Tensor  # Squares of typical errors.
    terms: Tensor  # Number of the terms of a sum.
    steps: Tensor  # Largest relative error of the rows' probabilities, in float32 roundoffs.


def by_head(rows: Tensor, problem: Problem) -> Tensor:
    """Returns rows [pairs, group · rows, ...] as [pairs, group, rows, ...]."""
    split: Tensor = rows.unflatten(1, (problem.group_size, -1))
    return split


def bias_gradient(problem: Problem, work: Work, chosen: Tensor) -> Gradient:
    """Returns the gradient of the bias in the compared rows: [pairs, group, rows, keys, 1].

    It is dS, with each element as a row of its own. Each is rounded once and has an error of P times the
    errors of dP and delta. It is zero for hidden keys. `chosen` are the compared rows, [rows] in int64 on the
    CPU.
    """
    errors = work.errors
    here = torch.isin(work.rows, chosen).nonzero().flatten()

    def picked(rows: Tensor) -> Tensor:
        split = by_head(rows, problem)
        part = split if len(here) == len(work.rows) else split[:, :, here]
        return part if part.dim() > 3 else part[..., None]

    exact, weights = picked(work.exact.biased), picked(work.exact.weights)
    typical = picked(errors.delta + errors.product) * weights + picked(errors.weight).sqrt() * exact.abs()
    typical += picked(errors.least)
    plain = (once(picked(work.plain.biased), problem) - exact).abs()
    seen = weights.bool().double()
    figures = RowFigures(plain, typical, exact.abs(), seen, picked(errors.steps).expand(seen.shape))
    return Gradient(exact[..., None], allowed_error(figures, problem))


def slope_sums(problem: Problem, work: Work, pairs: Pairs, lengths: Lengths) -> OfHeads:
    """Returns the partial sums of the slopes' gradients over some rows."""
    group = problem.group_size
    some = Rows(pairs.batch.repeat_interleave(group), pairs.heads(problem).flatten(), work.rows)
    distance = score_rows(problem, lengths, NO_EXTRA_INPUTS, some, work.keys.device).distances()
    distance = distance.expand(len(some.batch), -1, -1).reshape(work.exact.biased.shape)
    errors, biased = work.errors, work.exact.biased
    # All keys of a row share the error of its delta.
    alike = (errors.delta + errors.product) * (work.exact.weights * distance).sum(-1)
    spread = errors.weight * squared(biased * distance).sum(-1) + squared(alike)
    spread += squared(errors.least) * squared(distance).sum(-1)
    exact, plain = -(biased * distance).sum(-1), -(work.plain.biased * distance).sum(-1)
    return _of_heads(problem, exact, plain, spread, work.keys, errors.steps)


def _of_heads(problem: Problem, *figures: Tensor) -> OfHeads:
    """Returns the partial sums of figures of rows, and the maximum of the last one."""
    *summed, steps = (by_head(rows, problem) for rows in figures)
    exact, plain, spread, terms = (rows.sum(-1) for rows in summed)
    return OfHeads(exact, plain, spread, terms, steps.amax(-1))


def head_gradient(problem: Problem, sums: OfHeads) -> Gradient:
    """Returns the gradients of slopes or sinks from sums over all rows. A head is a row of one element."""
    plain = (sums.plain - sums.exact).abs()
    figures = RowFigures(plain, sums.spread.sqrt(), sums.exact.abs(), sums.terms, sums.steps)
    return Gradient(sums.exact[..., None], allowed_error(figures, problem, stored=Dtype.FP32))


def sink_sums(problem: Problem, rows: SinkRows, steps: Tensor) -> OfHeads:
    """Returns the partial sums of the sinks' gradients. `steps` are those of the rows' errors."""
    steps = steps.expand(rows.exact.shape)
    return _of_heads(problem, rows.exact, rows.plain, squared(rows.typical), rows.exists, steps)


class OfKeys(NamedTuple):
    """Partial sums of the gradients of k and v over some rows, [pairs, keys, ...]. `steps` is a maximum."""

    # Exact gradients; dk without the scale.
    dk: Tensor
    dv: Tensor
    # Those of the low-precision reference.
    plain_dk: Tensor
    plain_dv: Tensor
    # Squares of typical errors of each column.
    dk_spread: Tensor
    dv_spread: Tensor
    queries: Tensor  # Number of rows that see each key, [pairs, keys].
    # Largest relative error of the rows' probabilities, in float32 roundoffs, [pairs, 1].
    steps: Tensor


def key_sums(work: Work) -> OfKeys:
    """Returns the partial sums over some rows."""
    wide, exact, plain, errors = work.wide, work.exact, work.plain, work.errors
    weight, least = errors.weight[..., None], squared(errors.least)[..., None]
    q, dout, squares = squared(wide.q), squared(wide.dout), squared(work.shares)
    # The errors of different rows' deltas are independent.
    of_product = (squared(errors.delta) + squared(errors.product))[..., None] * q
    dk_spread = squared(exact.slopes).mT @ (weight * q) + squares.mT @ of_product
    dv_spread = squared(exact.kept).mT @ (weight * dout)
    return OfKeys(
        dk=exact.slopes.mT @ wide.q,
        dv=exact.kept.mT @ wide.dout,
        plain_dk=plain.slopes.mT @ wide.q,
        plain_dv=plain.kept.mT @ wide.dout,
        dk_spread=dk_spread + (least * q).sum(-2, keepdim=True),
        dv_spread=dv_spread + errors.least_weight**2 * dout.sum(-2, keepdim=True),
        queries=work.queries,
        steps=errors.steps.amax(1, keepdim=True),
    )


Sums = TypeVar("Sums", OfKeys, OfHeads, OfElements)


def added(total: Sums | None, sums: Sums) -> Sums:
    """Returns the partial sums of one more slice of rows, added to those of the earlier ones."""
    if total is None:
        return sums
    both = type(sums)(*map(torch.add, total, sums))
    return both._replace(steps=larger(total.steps, sums.steps))


def key_gradients(problem: Problem, scale: float, sums: OfKeys) -> tuple[Gradient, Gradient]:
    """Returns dk and dv of some pairs from the sums over all their query rows."""
    steps = sums.steps.expand(sums.queries.shape)
    factor = BF16_KEYS_FACTOR if problem.dtype is Dtype.BF16 else FACTOR

    def gradient(exact: Tensor, plain: Tensor, typical: Tensor) -> Gradient:
        plain_error = largest(once(plain, problem) - exact)
        figures = RowFigures(plain_error, typical, largest(exact), sums.queries, steps)
        return Gradient(exact, allowed_error(figures, problem, factor=factor))

    dk_typical, dv_typical = (spread.amax(-1).sqrt() for spread in (sums.dk_spread, sums.dv_spread))
    dk = gradient(scale * sums.dk, scale * sums.plain_dk, scale * dk_typical)
    return dk, gradient(sums.dv, sums.plain_dv, dv_typical)


class Chosen(NamedTuple):
    """The compared pairs and rows."""

    pairs: Pairs  # Sequences and KV heads, with their query heads. All their rows are compared.
    # Query rows in which the gradient of a bias is compared, [rows] in int64 on the CPU.
    rows: Tensor


class Expected(NamedTuple):
    """The reference of the forward pass and of the gradients."""

    out: Tensor  # The output, rounded once, [pairs, group, seqlen_q, value_head_dim].
    lse: Tensor  # The log-sum-exp in float32, [pairs, group, seqlen_q].
    # Gradients by their names in `BackwardTensors`: dq [pairs, group, seqlen_q, head_dim], dk and dv [pairs,
    # seqlen_kv, ...], dslopes and dsinks [pairs, group, 1]. Also dbias of some rows, [pairs, group, rows,
    # seqlen_kv, 1]. dtables, [elements, 1], if all pairs are compared.
    gradients: dict[str, Gradient]


class OfRows(NamedTuple):
    """The forward pass, dq and, if any, dbias of some rows, as in `Expected`."""

    out: Tensor
    lse: Tensor
    dq: Gradient
    dbias: Gradient | None


def expect_gradients(problem: Problem, inputs: BackwardCase, chosen: Chosen) -> Expected:
    """Returns the gradients of the chosen pairs and their tolerances."""
    some = pieces(problem, chosen.pairs, inputs.q.device.type)
    tables: OfElements | None = None
    has_tables = bool(derivatives(problem.functions).elements) and chosen.pairs.are_all(problem)
    parts = []
    for piece in some:
        part, sums = _of_pairs(problem, inputs, piece, chosen.rows, has_tables=has_tables)
        parts.append(part)
        tables = tables if sums is None else added(tables, sums)
    gradients = {name: _joined([part.gradients[name] for part in parts], 0) for name in parts[0].gradients}
    if tables is not None:
        gradients["dtables"] = element_gradient(problem, tables)
    return Expected(together([part.out for part in parts]), together([part.lse for part in parts]), gradients)


def _joined(parts: list[Gradient], axis: int) -> Gradient:
    return Gradient(*(together(tensors, axis) for tensors in zip(*parts, strict=True)))


def _of_pairs(
    problem: Problem, inputs: BackwardCase, piece: Piece, chosen: Tensor, *, has_tables: bool
) -> tuple[Expected, OfElements | None]:
    parts: list[OfRows] = []
    of_keys: OfKeys | None = None
    of_slopes: OfHeads | None = None
    of_sinks: OfHeads | None = None
    of_tables: OfElements | None = None
    for rows in piece.rows:
        work = work_on(problem, inputs, piece.pairs, rows)
        parts.append(_of_rows(problem, inputs, work, chosen))
        of_keys = added(of_keys, key_sums(work))
        if problem.alibi:
            of_slopes = added(of_slopes, slope_sums(problem, work, piece.pairs, inputs.lengths))
        if work.sinks is not None:
            of_sinks = added(of_sinks, sink_sums(problem, work.sinks, work.errors.steps))
        if has_tables:
            of_tables = added(of_tables, element_sums(problem, inputs, work, piece.pairs))
    assert of_keys is not None
    dk, dv = key_gradients(problem, inputs.scale, of_keys)
    gradients = {"dq": _joined([part.dq for part in parts], 2), "dk": dk, "dv": dv}
    of_bias = [part.dbias for part in parts if part.dbias is not None]
    if of_bias:
        gradients["dbias"] = _joined(of_bias, 2)
    if of_slopes is not None:
        gradients["dslopes"] = head_gradient(problem, of_slopes)
    if of_sinks is not None:
        gradients["dsinks"] = head_gradient(problem, of_sinks)
    out, lse = (together(rows, 2) for rows in ([part.out for part in parts], [part.lse for part in parts]))
    return Expected(out, lse, gradients), of_tables


def _of_rows(problem: Problem, inputs: BackwardCase, work: Work, chosen: Tensor) -> OfRows:
    """Returns the results of some query rows."""
    exact = (work.exact.slopes @ work.wide.k).mul_(inputs.scale)
    plain = once((work.plain.slopes @ work.wide.k).mul_(inputs.scale), problem)
    figures = RowFigures(
        plain=largest(plain - exact),
        typical=inputs.scale * _typical(work),
        largest=largest(exact),
        terms=work.keys,
        steps=work.errors.steps,
    )
    dq = Gradient(by_head(exact, problem), by_head(allowed_error(figures, problem), problem))
    dbias = bias_gradient(problem, work, chosen) if problem.bias is Bias.ADDITIVE else None
    return OfRows(by_head(work.out, problem), by_head(work.lse, problem), dq, dbias)


def _typical(work: Work) -> Tensor:
    """Returns the typical error of each row of dq without the scale, [pairs, group · rows]."""
    wide, exact, errors = work.wide, work.exact, work.errors
    squares = squared(wide.k)
    spread: Tensor = errors.weight[..., None] * (squared(exact.slopes) @ squares)
    spread += squared(errors.product)[..., None] * (squared(work.shares) @ squares)
    spread += squared(errors.least)[..., None] * squares.sum(-2, keepdim=True)
    alike = (errors.delta + errors.product) * largest(work.shares @ wide.k)
    return alike + spread.amax(-1).sqrt()
