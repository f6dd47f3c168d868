"""Probes: values of q, k and v with which a single wrong tile fails verification."""

import enum
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from flashtune.core.features.records import NO_EXTRA_INPUTS, ExtraInputs
from flashtune.core.problem import KvScale, Problem
from flashtune.verification.inputs.placement import aside
from flashtune.verification.lengths import Lengths, equal_lengths
from flashtune.verification.mask_boundary_probes import FIRST_HIDDEN, LAST_VISIBLE, at_edges, with_latent

# Scores of `far_below` are so far below zero that a padding key of zeros would take all the weight.
DEPTH = 150.0
# Scores of `rising` rise by this much from the first key to the last.
CLIMB = 14.0
# Scores of `steep` rise by CLIMB times a power of two with an exponent in this range, in a share of the rows.
MIN_STEEP, MAX_STEEP = -2.0, 3.5
STEEP_SHARE = 1 / 12
NEEDLE = 8.0
# Factor of the rows between needles.
CALM = 0.1
# Factor of queries and keys of `faint`. The product of their scales is zero in float32.
FAINTNESS = 2.0**-100
# Outliers increase the error of quantisation. One element in a thousand is ten times as large, as in the
# experiments of FlashAttention-3 (Shah et al., 2024).
OUTLIER_SHARE = 0.001
OUTLIER_SIZE = 10.0
# Tensors of at most this many elements are filled on the CPU.
FEW_ELEMENTS = 2**20
# Magnitudes of the heads of quantised tensors differ by up to this power of two. The scale of another head
# then gives a wrong result.
HEAD_POWER = 2


class Probe(enum.StrEnum):
    """The kind of error that a case exposes.

    random     Normal q, k and v, with outliers if they will be quantised, because outliers determine the
               scales.
    far_below  All scores near -150. Padding that is not masked takes all the weight, and exponentials that
               are not relative to the maximum become zero.
    needle     Nearly equal probabilities, and one key of each block is large in V. A block that is skipped,
               masked or processed twice is missing or doubled in a column of every row.
    first, last  As needle, at the first and at the last key of each block.
    rising     Scores rise along the keys in even rows and fall in odd rows. The running maximum changes in
               every block, or only in the first.
    steep      As rising, but by 4 to 150, and in a few separate rows only. Threads that decide together
               must not miss a row that needs rescaling, nor postpone it indefinitely.
    faint      Queries and keys near zero, so that all probabilities are equal and the log-sum-exp is known
               to the last bits. A missing key changes it, even if 8-bit products truncate other scores.
    diagonal   The last visible key has much weight; the first hidden key would have more.
    edge       As diagonal, at any border of a row's mask: window, chunk, first tokens, prefix, length.
    sink       As random, with sinks that take nearly all the weight in some heads and none in others.
    """

    RANDOM = "random"
    FAR_BELOW = "far_below"
    NEEDLE = "needle"
    FIRST = "first"
    LAST = "last"
    RISING = "rising"
    STEEP = "steep"
    FAINT = "faint"
    DIAGONAL = "diagonal"
    EDGE = "edge"
    SINK = "sink"


# The probes of a passed verdict at every level, for every problem.
EVERY_LEVEL = frozenset({Probe.RANDOM, Probe.FAR_BELOW, Probe.NEEDLE, Probe.LAST, Probe.RISING})
# The comparison of rows between calls, which verdicts of batch-invariant kernels name too.
INVARIANCE = "invariance"


class Values(NamedTuple):
    """q, k and v as [batch, heads, seqlen, head_dim] in float32, not yet rounded to their dtype."""

    q: Tensor
    k: Tensor
    v: Tensor


def make_values(
    probe: Probe,
    problem: Problem,
    scale: float,
    block: int,
    generator: torch.Generator,
    lengths: Lengths | None = None,
    side: ExtraInputs = NO_EXTRA_INPUTS,
) -> Values:
    """Returns new values for a probe.

    The values are made on the generator's device, for this softmax scale. Prefixes and biases determine the
    visible keys of `edge`.
    """
    if problem.mla and probe not in (Probe.RANDOM, Probe.SINK):
        # The first columns hold the probe's values, so the other columns alone determine the scores.
        own = msgspec.structs.replace(problem, head_dim=problem.head_dim - problem.value_head_dim, mla=False)
        q, k, v = make_values(probe, own, scale, block, generator, lengths, side)
        return Values(*with_latent(q, k, v), v)
    values = Values(
        _normal((problem.batch, problem.heads, problem.seqlen_q, problem.head_dim), generator),
        _normal((problem.batch, problem.kv_heads, problem.seqlen_kv, problem.head_dim), generator),
        _normal((problem.batch, problem.kv_heads, problem.seqlen_kv, problem.value_head_dim), generator),
    )
    if probe is Probe.EDGE:
        q, k = at_edges(problem, scale, lengths or equal_lengths(problem), side, generator)
        made = Values(q, k, values.v)
    else:
        made = _made(probe, values, problem, scale, block, generator)
    if problem.dtype.is_quantized or (problem.kv_dtype and problem.kv_scale is not KvScale.TENSOR):
        grow = probe is Probe.RANDOM and problem.dtype.is_quantized
        made = _unlike_heads(made, problem, grow, aside(generator))
    return made._replace(v=made.k[..., : problem.value_head_dim]) if problem.mla else made


def _made(
    probe: Probe, values: Values, problem: Problem, scale: float, block: int, generator: torch.Generator
) -> Values:
    match probe:
        case Probe.RANDOM | Probe.SINK | Probe.EDGE:
            if problem.dtype.is_quantized:
                return Values(*(_with_outliers(value, generator) for value in values))
            return values
        case Probe.FAR_BELOW:
            return _far_below(values, scale)
        case Probe.NEEDLE | Probe.FIRST | Probe.LAST:
            return _needles(values, probe, scale, block, aside(generator))
        case Probe.RISING:
            return _rising(values, scale, 1.0 - 2.0 * (torch.arange(problem.seqlen_q) % 2))
        case Probe.STEEP:
            return _rising(values, scale, _few_steep(values.q.shape[:3], aside(generator)))
        case Probe.FAINT:
            return Values(FAINTNESS * values.q, FAINTNESS * values.k, values.v)
        case Probe.DIAGONAL:
            return _diagonal(values, problem, scale, aside(generator))


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, device=generator.device, dtype=torch.float32)


def _with_outliers(normal: Tensor, generator: torch.Generator) -> Tensor:
    # Integers of which one in a thousand is zero. Casts load no new CUDA kernels, comparisons would.
    drawn = torch.rand(normal.shape, generator=generator, device=normal.device) * (1 / OUTLIER_SHARE)
    rare = 1.0 - drawn.int().bool().float()
    return normal + rare * OUTLIER_SIZE * _normal(tuple(normal.shape), generator)


def _unlike_heads(values: Values, problem: Problem, grow: bool, generator: torch.Generator) -> Values:
    """Returns values with the same scores, but with heads of k and v of different magnitudes.

    With `grow`, the scores of some query heads are twice as large.
    """

    def sizes(heads: int, least: int, largest: int) -> Tensor:
        return 2.0 ** torch.randint(least, largest + 1, (problem.batch, heads, 1, 1), generator=generator)

    k_size, v_size = (sizes(problem.kv_heads, -HEAD_POWER, HEAD_POWER) for _ in range(2))
    q_size = (1 / k_size).repeat_interleave(problem.group_size, dim=1)
    q_size = q_size * sizes(problem.heads, 0, 1) if grow else q_size
    each = zip((q_size, k_size, v_size), values, strict=True)
    return Values(*(size.to(value.device) * value for size, value in each))


def _far_below(values: Values, scale: float) -> Values:
    # All queries point in one direction and all keys in the opposite one.
    width = values.q.shape[-1]
    size = (DEPTH / (scale * width)) ** 0.5
    return Values(0.3 * values.q + size, 0.3 * values.k - size, values.v)


def _needles(values: Values, probe: Probe, scale: float, block: int, generator: torch.Generator) -> Values:
    # Neighbouring blocks use different columns.
    v = with_needles(values.v, probe, block, generator, (7, 0))
    # Scores of about 0.25 in magnitude: probabilities are nearly equal but still differ between keys.
    calm = 0.5 / (scale**0.5 * values.q.shape[-1] ** 0.25)
    return Values(calm * values.q, calm * values.k, v)


def with_needles(
    normal: Tensor, probe: Probe, block: int, generator: torch.Generator, steps: tuple[int, int]
) -> Tensor:
    """Returns small values [batch, heads, rows, width] with a large element, a needle, in each block of rows.

    From block to block and from head to head, the column of the needle increases by `steps`. The signs, and
    the rows of `needle`, come from a generator on the CPU.
    """
    batch, heads, rows, width = normal.shape
    block_number, head = torch.arange(-(-rows // block)), torch.arange(heads)[:, None]
    shape = (batch, heads, len(block_number))
    if probe is Probe.NEEDLE:
        offset = torch.randint(block, shape, generator=generator)
    else:
        offset = torch.full(shape, 0 if probe is Probe.FIRST else block - 1)
    row = (block_number * block + offset).clamp_max(rows - 1)
    column = (block_number * steps[0] + head * steps[1]) % width
    sign = torch.randint(2, shape, generator=generator) * 2.0 - 1.0
    indices = torch.arange(batch)[:, None, None], head, row, column
    return replaced(CALM * normal, indices, NEEDLE * sign)


def replaced(tensor: Tensor, where: tuple[Tensor, ...], elements: Tensor) -> Tensor:
    """Returns the tensor with some elements replaced by nonzero ones. Large tensors are changed in place."""
    if tensor.numel() > FEW_ELEMENTS:
        tensor[where] = elements.to(tensor.device)
        return tensor
    # Indexing on the CPU loads no CUDA kernels.
    laid = torch.zeros(tensor.shape, dtype=tensor.dtype).index_put_(where, elements.to(tensor.dtype))
    return tensor * (1.0 - laid.bool().float()).to(tensor.device) + laid.to(tensor.device)


def _rising(values: Values, scale: float, direction: Tensor) -> Values:
    """Returns values whose scores rise along the keys by `direction` times CLIMB.

    `direction` is [seqlen_q] or [batch, heads, seqlen_q].
    """
    keys, width = values.k.shape[2], values.k.shape[-1]
    size = (CLIMB / 2 / (scale * width)) ** 0.5
    climb = size * torch.linspace(-1.0, 1.0, keys)[:, None]
    slopes = size * direction[..., None]
    q, k = (0.3 * value + way.to(value.device) for value, way in ((values.q, slopes), (values.k, climb)))
    return Values(q, k, values.v)


def _few_steep(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Returns the slope of the scores: random in a few rows, and zero in the others.

    The last rows of the first and of the last head have the largest positive and negative slope.
    """
    here, power, way = (torch.rand(shape, generator=generator, dtype=torch.float32) for _ in range(3))
    steep = 2.0 ** (MIN_STEEP + (MAX_STEEP - MIN_STEEP) * power)
    some = (here < STEEP_SHARE) * steep * (1.0 - 2.0 * (way < 0.5))
    some[0, 0, -1], some[-1, -1, -1] = 2.0**MAX_STEEP, -(2.0**MAX_STEEP)
    return some


def _diagonal(values: Values, problem: Problem, scale: float, generator: torch.Generator) -> Values:
    # Each key is a random vector of signs. A query combines its last visible key and, with a larger factor,
    # the next key, which is hidden.
    width = problem.head_dim
    shape = (problem.batch, problem.kv_heads, problem.seqlen_kv + 1, width)
    words = torch.randint(2, shape, generator=generator) * 2.0 - 1.0
    last = torch.arange(problem.seqlen_q) + problem.diagonal
    words_of_keys = LAST_VISIBLE * words[:, :, last.clamp(0, problem.seqlen_kv - 1)]
    words_of_keys = words_of_keys + FIRST_HIDDEN * words[:, :, (last + 1).clamp(0, problem.seqlen_kv)]
    q = words_of_keys.repeat_interleave(problem.group_size, dim=1) * (1 / (scale * width))
    q, k = (made.to(values.v.device) for made in (q, words[:, :, : problem.seqlen_kv].clone()))
    return Values(q, k, values.v)
