"""The forward pass of some rows in float64, and what its gradients are made of: weights, dP, delta."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from flashtune.core.extra_inputs import Side
from flashtune.core.layouts import TORCH_DTYPES
from flashtune.verification.reference.dropout import factors
from flashtune.verification.reference.forward import HIDDEN, softmax
from flashtune.verification.reference.masks import Rows
from flashtune.verification.reference.scores import laid_over, seen_by, sinks_of
from flashtune.verification.tolerance import heaviest, squared

if TYPE_CHECKING:
    from torch import Tensor

    from flashtune.core.problem import Problem
    from flashtune.verification.gradients.head_sampling import Pairs
    from flashtune.verification.lengths import Lengths


class Given(NamedTuple):
    """What a backward pass is made of, as sequences see it that lie side by side.

    Attributes:
        q: [batch, heads, seqlen_q, head_dim] in the problem's type; finite beyond a sequence's end as well.
        k: [batch, kv_heads, seqlen_kv, head_dim] likewise.
        v: [batch, kv_heads, seqlen_kv, value_head_dim] likewise.
        dout: The gradient of the output, [batch, heads, seqlen_q, value_head_dim] likewise.
        dlse: That of the log-sum-exp, float32 [batch, heads, seqlen_q]; None for zeros.
        side: Side inputs.
        scale: Softmax scale.
        lengths: Of each sequence.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor | None
    side: Side
    scale: float
    lengths: Lengths


class Wide(NamedTuple):
    """Some rows of some pairs in float64; the rows of all heads that share keys are one behind the other.

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
        scores: [pairs, group · rows, keys] in float64, with all that is laid over them; next to -inf
            where hidden.
        exact: P, alike.
        slope: 1 - tanh² where scores are capped, alike; None where they are not.
        kept: What dropout multiplies P by, alike; None where nothing is dropped.
        out: [pairs, group · rows, value_head_dim].
        lse: [pairs, group · rows], -inf where nothing is seen.
        added: Largest magnitude of what was added to a score that has weight, alike; None for nothing.
        keys: How many keys each row sees, alike.
        queries: How many rows see each key, [pairs, keys].
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


def widened(problem: Problem, given: Given, pairs: Pairs, rows: Tensor) -> Wide:
    """Some rows of some pairs, in float64."""

    def stacked(tensor: Tensor) -> Tensor:
        return pairs.of_queries(problem, tensor, rows).flatten(1, 2).double()

    def own(tensor: Tensor) -> Tensor:
        return pairs.of_keys(problem, tensor).double()

    dlse = 0.0 if given.dlse is None else stacked(given.dlse)
    return Wide(stacked(given.q), own(given.k), own(given.v), stacked(given.dout), dlse)


def weights_of(problem: Problem, given: Given, wide: Wide, pairs: Pairs, rows: Tensor) -> Weights:
    """The forward pass of some rows of some pairs."""
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
        # Rows that see no key have equal weights by now.
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
    """What is taken off the scores: nothing where all are hidden."""
    return lse.nan_to_num(nan=math.nan, posinf=math.inf, neginf=0.0)


def rounded(out: Tensor, problem: Problem) -> Tensor:
    """The output as the forward pass stores it."""
    return out.to(TORCH_DTYPES[problem.out_dtype])
