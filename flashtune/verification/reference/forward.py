"""The float64 reference of the forward pass, and a low-precision reference of the same rows.

Both are computed on the device of the inputs, a few heads at a time (`chunks.py`). Small masks are computed
on the CPU (`masks.py`). The low-precision reference rounds where unfused low-precision attention rounds.
Scores and probabilities are float32, probabilities are rounded to the inputs' dtype before the product with
V, and the output is rounded once. Its products are exact, so it does not depend on a library's order of
summation or on TF32 settings. Quantised inputs are dequantised with their scales, so the error of
quantisation is not an error of the kernel.

Here all sequences are as long as the longest, for any memory layout of the kernel. Rows and keys after the
end of a shorter sequence are hidden (`masks.py`). `flashtune/core/features/table.py` has the arithmetic of
softcap, ALiBi and bias.

A process that verifies one kernel loads each CUDA kernel of torch for the first time, and with it the others
of its source file. This takes from 2 ms (absolute values) over 20 ms (indexing) to 50 ms (masked fills). So
the reference uses additions, products and copies where possible. It does not divide or compare, and indexes
only if not all rows are compared.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from flashtune.core.features.description import Changed
from flashtune.core.features.records import NO_EXTRA_INPUTS, ExtraInputs
from flashtune.core.features.table import changed_scores, score_derivative
from flashtune.core.layouts import TORCH_DTYPES
from flashtune.core.problem import Problem
from flashtune.verification.lengths import Lengths, equal_lengths
from flashtune.verification.reference.masks import Rows, factors
from flashtune.verification.reference.scores import (
    RowMasks,
    chunked,
    finite_scores,
    levelled,
    score_rows,
    seen_by,
    sinks_of,
    stretched,
    together,
    widened,
)
from flashtune.verification.tolerance import (
    WEIGHT_RANGE,
    RowScale,
    allowed_error,
    allowed_lse_error,
    heaviest,
    inverse,
    larger,
    norm,
)

# Largest scores and outputs of one reference, in elements. For larger problems only some heads are compared.
MAX_SCORES = 2**28
MAX_OUTPUTS = 2**23
# Added to scores of hidden keys. Finite, so that rows without visible keys need no separate code path.
HIDDEN = -1e30
# All rows of problems with at most this many rows are compared.
ALL_ROWS = 768
# Tile sides are powers of two, so multiples of this are borders of every smaller tile too.
BORDER = 128
MAX_BORDERS = 192
FIRST_ROWS = 32
LAST_ROWS = 160
RANDOM_ROWS = 96


class Sample(NamedTuple):
    """The compared rows and heads. On the CPU, where arithmetic loads no CUDA kernels."""

    heads: Tensor  # [heads], each `batch index · heads of a sequence + head`; int64.
    rows: Tensor  # [rows], ascending; int64.


class Expected(NamedTuple):
    """The reference and the tolerances of the sampled rows, in float64."""

    out: Tensor  # [heads, rows, value_head_dim].
    allowed: Tensor  # Tolerance of `out`, [heads, rows].
    # [heads, rows], natural log. Rows without visible keys have the value of their sink, or -inf.
    lse: Tensor
    lse_allowed: Tensor  # Tolerance of `lse`, [heads, rows].


def sample(problem: Problem, generator: torch.Generator) -> Sample:
    """Returns the rows and heads to compare: all of a small problem, otherwise a sample.

    A sample has the first and last rows, rows at tile borders, and random rows.
    """
    rows = _sampled_rows(problem.seqlen_q, generator)
    all_heads = problem.batch * problem.heads
    affordable = min(
        MAX_SCORES // max(1, len(rows) * problem.seqlen_kv),
        MAX_OUTPUTS // max(1, len(rows) * problem.value_head_dim),
    )
    wanted = max(2, affordable)
    if wanted >= all_heads:
        return Sample(torch.arange(all_heads), rows)
    shuffled = torch.randperm(all_heads, generator=generator, device=generator.device).cpu()
    ends = torch.tensor([0, all_heads - 1])
    inner = shuffled[(shuffled != 0) & (shuffled != all_heads - 1)][: wanted - 2]
    return Sample(torch.cat([ends, inner]).unique(), rows)


def _sampled_rows(seqlen_q: int, generator: torch.Generator) -> Tensor:
    device = generator.device
    everything: Tensor = torch.arange(seqlen_q)
    if seqlen_q <= ALL_ROWS:
        return everything
    borders = everything[BORDER::BORDER]
    if len(borders) > MAX_BORDERS:
        shuffled = torch.randperm(len(borders), generator=generator, device=device).cpu()
        borders = borders[shuffled[:MAX_BORDERS]]
    others = torch.randint(seqlen_q, (RANDOM_ROWS,), generator=generator, device=device).cpu()
    parts = [everything[:FIRST_ROWS], borders - 1, borders, others, everything[-LAST_ROWS:]]
    rows: Tensor = torch.cat(parts).unique()
    return rows


def expect(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    chosen: Sample,
    side: ExtraInputs = NO_EXTRA_INPUTS,
    lengths: Lengths | None = None,
) -> Expected:
    """Returns the reference and the tolerances of the chosen rows.

    Args:
        problem: Shape, dtype, masks and other features.
        q: [batch, heads, seqlen_q, head_dim]. Like k and v, it is finite after the end of a sequence too.
        k: [batch, kv_heads, seqlen_kv, head_dim].
        v: [batch, kv_heads, seqlen_kv, value_head_dim].
        scale: Softmax scale.
        chosen: Rows and heads.
        side: Extra inputs. A quantised cache may have a scale for each key, [batch, kv_heads, seqlen_kv].
        lengths: Lengths of the sequences, unless all are equal.
    """
    lengths = lengths or equal_lengths(problem)
    parts = []
    for chunk in chunked(problem, chosen.heads, len(chosen.rows), q.device.type):
        some = Rows(chunk.heads // problem.heads, chunk.heads % problem.heads, chosen.rows)
        wide_q, wide_k, wide_v = widened(problem, chunk, chosen.rows, (q, k, v), side)
        seen = seen_by(problem, lengths, side, some, q.device)
        rows = score_rows(problem, lengths, side, some, q.device)
        products = _product(wide_q, wide_k.mT).mul_(scale)
        slope = score_derivative(products, rows) if problem.functions else None
        laid = changed_scores(products, rows, sizes=True)
        sinks = sinks_of(side, some, q.device)
        softcap = side.softcap or 0.0
        kept = factors(problem, lengths, side, some, q.device)
        wide = wide_q, wide_k, wide_v
        parts.append(_expect_heads(problem, *wide, scale, seen, laid, slope, sinks, softcap, kept))
    return Expected(*map(together, zip(*parts, strict=True)))


def _product(rows: Tensor, shared: Tensor) -> Tensor:
    """Returns [heads, rows, n] times [heads, n, columns] or [1, n, columns], which is not copied."""
    if len(shared) == len(rows):
        return rows @ shared
    return (rows.flatten(0, 1) @ shared[0]).reshape(*rows.shape[:2], shared.shape[-1])


def _expect_heads(
    problem: Problem,
    wide_q: Tensor,
    wide_k: Tensor,
    wide_v: Tensor,
    scale: float,
    seen: RowMasks,
    laid: Changed,
    slope: Tensor | None,
    sinks: Tensor | None,
    softcap: float,
    kept: Tensor | None,
) -> Expected:
    """Returns the reference of one chunk, from float64 tensors.

    q is [heads, rows, head_dim], k and v are [heads or 1, keys, ...] and sinks are [heads, 1]. `slope` is the
    derivative of scores with a score function. `kept` are the dropout factors of the probabilities, [heads,
    rows, keys], or None without dropout.
    """
    laid, seen = finite_scores(problem, laid, seen)
    scores, levels = levelled(problem, laid.scores.add_(seen.hidden.double().mul_(HIDDEN)), sinks)
    weights, total, lse = softmax(scores, sinks)
    bound = stretched(scale * norm(wide_q) * norm(wide_k).amax(-1, keepdim=True), slope, weights)
    # Without a sink, rows without visible keys have equal weights here. `full` is 0 for these rows, else 1.
    full = seen.keys.bool().double() if sinks is None else torch.ones_like(seen.keys)
    # Only terms of keys with weight count. The weights are relative to the row's largest at this point.
    added = None if laid.added is None else heaviest(laid.added, weights)
    if added is not None and levels is not None:
        # Where it absorbs the scores, no key differs from another.
        added = added.mul_((levels == 0).double())
    weights.mul_(inverse(total)[..., None])
    if kept is not None:
        weights.mul_(kept)
    out = _product(weights, wide_v).mul_(full[..., None])
    squares = weights.mul_(weights)
    row_scale = RowScale(
        spread=_product(squares, wide_v * wide_v).amax(-1).sqrt(),
        largest=out.abs().amax(-1),
        score=bound,
        keys=seen.keys.expand(wide_q.shape[:2]),
        lse=lse.abs().mul_(full),
        added=added,
        softcap=softcap,
    )
    if problem.kv_dtype is not None:
        products = _product(wide_q * wide_q, (wide_k * wide_k).mT).mul_((~seen.hidden).double())
        focus = squares.sum(-1).sqrt()
        row_scale = row_scale._replace(products=scale * products.amax(-1).sqrt(), focus=focus)
    plain_out, plain_lse = _plain(scores, wide_v, problem, sinks, kept)
    plain_error = (plain_out - out).abs().amax(-1)
    plain_lse_error = (plain_lse - lse).abs().mul_(full)
    lse.add_(full.log())
    return Expected(
        out,
        allowed_error(plain_error, row_scale, problem),
        lse if levels is None else lse.add_(levels),
        allowed_lse_error(plain_lse_error, row_scale, problem),
    )


def softmax(scores: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Returns unnormalised probabilities, their sums and the log-sum-exp of each row.

    Sinks, [heads, 1], are included in the sum and in the log-sum-exp. Hidden scores are finite. Their weight
    is zero in rows with a sink or a visible key.
    """
    largest = scores.amax(-1)
    if sinks is not None:
        largest = larger(largest, sinks)
    weights = (scores - largest[..., None]).exp_()
    total = weights.sum(-1)
    if sinks is not None:
        total = total + (sinks - largest).exp()
    return weights, total, largest + total.log()


def _plain(
    scores: Tensor, wide_v: Tensor, problem: Problem, sinks: Tensor | None, kept: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns the low-precision reference of output and log-sum-exp, as float64. Inputs are not changed."""
    weights, total, lse = softmax(scores.float(), None if sinks is None else sinks.float())
    low = (weights * WEIGHT_RANGE[problem.dtype]).to(TORCH_DTYPES[problem.dtype])
    # The range is a power of two, so its inverse is exact.
    rounded = low.double() * (1 / WEIGHT_RANGE[problem.dtype])
    product = _product(rounded if kept is None else rounded * kept, wide_v).float().double()
    out = (product * inverse(total.double())[..., None]).float()
    return out.to(TORCH_DTYPES[problem.out_dtype]).double(), lse.double()
