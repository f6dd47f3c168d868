"""The forward pass of some rows in float64, and P and dS: exact, in low precision, and their errors."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from flashtune.core.features.functions import derivative_errors
from flashtune.core.features.records import ExtraInputs
from flashtune.core.features.table import changed_scores, score_derivative
from flashtune.core.layouts import TORCH_DTYPES
from flashtune.core.problem import Problem
from flashtune.verification.gradients.head_sampling import Pairs
from flashtune.verification.gradients.tolerance import (
    LSE_STEPS,
    P_SCALE,
    QueryErrors,
    Sizes,
    keeps_low_p,
    query_errors,
)
from flashtune.verification.inputs.placement import missing
from flashtune.verification.lengths import Lengths
from flashtune.verification.reference.forward import HIDDEN, softmax
from flashtune.verification.reference.masks import Rows, factors
from flashtune.verification.reference.scores import (
    finite_scores,
    levelled,
    score_rows,
    seen_by,
    sinks_of,
    stretched,
)
from flashtune.verification.tolerance import FLOAT32_ROUNDOFF, FUNCTION_STEPS, heaviest, norm


class BackwardCase(NamedTuple):
    """The inputs of a backward pass in padded form. Tensors are finite after the end of a sequence too."""

    q: Tensor  # [batch, heads, seqlen_q, head_dim] in the problem's dtype.
    k: Tensor  # [batch, kv_heads, seqlen_kv, head_dim] in the same dtype.
    v: Tensor  # [batch, kv_heads, seqlen_kv, value_head_dim] in the same dtype.
    # The gradient of the output, [batch, heads, seqlen_q, value_head_dim] in the same dtype.
    dout: Tensor
    # The gradient of the log-sum-exp, float32 [batch, heads, seqlen_q], or None for zeros.
    dlse: Tensor | None
    side: ExtraInputs
    scale: float  # Softmax scale.
    lengths: Lengths


class Float64Rows(NamedTuple):
    """Some rows of some pairs in float64. The rows of the heads of a group are concatenated."""

    q: Tensor  # [pairs, group · rows, head_dim].
    k: Tensor  # [pairs, keys, head_dim].
    v: Tensor  # [pairs, keys, value_head_dim].
    dout: Tensor  # [pairs, group · rows, value_head_dim].
    dlse: Tensor | float  # [pairs, group · rows].


class Weights(NamedTuple):
    """The forward pass of some rows."""

    # [pairs, group · rows, keys] in float64, with softcap, ALiBi and bias. Very negative if hidden.
    scores: Tensor
    exact: Tensor  # P, of the same shape.
    # Derivative of the scores by those before features, of the same shape; None if it is 1.
    slope: Tensor | None
    # Bounds of its rounding errors in float32, in roundoffs, likewise.
    slope_errors: Tensor | None
    kept: Tensor | None  # Dropout factors of P, of the same shape, or None without dropout.
    out: Tensor  # [pairs, group · rows, value_head_dim].
    lse: Tensor  # [pairs, group · rows], -inf in rows without visible keys.
    # FINITE_MASK in rows whose keys all have it, else 0, like `lse`; None if all are 0. `scores` and `lse`
    # are relative to them.
    levels: Tensor | None
    # Largest magnitude of a bias or ALiBi term of a key with weight, like `lse`. None without such.
    added: Tensor | None
    keys: Tensor  # Number of visible keys of each row, like `lse`.
    queries: Tensor  # Number of rows that see each key, [pairs, keys].


def widened(problem: Problem, inputs: BackwardCase, pairs: Pairs, rows: Tensor) -> Float64Rows:
    """Returns some rows of some pairs in float64."""

    def stacked(tensor: Tensor) -> Tensor:
        return pairs.of_queries(problem, tensor, rows).flatten(1, 2).double()

    def own(tensor: Tensor) -> Tensor:
        return pairs.of_keys(problem, tensor).double()

    dlse = 0.0 if inputs.dlse is None else stacked(inputs.dlse)
    return Float64Rows(stacked(inputs.q), own(inputs.k), own(inputs.v), stacked(inputs.dout), dlse)


def weights_of(
    problem: Problem, inputs: BackwardCase, wide: Float64Rows, pairs: Pairs, rows: Tensor
) -> Weights:
    """Returns the forward pass of some rows of some pairs."""
    device, group, side = wide.q.device, problem.group_size, inputs.side
    some = Rows(pairs.batch.repeat_interleave(group), pairs.heads(problem).flatten(), rows)
    scores = (wide.q @ wide.k.mT).mul_(inputs.scale)
    by_head = scores.view(len(some.head), len(rows), -1)
    features = score_rows(problem, inputs.lengths, side, some, device)
    slope = score_derivative(by_head, features)
    slope = None if slope is None else slope.expand(by_head.shape).reshape(scores.shape)
    slope_errors = derivative_errors(by_head, features) if problem.functions else None
    slope_errors = None if slope_errors is None else slope_errors.reshape(scores.shape)
    seen = seen_by(problem, inputs.lengths, side, some, device)
    biased = changed_scores(by_head, features, sizes=True)
    sinks = sinks_of(side, some, device)
    biased, seen = finite_scores(problem, biased, seen)
    by_head, levels = levelled(problem, biased.scores.add_(seen.hidden.double().mul_(HIDDEN)), sinks)
    scores = by_head.view_as(scores)
    lse = softmax(by_head, sinks)[2]
    if sinks is None:
        # Rows without visible keys have equal weights here.
        lse.add_(seen.keys.bool().double().log())
    lse = lse.view(scores.shape[:2])
    exact = (scores - finite(lse)[..., None]).exp_()
    added = None if biased.added is None else heaviest(biased.added, exact.view_as(by_head)).view_as(lse)
    if levels is not None:
        levels = levels.view_as(lse)
        added = None if added is None else added * (levels == 0).double()
    visible = (~seen.hidden).expand(by_head.shape)
    queries = visible.unflatten(0, (-1, group)).sum((1, 2)).double()
    keys = seen.keys.expand(by_head.shape[:2]).reshape(lse.shape)
    kept = factors(problem, inputs.lengths, side, some, device)
    kept = None if kept is None else kept.view_as(exact)
    out = (exact if kept is None else exact * kept) @ wide.v
    return Weights(scores, exact, slope, slope_errors, kept, out, lse, levels, added, keys, queries)


def finite(lse: Tensor) -> Tensor:
    """Returns the log-sum-exp with -inf replaced by 0, to be subtracted from scores."""
    return lse.nan_to_num(nan=math.nan, posinf=math.inf, neginf=0.0)


def rounded(out: Tensor, problem: Problem) -> Tensor:
    """Returns the output in the dtype in which the forward pass stores it."""
    return out.to(TORCH_DTYPES[problem.out_dtype])


class Scores(NamedTuple):
    """P and dS of some rows, [pairs, group · rows, keys] in float64."""

    weights: Tensor  # P.
    kept: Tensor  # P after dropout. P itself without dropout.
    slopes: Tensor  # dS of the scores before features. Includes their derivative.
    biased: Tensor  # dS of the scores after features. Equal to `slopes` if the derivative is 1.


class SinkRows(NamedTuple):
    """The gradients of sinks of some rows, [pairs, group · rows] in float64; 0 for rows that are absent."""

    exact: Tensor  # -exp(sink - lse) · delta.
    plain: Tensor  # That of the low-precision reference.
    typical: Tensor  # Its typical error.
    exists: Tensor  # 1 for rows of a sequence, else 0.


class Work(NamedTuple):
    """Some query rows of some pairs."""

    rows: Tensor  # The rows, [rows] in int64 on the CPU.
    wide: Float64Rows  # Inputs.
    out: Tensor  # The output as the forward pass stores it, [pairs, group · rows, value_head_dim].
    lse: Tensor  # The log-sum-exp as the forward pass stores it, [pairs, group · rows] in float32.
    keys: Tensor  # Number of visible keys of each row, [pairs, group · rows].
    queries: Tensor  # Number of rows that see each key, [pairs, keys].
    exact: Scores  # P and dS.
    plain: Scores  # P and dS of the low-precision reference, rounded to the inputs' dtype.
    # P times the derivative of scores, by which errors of dP and delta change dS. P itself if that is less.
    shares: Tensor
    errors: QueryErrors  # Errors of the quantities of each row.
    sinks: SinkRows | None  # The gradients of sinks of each row, or None without sinks.


def work_on(problem: Problem, inputs: BackwardCase, pairs: Pairs, rows: Tensor) -> Work:
    """Returns the quantities that gradients are computed from, for some query rows of some pairs."""
    wide = widened(problem, inputs, pairs, rows)
    weights = weights_of(problem, inputs, wide, pairs, rows)
    out, lse = rounded(weights.out, problem), weights.lse.float()
    products = wide.dout @ wide.v.mT
    if weights.kept is not None:
        products.mul_(weights.kept)
    exact_delta = (wide.dout * weights.out).sum(-1) - wide.dlse
    plain_delta = ((wide.dout * out.double()).sum(-1) - wide.dlse).float()
    exact = _scores(weights.exact, products, exact_delta, weights.slope, weights.kept)
    plain = _plain(problem, weights, lse, products.float(), plain_delta)
    errors = query_errors(problem, _sizes(inputs, wide, weights, exact_delta), inputs.side.softcap or 0.0)
    if weights.slope_errors is not None:
        # dS has the rounding error of the derivative too, of any key.
        of_slope = times(exact.biased, weights.slope_errors).abs().amax(-1)
        errors = errors._replace(least=errors.least + FLOAT32_ROUNDOFF * of_slope)
    sinks = None
    if inputs.side.sinks is not None:
        sinks = _sink_rows(problem, inputs, pairs, rows, (weights.lse, exact_delta, plain_delta), errors)
    if weights.levels is not None:
        lse = (weights.lse + weights.levels).float()
    shares = weights.exact
    if weights.slope is not None:
        shares = torch.where(weights.slope.abs() > 1.0, times(shares, weights.slope), shares)
    return Work(rows, wide, out, lse, weights.keys, weights.queries, exact, plain, shares, errors, sinks)


def _sink_rows(
    problem: Problem,
    inputs: BackwardCase,
    pairs: Pairs,
    rows: Tensor,
    of_rows: tuple[Tensor, Tensor, Tensor],
    errors: QueryErrors,
) -> SinkRows:
    """Returns the gradients of sinks. `of_rows` are the log-sum-exps and both deltas of the rows."""
    lse, exact_delta, plain_delta = of_rows
    heads = pairs.heads(problem)
    assert inputs.side.sinks is not None
    sink = inputs.side.sinks.cpu()[heads].double().repeat_interleave(len(rows), 1).to(lse.device)
    exists = torch.ones_like(lse)
    absent = missing(problem, inputs.lengths, pairs.numbers(problem).flatten(), rows)
    if absent is not None:
        exists = (~absent).double().view(lse.shape).to(lse.device)
    # A sink of -inf has no weight, in rows without visible keys too.
    weight = (sink - finite(lse)).exp() * exists
    plain = (sink.float() - finite(lse.float())).exp().double() * exists
    # The exponent has the errors of the sink and of the log-sum-exp.
    steps = errors.steps + FUNCTION_STEPS + LSE_STEPS * sink.nan_to_num(neginf=0.0).abs()
    typical = weight * (errors.delta + FLOAT32_ROUNDOFF * steps * exact_delta.abs())
    return SinkRows(-weight * exact_delta, -plain * plain_delta.double(), typical, exists)


def _scores(
    weights: Tensor, products: Tensor, delta: Tensor, slope: Tensor | None, kept: Tensor | None
) -> Scores:
    biased = (products - delta[..., None]).mul_(weights)
    dropped = weights if kept is None else weights * kept
    return Scores(weights, dropped, biased if slope is None else times(biased, slope), biased)


def times(biased: Tensor, slope: Tensor) -> Tensor:
    """Returns products with derivatives, which may be infinite where a key has no weight: there zero."""
    return torch.where(biased == 0.0, 0.0, biased * slope)


def _plain(problem: Problem, weights: Weights, lse: Tensor, products: Tensor, delta: Tensor) -> Scores:
    """Returns P and dS of unfused low-precision code, both rounded to the inputs' dtype."""
    low = TORCH_DTYPES[problem.dtype]
    p = (weights.scores.float() - finite(lse)[..., None]).exp_()
    # Kernels keep P in 16 bits until dP is known, times a power of two so that fp16 loses no small ones.
    held = (p * P_SCALE).to(low).float() / P_SCALE if keeps_low_p(problem) else p
    scores = _scores(held, products, delta, None if weights.slope is None else weights.slope.float(), None)
    slopes = scores.slopes.to(low).double()
    biased = slopes if weights.slope is None else scores.biased.to(low).double()
    rounded_p = p.to(low).double()
    kept = rounded_p if weights.kept is None else rounded_p * weights.kept
    return Scores(rounded_p, kept, slopes, biased)


def _sizes(inputs: BackwardCase, wide: Float64Rows, weights: Weights, delta: Tensor) -> Sizes:
    kept = 1.0 / (1.0 - (inputs.side.dropout or 0.0))
    product = norm(wide.dout) * norm(wide.v).amax(-1, keepdim=True) * kept
    bound = inputs.scale * norm(wide.q) * norm(wide.k).amax(-1, keepdim=True)
    return Sizes(
        score=stretched(bound, weights.slope, weights.exact),
        lse=finite(weights.lse).abs(),
        added=weights.added,
        product=product,
        delta=norm(wide.dout * weights.out),
        change=product + delta.abs(),
        kept=kept,
    )


def once(gradient: Tensor, problem: Problem) -> Tensor:
    """Returns a gradient as a float32 sum that is rounded once to the inputs' dtype."""
    return gradient.float().to(TORCH_DTYPES[problem.dtype]).double()


def largest(tensor: Tensor) -> Tensor:
    """Returns the largest magnitude of each row."""
    return tensor.abs().amax(-1)
