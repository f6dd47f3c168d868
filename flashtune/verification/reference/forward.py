"""The float64 reference, and the same rows computed plainly in low precision.

Everything is worked out on the device that holds the inputs, a few heads at a time (`chunks.py`), but for
small masks (`visible.py`).
The plain computation rounds where unfused low-precision attention rounds (scores and weights to
float32, weights to the inputs' type before they meet V, the output once) and takes its products
exactly: it hangs on no library's order of summation and on no TF32 setting. Quantised inputs are the
numbers that they stand for with their scales: what quantising cost is no error of a kernel's.

Sequences are as long as the longest here, wherever they lie in a kernel's memory: what a shorter one lacks
is hidden (`visible.py`), and what is laid over scores is in `scores.py`.

A process that proves one kernel loads each of torch's kernels for the first time, and with the first one of a
source file all that torch compiled with it: from 2 ms (absolute values) over 20 (look-ups) to 50 (masked
fills). So what adding, multiplying and copying can do is done by these: nothing is looked up where all rows
are wanted, divided or compared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from flashtune.core.extra_inputs import NO_SIDE, Side
from flashtune.core.layouts import TORCH_DTYPES
from flashtune.core.problem import Problem
from flashtune.verification.lengths import Lengths, equal_lengths
from flashtune.verification.reference.chunks import chunked, together, widened
from flashtune.verification.reference.dropout import factors
from flashtune.verification.reference.masks import Rows
from flashtune.verification.reference.scores import Laid, Seen, laid_over, seen_by, sinks_of
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

if TYPE_CHECKING:
    from torch import Tensor

# Scores and outputs of one reference, in elements: larger problems are sampled by head.
MAX_SCORES = 2**28
MAX_OUTPUTS = 2**23
# Added to scores of keys that are hidden: finite, so that no row without keys needs a path of its own.
HIDDEN = -1e30
# Up to this many rows all are compared.
ALL_ROWS = 768
# Tiles are powers of two: these borders are borders of every smaller tile as well.
BORDER = 128
MAX_BORDERS = 192
FIRST_ROWS = 32
LAST_ROWS = 160
RANDOM_ROWS = 96


class Sample(NamedTuple):
    """Which rows of which heads are compared; on the CPU, where arithmetic with them loads no kernels.

    Attributes:
        heads: [heads], each `batch index · heads of a sequence + head`; int64.
        rows: [rows], ascending; int64.
    """

    heads: Tensor
    rows: Tensor


class Expected(NamedTuple):
    """What a right kernel writes at the sampled rows, and how far it may be off; in float64.

    Attributes:
        out: [heads, rows, value_head_dim].
        allowed: [heads, rows].
        lse: [heads, rows], natural log, -inf for rows with nothing to attend to, or their sink.
        lse_allowed: [heads, rows].
    """

    out: Tensor
    allowed: Tensor
    lse: Tensor
    lse_allowed: Tensor


def sample(problem: Problem, generator: torch.Generator) -> Sample:
    """Rows and heads to compare: all of a small problem, else the last rows, tile borders and more."""
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
    side: Side = NO_SIDE,
    lengths: Lengths | None = None,
) -> Expected:
    """The reference of the chosen rows and what a kernel's error may be there.

    Args:
        problem: Shape, type, masks, and what else is laid over scores.
        q: [batch, heads, seqlen_q, head_dim]; finite beyond a sequence's end as well, like k and v.
        k: [batch, kv_heads, seqlen_kv, head_dim].
        v: [batch, kv_heads, seqlen_kv, value_head_dim].
        scale: Softmax scale.
        chosen: Rows and heads.
        side: Side inputs; scales of a quantised cache may be those of each key, [batch, kv_heads, seqlen_kv].
        lengths: Of each sequence, where they are not all of the longest.
    """
    lengths = lengths or equal_lengths(problem)
    parts = []
    for chunk in chunked(problem, chosen.heads, len(chosen.rows), q.device.type):
        some = Rows(chunk.heads // problem.heads, chunk.heads % problem.heads, chosen.rows)
        wide_q, wide_k, wide_v = widened(problem, chunk, chosen.rows, (q, k, v), side)
        seen = seen_by(problem, lengths, side, some, q.device)
        laid = laid_over(problem, _product(wide_q, wide_k.mT).mul_(scale), lengths, side, some)
        sinks = sinks_of(side, some, q.device)
        softcap = side.softcap or 0.0
        kept = factors(problem, lengths, side, some, q.device)
        parts.append(_expect_heads(problem, wide_q, wide_k, wide_v, scale, seen, laid, sinks, softcap, kept))
    return Expected(*map(together, zip(*parts, strict=True)))


def _product(rows: Tensor, shared: Tensor) -> Tensor:
    """[heads, rows, n] times [heads, n, columns], or [1, n, columns], of which no copies are made."""
    if len(shared) == len(rows):
        return rows @ shared
    return (rows.flatten(0, 1) @ shared[0]).reshape(*rows.shape[:2], shared.shape[-1])


def _expect_heads(
    problem: Problem,
    wide_q: Tensor,
    wide_k: Tensor,
    wide_v: Tensor,
    scale: float,
    seen: Seen,
    laid: Laid,
    sinks: Tensor | None,
    softcap: float,
    kept: Tensor | None,
) -> Expected:
    """One chunk: q [heads, rows, head_dim], k and v [heads or 1, keys, ...], sinks [heads, 1], in float64.

    `kept` are factors of the weights, [heads, rows, keys]; None for ones.
    """
    scores = laid.scores.add_(seen.hidden.double().mul_(HIDDEN))
    weights, total, lse = softmax(scores, sinks)
    # Rows that see no key have equal weights by now, where there is no sink: 0 for them, and 1 for others.
    full = seen.keys.bool().double() if sinks is None else torch.ones_like(seen.keys)
    # What was added to keys that have weight, and to no others: weights are relative to the largest here.
    added = None if laid.added is None else heaviest(laid.added, weights)
    weights.mul_(inverse(total)[..., None])
    if kept is not None:
        weights.mul_(kept)
    out = _product(weights, wide_v).mul_(full[..., None])
    squares = weights.mul_(weights)
    row_scale = RowScale(
        spread=_product(squares, wide_v * wide_v).amax(-1).sqrt(),
        largest=out.abs().amax(-1),
        score=scale * norm(wide_q) * norm(wide_k).amax(-1, keepdim=True),
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
    return Expected(
        out,
        allowed_error(plain_error, row_scale, problem),
        lse.add_(full.log()),
        allowed_lse_error(plain_lse_error, row_scale, problem),
    )


def softmax(scores: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Unnormalised weights, their sums and the log-sum-exp of each row.

    A sink, [heads, 1], is in the sum and in the log-sum-exp. Hidden scores are finite, and weigh nothing
    beside a sink or a key that is seen.
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
    """Output and log-sum-exp with the roundings of low precision, as float64. Overwrites nothing."""
    weights, total, lse = softmax(scores.float(), None if sinks is None else sinks.float())
    low = (weights * WEIGHT_RANGE[problem.dtype]).to(TORCH_DTYPES[problem.dtype])
    # The range is a power of two: its inverse is exact.
    rounded = low.double() * (1 / WEIGHT_RANGE[problem.dtype])
    product = _product(rounded if kept is None else rounded * kept, wide_v).float().double()
    out = (product * inverse(total.double())[..., None]).float()
    return out.to(TORCH_DTYPES[problem.out_dtype]).double(), lse.double()
