"""What the side inputs of a case hold: slopes, biases, sinks, prefixes, the cap, scales of a cache.

All is made as sequences see it that lie side by side, [batch, heads, ...]; `placing.py` puts it into memory.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from flashtune.core.extra_inputs import Side
from flashtune.core.layouts import LARGEST_STORED, STORED_DTYPES, TORCH_DTYPES
from flashtune.core.problem import Bias, KvDtype, KvScale, Problem
from flashtune.verification.inputs.cpu_generator import aside
from flashtune.verification.probes import DEPTH, Probe

if TYPE_CHECKING:
    from torch import Tensor

    from flashtune.verification.lengths import Lengths

# Caps of scores: one that normal scores feel, and ones that leave a probe's scores where they bite.
TIGHT_CAP, WIDE_CAP, DEEP_CAP = 2.5, 30.0, 50.0
# What distance takes off all keys together, where a probe's scores must stay what they are.
CALM_SLOPE = 4.0
# Sinks over and under the scores: weights next to nothing, and a sink next to nothing.
HIGH_SINK, LOW_SINK = 11.0, -1e4
# Of keys, of blocks of a few rows, and of rows, so many are hidden by a bias.
HIDDEN_KEYS, HIDDEN_BLOCKS, HIDDEN_ROWS = 0.2, 0.3, 0.08
ROWS_OF_A_BLOCK = 16
# A bias for each sequence and head up to so many elements; beyond, sequences share one, and then heads.
MAX_BIAS = 2**28
# Pages, or heads, differ in scale by powers of two up to this one.
SCALE_POWER = 2
# Probes whose scores a side input must not drown.
LOUD = (Probe.RANDOM, Probe.SINK)
# Shares of weights that fall: as in training, and so many that most of a row's do.
USUAL_DROPOUT, HIGH_DROPOUT = 0.1, 0.75


def make_side(
    probe: Probe, problem: Problem, lengths: Lengths, block: int, generator: torch.Generator
) -> Side:
    """Fresh side inputs for a probe, but for lengths, tables and scales.

    Args:
        probe: What q, k and v will hold.
        problem: Which side inputs there are.
        lengths: Of each sequence.
        block: Keys of a tile.
        generator: Source of randomness; its device is where they are made, but for the seed of dropout.
    """
    return Side(
        slopes=_slopes(probe, problem).to(generator.device) if problem.alibi else None,
        bias=_bias(probe, problem, block, generator) if problem.bias is not Bias.NONE else None,
        sinks=_sinks(probe, problem, lengths, generator) if problem.sinks else None,
        prefix=_prefixes(lengths, block).to(generator.device) if problem.prefix else None,
        seed=_seed(aside(generator, 5)) if problem.dropout else None,
        softcap=_cap(probe) if problem.softcap else None,
        dropout=(HIGH_DROPOUT if probe is Probe.RISING else USUAL_DROPOUT) if problem.dropout else None,
    )


def _seed(generator: torch.Generator) -> Tensor:
    """Both of its words count: int64 [1], on the CPU."""
    return torch.randint(2**63 - 1, (1,), generator=generator)


def _cap(probe: Probe) -> float:
    if probe in LOUD:
        return TIGHT_CAP
    return DEEP_CAP if probe in (Probe.FAR_BELOW, Probe.STEEP, Probe.EDGE) else WIDE_CAP


def _slopes(probe: Probe, problem: Problem) -> Tensor:
    """Another one for each head and sequence: [batch, heads] in float32."""
    heads = 2.0 ** (-8.0 * (torch.arange(problem.heads) + 1) / problem.heads)
    sequences = 1.0 + 0.25 * (torch.arange(problem.batch) % 4)
    slopes = sequences[:, None] * heads
    if probe not in LOUD:
        slopes = slopes * (CALM_SLOPE / max(1, problem.seqlen_kv))
    return slopes.float()


def _bias(probe: Probe, problem: Problem, block: int, generator: torch.Generator) -> Tensor:
    """[batch, heads, seqlen_q, seqlen_kv], where it is large with a stride of zero.

    Some keys, some keys of all rows of a block and some rows altogether are hidden: by False, or by -inf.
    """
    pairs = problem.seqlen_q * problem.seqlen_kv
    heads = problem.heads if problem.heads * pairs <= MAX_BIAS else 1
    batch = problem.batch if problem.batch * heads * pairs <= MAX_BIAS else 1
    device = generator.device
    shape = (batch, heads, problem.seqlen_q, problem.seqlen_kv)

    def drawn(*size: int) -> Tensor:
        return torch.rand(size, generator=generator, device=device)

    def kept(share: float, *size: int) -> Tensor:
        # 0 for so large a share, 1 for the others, by casts.
        return (drawn(*size) * (1 / share)).int().bool().float()

    rows, columns = -(-shape[2] // ROWS_OF_A_BLOCK), -(-shape[3] // block)
    blocks = kept(HIDDEN_BLOCKS, batch, heads, rows, 1, columns, 1)
    seen = blocks.expand(-1, -1, -1, ROWS_OF_A_BLOCK, -1, block).flatten(4, 5).flatten(2, 3).contiguous()
    seen = seen[:, :, : shape[2], : shape[3]].mul_(kept(HIDDEN_KEYS, *shape))
    seen.mul_(kept(HIDDEN_ROWS, batch, heads, shape[2], 1))
    full = (problem.batch, problem.heads, *shape[2:])
    if problem.bias is Bias.BOOLEAN:
        return seen.bool().expand(full)
    size = 1.5 if probe in LOUD else 0.1
    normal = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
    bias = normal.mul_(size).add_(seen.log_())
    return bias.to(TORCH_DTYPES[problem.dtype]).expand(full)


def _sinks(probe: Probe, problem: Problem, lengths: Lengths, generator: torch.Generator) -> Tensor:
    """About as heavy as all keys together; in `sink` far heavier in some heads, next to nothing in others."""
    spread = 4.0 * torch.rand(problem.heads, generator=aside(generator, 4)) - 2.0
    level = math.log(max(1, *lengths.keys)) if lengths.keys else 0.0
    if probe is Probe.FAR_BELOW:
        level -= DEEP_CAP * math.tanh(DEPTH / DEEP_CAP) if problem.softcap else DEPTH
    sinks = spread + level
    if probe is Probe.SINK:
        head = torch.arange(problem.heads) % 3
        sinks = torch.where(head == 0, sinks + HIGH_SINK, torch.where(head == 1, LOW_SINK, sinks))
    return sinks.float().to(generator.device)


def _prefixes(lengths: Lengths, block: int) -> Tensor:
    """Half of the keys, around a block's border, none, one, all, and more than there are: int32 [batch]."""
    turns = (
        lambda keys: keys // 2,
        lambda keys: block + 1,
        lambda keys: 0,
        lambda keys: keys + 5,
        lambda keys: 1,
        lambda keys: block - 1,
        lambda keys: keys,
    )
    prefixes = [turns[index % len(turns)](keys) for index, keys in enumerate(lengths.keys)]
    return torch.tensor(prefixes, dtype=torch.int32)


class Stored(NamedTuple):
    """A cache's keys or values as they are stored, and the scale of each key.

    Attributes:
        elements: [batch, kv_heads, seqlen_kv, width] in 8 bits.
        scales: Float32 [batch, kv_heads, seqlen_kv].
    """

    elements: Tensor
    scales: Tensor


def store(values: Tensor, problem: Problem, generator: torch.Generator) -> Stored:
    """Keys or values in a cache's 8 bits: what shares a scale differs from its neighbours by powers of two.

    Args:
        values: [batch, kv_heads, seqlen_kv, width] in float32.
        problem: The cache's element type and what shares a scale.
        generator: Source of the powers, on the CPU.
    """
    kind = problem.kv_dtype
    assert kind is not None
    batch, heads, keys, _ = values.shape
    shared = {KvScale.TENSOR: (1, 1, 1), KvScale.HEAD: (1, heads, 1), KvScale.PAGE: (batch, heads, 1)}
    shape = shared[problem.kv_scale]
    if problem.kv_scale is KvScale.PAGE and problem.page_size:
        shape = (batch, heads, -(-keys // problem.page_size))
    # A hair more than what the largest element just fits with: beyond it some versions of torch make NaN.
    largest = values.abs().amax((0, 2, 3)) if problem.kv_scale is not KvScale.TENSOR else values.abs().amax()
    least = largest.cpu().clamp_min(1e-6).reshape(1, -1, 1) * ((1.0 + 2.0**-20) / LARGEST_STORED[kind])
    powers = 2.0 ** torch.randint(0, SCALE_POWER + 1, shape, generator=generator)
    scales = (least * powers).float()
    if scales.shape[2] > 1:
        scales = scales.repeat_interleave(problem.page_size, 2)[:, :, :keys]
    scales = scales.expand(batch, heads, keys)
    elements = values * (1 / scales)[..., None].to(values.device)
    if kind is KvDtype.INT8:
        elements = elements.round()
    return Stored(elements.to(STORED_DTYPES[kind]), scales.to(values.device))
