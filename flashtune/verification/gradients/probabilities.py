"""The forward pass of some rows in float64, with the quantities that gradients are computed from."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from flashtune.core.extra_inputs import ExtraInputs
from flashtune.core.layouts import TORCH_DTYPES
from flashtune.verification.reference.forward import HIDDEN, softmax
from flashtune.verification.reference.masks import Rows, factors
from flashtune.verification.reference.scores import laid_over, seen_by, sinks_of
from flashtune.verification.tolerance import heaviest, squared

if TYPE_CHECKING:
    from torch import Tensor

    from flashtune.core.problem import Problem
    from flashtune.verification.gradients.head_sampling import Pairs
    from flashtune.verification.lengths import Lengths


class BackwardCase(NamedTuple):
    """The inputs of a backward pass in padded form. Tensors are finite after the end of a sequence too.

    Attributes:
        q: [batch, heads, seqlen_q, head_dim] in the problem's dtype.
        k: [batch, kv_heads, seqlen_kv, head_dim] in the same dtype.
        v: [batch, kv_heads, seqlen_kv, value_head_dim] in the same dtype.
        dout: The gradient of the output, [batch, heads, seqlen_q, value_head_dim] in the same dtype.
        dlse: The gradient of the log-sum-exp, float32 [batch, heads, seqlen_q], or None for zeros.
        side: Extra inputs.
        scale: Softmax scale.
        lengths: Lengths of the sequences.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor | None
    side: ExtraInputs
    scale: float
    lengths: Lengths


class Float64Rows(NamedTuple):
    """Some rows of some pairs in float64. The rows of the heads of a group are concatenated.

    Attributes:
        q: [pairs, group · rows, head_dim].
        k: [pairs, keys, head_dim].
        v: [pairs, keys, value_head_dim].
        dout: [pairs, group · rows, value_head_dim].
        dlse: [pairs, group · rows].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor | float


class Weights(NamedTuple):
    """The forward pass of some rows.

    Attributes:
        scores: [pairs, group · rows, keys] in float64, with softcap, ALiBi and bias. Very negative if hidden.
        exact: P, of the same shape.
        slope: 1 - tanh² of the softcap, of the same shape, or None without softcap.
        kept: Dropout factors of P, of the same shape, or None without dropout.
        out: [pairs, group · rows, value_head_dim].
        lse: [pairs, group · rows], -inf in rows without visible keys.
        added: Largest magnitude of a bias or ALiBi term of a key with weight, like `lse`. None without such.
        keys: Number of visible keys of each row, like `lse`.
        queries: Number of rows that see each key, [pairs, keys].
    """

    scores: Tensor
    exact: Tensor
    slope: Tensor | None
    kept: Tensor | None
    out: Tensor
    lse: Tensor
    added: Tensor | None
    keys: Tensor
    queries: Tensor


def widened(problem: Problem, given: BackwardCase, pairs: Pairs, rows: Tensor) -> Float64Rows:
    """Returns some rows of some pairs in float64."""

    def stacked(tensor: Tensor) -> Tensor:
        return pairs.of_queries(problem, tensor, rows).flatten(1, 2).double()

    def own(tensor: Tensor) -> Tensor:
        return pairs.of_keys(problem, tensor).double()

    dlse = 0.0 if given.dlse is None else stacked(given.dlse)
    return Float64Rows(stacked(given.q), own(given.k), own(given.v), stacked(given.dout), dlse)


def weights_of(
    problem: Problem, given: BackwardCase, wide: Float64Rows, pairs: Pairs, rows: Tensor
) -> Weights:
    """Returns the forward pass of some rows of some pairs."""
    device, group, side = wide.q.device, problem.group_size, given.side
    some = Rows(pairs.batch.repeat_interleave(group), pairs.heads(problem).flatten(), rows)
    scores = (wide.q @ wide.k.mT).mul_(given.scale)
    slope = None if side.softcap is None else 1.0 - squared((scores / side.softcap).tanh_())
    by_head = scores.view(len(some.head), len(rows), -1)
    seen = seen_by(problem, given.lengths, side, some, device)
    laid = laid_over(problem, by_head, given.lengths, side, some)
    by_head = laid.scores.add_(seen.hidden.double().mul_(HIDDEN))
    scores = by_head.view_as(scores)
    sinks = sinks_of(side, some, device)
    lse = softmax(by_head, sinks)[2]
    if sinks is None:
        # Rows without visible keys have equal weights here.
        lse.add_(seen.keys.bool().double().log())
    lse = lse.view(scores.shape[:2])
    exact = (scores - finite(lse)[..., None]).exp_()
    added = None if laid.added is None else heaviest(laid.added, exact.view_as(by_head)).view_as(lse)
    visible = (~seen.hidden).expand(by_head.shape)
    queries = visible.unflatten(0, (-1, group)).sum((1, 2)).double()
    keys = seen.keys.expand(by_head.shape[:2]).reshape(lse.shape)
    kept = factors(problem, given.lengths, side, some, device)
    kept = None if kept is None else kept.view_as(exact)
    out = (exact if kept is None else exact * kept) @ wide.v
    return Weights(scores, exact, slope, kept, out, lse, added, keys, queries)


def finite(lse: Tensor) -> Tensor:
    """Returns the log-sum-exp with -inf replaced by 0, to be subtracted from scores."""
    return lse.nan_to_num(nan=math.nan, posinf=math.inf, neginf=0.0)


def rounded(out: Tensor, problem: Problem) -> Tensor:
    """Returns the output in the dtype in which the forward pass stores it."""
    return out.to(TORCH_DTYPES[problem.out_dtype])
